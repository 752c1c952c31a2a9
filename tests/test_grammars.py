"""Grammars before a run: what compiles, what a backend drops, what drafts are worth, against the real matchers.

The matchers run in processes of their own, each started once for the whole module.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from specgram_lab.grammars import (
    ChildLimits,
    CompilerSession,
    MatcherError,
    Preflight,
    Question,
    Replay,
    TextMatch,
    Walk,
    child,
    classify,
    for_prompt,
    jobs,
    preflight,
    preflight_many,
    replay,
    to_vllm,
    tools_grammar,
    validate_texts,
    walk,
    whitespace_mode,
)
from specgram_lab.grammars.enforcement import findings
from specgram_lab.grammars.instances import finite_texts, near_misses, smallest
from specgram_lab.grammars.whitespace import version_tuple
from specgram_lab.paths import DATA, DataNotFoundError
from specgram_lab.spec import Grammar, SpecError


def schema(value: Any, **more: Any) -> Grammar:
    return Grammar(kind="json_schema", value=value, **more)


def regex(value: str) -> Grammar:
    return Grammar(kind="regex", value=value)


def ebnf(value: str) -> Grammar:
    return Grammar(kind="ebnf", value=value)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


INTEGER = {"type": "integer"}
OBJECT = Grammar(kind="json_object")
KIND_NOTE = json.loads((DATA / "schemas" / "kind_note.json").read_text(encoding="utf-8"))
TWO = {
    "type": "object",
    "properties": {"a": INTEGER, "b": INTEGER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ENDLESS = {
    "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
    "$ref": "#/$defs/n",
}
UNICODE = {"type": "object", "properties": {"naïve 🚀": {"const": "Ω"}}, "required": ["naïve 🚀"]}

GRAMMARS: dict[str, Grammar] = {
    "none": Grammar(),
    "json_object": OBJECT,
    "json_object compact": Grammar(kind="json_object", disable_any_whitespace=True),
    "any": schema({}),
    "two": schema(TWO),
    "two compact": schema(TWO, disable_any_whitespace=True),
    "two guidance": schema(TWO, disable_any_whitespace=True, backend="guidance"),
    "boolean": schema({"type": "boolean"}),
    "choice": Grammar(kind="choice", value=["yes", 'no "way"\n', "在线"]),
    "sibling of anyOf": schema(
        {"type": "object", "properties": {"x": INTEGER}, "additionalProperties": False, "anyOf": [{"required": ["x"]}]}
    ),
    "required undeclared": schema({"type": "object", "required": ["a"]}),
    "allOf": schema({"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]}),
    "untyped pattern": schema(
        {"type": "object", "properties": {"p": {"pattern": "^[a-z]+$", "maxLength": 3}}, "required": ["p"]}
    ),
    "pattern and length": schema({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}),
    "allOf auto": schema({"allOf": [{"type": "string"}, {"maxLength": 3}]}, backend="auto"),
    "negative lookahead": schema({"type": "string", "pattern": "^(?!admin)[a-z]+$"}),
    "lookahead": schema({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4}$"}),
    "regex lookahead": regex("(?=a)ab"),
    "regex backreference": regex(r"(a|b)\1"),
    "regex word boundary": regex(r"\bfoo\b"),
    "regex unclosed": regex("[a-z"),
    "regex after a bad one": regex("^(.*)$"),
    "regex nested quantifier": regex("(a+)+b"),
    "enum empty": schema({"enum": []}),
    "property false": schema({"type": "object", "properties": {"a": False}}),
    "range empty": schema({"type": "integer", "minimum": 10, "maximum": 3}),
    "length empty": schema({"type": "string", "minLength": 10, "maxLength": 3}),
    "ebnf no root": ebnf('start ::= "a"'),
    "ebnf undefined": ebnf("root ::= foo"),
    "ebnf endless": ebnf('root ::= "a" root'),
    "ebnf lark": ebnf('start: "a" | "b"'),
    "schema endless": schema(ENDLESS),
    "nested 64": schema(nested(31)),
    "nested 65": schema(nested(65)),
    "no schema": schema({"type": []}),
    "unicode": schema(UNICODE),
    "tools": tools_grammar(json.loads((DATA / "schemas" / "toolset.json").read_text(encoding="utf-8"))),
    "sql": ebnf((DATA / "schemas" / "sql.ebnf").read_text(encoding="utf-8")),
    "date": regex((DATA / "schemas" / "date.regex").read_text(encoding="utf-8")),
}


@pytest.fixture(scope="module")
def compiler(target_folder: Path) -> Iterator[CompilerSession]:
    if importlib.util.find_spec("xgrammar") is None:
        pytest.skip("xgrammar is not installed")
    with CompilerSession(target_folder) as session:
        yield session


@pytest.fixture(scope="module")
def flights(compiler: CompilerSession) -> Mapping[str, Preflight]:
    limits = ChildLimits(seconds=60)  # what is slow here is the machine, no grammar of this table
    found = preflight_many(list(GRAMMARS.values()), compiler, min_tokens=64, limits=limits, vllm="0.32.0")
    return dict(zip(GRAMMARS, found, strict=True))


REFUSED = [
    # vllm#19270, csaf#1518: xgrammar's text and position
    ("regex lookahead", "invalid_grammar", "at position 3: Lookahead is not supported yet."),
    ("regex backreference", "invalid_grammar", "at position 6: Backreference is not supported yet."),
    ("regex word boundary", "invalid_grammar", "at position 1: Word boundary is not supported yet."),
    ("regex unclosed", "invalid_grammar", "at position 5: Unclosed '['"),
    # vllm#20195, #28210, #43920: empty and contradictory grammars
    ("enum empty", "invalid_grammar", "enum array must not be empty"),
    ("property false", "invalid_grammar", "cannot accept any value"),
    ("range empty", "invalid_grammar", "minimum greater than maximum"),
    ("length empty", "invalid_grammar", "minLength 10 is greater than maxLength 3"),
    ("ebnf no root", "invalid_grammar", 'The root rule with name "root" is not found'),
    ("ebnf undefined", "invalid_grammar", 'at line 1, column 10: Rule "foo" is not defined'),
    ("nested 65", "invalid_grammar", "at most 64 levels"),
    ("ebnf endless", "empty_language", "no text ends it"),
    ("schema endless", "empty_language", "no text ends it"),
    # vLLM 0.32 hands neither to xgrammar
    ("allOf", "unsupported", "contains features not supported by xgrammar."),
    ("pattern and length", "unsupported", "contains features not supported by xgrammar."),
]


@pytest.mark.parametrize(("name", "kind", "words"), REFUSED)
def test_refused(flights: Mapping[str, Preflight], name: str, kind: str, words: str) -> None:
    found = flights[name]
    assert (found.ok, found.reason_kind) == (False, kind)
    assert words in found.reason
    assert found.reason.startswith("grammar ")
    assert "/project/" not in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize("name", sorted(set(GRAMMARS) - {name for name, _, _ in REFUSED}))
def test_whoever_is_accepted_can_end(flights: Mapping[str, Preflight], name: str) -> None:
    found = flights[name]
    assert (found.ok, found.reason) == (True, "")
    assert found.accepts_finite
    assert found.shortest_text is not None
    grammar = GRAMMARS[name]
    if grammar.kind in ("json_object", "choice", "regex") or name in ("two", "two compact", "boolean", "unicode"):
        assert classify(grammar, found.shortest_text, "stop").kind == "valid"


def test_a_bad_grammar_leaves_the_next_alone(flights: Mapping[str, Preflight]) -> None:
    assert flights["regex after a bad one"].ok
    assert flights["regex nested quantifier"].ok
    assert flights["nested 64"].ok


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        # xgrammar#858
        ("sibling of anyOf", ["properties beside anyOf is ignored", "is not of type 'object'"]),
        (
            "required undeclared",
            ["required 'a' is not among properties", "accepts {}: at $, 'a' is a required property"],
        ),
        ("allOf", ["allOf of 2 branches is ignored", "is not of type 'string'"]),
        # vllm#57550
        ("untyped pattern", ["pattern without type is ignored", "maxLength without type is ignored", "does not match"]),
        ("pattern and length", ["maxLength beside pattern is ignored", "'abcd' is too long"]),
        # vllm#17313: look-around in a pattern of JSON is dropped without a word to the user
        ("negative lookahead", ["look-around in the pattern", 'accepts "admin"']),
        ("lookahead", ["look-around in the pattern", 'accepts "abcd"']),
        ("regex after a bad one", ["a dot also matches a line feed"]),
    ],
)
def test_not_enforced_by_rule_and_by_evidence(
    flights: Mapping[str, Preflight], name: str, sentences: list[str]
) -> None:
    found = flights[name].not_enforced
    for sentence in sentences:
        assert any(sentence in line for line in found), found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["json_object", "any", "two", "two compact", "boolean", "unicode", "date", "sql"])
def test_nothing_is_dropped(flights: Mapping[str, Preflight], name: str) -> None:
    assert flights[name].not_enforced == ()


def test_a_schema_that_the_backend_narrows(flights: Mapping[str, Preflight]) -> None:
    assert 'refuses {"a": 0}, which obeys the schema' in flights["required undeclared"].warnings
    assert any("no JSON Schema" in line for line in flights["no schema"].warnings)


def test_min_tokens_beyond_the_longest_text(flights: Mapping[str, Preflight]) -> None:
    # vllm#53665, #54218
    found = flights["boolean"]
    assert found.longest_bytes == len("false")
    assert any(line.startswith("min_tokens 64 exceeds the longest string of the grammar") for line in found.warnings)
    assert any("exceeds the longest string" in line for line in flights["choice"].warnings)
    assert flights["two"].longest_tokens is None
    assert not flights["two"].warnings


def test_times_are_apart(flights: Mapping[str, Preflight]) -> None:
    for name in ("two", "sql", "date", "tools"):
        assert (flights[name].compile_s or 0) > 0
        assert 0 < (flights[name].fill_s or 0) < 1


def test_auto_falls_back_as_vllm_does(flights: Mapping[str, Preflight]) -> None:
    found = flights["allOf auto"]
    assert found.ok
    assert found.warnings[0].startswith("auto becomes guidance: ")


QUESTIONS: dict[str, Question] = {
    "open string": Question(OBJECT, '{"region": "us-east-1', ('\n\n", "x"', '", "cpu": 4}', "```json")),
    "blanks": Question(OBJECT, '{"a":' + " \n" * 50),
    "two blanks": Question(OBJECT, '{"a":  1}', max_whitespace=2),
    "three blanks": Question(OBJECT, '{"a":   1}', max_whitespace=2),
    "digits": Question(schema({}), "7" * 500),
    "null xgrammar": Question(schema(KIND_NOTE), '{"kind":', (" null", ' "A"')),
    "null guidance": Question(schema(KIND_NOTE, backend="guidance"), '{"kind":', (" null", ' "A"')),
    "null whole": Question(schema(KIND_NOTE), '{"kind": null, "note": null}'),
    "A whole": Question(schema(KIND_NOTE), '{"kind": "A", "note": null}'),
    "surrogate": Question(OBJECT, r'{"s":"\ud83d"}'),
    "end": Question(OBJECT, '{"a":1}', ((2,), (2, 2), "x")),
    "raw enum": Question(schema(UNICODE), '{"naïve 🚀": "', ('Ω"}', '\\u03a9"}')),
}


@pytest.fixture(scope="module")
def replays(compiler: CompilerSession) -> Mapping[str, Replay]:
    found = replay(list(QUESTIONS.values()), compiler, limits=ChildLimits(seconds=60))
    return dict(zip(QUESTIONS, found, strict=True))


def test_drafts_inside_an_open_string(replays: Mapping[str, Replay]) -> None:
    # vllm#53777, #53181, #44006: a raw line feed is illegal there, a code fence is not
    drafts = replays["open string"].drafts
    assert [(len(draft.token_ids), draft.valid) for draft in drafts] == [(6, 0), (7, 7), (2, 2)]


def test_blanks_are_legal_without_end(replays: Mapping[str, Replay]) -> None:
    # vllm#38696, #44619
    found = replays["blanks"]
    assert (found.legal, found.allowed, found.eos_allowed) == (True, 285, False)
    assert replays["two blanks"].complete
    assert not replays["three blanks"].legal


def test_digits_are_legal_without_end(replays: Mapping[str, Replay]) -> None:
    # vllm#52011
    found = replays["digits"]
    assert (found.legal, found.allowed, found.eos_allowed) == (True, 14, True)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_a_walk_asks_about_a_draft_after_each_token_and_the_end_is_one(compiler: CompilerSession, backend: str) -> None:
    (asked,) = replay([Question(OBJECT, "", ('{"a": 12}',))], compiler)
    text = asked.drafts[0].token_ids
    drafts = tuple((*text[at + 1 :], 2, 2) for at in range(len(text)))
    grammar = schema({"type": "object"}, backend=backend)
    (found,) = walk([Walk(grammar, text, drafts, (2,))], compiler)
    left = [len(text) - at for at in range(len(text))]  # and one end; nothing follows it
    assert found == (left if backend == "xgrammar" else [*left[:-1], 0])  # vLLM asks no llguidance that has stopped


def test_every_token_that_ends_a_text_may_stand_behind_it(compiler: CompilerSession) -> None:
    (asked,) = replay([Question(OBJECT, "", ('{"a": 1}',))], compiler)
    text = asked.drafts[0].token_ids
    for stops, valid in (((2,), 0), ((2, 0), 1)):
        (found,) = walk([Walk(OBJECT, text, ((),) * (len(text) - 1) + ((0,),), stops)], compiler)
        assert found[-1] == valid


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_null_from_the_prompt_is_no_valid_draft(replays: Mapping[str, Replay], backend: str) -> None:
    # vllm#15554
    null, word = replays[f"null {backend}"].drafts
    assert null.valid == 0
    assert word.valid == len(word.token_ids)
    assert not replays["null whole"].legal
    assert replays["A whole"].complete


def test_end_of_text_ends_the_draft(replays: Mapping[str, Replay]) -> None:
    assert replays["surrogate"].complete
    stop, twice, more = replays["end"].drafts
    assert (stop.valid, twice.valid, more.valid) == (1, 1, 0)
    raw, escaped = replays["raw enum"].drafts
    assert raw.valid == len(raw.token_ids)
    assert escaped.valid == 0


def test_the_matcher_on_whole_texts(compiler: CompilerSession) -> None:
    grammar = ebnf('root ::= "a" [b-d]{1,3} "🚀"')
    texts = ["abc🚀", "ab", "axc", "ab🚀!", "a\ud83d", ""]
    found = validate_texts(grammar, texts, compiler, limits=ChildLimits(seconds=60))
    assert found == [
        TextMatch(4, True), TextMatch(2, False), TextMatch(1, False), TextMatch(3, True), TextMatch(1, False),
        TextMatch(0, False),
    ]  # fmt: skip
    verdicts = [classify(grammar, text, "stop", match=match).kind for text, match in zip(texts, found, strict=True)]
    assert verdicts == ["valid", "invalid", "invalid", "desync_after_end", "invalid", "empty"]


FORMS = ('{"a":1,"b":2}', '{"a": 1, "b": 2}', '{"a":1, "b":2}', "[1,2]", "[1, 2]")
LEGAL = {
    "compact": {'{"a":1,"b":2}', "[1,2]"},
    "spaced": {'{"a": 1, "b": 2}', "[1, 2]"},
    "mixed": {'{"a":1, "b":2}', "[1, 2]"},
    "any": set(FORMS),
}
WHITESPACE = [
    (Grammar(kind="json_object", disable_any_whitespace=True), "0.32.0", "mixed"),
    (schema(TWO, disable_any_whitespace=True), "0.32.0", "compact"),
    (schema({"type": "array", "items": INTEGER}, disable_any_whitespace=True), "0.32.0", "compact"),
    (schema({"type": "array"}, disable_any_whitespace=True), "0.32.0", "mixed"),
    (schema({"type": "object", "additionalProperties": INTEGER}, disable_any_whitespace=True), "0.33.0", "compact"),
    (Grammar(kind="json_object", disable_any_whitespace=True), "0.31.2", "spaced"),
    (schema(TWO, disable_any_whitespace=True), "0.28.0", "spaced"),
    (schema({"type": "array", "items": INTEGER}, disable_any_whitespace=True), "0.30.1", "spaced"),
    (schema(TWO, disable_any_whitespace=True, backend="guidance"), "0.32.0", "compact"),
    (schema(TWO), "0.32.0", "any"),
]


def test_whitespace_mode_against_the_matchers(compiler: CompilerSession) -> None:
    # vllm#58067, #12744, xgrammar#945
    made = [{**jobs.job(grammar, vllm=vllm), "texts": FORMS} for grammar, vllm, _ in WHITESPACE]
    report = compiler.run(made, ChildLimits(seconds=60))
    for (grammar, vllm, mode), answer in zip(WHITESPACE, report.answers, strict=True):
        legal = {text for text, match in zip(FORMS, answer["matches"], strict=True) if match == [len(text), True]}
        assert whitespace_mode(grammar, vllm=vllm, xgrammar="0.2.8") == mode
        assert legal
        assert legal <= LEGAL[mode], (grammar.value, vllm)


def test_whitespace_mode_without_json_or_flag() -> None:
    assert whitespace_mode(regex("a")) == "none"
    assert whitespace_mode(OBJECT) == "any"
    fixed = Grammar(kind="json_object", disable_any_whitespace=True)
    assert whitespace_mode(fixed, vllm="0.34.0", xgrammar="0.2.9") == "compact"


def _script(folder: Path, body: str) -> Path:
    path = folder / "child.py"
    path.write_text(
        "import json, sys, time, os\n"
        "def say(**found): print(json.dumps(found), flush=True)\n"
        'answer = dict(compile_s=0.1, search=dict(text="a", steps=1, exhausted=False), spoken="")\n' + body
    )
    return path


OBEDIENT = """
say(xgrammar="0.2.8", vllm="0.32.0")
for line in sys.stdin:
    job = json.loads(line)
    if job["text"] == "hang": time.sleep(600)
    if job["text"] == "grow":
        hoard = [bytearray(2**20) for _ in range(200)]
        time.sleep(600)
    if job["text"] == "die": os.abort()
    if job["text"] == "bad": say(error="[11:53:52] /project/cpp/x.cc:83: no good\\n", spoken="")
    else: say(**answer)
"""


def test_limits_end_one_grammar_and_not_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Path
) -> None:
    # xgrammar#852, vllm#54003: a compile without end is a row, and the grammars behind it are looked at
    monkeypatch.setattr(child, "_SCRIPT", _script(tmp_path, OBEDIENT))
    limits = ChildLimits(seconds=1.0, memory_mib=64)
    texts = ["fine", "hang", "fine", "grow", "die", "bad", "fine"]
    found = preflight_many([regex(text) for text in texts], target_folder, limits=limits)
    assert [one.reason_kind for one in found] == [
        "", "grammar_timeout", "", "grammar_memory", "unsupported", "invalid_grammar", "",
    ]  # fmt: skip
    assert found[1].reason == "grammar regex took more than 1 s to compile"
    assert found[3].reason == "grammar regex took more than 64 MiB to compile"
    assert "signal 6" in found[4].reason
    assert found[5].reason.endswith(": no good")


def test_without_xgrammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Path) -> None:
    monkeypatch.setattr(child, "_SCRIPT", _script(tmp_path, "say(xgrammar=None, fault='No module named xgrammar')"))
    found = preflight(regex("a"), target_folder)
    assert (found.ok, found.reason_kind) == (False, "unsupported")
    assert "No module named xgrammar" in found.reason
    with pytest.raises(MatcherError, match="No module named xgrammar"):
        replay([Question(OBJECT, "{")], target_folder)
    monkeypatch.setattr(child, "_SCRIPT", _script(tmp_path, "sys.exit('broken installation')"))
    assert "broken installation" in preflight(regex("a"), target_folder).reason


def test_the_lab_itself_loads_none_of_the_engines() -> None:
    code = (
        "import sys, specgram_lab.grammars, specgram_lab.workloads\n"
        "print(sorted({'vllm', 'torch', 'xgrammar', 'transformers', 'llguidance', 'jsonschema'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=DATA.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_per_prompt_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Path) -> None:
    own = Grammar(kind="json_schema", per_prompt=True)
    assert for_prompt(own, {"type": "null"}) == schema({"type": "null"})
    assert for_prompt(OBJECT, {"type": "null"}) == OBJECT
    with pytest.raises(SpecError, match="takes each prompt's schema, and a prompt has none"):
        preflight(own, target_folder, schemas=[{"type": "null"}, None])
    counted = OBEDIENT.replace(
        "say(**answer)", "say(**answer, matches=[[0, False]] * len(job['texts']), tokens=[1] * len(job['count']))"
    )
    monkeypatch.setattr(child, "_SCRIPT", _script(tmp_path, counted))
    assert preflight(
        own, target_folder, schemas=[{"type": "null"}, {"type": "null"}, {"allOf": [{}, {}]}]
    ).reason_kind == ("unsupported")
    with pytest.raises(DataNotFoundError, match=r"has no tokenizer\.json"):
        preflight(OBJECT, tmp_path)


@pytest.mark.parametrize(
    ("grammar", "wanted"),
    [
        (Grammar(), {}),
        (OBJECT, {"json_object": True}),
        (schema({"enum": ["é"]}), {"json": '{"enum": ["é"]}'}),
        (regex("a+"), {"regex": "a+"}),
        (ebnf('root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Grammar(kind="choice", value=["a", "b"]), {"choice": ["a", "b"]}),
        (Grammar(kind="structural_tag", value={"type": "x"}), {"structural_tag": '{"type": "x"}'}),
    ],
)
def test_request_parameters(grammar: Grammar, wanted: dict[str, Any]) -> None:
    assert to_vllm(grammar) == wanted


def test_request_parameters_of_a_prompt() -> None:
    own = Grammar(kind="json_schema", per_prompt=True, name="own")
    assert to_vllm(own, {"type": "null"}) == {"json": '{"type": "null"}'}
    with pytest.raises(SpecError, match="grammar own takes each prompt's schema, and this prompt has None"):
        to_vllm(own)


def test_tools(compiler: CompilerSession) -> None:
    tools = json.loads((DATA / "schemas" / "toolset.json").read_text(encoding="utf-8"))
    calls = {
        "hermes": '<tool_call>\n{"name": "set_timer", "arguments": {"minutes": 10}}\n</tool_call>',
        "qwen3_coder": (
            "<tool_call>\n<function=set_timer>\n<parameter=minutes>\n10\n</parameter>\n</function>\n</tool_call>"
        ),
    }
    texts = [*calls.values(), "no call", calls["hermes"].replace("10", "1000"), calls["hermes"].replace("set", "get")]
    made = [
        {**jobs.job(tools_grammar(tools, style=style, at_least_one=forced)), "texts": texts}
        for style in calls
        for forced in (True, False)
    ]
    report = compiler.run(made, ChildLimits(seconds=60))
    whole = [
        [match == [len(text), True] for text, match in zip(texts, answer["matches"], strict=True)]
        for answer in report.answers
    ]
    assert whole == [
        [True, False, False, False, False],
        [True, False, True, False, False],
        [False, True, False, False, False],
        [False, True, True, False, False],
    ]


@pytest.mark.parametrize(
    ("tools", "style", "words"),
    [
        ([], "hermes", "needs at least one tool"),
        ([{"name": "a"}], "json", "style 'json' is not known, there are hermes, qwen3_coder"),
        ([{"description": "x"}], "hermes", "tool 0 has no name"),
        ([{"name": "a"}, {"name": "a"}], "hermes", "tool 1 has the name of an earlier one"),
        ([{"name": "a", "parameters": 3}], "hermes", "tool a has parameters that are no schema: 3"),
    ],
)
def test_tools_refused(tools: list[dict[str, Any]], style: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        tools_grammar(tools, style=style)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ({"type": "boolean"}, ["true", "false"]),
        ({"enum": ["a", 1]}, ['"a"', "1"]),
        ({"type": "integer", "minimum": -5, "maximum": 100}, ["-5", "100"]),
        ({"anyOf": [{"const": "x"}, {"type": "null"}]}, ['"x"', "null"]),
        ({"type": "string", "maxLength": 3}, None),
        ({"anyOf": [{"type": "null"}, {}]}, None),
    ],
)
def test_finite_languages(value: Any, texts: list[str] | None) -> None:
    assert finite_texts(value) == texts


@pytest.mark.parametrize(
    "value",
    [
        TWO,
        KIND_NOTE,
        {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2},
        {"type": "integer", "minimum": 7, "multipleOf": 5},
        {"$defs": {"x": INTEGER}, "type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]},
        {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
        {"allOf": [{"type": "string"}, {"minLength": 4}]},
        True,
    ],
)
def test_smallest_values(value: Any) -> None:
    found, built = smallest(value)
    assert found
    assert classify(schema(value), json.dumps(built), "stop").kind == "valid"
    assert near_misses(value, built, True)


@pytest.mark.parametrize(
    "value", [False, {"enum": []}, ENDLESS, {"type": "string", "pattern": "^Q{9}$"}, {"type": "nothing"}]
)
def test_no_smallest_value(value: Any) -> None:
    assert not smallest(value)[0]


def test_rules_reach_every_part() -> None:
    value = {
        "$defs": {"d": {"not": {}}},
        "type": "object",
        "properties": {"list": {"type": "array", "items": {"type": "number", "multipleOf": 2}, "uniqueItems": True}},
        "additionalProperties": {"$ref": "#/$defs/d", "maxLength": 3},
    }
    assert [str(one) for one in findings(value)] == [
        "$.properties.list: uniqueItems is ignored",
        "$.properties.list.items: multipleOf is ignored",
        "$.$defs.d: not is ignored",
        "$.additionalProperties: maxLength beside $ref is ignored",
    ]


GATED = [
    KIND_NOTE,
    TWO,
    *({"type": "integer", "multipleOf": 5, **more} for more in ({}, {"minimum": 3})),
    {"multipleOf": 5},
    *({"type": "array", key: value} for key, value in (("uniqueItems", True), ("contains", {}), ("minItems", 1))),
    *({"type": "string", "format": name} for name in ("date", "iri", "uuid")),
    {"type": "string", "format": "email", "maxLength": 3},
    {"pattern": "a", "maxLength": 3},
    {"type": ["string", "null"], "pattern": "a", "minLength": 3},
    {"allOf": [{}]},
    {"allOf": [{}, {}]},
    {"anyOf": [{"type": "null"}, {"allOf": [{}, {}]}]},
    *(
        {"type": "object", "propertyNames": {"maxLength": 3}, **more}
        for more in ({}, {"properties": {}}, {"patternProperties": {"a": {}}}, {"unevaluatedProperties": False})
    ),
    {"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}},
    {"type": "object", "patternProperties": {"a": {}}},
    {"type": "object", "patternProperties": {"a": {}, "b": {}}},
    {"type": "object", "patternProperties": {"a": {}}, "properties": {}},
    {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "number", "multipleOf": 2}}}},
]


def test_vllm_refuses_what_the_rules_say() -> None:
    if (version_tuple(jobs.installed_vllm(sys.executable)) or (0,)) < (0, 32):
        pytest.skip("vLLM 0.32 or newer is not installed")
    code = (
        "import json, sys\n"
        "from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features as gate\n"
        "print(json.dumps([gate(value) for value in json.load(sys.stdin)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(GATED), capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == [any(one.refused for one in findings(value)) for value in GATED]
    assert True in said
    assert False in said
