"""Specs: round trips, ids, and one clear sentence for everything that cannot be run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgram_lab.spec import SpecError, dump_cell, load_cell, parse_cell

SYNTHETIC = {"method": "draft_model", "model": "target", "k": 2, "rejection": "synthetic"}
PROMPTS = {"workload": {"prompts": "records"}}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "a cell is a mapping, got list"),
        ({}, "workload: field required"),
        ({"workload": {"prompts": "x", "limits": 1}}, "workload.limits is not a known key"),
        ({"workload": {}}, "exactly one of prompts, inline, scenario; got none"),
        ({"workload": {"prompts": "x", "inline": ["y"]}}, "got ['prompts', 'inline']"),
        (PROMPTS | {"drafter": {"method": "ngram", "k": "4"}}, "drafter.k: input should be a valid integer, got '4'"),
        (PROMPTS | {"drafter": {"method": "ngram"}}, "drafter ngram with k=0: k is 0 for none and at least 1"),
        (PROMPTS | {"drafter": {"k": 3}}, "drafter none with k=3"),
        (PROMPTS | {"drafter": {"method": "draft_model", "k": 3}}, "drafter draft_model needs model"),
        (PROMPTS | {"drafter": {"method": "ngram", "k": 3, "model": "x"}}, "drafter ngram takes no model, got 'x'"),
        (
            PROMPTS | {"drafter": {"method": "ngram", "k": 3, "prompt_lookup_min": 5, "prompt_lookup_max": 3}},
            "prompt_lookup_min 5 is larger than prompt_lookup_max 3",
        ),
        (
            PROMPTS | {"drafter": {"method": "ngram", "k": 3, "ngram_prompt_lookup_max": 3}},
            "ngram_prompt_lookup_max is vLLM's old spelling, write prompt_lookup_max",
        ),
        (PROMPTS | {"drafter": {"method": "ngram", "num_speculative_tokens": 3}}, "is called k here"),
        (PROMPTS | {"grammar": {"kind": "json_object", "value": {}}}, "grammar json_object takes no value"),
        (PROMPTS | {"grammar": {"kind": "choice", "value": []}}, "cannot be an empty list"),
        (PROMPTS | {"grammar": {"kind": "ebnf", "value": ""}}, "needs a text that is not empty, got ''"),
        (PROMPTS | {"grammar": {"kind": "regex"}}, "grammar regex needs a value"),
        (
            PROMPTS | {"grammar": {"kind": "json_object", "backend": "auto", "disable_any_whitespace": True}},
            "disable_any_whitespace needs backend xgrammar or guidance",
        ),
        (PROMPTS | {"engine": {"patches": ["av-on-cpu", "av-on-cpu"]}}, "patches names one twice"),
        (PROMPTS | {"engine": {"budget": {"policy": "fixed"}}}, "budget fixed needs value"),
        (PROMPTS | {"engine": {"budget": {"policy": "fraction", "value": 1.5}}}, "at most 1, got 1.5"),
        (PROMPTS | {"engine": {"budget": {"policy": "fixed", "value": 2.7}}}, "a whole number of tokens, got 2.7"),
        (PROMPTS | {"engine": {"budget": {"policy": "schedule"}}}, "from workload.scenario, which is missing"),
        (PROMPTS | {"engine": {"budget": {"policy": "all", "verify_cost": [-1, 0.1]}}}, "has a negative number"),
        (PROMPTS | {"engine": {"kind": "scripted"}}, "engine scripted needs workload.scenario"),
        (
            PROMPTS | {"drafter": "{'method': 'ngram', 'enable': True}"},
            "drafter is a text that is not JSON at column 2; JSON wants double quotes and true",
        ),
        (
            PROMPTS | {"drafter": {**SYNTHETIC, "synthetic_rates": [0.2, 0.5]}},
            "between 0 and 1 and never rise, got [0.2, 0.5]",
        ),
        (PROMPTS | {"drafter": {**SYNTHETIC, "synthetic_rates": [1.5, 0.5]}}, "between 0 and 1 and never rise"),
        ({"workload": {"prompts": "x", "temperature": float("inf")}}, "should be a finite number"),
        ({"workload": {"prompts": "x", "max_tokens": 1024}}, "leaves no room for a prompt in max_model_len 1024"),
        (
            {"workload": {"inline": ["x"]}, "grammar": {"kind": "json_schema", "per_prompt": True}},
            "inline texts bring none",
        ),
        ({"workload": {"prompts": "x", "min_tokens": 9, "max_tokens": 8}}, "min_tokens 9 is larger than max_tokens 8"),
        ({"workload": {"prompts": "x", "logit_bias": {"the": 1.0}}}, "has the key 'the', token ids are wanted"),
        (
            {
                "workload": {"prompts": "x", "concurrency": 240},
                "drafter": {"method": "ngram", "k": 16},
                "engine": {"max_num_batched_tokens": 2048},
            },
            "2048 leaves no room beside k 16 x concurrency 240 = 3840 draft slots; 4096 would work",
        ),
    ],
)
def test_bad_input_gets_one_sentence(content, sentence):
    with pytest.raises(SpecError) as caught:
        parse_cell(content)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_drafter_may_be_json_text_as_vllms_option_is():
    given = parse_cell(PROMPTS | {"drafter": '{"method": "ngram", "k": 2}'})
    assert given == parse_cell(PROMPTS | {"drafter": {"method": "ngram", "k": 2}})


@pytest.mark.parametrize(
    ("given_lookup", "effective"),
    [({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 2}, (2, 2)), ({}, (5, 5)),
     ({"prompt_lookup_min": 1, "prompt_lookup_max": 3}, (1, 3))],
)  # fmt: skip
def test_lookup_is_filled_in_as_vllm_does(given_lookup, effective):
    cell = parse_cell(PROMPTS | {"drafter": {"method": "ngram", "k": 2, **given_lookup}})
    assert cell.drafter.effective_lookup == effective


cells = st.builds(
    lambda drafter, grammar, workload, engine: {
        "drafter": drafter,
        "grammar": grammar,
        "workload": workload,
        "engine": engine,
    },
    st.one_of(
        st.just({}),
        st.builds(lambda k: {"method": "ngram", "k": k}, st.integers(1, 64)),
        st.builds(lambda k: {"method": "draft_model", "model": "target", "k": k}, st.integers(1, 8)),
    ),
    st.one_of(
        st.just({}),
        st.just({"kind": "json_object"}),
        st.builds(lambda v: {"kind": "json_schema", "value": {"enum": v}}, st.lists(st.text(), min_size=1)),
        st.builds(lambda v: {"kind": "choice", "value": v}, st.lists(st.text(), min_size=1)),
    ),
    st.builds(
        lambda texts, heat: {"inline": texts, "temperature": heat},
        st.lists(st.text(st.characters(codec="utf-8")), min_size=1),
        st.floats(0, 2),
    ),
    st.builds(
        lambda runner, side: {"runner": runner, "scheduling": side},
        st.sampled_from(["v1", "v2"]),
        st.sampled_from(["sync", "async"]),
    ),
)


@given(cells)
def test_yaml_and_canonical_json_give_the_same_cell_back(tmp_path_factory, content):
    cell = parse_cell(content)
    path = tmp_path_factory.mktemp("cell") / "cell.yaml"
    path.write_text(dump_cell(cell), encoding="utf-8")
    assert load_cell(path) == cell
    again = json.loads(cell.canonical())
    del again["spec_version"]
    assert parse_cell(again).cell_id == cell.cell_id


def test_limits_and_the_interpreter_are_no_part_of_the_id():
    plain = parse_cell(PROMPTS)
    assert (
        parse_cell(PROMPTS | {"limits": {"timeout_s": 5.0}, "engine": {"python": "/opt/python"}}).cell_id
        == plain.cell_id
    )
    assert parse_cell(PROMPTS | {"engine": {"seed": 1}}).cell_id != plain.cell_id


def test_a_schema_file_is_read_into_the_cell(tmp_path):
    (tmp_path / "one.json").write_text('{"type": "boolean"}', encoding="utf-8")
    (tmp_path / "cell.yaml").write_text(
        "workload: {prompts: records}\ngrammar: {kind: json_schema, file: one.json}\n", encoding="utf-8"
    )
    cell = load_cell(tmp_path / "cell.yaml")
    assert cell.grammar.value == {"type": "boolean"}
    assert cell.grammar.label == "one"


def test_a_broken_file_is_named_with_the_line(tmp_path):
    path = tmp_path / "cell.yaml"
    path.write_text("workload: {prompts: records}\n  oops: [", encoding="utf-8")
    with pytest.raises(SpecError, match=r"cell\.yaml is not YAML in line 2"):
        load_cell(path)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        load_cell(tmp_path / "none.yaml")


def test_paths_in_a_file_are_relative_to_it(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"id": "one", "text": "Hello."}', encoding="utf-8")
    (tmp_path / "cell.yaml").write_text("workload: {prompts: mine.jsonl}\n", encoding="utf-8")
    assert load_cell(tmp_path / "cell.yaml").workload.prompts == str(tmp_path / "mine.jsonl")
    (tmp_path / "cell.yaml").write_text("workload: {prompts: records}\n", encoding="utf-8")
    assert load_cell(tmp_path / "cell.yaml").workload.prompts == "records"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"workload: {prompts: records, prompts: tools}", "the key 'prompts' occurs twice"),
        (b"workload: {prompts: r\xe9}", "is not UTF-8 at byte 22"),
        (b"workload: {prompts: records}\ngrammar: {kind: json_schema, file: s.json}", "s.json is not JSON in line 1"),
    ],
)
def test_a_file_with_a_fault_gets_one_sentence(tmp_path, content, sentence):
    (tmp_path / "s.json").write_text("{'type': 'object'}", encoding="utf-8")
    (tmp_path / "cell.yaml").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_cell(tmp_path / "cell.yaml")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
