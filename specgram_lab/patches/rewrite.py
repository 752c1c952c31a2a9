"""A function of vLLM compiled anew from its own source with a few lines changed: a fix put in or taken out again.

The registry has compared the source's fingerprint with those that were studied before a patch is applied; each text to
be replaced must occur exactly once all the same.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from specgram_lab.patches.registry import PatchError

_SOURCE = "_specgram_source"
"""Attribute of a rewritten function: its text, for the next rewriting."""


def rewritten(function: Any, *changes: tuple[str, str]) -> Any:
    """``function`` with each (old, new) text of its dedented source replaced; it lives in the same globals.

    A function that was rewritten before keeps those changes.

    Raises:
        PatchError: another kind of patch stands in front of the function, or a text does not occur exactly once.
    """
    source = vars(function).get(_SOURCE)
    if source is None and hasattr(function, "__wrapped__"):
        raise PatchError(f"{function.__qualname__} is already replaced by another patch")
    source = source or textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if source.count(old) != 1:
            raise PatchError(f"{function.__qualname__} has {source.count(old)} places that read {old.strip()!r}")
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    code = compile(source, f"<specgram {function.__qualname__}>", "exec", dont_inherit=True)
    exec(code, function.__globals__, made)  # noqa: S102  vLLM's own text
    result = made[function.__name__]
    result.__qualname__ = function.__qualname__
    # the registry looks at the original
    vars(result).update({_SOURCE: source, "__wrapped__": inspect.unwrap(function)})
    return result
