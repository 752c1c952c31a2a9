"""Real engines with real weights on a CPU: what the ledger says must be what vLLM says."""

from __future__ import annotations

import json

import engines
import pandas as pd
import pytest
from engines import NGRAM, OBJECT, SCHEMA, SELF, cell

from specgram_lab import ledger, semantics, tables, twins
from specgram_lab.grammars import tools_grammar
from specgram_lab.spec import parse_cell

pytestmark = pytest.mark.engine

V2 = {"engine": {"runner": "v2"}}
ASYNC = {"engine": {"scheduling": "async"}}
REAL = {
    "v1-ngram-object": cell(NGRAM, OBJECT),
    "v1-ngram-schema": cell(NGRAM, SCHEMA),
    "v1-ngram-free": cell(NGRAM),
    "v1-self-schema": cell(SELF, SCHEMA),
    "v1-self-free": cell(SELF),
    "v1-async-self-schema": cell(SELF, SCHEMA, **ASYNC),
    "v1-async-self-free": cell(SELF, **ASYNC),
    "v2-ngram-schema": cell(NGRAM, SCHEMA, **V2),
    "v2-self-schema": cell(SELF, SCHEMA, **V2),
    "v2-self-free": cell(SELF, **V2),
    "v2-async-self-schema": cell(SELF, SCHEMA, engine={"runner": "v2", "scheduling": "async"}),
    "v2-async-self-free": cell(SELF, engine={"runner": "v2", "scheduling": "async"}),
}
TWINS = {
    "v1-none-schema": cell({}, SCHEMA),
    "v1-none-free": cell({}),
}
NULL_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["A", "B"]}, "note": {"type": ["string", "null"], "maxLength": 12}},
    "required": ["kind", "note"],
    "additionalProperties": False,
}
TOOL = {
    "name": "ring",
    "parameters": {"type": "object", "properties": {"times": {"enum": [1, 2]}}, "required": ["times"]},
}
KINDS = {
    "ebnf": {"kind": "ebnf", "value": 'root ::= "It is " ("warm" | "cold") "."'},
    "choice": {"kind": "choice", "value": ["a red boat", "a red barn", "nothing"]},
    "structural_tag": tools_grammar([TOOL]).model_dump(mode="json"),
    "json_schema": {"kind": "json_schema", "value": {"enum": ["a red boat", "nothing"]}},
}
GUIDANCE = {**SCHEMA, "backend": "guidance", "disable_any_whitespace": True}
OTHERS = {
    **{kind: cell(NGRAM, grammar, workload={"limit": 2, "max_tokens": 64}) for kind, grammar in KINDS.items()},
    "guidance": cell(NGRAM, GUIDANCE, workload={"limit": 2, "max_tokens": 64}),
    "unrecorded": cell(NGRAM, SCHEMA, engine={"record": False}),
    "unrecorded-v2": cell(SELF, SCHEMA, engine={"runner": "v2", "scheduling": "async", "record": False}),
    "async-ngram": cell(NGRAM, OBJECT, **ASYNC),
    "copy": cell(NGRAM, SCHEMA, workload={"prompts": "copy", "limit": 4, "max_tokens": 64}),
    "copy-none": cell({}, SCHEMA, workload={"prompts": "copy", "limit": 4, "max_tokens": 64}),
    "min-p-none": cell({}, OBJECT, workload={"min_p": 0.01, "temperature": 0.7, "limit": 2}),
    "min-p-tiny": cell(NGRAM, OBJECT, workload={"min_p": 1e-6, "temperature": 0.7, "limit": 2}),
    "min-p": cell(NGRAM, OBJECT, workload={"min_p": 0.01, "temperature": 0.7, "limit": 2}),
    "logit-bias": cell(NGRAM, OBJECT, workload={"logit_bias": {"5": 1.0}, "limit": 2}),
    "penalty": cell(NGRAM, OBJECT, workload={"repetition_penalty": 1.1, "limit": 2}),
    "min-tokens": cell(
        NGRAM,
        {"kind": "json_schema", "value": {"type": "boolean"}},
        workload={"min_tokens": 64, "max_tokens": 96, "limit": 1},
    ),
    "good-regex": cell(NGRAM, {"kind": "regex", "value": "[a-z ]{1,40}"}, workload={"limit": 1}),
    "bad-regex": cell(NGRAM, {"kind": "regex", "value": "[a-z"}, workload={"limit": 1}),
    "after-bad-regex": cell(NGRAM, OBJECT, workload={"limit": 1}),
    "null-copied": parse_cell(
        {
            "drafter": {"method": "ngram", "k": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
            "grammar": {"kind": "json_schema", "value": NULL_SCHEMA},
            "workload": {
                "inline": ['Fill in {"kind": null, "note": null} and {"kind": null, "note": null}. Answer with JSON.'],
                "max_tokens": 40,
                "concurrency": 4,
            },
        }
    ),
    "never-drafts": cell({"method": "ngram", "k": 2, "prompt_lookup_max": 9}, workload={"limit": 2, "max_tokens": 12}),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory, target_folder):
    return engines.run(REAL | TWINS | OTHERS, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", REAL)
def test_the_engine_counting_of_the_ledger_is_what_vllm_reported(ran, name):
    one = ran[name]
    assert one.run["outcome"] == "ok", one.run["reason"]
    seen = semantics.reported(one.requests, one.runs)
    assert min(seen.values()) > 0, seen
    assert semantics.reconcile(one.steps, one.requests, one.runs) == []


@pytest.mark.parametrize("name", REAL)
def test_runner_and_scheduling_are_the_ones_that_were_asked_for(ran, name):
    run = ran[name].run
    assert (run["runner_effective"], run["scheduling_effective"]) == (
        run["runner_requested"],
        run["scheduling_requested"],
    )


@pytest.mark.parametrize("name", [name for name in REAL if name.startswith("v2")])
def test_no_kernel_of_runner_v2_runs_in_the_interpreter(ran, name):
    assert json.loads(ran[name].run["provenance"])["interpreted_kernels"] == {}


@pytest.mark.parametrize("name", REAL)
def test_every_sampled_token_that_was_committed_is_in_the_output(ran, name):
    one = ran[name]
    for request, steps in one.steps.groupby("request_id"):
        kept = [t for row in steps.itertuples() for t in row.sampled_token_ids[: row.committed]]
        output = one.requests.set_index("request_id").loc[request, "token_ids"]
        assert kept == list(output)


@pytest.mark.parametrize("name", [name for name in REAL if "self" in name])
def test_the_target_as_its_own_drafter_is_always_right(ran, name):
    """All verified drafts that the grammar left in are accepted; only the end of the output may cut."""
    steps = ran[name].steps
    spec = steps[steps["drafted"] > 0]
    assert len(spec) > 20
    last = spec.groupby("request_id")["step"].transform("max") == spec["step"]
    inside = spec[~last]
    missed = inside[inside["accepted"] < inside[["verified", "grammar_valid"]].min(axis=1)]
    assert missed.empty, missed.to_string()


@pytest.mark.parametrize(
    ("with_it", "without"), [("v1-ngram-schema", "unrecorded"), ("v2-async-self-schema", "unrecorded-v2")]
)
def test_a_run_without_the_recorder_gives_the_same_text(ran, with_it, without):
    recorded, bare = ran[with_it], ran[without]
    assert "recorder" not in json.loads(bare.run["provenance"])["patches"]
    assert bare.steps.empty
    assert list(recorded.requests["text"]) == list(bare.requests["text"])
    assert recorded.run["engine_draft_tokens"] == bare.run["engine_draft_tokens"]


@pytest.mark.parametrize(
    ("one", "other"), [("v1-self-schema", "v1-async-self-schema"), ("v2-self-schema", "v2-async-self-schema")]
)
def test_sync_and_async_decode_the_same_and_the_rfc_counts_the_same_steps(ran, one, other):
    a, b = ran[one], ran[other]
    assert list(a.requests["text"]) == list(b.requests["text"])
    totals = [semantics.totals(x.steps, (), ("rfc",), runs=x.runs).iloc[0] for x in (a, b)]
    assert totals[0]["spec_steps"] == totals[1]["spec_steps"]
    assert totals[0]["drafted"] == totals[1]["drafted"]
    assert totals[0]["verified"] < totals[1]["verified"]  # invalid drafts enter the async forward pass


def test_outputs_are_held_against_the_twin_without_a_drafter(ran):
    """Greedy speculation is lossless; one near-tie within bfloat16 may fall the other way."""
    names = ["v1-none-schema", "v1-none-free", "v1-ngram-schema", "v1-ngram-free", "v1-self-schema", "v1-self-free"]
    runs = pd.concat([ran[name].runs for name in names])
    found = twins.diverged(runs, pd.concat([ran[name].requests for name in names]))
    assert len(found) == 4 * 6
    assert set(found["twin"]) == {ran["v1-none-schema"].run["run_id"], ran["v1-none-free"].run["run_id"]}
    assert found["diverged"].sum() <= 1, found[found["diverged"]].to_string()


def test_async_is_not_filled_with_sync_numbers(ran):
    run = ran["async-ngram"].run
    assert run["outcome"] == "unsupported"
    assert "async scheduling with ngram" in run["reason"]
    assert pd.isna(run["scheduling_effective"])


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("min-p-tiny", "ok"), ("min-p", "rejected_request"), ("logit-bias", "rejected_request"), ("penalty", "ok")],
)
def test_request_parameters_that_speculation_refuses_are_rows(ran, name, outcome):
    one = ran[name]
    assert one.run["outcome"] == outcome, one.run["reason"]
    if outcome == "rejected_request":
        assert set(one.requests["finish_reason"]) == {"rejected"}
        assert "min_p" in one.run["reason"]
    else:
        assert one.requests["output_tokens"].min() > 0


def test_the_same_request_without_a_drafter_runs_and_there_is_nothing_to_compare(ran):
    refused, twin = ran["min-p"], ran["min-p-none"]
    assert twin.run["outcome"] == "ok", twin.run["reason"]
    assert twin.requests["output_tokens"].min() > 0
    both = twins.diverged(pd.concat([refused.runs, twin.runs]), pd.concat([refused.requests, twin.requests]))
    assert refused.run["run_id"] not in set(both["run_id"])
    shown = tables.summary({name: pd.concat([getattr(r, name) for r in (refused, twin)]) for name in ledger.TABLES})
    assert shown["output_tokens_per_s"].isna().iloc[0]


def test_values_that_the_prompt_repeats_are_copied_and_every_output_is_judged(ran):
    """No event of the grammar is no proof: each output is parsed, held against its schema and against its twin."""
    copied, twin = ran["copy"], ran["copy-none"]
    assert copied.steps["accepted"].sum() > 0
    for one in (copied, twin):
        assert set(one.requests["output_class"]) <= {"valid", "truncated"}, one.requests["text"].tolist()
    found = twins.diverged(pd.concat([copied.runs, twin.runs]), pd.concat([copied.requests, twin.requests]))
    assert len(found) == 4
    assert found["diverged"].sum() <= 1, found.to_string()  # a near-tie within bfloat16


def test_min_tokens_beyond_the_grammar_is_warned_of_and_ends_well(ran):
    one = ran["min-tokens"]
    assert one.run["outcome"] == "ok", one.run["reason"]
    assert one.requests["text"].iloc[0].strip() in ("true", "false")
    assert one.requests["finish_reason"].iloc[0] == "stop"
    assert any("min_tokens" in warning for warning in one.run["warnings"]), one.run["warnings"]


def test_a_bad_grammar_costs_only_itself(ran):
    assert ran["good-regex"].run["outcome"] == "ok"
    bad = ran["bad-regex"].run
    assert bad["outcome"] == "grammar_rejected"
    assert "Unclosed '['" in bad["reason"]
    assert ran["after-bad-regex"].run["outcome"] == "ok"


@pytest.mark.parametrize("name", [*KINDS, "guidance"])
def test_every_kind_of_grammar_is_obeyed_and_recorded(ran, name):
    one = ran[name]
    assert one.run["outcome"] == "ok", one.run["reason"]
    assert set(one.requests["output_class"]) == {"valid"}, one.requests["text"].tolist()
    assert bool((one.steps["judged"] | (one.steps["drafted"] == 0)).all())
    assert semantics.reconcile(one.steps, one.requests, one.runs) == []


def test_a_null_copied_from_the_prompt_is_drafted_and_never_emitted(ran):
    one = ran["null-copied"]
    assert one.run["outcome"] == "ok", one.run["reason"]
    assert one.requests["output_class"].iloc[0] in ("valid", "truncated")
    assert '"kind": null' not in one.requests["text"].iloc[0]
    assert (one.steps["drafted"] - one.steps["grammar_valid"]).sum() > 0


def test_lookup_defaults_are_what_vllm_makes_of_them(ran):
    """Asked for was a maximum alone."""
    one = ran["never-drafts"]
    effective = json.loads(one.run["config_effective"])
    assert (
        (effective["prompt_lookup_min"], effective["prompt_lookup_max"]) == one.cell.drafter.effective_lookup == (9, 9)
    )


def test_a_drafter_that_never_drafts_has_no_rate(ran):
    one = ran["never-drafts"]
    assert one.run["outcome"] == "ok"
    total = semantics.totals(one.steps, (), ("rfc",), runs=one.runs).iloc[0]
    assert total["drafted"] == 0
    assert pd.isna(total["acceptance_rate"])
    assert pd.isna(total["mean_acceptance_length"])
    assert f"no drafts were proposed in {one.run['output_tokens']} tokens" in total["warning"]
