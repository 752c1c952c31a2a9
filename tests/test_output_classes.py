"""What `classify` says of texts, without an engine: each class, and properties that hold for any text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgram_lab.grammars import OutputClass, TextMatch, classify, classify_many, escape_surrogates
from specgram_lab.grammars.jsontext import scan
from specgram_lab.spec import Grammar

OBJECT = Grammar(kind="json_object")
ANY = Grammar(kind="json_schema", value={})
SMALL = Grammar(
    kind="json_schema",
    value={
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 3}},
        "required": ["a"],
        "additionalProperties": False,
    },
)
CHOICE = Grammar(kind="choice", value=["yes", "no", "yesterday"])
MONTH = Grammar(kind="regex", value=r"\d{4}-\d{2}")
EBNF = Grammar(kind="ebnf", value='root ::= "a" | "bb"')


@pytest.mark.parametrize(
    ("grammar", "text", "finish", "kind", "position"),
    [
        (OBJECT, '{"a": 1}', "stop", "valid", None),
        (OBJECT, "[1]", "stop", "invalid", None),
        (OBJECT, '{"a": 1', "length", "truncated", 7),
        (OBJECT, '{"a": 1', "stop", "invalid", 7),
        (OBJECT, '{"a": 1', "error", "truncated", 7),
        (OBJECT, '{"a": tru', "length", "truncated", 9),
        (OBJECT, '{"a": 1.', "length", "truncated", 8),
        (OBJECT, '{"a": "x\\u00', "length", "truncated", 12),
        (OBJECT, '{"a": 01}', "length", "invalid", 7),
        (OBJECT, '{"a": 1,}', "length", "invalid", 8),
        (OBJECT, '{"a": "x\n"}', "stop", "invalid", 8),
        (OBJECT, '{"a": NaN}', "stop", "invalid", 6),
        (OBJECT, "", "stop", "empty", 0),
        (OBJECT, "", "rejected", "empty", 0),
        (OBJECT, " \n", "length", "empty", 0),
        # vllm#36138, #34650: a fence or a doubled brace after the reasoning is a failure, also with finish stop
        (OBJECT, '```json\n{"a": 1}\n```', "stop", "invalid", 0),
        (OBJECT, '{{"a": 1}', "stop", "invalid", 1),
        (OBJECT, 'Sure! {"a": 1}', "stop", "invalid", 0),
        # vllm#40875, #41758: a stray quote behind a bare value, with finish stop and no FSM error
        (OBJECT, '{"ok": true"}', "stop", "invalid", 11),
        (OBJECT, '{"a": 1} {"a": 2}', "stop", "desync_after_end", 9),
        (OBJECT, '{"a": 1}"', "length", "desync_after_end", 8),
        # vllm#38696: blanks inside the value until max_tokens
        (OBJECT, '{"a":' + " \n" * 50, "length", "whitespace_runaway", 5),
        (OBJECT, '{"a":' + " \n" * 50, "stop", "invalid", 105),
        (OBJECT, '{"a": "' + " " * 80, "length", "whitespace_runaway", 7),
        (OBJECT, '{"a": 1}' + " " * 80, "length", "whitespace_runaway", 8),
        (OBJECT, '{"a":' + " " * 8, "length", "truncated", 13),
        # vllm#52011: a number that nothing bounds
        (ANY, "7" * 500, "length", "number_runaway", 0),
        (ANY, '{"a": 0.' + "3" * 90, "length", "number_runaway", 6),
        (ANY, "7" * 500, "stop", "valid", None),
        (ANY, "7" * 6000, "stop", "valid", None),
        (ANY, "12", "length", "truncated", 2),
        (SMALL, '{"a": 3}', "length", "valid", None),
        (SMALL, '{"a": 4}', "stop", "invalid", None),
        (SMALL, '{"b": 1}', "stop", "invalid", None),
        (CHOICE, "yes", "stop", "valid", None),
        (CHOICE, "yest", "length", "truncated", 4),
        (CHOICE, "yest", "stop", "invalid", 4),
        (CHOICE, "no.", "stop", "desync_after_end", 2),
        (CHOICE, "ya", "stop", "invalid", 1),
        (MONTH, "2024-05", "stop", "valid", None),
        (MONTH, "2024-", "length", "truncated", 5),
        (MONTH, "20x4", "stop", "invalid", 2),
        (MONTH, "2024-05.", "stop", "desync_after_end", 7),
        (MONTH, "٢٠٢٤-٠٥", "stop", "invalid", 0),
        (Grammar(), "anything", "stop", "not_judged", None),
        (EBNF, "a", "stop", "not_judged", None),
    ],
)
def test_class(grammar: Grammar, text: str, finish: str, kind: str, position: int | None) -> None:
    verdict = classify(grammar, text, finish)
    assert (verdict.kind, verdict.position) == (kind, position), verdict.detail
    assert verdict.detail or kind == "valid"


@pytest.mark.parametrize(
    ("text", "finish", "words"),
    [
        ('{{"a": 1}', "stop", "doubled brace"),
        ("```json", "stop", "code fence"),
        ("Sure", "stop", "does not begin as JSON"),
        ('{"a": 1', "length", "cut by max_tokens"),
        ('{"a": 1', "stop", "nothing cut it"),
        ('{"a": 1', "abort", "ended with abort"),
    ],
)
def test_detail_names_the_fault(text: str, finish: str, words: str) -> None:
    assert words in classify(OBJECT, text, finish).detail


def test_schema_breach_names_its_place() -> None:
    assert classify(SMALL, '{"a": 4}', "stop").detail == "at $.a: 4 is greater than the maximum of 3"


def test_schema_of_the_prompt() -> None:
    own = Grammar(kind="json_schema", per_prompt=True)
    schema = {"type": "array", "items": {"type": "integer"}}
    assert classify(own, "[1]", "stop", schema=schema).kind == OutputClass.VALID
    assert classify(own, '["x"]', "stop", schema=schema).kind == OutputClass.INVALID
    assert classify(own, "[1]", "stop").kind == OutputClass.NOT_JUDGED
    many = classify_many(own, ["[1]", "{}"], ["stop", "stop"], schemas=[schema, schema])
    assert [verdict.kind for verdict in many] == ["valid", "invalid"]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        classify_many(own, ["[1]"], ["stop", "stop"])


def test_the_matcher_judges_ebnf() -> None:
    assert classify(EBNF, "bb", "stop", match=TextMatch(2, True)).kind == OutputClass.VALID
    assert classify(EBNF, "b", "length", match=TextMatch(1, False)).kind == OutputClass.TRUNCATED
    assert classify(EBNF, "bc", "stop", match=TextMatch(1, False)).position == 1
    assert classify(EBNF, "ab", "stop", match=TextMatch(1, True)).kind == OutputClass.DESYNC_AFTER_END


def test_reasoning_is_not_judged() -> None:
    text = 'The user wants {{ JSON }}.</think>{"a": 1'
    verdict = classify(OBJECT, text, "length", reasoning_end="</think>")
    assert (verdict.kind, verdict.position) == ("truncated", len(text))
    assert classify(OBJECT, "still thinking", "length", reasoning_end="</think>").kind == "truncated"
    assert classify(OBJECT, text, "length").kind == "invalid"


def test_doubled_name_is_said() -> None:
    verdict = classify(ANY, '{"a": 1, "a": 2}', "stop")
    assert verdict.kind == "valid"
    assert "'a' occurs twice" in verdict.detail


def test_nesting_without_recursion() -> None:
    assert classify(ANY, "[" * 100_000, "length").kind == "truncated"
    assert classify(ANY, "[" * 100_000 + "]" * 100_000, "stop").kind == "not_judged"


def test_lone_surrogate_is_kept_and_escaped() -> None:
    # jupyter/notebook#2680: legal JSON whose value cannot be encoded
    spelled = r'{"s":"\ud83d"}'
    assert classify(OBJECT, spelled, "stop").kind == "valid"
    assert escape_surrogates(json.loads(spelled)["s"]) == r"\ud83d"
    assert escape_surrogates("\ud83d\ude00 \ude00 naïve") == "😀 \\ude00 naïve"
    strict = Grammar(kind="json_schema", value={"properties": {"s": {"maxLength": 0}}})
    verdict = classify(strict, spelled, "stop")
    assert verdict.kind == "invalid"
    verdict.detail.encode("utf-8")


@pytest.mark.parametrize("escaped", [True, False])
def test_non_ascii_enum(escaped: bool) -> None:
    # xgrammar#418: judged by characters, however the schema was written
    schema = json.loads(json.dumps({"enum": ["在线", "離線"]}, ensure_ascii=escaped))
    grammar = Grammar(kind="json_schema", value=schema)
    assert classify(grammar, '"在线"', "stop").kind == "valid"
    wrong = classify(grammar, '"离线"', "stop")
    assert wrong.kind == "invalid"
    assert "在线" in wrong.detail


def test_backtracking_is_bounded() -> None:
    evil = "a" * 60 + "!"
    started = time.monotonic()
    assert classify(Grammar(kind="regex", value="(a|aa)+b"), evil, "stop").kind in ("invalid", "not_judged")
    pattern = Grammar(kind="json_schema", value={"type": "string", "pattern": "^(a|aa)+$"})
    assert classify(pattern, json.dumps(evil), "stop").kind in ("invalid", "not_judged")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "#/$defs/gone"},
        {"$ref": "http://example.invalid/x"},
        {"pattern": "[a-"},
        {"minimum": "x"},
    ],
)
def test_schema_that_cannot_be_applied(schema: dict[str, Any]) -> None:
    text = '"x"' if "pattern" in schema else "1"
    verdict = classify(Grammar(kind="json_schema", value=schema), text, "stop")
    assert verdict.kind == "not_judged"
    assert verdict.detail


FINISH = st.sampled_from(["stop", "length", "error", "abort", "rejected", None])
GRAMMARS = st.sampled_from([OBJECT, ANY, SMALL, CHOICE, MONTH, EBNF, Grammar()])
TEXTS = st.text(st.one_of(st.characters(), st.sampled_from('{}[]":,0123456789-+.eE \n\\utrflsan\ud83d')), max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(GRAMMARS, TEXTS, FINISH, st.none() | st.builds(TextMatch, st.integers(0, 5), st.booleans()))
def test_every_text_has_a_verdict(grammar: Grammar, text: str, finish: str | None, match: TextMatch | None) -> None:
    verdict = classify(grammar, text, finish, match=match)
    assert verdict.position is None or 0 <= verdict.position <= len(text)
    verdict.detail.encode("utf-8")


@given(TEXTS)
def test_scan_agrees_with_json(text: str) -> None:
    found = scan(text)
    try:
        json.loads(text.strip(" \t\n\r"), parse_constant=lambda word: 1 / 0)
        legal = True
    except (ValueError, ZeroDivisionError):
        legal = False
    whole = found.end is not None and not text[found.end :].strip(" \t\n\r")
    assert whole == legal


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_every_value_is_complete_and_every_beginning_legal(value: Any, escaped: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=indent)
    assert scan(text).end == len(text)
    for cut in range(len(text)):
        assert scan(text[:cut]).error is None
    assert classify(ANY, text, "stop").kind == ("valid" if text.strip() else "empty")


@given(st.text())
def test_escaped_text_can_be_encoded(text: str) -> None:
    text += "\udc00\ud800"
    assert "\\udc00" in escape_surrogates(text)
    escape_surrogates(text).encode("utf-8")
