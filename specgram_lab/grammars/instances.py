"""Small values of a JSON Schema, and near misses of them: what a grammar should accept, and what it should not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from specgram_lab.grammars import oracle

MAX_PROBES = 120
_STRINGS = ("", "a", "ab", "abcd", "abcdef", "ABCDEF", "admin", "a1b2", "AB123", "2024-02-03", "a@b.org", "/ab", "7")
_SCALARS = (None, True, 7, -1, 1_000_000, 1.5, *_STRINGS)
_SHAPES: tuple[Any, ...] = ([], [1, 1], {}, {"a": 1}, 42)
_DEPTH = 12


class _NoInstanceError(Exception):
    """No value can be built; the search over the grammar may still find one."""


def smallest(schema: Any) -> tuple[bool, Any]:
    """Whether a small value that obeys ``schema`` could be built, and the value; jsonschema has checked it."""
    try:
        value = _build(schema, schema, 0)
    except (_NoInstanceError, RecursionError, TypeError, ValueError, AttributeError, KeyError):
        return False, None
    return oracle.check(value, schema) is None, value


def _build(schema: Any, root: Any, depth: int) -> Any:
    if schema is True or schema == {}:
        return 0
    if not isinstance(schema, dict) or depth > _DEPTH:
        raise _NoInstanceError
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return min(schema["enum"], key=lambda value: len(json.dumps(value)))
    if "$ref" in schema:
        return _build(_resolve(schema["$ref"], root), root, depth + 1)
    if "allOf" in schema:
        merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
        for branch in schema["allOf"]:
            merged |= branch
        return _build(merged, root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _first(schema, key, root, depth)
    kinds = schema.get("type") or ("object" if "properties" in schema or "required" in schema else "string")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    return _of_type(kind, schema, root, depth)


def _first(schema: dict[str, Any], key: str, root: Any, depth: int) -> Any:
    rest = {name: value for name, value in schema.items() if name != key}
    for branch in schema[key]:
        try:
            value = _build({**rest, **branch} if isinstance(branch, dict) else branch, root, depth + 1)
        except _NoInstanceError:
            continue
        if (
            oracle.check(value, {**schema, "$defs": root.get("$defs", {})} if isinstance(root, dict) else schema)
            is None
        ):
            return value
    raise _NoInstanceError


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise _NoInstanceError
    found = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found


def _of_type(kind: str, schema: dict[str, Any], root: Any, depth: int) -> Any:
    if kind == "object":
        declared = schema.get("properties", {})
        required = schema.get("required", [])
        ordered = [name for name in declared if name in required] + [name for name in required if name not in declared]
        return {name: _build(declared.get(name, True), root, depth + 1) for name in ordered}
    if kind == "array":
        first = [_build(item, root, depth + 1) for item in schema.get("prefixItems", [])]
        missing = max(0, schema.get("minItems", 0) - len(first))
        return first + [_build(schema.get("items", True), root, depth + 1) for _ in range(missing)]
    if kind == "string":
        return _string(schema)
    if kind in ("integer", "number"):
        return _number(schema, kind)
    return {"boolean": True, "null": None}[kind]


def _string(schema: dict[str, Any]) -> str:
    fitting = [text for text in _STRINGS if oracle.check(text, {**schema, "type": "string"}) is None]
    if fitting and "format" not in schema:
        return fitting[0]
    if "pattern" in schema or "format" in schema:
        raise _NoInstanceError
    return "a" * int(schema.get("minLength", 0))


def _number(schema: dict[str, Any], kind: str) -> int | float:
    step = schema.get("multipleOf", 1)
    low, high = schema.get("minimum"), schema.get("maximum")
    candidates = [0, 1, step, low, high, *([schema["exclusiveMinimum"] + step] if "exclusiveMinimum" in schema else [])]
    if low is not None:
        candidates.append(-(-low // step) * step)
    for value in candidates:
        if isinstance(value, int | float) and oracle.check(value, {**schema, "type": kind}) is None:
            return value
    raise _NoInstanceError


def dump(value: Any, form: tuple[str, str]) -> str:
    """A value as JSON text with these separators (item, key)."""
    return json.dumps(value, separators=form, ensure_ascii=False)


def near_misses(schema: Any, base: Any, has_base: bool) -> list[Any]:
    """Values that differ from ``base`` in one place, and plain values; some obey ``schema``, some do not."""
    found: list[Any] = [*_SCALARS, *_SHAPES]
    if has_base:
        found += _altered(base)
    if isinstance(schema, dict):
        found += [value for value in schema.get("enum", []) if isinstance(schema.get("enum"), list)]
    unique = {json.dumps(value, sort_keys=True): value for value in found}
    return list(unique.values())[:MAX_PROBES]


def _altered(base: Any) -> Iterator[Any]:
    for path in _paths(base, ()):
        here = _get(base, path)
        if isinstance(here, dict):
            for name in here:
                yield _with(base, path, {key: value for key, value in here.items() if key != name})
            yield _with(base, path, {**here, "zz": 1})
        elif isinstance(here, list):
            yield _with(base, path, [])
            if here:
                yield _with(base, path, [*here, here[-1]])
        if path:
            for value in ("ABCDEF", "abcdef", "admin", "abcd", "", 1_000_000, -1, 1.5, None):
                yield _with(base, path, value)


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from _paths(below, (*path, key))


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(base: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(base)
    _get(changed, path[:-1])[path[-1]] = value
    return changed


def finite_texts(schema: Any) -> list[str] | None:
    """All texts of a schema without blanks in its language, of which the longest matters; None where there is no end.

    Covers booleans, null, const, enum, bounded integers (their ends), and anyOf of these. Numbers of a range are
    given by both ends, which have the most digits.
    """
    if not isinstance(schema, dict):
        return None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        flat = isinstance(values, list) and all(not isinstance(value, dict | list) for value in values)
        return [json.dumps(value, ensure_ascii=False) for value in values] if flat and values else None
    if "anyOf" in schema:
        parts = [finite_texts(branch) for branch in schema["anyOf"]]
        known = [part for part in parts if part is not None]
        return [text for part in known for text in part] if parts and len(known) == len(parts) else None
    kind = schema.get("type")
    if kind == "boolean":
        return ["true", "false"]
    if kind == "null":
        return ["null"]
    if kind == "integer" and isinstance(schema.get("minimum"), int) and isinstance(schema.get("maximum"), int):
        return [str(schema["minimum"]), str(schema["maximum"])]
    return None
