"""The independent judges: json, jsonschema (Draft 2020-12, formats off) and regex, each bounded and offline."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import regex

MATCH_SECONDS = 1.0
"""Longest time for one pattern on one text; a pattern that needs more backtracks without end."""
_BIG_INTEGER_DIGITS = 4000
"""Python refuses to read integers of more than 4300 digits; beyond this an integer is read as a float."""


class _Unjudged(Exception):
    """A part of a schema that the judge cannot apply."""


@dataclass(frozen=True)
class Reading:
    """A JSON text as a value; ``fault`` says why there is none, ``doubled`` is a name that one object has twice."""

    value: Any = None
    fault: str = ""
    doubled: str | None = None


@dataclass(frozen=True)
class Breach:
    """Where a value breaks its schema (a JSON path) and how; ``unjudged``: the schema itself could not be applied."""

    path: str
    message: str
    unjudged: bool = False


def read_json(text: str) -> Reading:
    """Read a text that is JSON; of a name that occurs twice in one object the last value counts."""
    doubled: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(items)
        if len(seen) < len(items) and not doubled:
            names = [name for name, _ in items]
            doubled.append(next(name for name in names if names.count(name) > 1))
        return seen

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_int=_read_integer)
    except RecursionError:
        return Reading(fault="nested too deeply for Python's json")
    except ValueError as error:
        return Reading(fault=f"json cannot read it: {error}")
    return Reading(value, doubled=doubled[0] if doubled else None)


def _read_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _BIG_INTEGER_DIGITS else float(digits)


def _search(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=MATCH_SECONDS) is not None
    except regex.error as error:
        raise _Unjudged(f"the pattern {pattern!r} cannot be read: {error}") from None
    except TimeoutError:
        raise _Unjudged(f"the pattern {pattern!r} took more than {MATCH_SECONDS} s") from None


def _pattern(validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Exception]:
    if validator.is_type(instance, "string") and not _search(pattern, instance):
        yield _jsonschema().ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, _schema: Any) -> Iterator[Exception]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, subschema in patterns.items():
        for name, value in instance.items():
            if _search(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


@functools.cache
def _jsonschema() -> Any:
    """The package; most of its import is one checker of IRIs where that is installed, and formats are off here."""
    name = "rfc3987_syntax"
    absent = sys.modules.setdefault(name, None) is None  # type: ignore[arg-type]
    import jsonschema

    if absent:
        del sys.modules[name]
    return jsonschema


@functools.cache
def _validator_class() -> Any:
    jsonschema = _jsonschema()
    return jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"pattern": _pattern, "patternProperties": _pattern_properties}
    )


def schema_fault(schema: Any) -> str:
    """Why ``schema`` is no JSON Schema (Draft 2020-12), or an empty text."""
    jsonschema = _jsonschema()
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        return f"at {error.json_path}: {error.message}"
    except RecursionError:
        return "the schema is nested too deeply for jsonschema"
    return ""


def check(value: Any, schema: Any) -> Breach | None:
    """The most telling breach of ``schema`` by ``value``, None if it obeys; remote references are not fetched."""
    import referencing
    import referencing.exceptions

    jsonschema = _jsonschema()

    try:
        # An empty registry: jsonschema's own default would fetch a remote reference over the network.
        validator = _validator_class()(schema, registry=referencing.Registry())
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except _Unjudged as unjudged:
        return Breach("$", str(unjudged), unjudged=True)
    except referencing.exceptions.Unresolvable as missing:
        return Breach("$", f"the schema refers to {missing.ref!r}, which is not in it", unjudged=True)
    except RecursionError:
        return Breach("$", "value and schema are nested too deeply for jsonschema", unjudged=True)
    except Exception as fault:  # noqa: BLE001 a schema that is none makes jsonschema raise whatever Python raises
        return Breach("$", f"jsonschema cannot apply the schema: {type(fault).__name__}: {fault}", unjudged=True)
    if error is None:
        return None
    return Breach(error.json_path, error.message)


def match_regex(pattern: str, text: str) -> tuple[bool, int] | str:
    """Whether ``pattern`` matches the whole text, and how many characters are a legal beginning.

    Letters, digits and blanks of classes such as ``\\d`` are ASCII, as xgrammar has them. A text in place of the
    pair says why there is no answer (a pattern that `regex` cannot read, or that backtracks without end).
    """
    try:
        compiled = regex.compile(pattern, regex.ASCII)
        if compiled.fullmatch(text, timeout=MATCH_SECONDS):
            return True, len(text)
        if compiled.fullmatch(text, partial=True, timeout=MATCH_SECONDS):
            return False, len(text)
        return _longest_beginning(compiled, text)
    except regex.error as error:
        return f"the regex cannot be read: {error}"
    except TimeoutError:
        return f"the regex took more than {MATCH_SECONDS} s"


def _longest_beginning(compiled: Any, text: str) -> tuple[bool, int]:
    """Bisect: a text whose beginning no match can have is no beginning either."""
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        if compiled.fullmatch(text, 0, middle, partial=True, timeout=MATCH_SECONDS):
            low = middle
        else:
            high = middle
    return bool(compiled.fullmatch(text, 0, low, timeout=MATCH_SECONDS)), low
