"""Which blanks an engine allows between the tokens of JSON: a matter of vLLM, xgrammar, the kind, and one flag."""

from __future__ import annotations

import re
from typing import Any, Literal

from specgram_lab.spec import Grammar

Whitespace = Literal["any", "compact", "spaced", "mixed", "none"]
"""``compact`` is ``{"a":1,"b":2}``, ``spaced`` ``{"a": 1, "b": 2}``; ``mixed`` is compact where members and items are
declared and ``{"a":1, "b":2}``, ``[1, 2]`` where they are not."""

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$comment", "$schema", "$id", "$anchor", "$defs", "definitions",
})  # fmt: skip
"""Keywords that constrain nothing where they stand."""

_SEPARATORS_SINCE = (0, 32)
"""vLLM passes separators with disable_any_whitespace from here on (vllm#58067); before, xgrammar's own apply."""
_COMMA_FIXED_IN = (0, 2, 9)
"""xgrammar keeps a space behind the comma of undeclared members and items until here (xgrammar#945)."""


def version_tuple(version: str | None) -> tuple[int, ...] | None:
    """The leading numbers of a version, ``0.32.0rc1`` as (0, 32, 0); None where there is no version."""
    numbers = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else None


def passes_separators(vllm: str | None) -> bool:
    """Whether this vLLM tells xgrammar the separators; an unknown build is taken for a current one."""
    known = version_tuple(vllm)
    return known is None or known >= _SEPARATORS_SINCE


def whitespace_mode(grammar: Grammar, *, vllm: str | None = None, xgrammar: str | None = None) -> Whitespace:
    """What ``grammar`` allows between JSON tokens; ``none`` for kinds that are not JSON.

    Args:
        grammar: its ``disable_any_whitespace`` and ``backend`` count; a per-prompt grammar is taken for one that
            declares all its members.
        vllm: version of the engine, None for a current one.
        xgrammar: version of xgrammar, None for 0.2.8.

    Checked by running vLLM 0.32's settings, and those of 0.28 to 0.31, on xgrammar 0.2.8 and llguidance 1.7.6.
    """
    if grammar.kind not in ("json_object", "json_schema"):
        return "none"
    if not grammar.disable_any_whitespace:
        return "any"
    if grammar.backend == "guidance":
        return "compact"
    if not passes_separators(vllm):
        return "spaced"
    fixed = (version_tuple(xgrammar) or (0, 2, 8)) >= _COMMA_FIXED_IN
    return "compact" if fixed or not (grammar.kind == "json_object" or _untyped(grammar.value)) else "mixed"


def _untyped(schema: Any) -> bool:
    """Whether some part of ``schema`` is any JSON, a bare object or a bare array, which xgrammar spaces its own way."""
    if schema is True:
        return True
    if isinstance(schema, list):
        return any(_untyped(item) for item in schema)
    if not isinstance(schema, dict):
        return False
    keys = set(schema) - ANNOTATIONS
    if not keys or (keys == {"type"} and {"object", "array"} & set(_types(schema))):
        return True
    single = ("items", "additionalProperties", "unevaluatedProperties", "prefixItems", "anyOf", "oneOf", "allOf")
    maps = ("properties", "patternProperties", "$defs", "definitions")
    members = [list(schema[key].values()) for key in maps if isinstance(schema.get(key), dict)]
    return any(_untyped(schema[key]) for key in single if key in schema) or any(_untyped(part) for part in members)


def _types(schema: dict[str, Any]) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else [item for item in kind if isinstance(item, str)]


def dump_forms(mode: Whitespace) -> tuple[tuple[str, str], ...]:
    """The separators (item, key) of the forms in which a value may be legal, the most likely first."""
    forms = {"compact": (",", ":"), "spaced": (", ", ": "), "mixed": (", ", ":")}
    first = forms.get(mode, forms["spaced"])
    return (first, *(form for form in forms.values() if form != first))
