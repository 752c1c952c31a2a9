"""How a native kernel stands in for a Triton kernel: in vLLM's own registry of overrides, before 0.31 in its place."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from specgram_lab.builders.cpu.kernels.numeric import Interpreted
from specgram_lab.patches.registry import Replacements

try:
    from vllm.triton_utils import dispatcher
    from vllm.triton_utils.dispatcher import KernelOverride
except ImportError:  # vLLM before 0.31
    dispatcher = None

    class KernelOverride:  # type: ignore[no-redef]
        """What vLLM's own wrapper keeps of the kernel that it stands for."""

        def __init__(self, kernel: Any, impl: Callable[..., Any]) -> None:
            self._impl = impl
            self.arg_names = tuple(kernel.arg_names)
            self.constexprs = getattr(kernel, "constexprs", None)
            self.__name__ = impl.__name__
            self.__module__ = kernel.__module__


SEAM: Any = dispatcher
"""vLLM's registry of overrides; None before 0.31."""
_COMPILER_OPTIONS = ("num_warps", "num_stages", "num_ctas")

native_counts: Counter[str] = Counter()
"""Launches that ran natively, by full kernel name."""


class GridOverride(KernelOverride):
    """vLLM's wrapper around an override, keeping what it throws away: the launch grid and the original.

    Several kernels know the number of requests only from the grid. The original kernel is needed for the
    launches that a native version declines by raising Interpreted.
    """

    name: str
    original: Any

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Bind the grid, as ``kernel[grid]`` does."""

        def launch(*args: Any, **kwargs: Any) -> None:
            for option in _COMPILER_OPTIONS:
                kwargs.pop(option, None)
            try:
                self._impl(grid, *args, **kwargs)
            except Interpreted:
                self.original[grid](*args, **kwargs)
            else:
                native_counts[self.name] += 1

        return launch


def keep_grid(wrapper: KernelOverride, name: str, original: Any) -> None:
    """Turn a wrapper that ``register_kernels`` made, and has bound everywhere, into a GridOverride."""
    wrapper.__class__ = GridOverride
    wrapper.name = name
    wrapper.original = original


@contextmanager
def scanning_vllm_only() -> Iterator[None]:
    """Let ``register_kernels`` look for references to kernels in vLLM's modules alone.

    It scans every attribute of every loaded module (seconds for our number of kernels) and dies on the
    library objects of cffi, whose ``__dict__`` is no dictionary. Only vLLM's modules hold its kernels.
    """
    modules = {name: module for name, module in sys.modules.items() if name.split(".", 1)[0] == "vllm"}
    dispatcher.sys = SimpleNamespace(modules=modules)
    try:
        yield
    finally:
        dispatcher.sys = sys


def stand_in(kernels: Mapping[str, tuple[Any, Callable[..., Any]]], changes: Replacements) -> None:
    """What ``register_kernels`` does, for builds that have no such seam: every reference in vLLM's modules is replaced.

    Args:
        kernels: original and native version by full name.
        changes: takes note of what was there before.
    """
    wrappers = {}
    for name, (original, function) in kernels.items():
        wrappers[id(original)] = KernelOverride(original, function)
        keep_grid(wrappers[id(original)], name, original)
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] == "vllm" and module is not None:
            for attribute, value in list(vars(module).items()):
                if id(value) in wrappers:
                    changes.set(module, attribute, wrappers[id(value)])
