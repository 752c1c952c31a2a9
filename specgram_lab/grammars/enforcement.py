"""What xgrammar silently does not enforce of a JSON Schema, and what vLLM refuses to hand to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specgram_lab.grammars.whitespace import ANNOTATIONS

MAX_NESTING = 64
"""Levels of objects and arrays that vLLM 0.32 takes (``MAX_STRUCTURED_OUTPUT_JSON_NESTING``)."""
TAG_NESTING = 16
"""Further levels for a structural tag around its schemas (``STRUCTURAL_TAG_WRAPPER_NESTING``)."""
NESTED_TOO_DEEPLY = "The JSON schema is nested too deeply: objects and arrays may nest at most 64 levels"
NOT_SUPPORTED = "The provided JSON schema contains features not supported by xgrammar."
"""vLLM 0.32's words."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "propertyNames", "contains")
_FORMATS = frozenset({
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
})  # fmt: skip
_LENGTHS = ("minLength", "maxLength")
_NEEDS_TYPE = (
    "pattern", "format", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minItems", "maxItems", "uniqueItems", "required",
)  # fmt: skip
_SHAPES = frozenset(
    {"properties", "patternProperties", "additionalProperties", "propertyNames", "items", "prefixItems"}
)
_IGNORED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "$dynamicRef")
_LOOK_AROUND = re.compile(r"(?<!\\)\(\?(?:=|!|<=|<!)")


@dataclass(frozen=True)
class Finding:
    """One keyword at one place (a JSON path): whether xgrammar enforces it, and whether vLLM 0.32 refuses it."""

    path: str
    message: str
    enforced: bool = False
    refused: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def nesting(value: Any) -> int:
    """How many objects and arrays lie inside each other, 0 for a scalar; no depth is too much for it."""
    level, depth = [value], 0
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return depth


def findings(schema: Any) -> list[Finding]:
    """What a walk over ``schema`` finds, by rules that were checked by running xgrammar 0.2.8.

    The walk knows single keywords and pairs of them. That nothing is found does not prove that all is enforced, which
    is why outputs are validated as well.
    """
    return [finding for path, part in _parts(schema) for finding in _rules(path, part)]


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema with its path, in the order in which a reader meets them."""
    stack: list[tuple[str, Any]] = [("$", schema)]
    while stack:
        path, part = stack.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        below: list[tuple[str, Any]] = []
        for key in _MAPS:
            if isinstance(part.get(key), dict):
                below += [(f"{path}.{key}.{name}", value) for name, value in part[key].items()]
        for key in _LISTS:
            if isinstance(part.get(key), list):
                below += [(f"{path}.{key}[{place}]", value) for place, value in enumerate(part[key])]
        below += [(f"{path}.{key}", part[key]) for key in _SINGLES if key in part]
        stack += reversed(below)


def _rules(path: str, part: dict[str, Any]) -> Iterator[Finding]:
    yield from (Finding(path, f"{key} is ignored") for key in _IGNORED if key in part)
    keys = set(part) - ANNOTATIONS - set(_IGNORED)
    if "$ref" in part:
        if not str(part["$ref"]).startswith("#"):
            yield Finding(path, f"$ref {part['$ref']!r} is outside the schema, and anything is accepted for it")
        yield from _dropped(path, keys, "$ref")
    elif "const" in part or "enum" in part:
        yield from _fixed_values(path, part, keys)
    elif "anyOf" in part or "oneOf" in part:
        yield from _dropped(path, keys, "anyOf" if "anyOf" in part else "oneOf")
    elif "allOf" in part:
        branches = part["allOf"]
        if isinstance(branches, list) and len(branches) > 1:
            yield Finding(path, f"allOf of {len(branches)} branches is ignored, and anything is accepted", refused=True)
        else:
            yield from _dropped(path, keys, "allOf")
    elif "type" in part:
        yield from _typed(path, part)
    elif not keys & _SHAPES:
        yield from (Finding(path, f"{key} without type is ignored") for key in _NEEDS_TYPE if key in keys)


def _dropped(path: str, keys: set[str], stronger: str) -> Iterator[Finding]:
    for key in sorted(keys - {stronger}):
        refused = key == "allOf"
        yield Finding(path, f"{key} beside {stronger} is ignored", refused=refused)


def _fixed_values(path: str, part: dict[str, Any], keys: set[str]) -> Iterator[Finding]:
    from specgram_lab.grammars.oracle import check

    word = "const" if "const" in part else "enum"
    values = [part["const"]] if word == "const" else part["enum"]
    rest = {key: part[key] for key in keys - {"const", "enum"}}
    breaches = [value for value in values if check(value, rest)] if rest and isinstance(values, list) else []
    if breaches:
        yield Finding(path, f"{', '.join(sorted(rest))} beside {word} is ignored: {breaches[0]!r} is accepted")


def _typed(path: str, part: dict[str, Any]) -> Iterator[Finding]:
    kinds = part["type"] if isinstance(part["type"], list) else [part["type"]]
    if "string" in kinds:
        yield from _string(path, part)
    if {"integer", "number"} & set(kinds) and "multipleOf" in part:
        ranged = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} & set(part)
        enforced = "number" not in kinds and not ranged
        yield Finding(path, "multipleOf" if enforced else "multipleOf is ignored", enforced=enforced, refused=True)
    if "array" in kinds:
        for key in ("uniqueItems", "contains", "minContains", "maxContains"):
            if key in part:
                yield Finding(path, f"{key} is ignored", refused=True)
    if "object" in kinds:
        yield from _object(path, part)


def _string(path: str, part: dict[str, Any]) -> Iterator[Finding]:
    shaped = [key for key in ("pattern", "format") if key in part]
    for key in _LENGTHS:
        if key in part and shaped:
            yield Finding(path, f"{key} beside {shaped[0]} is ignored", refused=True)
    if len(shaped) == 2:
        yield Finding(path, "pattern beside format is ignored")
    if "format" in part and part["format"] not in _FORMATS:
        yield Finding(path, f"format {part['format']!r} is not known and is ignored", refused=True)
    if "pattern" in part and _LOOK_AROUND.search(str(part["pattern"])):
        yield Finding(path, f"look-around in the pattern {part['pattern']!r} is ignored")


def _object(path: str, part: dict[str, Any]) -> Iterator[Finding]:
    declared = part.get("properties")
    names = declared if isinstance(declared, dict) else {}
    required = part.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in names:
            closed = part.get("additionalProperties", False) is False
            how = "and the name cannot even be written" if closed else "and the name may be missing"
            yield Finding(path, f"required {name!r} is not among properties: it is ignored, {how}")
    if "propertyNames" in part:
        inner = part["propertyNames"] if isinstance(part["propertyNames"], dict) else {}
        pair = {"pattern", "format"} & set(inner) and set(_LENGTHS) & set(inner)
        closed = part.get("unevaluatedProperties", True) is not True
        if "properties" in part:
            yield Finding(path, "propertyNames is ignored for declared properties", refused=True)
        elif pair or closed or "patternProperties" in part:
            yield Finding(path, "propertyNames beside other bounds", enforced=True, refused=True)
    patterns = part.get("patternProperties")
    if isinstance(patterns, dict) and ("properties" in part or len(patterns) > 1):
        yield Finding(path, "patternProperties beside others of its kind", enforced=True, refused=True)
