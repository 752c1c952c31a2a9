"""The registry of patches: fingerprints of what they replace, switching on and off, what is active."""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from specgram_lab import capabilities

FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
"""``{symbol: {fingerprint: [releases]}}``; written by ``python -m specgram_lab.patches.fingerprint``."""

MODULES = {
    "async-on-cpu": "specgram_lab.patches.on_cpu",
    "v2-on-cpu": "specgram_lab.patches.on_cpu",
    "av-on-cpu": "specgram_lab.patches.on_cpu",
    "av-budget": "specgram_lab.patches.budget",
    "av-ngram": "specgram_lab.patches.budget",
    "rfc-counters": "specgram_lab.patches.rfc_counters",
    "scripted-drafter": "specgram_lab.patches.scripted_drafter",
    "guard-53046": "specgram_lab.patches.boundary",
    "pre-44297-window": "specgram_lab.patches.boundary",
    "pre-44297-bonus": "specgram_lab.patches.boundary",
    "pre-44297-assert": "specgram_lab.patches.boundary",
    "pre-44297-marker": "specgram_lab.patches.boundary",
    "pre-53046-probe": "specgram_lab.patches.boundary",
    "pre-56250-pp-async": "specgram_lab.patches.pipeline",
    "no-pp-spacing": "specgram_lab.patches.pipeline",
    "v2-without-worker": "specgram_lab.patches.pipeline",
    "pre-52436-mapping": "specgram_lab.patches.mapping",
    "max-whitespace": "specgram_lab.patches.whitespace",
    "recorder": "specgram_lab.samplers.hooks",
}
"""Where each patch is defined (as the module's ``PATCHES[name]``); imported only in a process that runs an engine."""


class PatchError(RuntimeError):
    """A patch that cannot be used here, said in one sentence."""


class Replacements:
    """Attributes set on vLLM's objects, with what was there before, so that all can be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, bool]] = []
        self._endings: list[Callable[[], None]] = []

    def set(self, owner: Any, attribute: str, value: Any) -> Any:
        """Set ``owner.attribute`` and return what a plain lookup gave before (a function, not a descriptor).

        A function of the lab's remembers what it stands for, so that another patch of the same symbol can still
        tell the original's fingerprint.
        """
        own = vars(owner).get(attribute) if hasattr(owner, "__dict__") else None
        found = getattr(owner, attribute, None)
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function) and function.__module__.startswith("specgram_lab.") and callable(found):
            vars(function).setdefault("__wrapped__", getattr(found, "__func__", found))
        self._before.append((owner, attribute, own, own is not None))
        setattr(owner, attribute, value)
        return found

    def at_end(self, ending: Callable[[], None]) -> None:
        """Call ``ending`` when the patch is undone; for what is no attribute, such as a log handler."""
        self._endings.append(ending)

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._endings:
            self._endings.pop()()
        while self._before:
            owner, attribute, value, was_own = self._before.pop()
            if was_own:
                setattr(owner, attribute, value)
            else:
                delattr(owner, attribute)


@dataclass(frozen=True)
class Patch:
    """One named change. ``apply`` gets the replacements to fill and the options from the cell's spec."""

    name: str
    purpose: str
    symbols: tuple[str, ...]
    apply: Callable[[Replacements, Mapping[str, Any]], None]
    optional: tuple[str, ...] = field(default=())
    """Symbols that only some releases have; absent ones are left alone."""
    releases: tuple[str, ...] = ()
    """Releases that it was written for; empty: every one whose source is known."""
    elsewhere: str = ""
    """Why it is for no other release, as the end of a sentence."""


def resolve(symbol: str) -> Any:
    """The object that ``package.module:Class.function`` names, without binding it.

    Raises:
        PatchError: this build has no such thing.
    """
    module_name, _, qualified = symbol.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise PatchError(f"this build has no module {module_name} ({error})") from None
    for part in qualified.split("."):
        try:
            found = inspect.getattr_static(found, part)
        except AttributeError:
            raise PatchError(f"this build has no {symbol}") from None
    while isinstance(found, classmethod | staticmethod):
        found = found.__func__
    return found.fget if isinstance(found, property) else found


def fingerprint(symbol: str) -> str:
    """`mark_of` the object that ``symbol`` names."""
    return mark_of(inspect.unwrap(resolve(symbol)))


def mark_of(found: Any) -> str:
    """16 hex digits of the SHA-256 of an object's source, read as a syntax tree: comments and layout do not count."""
    return digest(ast.parse(textwrap.dedent(inspect.getsource(found))))


def digest(tree: ast.AST) -> str:
    """The fingerprint of a syntax tree, whose docstrings are taken out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


@cache
def known_fingerprints() -> dict[str, dict[str, list[str]]]:
    """What was studied: per symbol, the fingerprints and the releases that have them."""
    return dict(json.loads(FINGERPRINTS.read_text(encoding="utf-8")))


def names() -> tuple[str, ...]:
    """All patches by name; needs no vLLM."""
    return tuple(sorted(MODULES))


def get(name: str) -> Patch:
    """The patch of that name; imports the module that defines it (and with it vLLM's neighbours, not vLLM)."""
    if name not in MODULES:
        raise PatchError(f"no patch {name!r}; there are {', '.join(names())}")
    found = importlib.import_module(MODULES[name]).PATCHES[name]
    assert isinstance(found, Patch)
    return found


def check(patch: Patch) -> dict[str, str]:
    """Fingerprints of all symbols of ``patch`` in this build.

    Raises:
        PatchError: it is for another release; a symbol is missing, or its source was never studied, in which case both
            fingerprints are named.
    """
    release = capabilities.build()[1].partition("+")[0]
    if patch.releases and release not in patch.releases:
        known_to = ", ".join(patch.releases)
        raise PatchError(f"patch {patch.name} is for vLLM {known_to}, this is {release or 'none'}: {patch.elsewhere}")
    found: dict[str, str] = {}
    for symbol in (*patch.symbols, *patch.optional):
        try:
            mark = fingerprint(symbol)
        except PatchError:
            if symbol in patch.optional:
                continue
            raise
        known = known_fingerprints().get(symbol, {})
        if mark not in known:
            seen = "; ".join(f"{k} in {', '.join(v)}" for k, v in known.items()) or "none"
            raise PatchError(
                f"patch {patch.name} does not know this build's {symbol}:"
                f" its source has fingerprint {mark}, known are {seen}"
            )
        found[symbol] = mark
    return found


@dataclass
class _Active:
    patch: Patch
    fingerprints: dict[str, str]
    options: dict[str, Any]
    replacements: Replacements


_ACTIVE: dict[str, _Active] = {}


def activate(wanted: Sequence[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Switch patches on in this process: all of them, or none when one is refused. Active ones stay as they are."""
    done: list[str] = []
    try:
        for name in wanted:
            if name in _ACTIVE:
                continue
            patch = get(name)
            marks = check(patch)
            chosen = dict((options or {}).get(name, {}))
            replacements = Replacements()
            _ACTIVE[name] = _Active(patch, marks, chosen, replacements)
            done.append(name)
            patch.apply(replacements, chosen)
    except BaseException:
        for name in reversed(done):
            deactivate(name)
        raise


def deactivate(name: str) -> None:
    """Switch one patch off: what it replaced is put back.

    Patches that came later may hold its functions, so they are taken off first and put on again.
    """
    order = list(_ACTIVE)
    later = order[order.index(name) + 1 :]
    for other in reversed(later):
        _ACTIVE[other].replacements.undo()
    _ACTIVE.pop(name).replacements.undo()
    for other in later:
        _ACTIVE[other].replacements = Replacements()
        _ACTIVE[other].patch.apply(_ACTIVE[other].replacements, _ACTIVE[other].options)


def change(name: str, options: Mapping[str, Any]) -> None:
    """Give an active patch other options, as it would have had from the start."""
    if _ACTIVE[name].options != dict(options):
        deactivate(name)
        activate([name], {name: options})


def active() -> dict[str, dict[str, Any]]:
    """What is switched on in this process: per patch its options and the fingerprints of what it replaced."""
    return {name: {"options": a.options, "fingerprints": a.fingerprints} for name, a in _ACTIVE.items()}
