"""Reads the compiler's answer: what it dropped, what it accepts although the schema does not, and what vLLM refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specgram_lab.grammars import enforcement, oracle
from specgram_lab.grammars.whitespace import Whitespace, version_tuple
from specgram_lab.spec import Grammar

MAX_SEEN = 6
"""Accepted near misses that are shown; the rest is counted."""
_GATES_SINCE = (0, 32)
"""The version whose refusals `enforcement` knows."""
_WARNING = re.compile(r"Warning: (.+)")
_PLACE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_DOT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(\.)", re.DOTALL)


def compiler_text(error: str) -> str:
    """The compiler's words without the clock and source line in front of them."""
    return _PLACE.sub("", error).strip()


def refused(grammar: Grammar, vllm: str | None) -> list[str]:
    """What of the schema vLLM does not hand to xgrammar; empty for other kinds and backends, and without vLLM."""
    version = version_tuple(vllm)
    if grammar.kind != "json_schema" or grammar.backend == "guidance" or version is None or version < _GATES_SINCE:
        return []
    return [str(finding) for finding in enforcement.findings(grammar.value) if finding.refused]


def of(
    grammar: Grammar, made: Mapping[str, Any], answer: Mapping[str, Any], mode: Whitespace
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(not enforced, warnings) of a compiled grammar, each one sentence, none twice."""
    said = list(dict.fromkeys(_WARNING.findall(str(answer.get("spoken", "")))))
    if grammar.kind == "regex":
        return tuple(_regex(str(grammar.value)) if grammar.backend != "guidance" else ()), tuple(said)
    if grammar.kind not in ("json_object", "json_schema"):
        return (), tuple(said)
    schema: Any = {"type": "object"} if grammar.kind == "json_object" else grammar.value
    fault = oracle.schema_fault(schema)
    warnings = [f"the schema is no JSON Schema of Draft 2020-12: {fault}"] if fault else []
    known: list[str] = []
    if grammar.backend != "guidance":
        known += [str(finding) for finding in enforcement.findings(schema) if not finding.enforced]
    known += said
    if "search" in answer:
        known += _seen(schema, made, answer)
        warnings += _narrower(made, answer, mode)
    return tuple(dict.fromkeys(known)), tuple(warnings)


def _regex(pattern: str) -> list[str]:
    if any(match.group(1) for match in _DOT.finditer(pattern)):
        return ["a dot also matches a line feed"]
    return []


def _seen(schema: Any, made: Mapping[str, Any], answer: Mapping[str, Any]) -> list[str]:
    """Texts that the compiled grammar accepts and jsonschema does not: evidence, whatever the rules say."""
    own = made.get("own", 0)
    accepted = [
        text
        for text, (length, complete) in list(zip(made.get("texts", []), answer.get("matches", []), strict=True))[own:]
        if complete and length == len(text)
    ]
    if answer["search"]["text"] is not None:
        accepted.append(answer["search"]["text"])
    found: dict[str, str] = {}
    for text in accepted:
        reading = oracle.read_json(text)
        if reading.fault:
            found.setdefault(reading.fault, f"accepts {text!r}, which is not JSON")
            continue
        breach = oracle.check(reading.value, schema)
        if breach is not None:
            found.setdefault(breach.path, f"accepts {text}: at {breach.path}, {breach.message}")
    shown = list(found.values())
    return shown[:MAX_SEEN] + ([f"and {len(shown) - MAX_SEEN} more of this kind"] if len(shown) > MAX_SEEN else [])


def _narrower(made: Mapping[str, Any], answer: Mapping[str, Any], mode: Whitespace) -> list[str]:
    own = made.get("own", 0)
    forms = list(zip(made["texts"], answer["matches"], strict=True))[:own]
    legal = [text for text, (length, complete) in forms if complete and length == len(text)]
    if not forms:
        return []
    if not legal:
        return [f"refuses {forms[0][0]}, which obeys the schema"]
    if forms[0][0] not in legal:
        return [f"whitespace is not as known for this build ({mode}): {legal[0]} is legal, {forms[0][0]} is not"]
    return []
