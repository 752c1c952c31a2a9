"""Native versions of the Triton kernels that Model Runner V2 launches, registered through vLLM's own seam
or, where a build has none, put in their place like any patch.

``register()`` inside the engine process, before V2 launches anything, is all a caller needs. A kernel without
a native version, or whose source in the installed vLLM is not the one that the native version was tested
against, still runs in Triton's interpreter; ``survey()`` says which.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from specgram_lab.builders.cpu.interpreter import interpreted_launches
from specgram_lab.patches.registry import Replacements, mark_of

__all__ = ["NATIVE", "interpreted_launches", "native_launches", "register", "survey"]

_AREAS = (
    "input_prep",
    "sampling",
    "rejection",
    "verification",
    "drafting",
    "dflash",
    "adaptive",
    "logprobs",
    "processors",
    "mtp",
    "truncation",
)
FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
"""``{kernel: {fingerprint: [releases]}}``; written by ``python -m specgram_lab.patches.fingerprint``."""
_SURVEYED_PACKAGE = "vllm.v1.worker.gpu"
_native: dict[str, Callable[..., None]] = {}
_registered: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    """Build ``NATIVE`` on first use: it imports numba and torch."""
    if name == "NATIVE":
        if not _native:
            for area in _AREAS:
                _native.update(importlib.import_module(f"{__name__}.{area}").KERNELS)
        return _native
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(changes: Replacements | None = None) -> list[str]:
    """Make vLLM use the native kernels; returns the full names of those that the installed build has.

    A second call changes nothing. Kernels whose source is not known are left alone: another vLLM may mean
    something else by them. ``changes`` takes note of what is replaced where vLLM has no seam for it.
    """
    from specgram_lab.builders.cpu.kernels.launch import SEAM, keep_grid, scanning_vllm_only, stand_in

    fitting: dict[str, Callable[..., None]] = {}
    originals: dict[str, Any] = {}
    for name, function in __getattr__("NATIVE").items():
        kernel = find(name)
        if name not in _registered and kernel is not None and _fits(kernel, function):
            fitting[name], originals[name] = function, kernel
    if SEAM is None:
        changes = changes or Replacements()
        stand_in({name: (originals[name], function) for name, function in fitting.items()}, changes)
        changes.at_end(_registered.clear)
    else:
        with scanning_vllm_only():
            SEAM.register_kernels(fitting)
    for name in fitting:
        wrapper = find(name)
        if SEAM is not None:
            keep_grid(wrapper, name, originals[name])
        _registered[name] = wrapper
    return sorted(_registered)


def native_launches() -> dict[str, int]:
    """Kernels that ran natively in this process, by full name, with their launch counts."""
    from specgram_lab.builders.cpu.kernels.launch import native_counts

    return dict(native_counts)


def survey() -> dict[str, str]:
    """Every Triton kernel of the V2 runner and every kernel of our table, as one of

    * ``native``: registered in this process,
    * ``available``: a fitting native version exists but was not registered,
    * ``interpreted``: we have one, but for another source than the installed kernel's,
    * ``unknown``: a kernel that our table does not have,
    * ``absent``: a kernel of our table that the installed build does not have.
    """
    names = set(__getattr__("NATIVE")) | set(_kernels_of_build())
    return {name: _state(name) for name in sorted(names)}


def _state(name: str) -> str:
    """One entry of :func:`survey`."""
    function = __getattr__("NATIVE").get(name)
    if name in _registered:
        return "native"
    kernel = find(name)
    if kernel is None:
        return "absent"
    if function is None:
        return "unknown"
    return "available" if _fits(kernel, function) else "interpreted"


def find(name: str) -> Any | None:
    """The kernel object of a full name, None where the installed build has none."""
    module, attribute = name.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError:
        return None


def _fits(kernel: Any, function: Callable[..., None]) -> bool:
    """Whether the kernel's source is known, and the native version takes exactly its parameters, after the grid."""
    code = function.__code__
    if tuple(getattr(kernel, "arg_names", ())) != code.co_varnames[1 : code.co_argcount]:
        return False
    return mark(kernel) in known_marks().get(f"{_home(kernel)}.{_written(kernel).__name__}", {})


def mark(kernel: Any) -> str:
    """Fingerprint of the kernel's source, as the patches have it."""
    return mark_of(_written(kernel))


@cache
def known_marks() -> dict[str, dict[str, list[str]]]:
    """Per kernel, the fingerprints that the native version was tested against, and the releases that have them."""
    return dict(json.loads(FINGERPRINTS.read_text(encoding="utf-8"))) if FINGERPRINTS.is_file() else {}


def _kernels_of_build() -> list[str]:
    """Full names of the launched kernels of the V2 runner, which vLLM names ``*_kernel``."""
    package = importlib.import_module(_SURVEYED_PACKAGE)
    names = []
    for info in pkgutil.walk_packages(package.__path__, _SURVEYED_PACKAGE + "."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # a module for other hardware
            continue
        names += [
            f"{info.name}.{attribute}"
            for attribute, value in vars(module).items()
            if attribute.endswith("_kernel") and hasattr(value, "arg_names") and _home(value) == info.name
        ]
    return names


def _home(kernel: Any) -> str:
    """The module that defines a kernel."""
    return str(_written(kernel).__module__)


def _written(kernel: Any) -> Any:
    """The function as it was written, seen through heuristics, the JIT and our wrappers."""
    function = getattr(kernel, "original", kernel)
    while hasattr(function, "fn"):
        function = function.fn
    return function
