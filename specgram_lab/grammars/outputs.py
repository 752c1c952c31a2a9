"""What became of an output: one verdict for every text, whatever the grammar and however the request ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import JsonValue

from specgram_lab.grammars import oracle
from specgram_lab.grammars.jsontext import Scan, scan
from specgram_lab.spec import Grammar

BLANK_RUN = 32
"""Characters of blanks in one run from which an output cut by its length counts as a whitespace runaway."""
NUMBER_RUN = 40
"""Characters of one number from which an output cut by its length counts as a number runaway.

The longest double in shortest decimal form has 24 characters, a 128-bit integer 39 digits."""

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")


class OutputClass(StrEnum):
    """The classes of an output; each text has exactly one."""

    VALID = "valid"
    """In the grammar's language, by a judge that is not the engine's own (JSON kinds, regex, choice)."""
    INVALID = "invalid"
    """Not in the language, and no longer or other output could mend it, or the model itself ended it too early."""
    TRUNCATED = "truncated"
    """A legal beginning that something other than the model cut: max_tokens, an error, an abort."""
    WHITESPACE_RUNAWAY = "whitespace_runaway"
    """Cut by its length after a long run of blanks, which the grammar allowed."""
    NUMBER_RUNAWAY = "number_runaway"
    """Cut by its length inside a number that the grammar did not bound."""
    DESYNC_AFTER_END = "desync_after_end"
    """A complete value, and more text behind it."""
    EMPTY = "empty"
    """No text at all, or blanks only."""
    NOT_JUDGED = "not_judged"
    """No grammar, or nothing at hand that can judge it; the detail says which."""


@dataclass(frozen=True)
class OutputVerdict:
    """The class of one output, why, and the character at which it went wrong (None where there is no such place).

    ``detail`` can always be encoded as UTF-8.
    """

    kind: OutputClass
    detail: str = ""
    position: int | None = None


@dataclass(frozen=True)
class TextMatch:
    """What the engine's own matcher says of a text: ``accepted`` characters of it, and whether it may end there."""

    accepted: int
    complete: bool


def escape_surrogates(text: str) -> str:
    r"""``text`` with every lone surrogate as its JSON escape (``\ud83d``), so that it can be encoded as UTF-8.

    A high surrogate with its low one behind it becomes the character that the two stand for.
    """
    joined = _PAIR.sub(lambda m: m.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text)
    return _LONE.sub(lambda m: f"\\u{ord(m.group()):04x}", joined)


def classify(
    grammar: Grammar,
    text: str,
    finish_reason: str | None,
    *,
    schema: JsonValue = None,
    match: TextMatch | None = None,
    reasoning_end: str | None = None,
) -> OutputVerdict:
    """The verdict on one output.

    Args:
        grammar: what the output was to obey.
        text: the output, special tokens left out.
        finish_reason: vLLM's (``stop``, ``length``, ``error``, ``abort``) or the lab's ``rejected``.
        schema: the prompt's own schema, for a grammar with ``per_prompt``.
        match: the matcher's word (`validate_texts`); EBNF and structural tags cannot be judged without it.
        reasoning_end: a marker up to which the output is reasoning, which no grammar judges.

    Never raises for any text: what cannot be judged is ``not_judged`` with the reason.
    """
    offset = 0
    if reasoning_end is not None:
        found = text.find(reasoning_end)
        if found < 0:
            verdict = _unfinished("the output ends inside the reasoning", len(text), finish_reason)
            return _safe(verdict, 0)
        offset = found + len(reasoning_end)
    return _safe(_judge(grammar, text[offset:], finish_reason, schema, match), offset)


def classify_many(
    grammar: Grammar,
    texts: Sequence[str],
    finish_reasons: Sequence[str | None],
    *,
    schemas: Sequence[JsonValue] | None = None,
    matches: Sequence[TextMatch | None] | None = None,
    reasoning_end: str | None = None,
) -> list[OutputVerdict]:
    """`classify` for the outputs of a run, in order; the sequences are equally long.

    Raises:
        ValueError: they are not.
    """
    own = schemas if schemas is not None else [None] * len(texts)
    known = matches if matches is not None else [None] * len(texts)
    return [
        classify(grammar, text, finish, schema=schema, match=match, reasoning_end=reasoning_end)
        for text, finish, schema, match in zip(texts, finish_reasons, own, known, strict=True)
    ]


def _safe(verdict: OutputVerdict, offset: int) -> OutputVerdict:
    position = None if verdict.position is None else verdict.position + offset
    return OutputVerdict(verdict.kind, escape_surrogates(verdict.detail), position)


def _judge(
    grammar: Grammar, text: str, finish: str | None, schema: JsonValue, match: TextMatch | None
) -> OutputVerdict:
    if grammar.kind == "none":
        return OutputVerdict(OutputClass.NOT_JUDGED, "no grammar")
    if not text.strip() and not _may_be_blank(grammar, text, match):
        if finish == "length" and len(text) >= BLANK_RUN:
            return OutputVerdict(OutputClass.WHITESPACE_RUNAWAY, f"nothing but {len(text)} blanks", 0)
        how = f", the request ended with {finish}" if finish not in ("stop", "length", None) else ""
        return OutputVerdict(OutputClass.EMPTY, f"{'blanks only' if text else 'no text'}{how}", 0)
    if grammar.kind == "json_object":
        return _judge_json(text, finish, {"type": "object"})
    if grammar.kind == "json_schema":
        wanted = schema if grammar.per_prompt else grammar.value
        if wanted is None:
            return OutputVerdict(OutputClass.NOT_JUDGED, "the prompt brought no schema")
        return _judge_json(text, finish, wanted)
    if grammar.kind == "choice":
        return _judge_choice(text, finish, grammar.value)
    if grammar.kind == "regex":
        own = oracle.match_regex(str(grammar.value), text)
        if isinstance(own, str):
            return _judge_match(text, finish, match, own)
        full, partial = own
        return _judge_match(text, finish, TextMatch(partial, full), "")
    return _judge_match(text, finish, match, f"a {grammar.kind} needs the matcher: validate_texts gives its word")


def _may_be_blank(grammar: Grammar, text: str, match: TextMatch | None) -> bool:
    if grammar.kind == "choice":
        return isinstance(grammar.value, list) and text in grammar.value
    if grammar.kind == "regex":
        own = oracle.match_regex(str(grammar.value), text)
        return own[0] if not isinstance(own, str) else bool(match and match.complete)
    return bool(match and match.complete and match.accepted == len(text))


def _unfinished(what: str, position: int, finish: str | None) -> OutputVerdict:
    if finish == "length":
        return OutputVerdict(OutputClass.TRUNCATED, f"{what}, cut by max_tokens", position)
    if finish in ("stop", None):
        return OutputVerdict(OutputClass.INVALID, f"{what}, though nothing cut it", position)
    return OutputVerdict(OutputClass.TRUNCATED, f"{what}, the request ended with {finish}", position)


def _judge_json(text: str, finish: str | None, schema: Any) -> OutputVerdict:
    found = scan(text)
    if found.error is not None:
        return OutputVerdict(OutputClass.INVALID, _name_fault(text, found), found.error)
    if found.end is None:
        return _runaway(text, found, finish) or _unfinished("the value is not complete", len(text), finish)
    rest = text[found.end :]
    extra = len(rest) - len(rest.lstrip(" \t\n\r"))
    if extra < len(rest):
        position = found.end + extra
        return OutputVerdict(
            OutputClass.DESYNC_AFTER_END,
            f"the value is complete at {found.end}, then {rest[extra:][:20]!a} follows",
            position,
        )
    if finish == "length" and extra >= BLANK_RUN:
        return OutputVerdict(OutputClass.WHITESPACE_RUNAWAY, f"{extra} blanks after the value", found.end)
    if finish == "length" and found.tail == "number" and not extra:
        return _runaway(text, found, finish) or _unfinished("the number could go on", len(text), finish)
    return _judge_value(text[found.start : found.end], schema)


def _judge_value(text: str, schema: Any) -> OutputVerdict:
    reading = oracle.read_json(text)
    if reading.fault:
        return OutputVerdict(OutputClass.NOT_JUDGED, reading.fault)
    breach = oracle.check(reading.value, schema)
    if breach is None:
        doubled = f"the name {reading.doubled!a} occurs twice in one object" if reading.doubled is not None else ""
        return OutputVerdict(OutputClass.VALID, doubled)
    if breach.unjudged:
        return OutputVerdict(OutputClass.NOT_JUDGED, breach.message)
    return OutputVerdict(OutputClass.INVALID, f"at {breach.path}: {breach.message}")


def _runaway(text: str, found: Scan, finish: str | None) -> OutputVerdict | None:
    if finish != "length":
        return None
    if found.tail == "number" and found.tail_length >= NUMBER_RUN:
        start = len(text) - found.tail_length
        return OutputVerdict(OutputClass.NUMBER_RUNAWAY, f"a number of {found.tail_length} characters goes on", start)
    if found.tail == "string":
        blanks = len(text) - len(text.rstrip(" \t"))
        if blanks >= BLANK_RUN:
            return OutputVerdict(OutputClass.WHITESPACE_RUNAWAY, f"{blanks} blanks inside a string", len(text) - blanks)
    if found.longest_blank >= BLANK_RUN:
        return OutputVerdict(
            OutputClass.WHITESPACE_RUNAWAY, f"{found.longest_blank} blanks between two tokens", found.blank_position
        )
    return None


def _name_fault(text: str, found: Scan) -> str:
    at = found.error if found.error is not None else 0
    if text.startswith("```", at):
        return f"a code fence, {found.why}"
    if at and text[at - 1] == "{" and text[at] == "{":
        return f"a doubled brace, {found.why}"
    if at == found.start:
        return f"the text does not begin as JSON: {found.why}"
    return found.why


def _judge_choice(text: str, finish: str | None, choices: JsonValue) -> OutputVerdict:
    known = [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []
    if text in known:
        return OutputVerdict(OutputClass.VALID)
    if any(choice.startswith(text) for choice in known):
        return _unfinished("no choice is complete", len(text), finish)
    begun = [choice for choice in known if choice and text.startswith(choice)]
    if begun:
        end = max(len(choice) for choice in begun)
        return OutputVerdict(
            OutputClass.DESYNC_AFTER_END, f"the choice {text[:end]!a} is complete, then more follows", end
        )
    shared = max((_shared(choice, text) for choice in known), default=0)
    return OutputVerdict(OutputClass.INVALID, f"not one of the {len(known)} choices", shared)


def _shared(left: str, right: str) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def _judge_match(text: str, finish: str | None, match: TextMatch | None, missing: str) -> OutputVerdict:
    if match is None:
        return OutputVerdict(OutputClass.NOT_JUDGED, missing)
    if match.accepted < len(text):
        if match.complete:
            return OutputVerdict(
                OutputClass.DESYNC_AFTER_END, "the text is complete, then more follows", match.accepted
            )
        found = text[match.accepted]
        return OutputVerdict(
            OutputClass.INVALID, f"found {found!a}, which the grammar does not allow there", match.accepted
        )
    if match.complete:
        return OutputVerdict(OutputClass.VALID)
    return _unfinished("the text is not complete", len(text), finish)
