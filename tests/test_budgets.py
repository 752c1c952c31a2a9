"""Budgets of adaptive verification: policies, cost curves, and what the real Model Runner V2 does with them."""

from __future__ import annotations

import json

import av_engine
import engines
import ledgers
import numpy as np
import pandas as pd
import pytest
from engines import NGRAM, SCHEMA, SELF, cell

from specgram_lab import capabilities, ledger, semantics
from specgram_lab.av import again, costs
from specgram_lab.av import report as budgets
from specgram_lab.av import tables as budget_tables
from specgram_lab.av.estimator import REFIT_INTERVAL
from specgram_lab.av.replay import ReplayError, load, replay
from specgram_lab.builders import options
from specgram_lab.patches.budget import choose_budget
from specgram_lab.spec import Budget, SpecError, parse_cell

PROMPTS = {"workload": {"prompts": "records"}}


@pytest.mark.parametrize(
    ("policy", "value", "budget"),
    [
        ("native", None, 4),
        ("all", None, 9),
        ("none", None, 0),
        ("fixed", 5.0, 5),
        ("fixed", 50.0, 9),
        ("per_request", 2.0, 6),
        ("per_request", 3.0, 8),
        ("fraction", 0.5, 4),
        ("fraction", 1.0, 9),
        ("schedule", [7, 0, 99], 0),
        ("schedule", [7], 9),
    ],
)
def test_policies(policy, value, budget):
    assert choose_budget(policy, value, [3, 4, 2], native=4, step=1) == budget


def test_a_budget_is_labelled_with_what_it_depends_on():
    assert Budget(policy="per_request", value=2.0).label == "per_request(2)"
    assert Budget(policy="native").label == "native"
    curve = costs.load("gpu-4x2080ti-fp4")
    assert Budget(policy="native", costs=curve).label == "native(gpu-4x2080ti-fp4)"


def test_a_cost_curve_is_part_of_the_cells_id_by_its_numbers():
    plain = parse_cell(PROMPTS)
    assert "costs" not in plain.canonical()
    named = parse_cell(PROMPTS | {"engine": {"budget": {"policy": "native", "costs": "gpu-4x2080ti-fp4"}}})
    assert parse_cell(named.model_dump(mode="json")) == named
    content = named.model_dump(mode="json")
    content["engine"]["budget"]["costs"]["verify"][0]["ms"] += 1
    assert parse_cell(content).cell_id != named.cell_id
    with pytest.raises(SpecError, match=r"no cost curve .none-such.; there are .*gpu-4x2080ti-fp4"):
        parse_cell(PROMPTS | {"engine": {"budget": {"policy": "native", "costs": "none-such"}}})


def test_every_curve_in_data_has_a_source_and_rises():
    assert {"cpu-2core", "gpu-4x2080ti-fp4", "gpu-nemotronh-30b-a3b"} <= set(costs.names())
    measured = costs.load("cpu-2core")
    assert len(measured.verify) > 8
    for point in (*measured.verify, *measured.draft):
        assert point.low <= point.ms <= point.high
    for name in costs.names():
        curve = costs.load(name)
        assert curve.name == name
        assert len(curve.source) > 20
        draft, verify = curve.tables(16, 64)
        assert (np.diff(verify) >= 0).all()
        assert (np.diff(draft) >= 0).all()
        assert len(verify) == 65


def test_budgets_share_an_engine_which_is_one_process():
    def key(engine, **budget):
        content = {"drafter": SELF, "engine": {"runner": "v2", **engine, "budget": budget}, **PROMPTS}
        return options.engine_key(parse_cell(content))

    assert key({}, policy="none") == key({}, policy="native", costs="gpu-4x2080ti-fp4") != key({}, policy="off")
    parallel = {"tensor_parallel": 2, "record": False}
    assert key(parallel, policy="none") != key(parallel, policy="all")


BAD = "{source: x, machine: x, model: x, "


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "a cost curve is a mapping, got list"),
        ("source: x", "machine: Field required"),
        (
            BAD + "draft: [{size: 1, ms: 1}], verify: [{size: 2, ms: 1}, {size: 1, ms: 2}]}",
            "do not ascend",
        ),
        (
            BAD + "draft: [{size: 1, ms: -1}], verify: [{size: 1, ms: 1}, {size: 2, ms: 2}]}",
            "draft.0.ms: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_bad_curve_is_refused_in_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(costs.CostError, match=sentence):
        costs.load(str(path))


def test_padding_makes_steps_and_no_padding_a_line():
    points = {"verify": [{"size": 4, "ms": 1.0}, {"size": 8, "ms": 3.0}], "draft": [{"size": 1, "ms": 0.5}]}
    common = {"name": "x", "source": "x", "machine": "x", "model": "x", **points}
    padded = costs.CostCurve.model_validate({**common, "graph_limit": 8}).tables(2, 10)[1]
    assert padded.tolist() == [1, 1, 1, 1, 1, 3, 3, 3, 3, 3.5, 4]
    smooth = costs.CostCurve.model_validate(common).tables(2, 10)[1]
    assert smooth.tolist() == [1, 1, 1, 1, 1, 1.5, 2, 2.5, 3, 3.5, 4]


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"device": "cuda"}, "requires full CUDA graphs; set enforce_eager: false"),
        ({"device": "cuda", "enforce_eager": False, "pipeline_parallel": 2, "record": False}, "pipeline parallelism"),
        ({"device": "cuda", "enforce_eager": False, "runner": "v1"}, "exists for Model Runner V2 only"),
        (
            {"device": "cuda", "enforce_eager": False, "cudagraph_mode": "PIECEWISE"},
            "cudagraph_mode PIECEWISE has none",
        ),
        ({"device": "cuda", "enforce_eager": False, "lora": True}, "not compatible with LoRA"),
        ({"lora": True}, "not compatible with LoRA"),
        ({"device": "cuda", "enforce_eager": False, "cudagraph_mode": "FULL_DECODE_ONLY"}, None),
        ({"device": "cuda", "enforce_eager": False}, None),
    ],
)
def test_where_adaptive_verification_cannot_run_is_known_before_loading(monkeypatch, engine, sentence):
    monkeypatch.setattr(capabilities, "has_cuda", lambda: True)
    asked = {"drafter": SELF, "engine": {"runner": "v2", "budget": {"policy": "all"}, **engine}, **PROMPTS}
    reason = capabilities.refusal(parse_cell(asked))
    assert reason is None if sentence is None else sentence in str(reason)


@pytest.mark.parametrize(
    ("drafter", "refused"), [(SELF, True), ({"method": "dspark", "model": "dspark", "k": 5}, False)]
)
def test_a_local_argmax_leaves_no_logits_to_estimate_from(drafter, refused):
    cell = parse_cell(
        {
            "drafter": drafter | {"local_argmax": True},
            "engine": {"runner": "v2", "budget": {"policy": "all"}},
            **PROMPTS,
        }
    )
    assert ("which local_argmax never makes" in str(capabilities.refusal(cell))) is refused
    assert options.speculative_config(cell)["use_local_argmax_reduction"] is True


def test_what_is_asked_of_vllm_alone_is_part_of_the_cell_where_it_is_asked():
    plain = parse_cell(PROMPTS)
    assert not {"cudagraph_mode", "lora", "local_argmax"} & set(json.loads(plain.canonical())["engine"])
    assert "local_argmax" not in json.loads(plain.canonical())["drafter"]
    asked = parse_cell({**PROMPTS, "engine": {"cudagraph_mode": "FULL_DECODE_ONLY", "lora": True}})
    assert asked.cell_id != plain.cell_id
    assert parse_cell(asked.model_dump(mode="json")) == asked
    arguments = options.engine_arguments(asked)
    assert arguments["compilation_config"] == {"cudagraph_mode": "FULL_DECODE_ONLY"}
    assert arguments["enable_lora"] is True


def test_an_ngram_drafter_is_ranked_only_where_the_patch_is_asked_for():
    asked = {"drafter": NGRAM, "engine": {"runner": "v2", "budget": {"policy": "all"}}, **PROMPTS}
    assert "gives no confidence" in str(capabilities.refusal(parse_cell(asked)))
    asked["engine"]["patches"] = ["av-ngram"]
    assert capabilities.refusal(parse_cell(asked)) is None


def two_steps(scheduling):
    """A prefill, then a draft of four of which the grammar accepts one, and the target keeps it."""
    steps = ledgers.steps_frame(
        ledgers.step(drafted=0, accepted=0, request_step=0),
        ledgers.step(drafted=4, valid=1, accepted=1, scheduling=scheduling, request_step=1),
    )
    row = {"run_id": "run", "step": 0, "request_id": "0", "confidences": [0.9, 0.5, 0.5, 0.2], "features": [2.0] * 4}
    return steps, pd.DataFrame([row])


@pytest.mark.parametrize(
    ("scheduling", "observed", "by_grammar", "verified", "invalid"), [("sync", 1, 0, 1, 0), ("async", 2, 1, 4, 3)]
)
def test_what_a_grammar_invalid_draft_teaches_and_takes(scheduling, observed, by_grammar, verified, invalid):
    """Asynchronously it is verified: budget is spent on all three, and the first of them is a verdict of 0."""
    steps, proposals = two_steps(scheduling)
    seen = budgets.verdicts(steps, proposals)
    assert seen["survival"].tolist() == pytest.approx([0.9, 0.45, 0.225, 0.045])
    assert seen["invalid"].tolist() == [False, True, True, True]
    assert seen["judged"].tolist() == [True, True, False, False]  # by the target, by the grammar, by nobody
    taught = budgets.labels(seen).iloc[0]
    assert (taught["observed"], taught["refused"], taught["by_grammar"]) == (observed, by_grammar, by_grammar)
    took = budgets.wasted(steps).iloc[0]
    assert (took["verified"], took["invalid"]) == (verified, invalid)


def test_confidence_against_reality_counts_what_was_judged():
    seen = pd.DataFrame(
        {
            "confidence": [0.05, 0.91, 0.95, 0.99, 0.93],
            "accepted": [False, True, True, False, True],
            "observed": [True, True, True, False, False],
            "judged": [True, True, True, True, False],
        }
    )
    found = budgets.reliability(seen)
    assert found["n"].tolist() == [1, 3]
    assert found["accepted"].tolist() == [0.0, pytest.approx(2 / 3)]
    assert (found["low"] <= found["accepted"]).all()
    assert (found["accepted"] <= found["high"]).all()


def test_the_calibration_error_is_that_of_the_bins_at_each_position():
    seen = pd.DataFrame(
        {
            "position": [0, 0, 0, 0, 1, 1],
            "confidence": [0.15, 0.15, 0.85, 0.95, 0.5, 0.5],
            "accepted": [False, True, True, True, True, False],
            "judged": [True, True, True, True, True, False],
        }
    )
    found = budgets.calibration(seen)
    assert found["n"].tolist() == [4, 1]
    assert found["expected_calibration_error"].tolist() == pytest.approx([(2 * 0.35 + 0.15 + 0.05) / 4, 0.5])
    assert found["accepted"].tolist() == [0.75, 1.0]


def test_both_fits_are_there_from_the_first_step_to_the_last(monkeypatch):
    """Recorded is one value a step; the fit without verdicts on invalid tokens changes at its refits only."""
    rows = [("run", step, name, 0.5) for step in range(150) for name in ("slope", "intercept 0")]
    monkeypatch.setattr(budgets, "drift", lambda _: pd.DataFrame(rows, columns=["run_id", "step", "name", "value"]))
    seen = pd.DataFrame({"step": range(120), "feature": 1.0, "accepted": True}).assign(
        run_id="run", position=0, observed=True, invalid=[step % 2 == 1 for step in range(120)]
    )
    both = budgets.both_fits(seen, None)
    assert (both["which"] == "recorded").sum() == len(rows)
    for _, line in both[both["which"] == "spared"].groupby("name"):
        assert line["step"].tolist() == [0, 99, 149]
        assert line["value"].iloc[0] == 0.5 != line["value"].iloc[1] == line["value"].iloc[2]


def test_tokens_can_be_made_dearer():
    curve = budgets.scaled(costs.linear(1.0, 0.5), 3.0)
    assert curve.tables(1, 4)[1].tolist() == [1.0, 2.5, 4.0, 5.5, 7.0]


# real engines: one per drafter, all policies on it

POLICIES = {
    "all": {"policy": "all"},
    "none": {"policy": "none"},
    "fixed": {"policy": "fixed", "value": 4.0},
    "per_request": {"policy": "per_request", "value": 1.0},
    "fraction": {"policy": "fraction", "value": 0.5},
    "native-cheap": {"policy": "native", "verify_cost": [1.0, 0.05]},
    "native": {"policy": "native", "verify_cost": [1.0, 0.3]},
    "native-dear": {"policy": "native", "verify_cost": [1.0, 1.5]},
    "native-curve": {"policy": "native", "costs": "gpu-nemotronh-30b-a3b"},
    **{f"fixed-{n}": {"policy": "fixed", "value": float(n)} for n in (0, 1, 2, 7)},
}
DRAFT_MODEL = {"method": "draft_model", "model": "draft_model", "k": 3}
EAGLE3 = {"method": "eagle3", "model": "eagle3", "k": 3}
DSPARK = {"method": "dspark", "model": "dspark", "k": 5}
GRAMMARS = {"free": {}, "schema": SCHEMA}
CONCURRENCY = 3
SHORT = {"limit": 4, "max_tokens": 16}
"""For the target as its own drafter, whose steps take long in float32."""
EXACT = {"dtype": "float32"}
"""In bfloat16 what a drafter is sure of depends a little on how many tokens were computed together."""


def grid(drafter, grammar, policies, scheduling="sync", **workload):
    patches = ["av-ngram"] if drafter["method"] == "ngram" else []
    return {
        f"{grammar}+{policy}": cell(
            drafter,
            GRAMMARS[grammar],
            target=EXACT,
            engine={"runner": "v2", "scheduling": scheduling, "budget": POLICIES[policy], "patches": patches},
            workload={"concurrency": CONCURRENCY, "limit": 5, "max_tokens": 20, **workload},
        )
        for policy in policies.split()
    }


@pytest.fixture(scope="module")
def self_drafting(tmp_path_factory, target_folder):
    """The target drafts for itself; vLLM's online estimator ranks, and in the long run is fitted at least once."""
    cells = grid(SELF, "free", "all none fixed native", **SHORT)
    cells |= grid(SELF, "schema", "all none per_request fraction native-curve", **SHORT)
    long = renamed(grid(SELF, "free", "native", limit=12, max_tokens=64), "long")
    return av_engine.run(cells | long, tmp_path_factory.mktemp("self"))


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory, target_folder):
    """The trained draft model, one request at a time and three at once."""
    cells = grid(DRAFT_MODEL, "free", "all fixed-1 fixed fixed-7 native")
    cells |= grid(DRAFT_MODEL, "schema", "all fixed-2 fixed per_request native-dear")
    alone = renamed(grid(DRAFT_MODEL, "free", "all fixed-0 fixed-1 fixed-2", limit=1), "alone")
    return av_engine.run(cells | alone, tmp_path_factory.mktemp("draft_model"))


@pytest.fixture(scope="module")
def ngram(tmp_path_factory, target_folder):
    cells = grid(NGRAM, "free", "all none fixed fixed-1 native-dear")
    cells |= grid(NGRAM, "schema", "all none fixed fraction native-cheap")
    cells |= renamed(grid(NGRAM, "free", "none native", limit=6, max_tokens=64), "long")
    return av_engine.run(cells, tmp_path_factory.mktemp("ngram"))


def renamed(cells, group):
    return {f"{group}+{name.partition('+')[2]}": one for name, one in cells.items()}


@pytest.fixture(scope="module")
def dspark(tmp_path_factory, target_folder):
    """A DSpark drafter with a confidence head; every second request has no grammar."""
    mixed = renamed(grid(DSPARK, "schema", "all none fixed per_request native-cheap native native-dear"), "mixed")
    mixed |= renamed(
        grid(DSPARK, "schema", "none", max_tokens=48), "long"
    )  # requests end, and others begin beside drafts
    return av_engine.run(mixed, tmp_path_factory.mktemp("dspark"), mixed=tuple(mixed))


@pytest.fixture(scope="module")
def dspark_async(tmp_path_factory, target_folder):
    """The same where the scheduler does not wait: drafts that the grammar refuses are verified, too."""
    mixed = renamed(grid(DSPARK, "schema", "all none fixed native native-dear", "async"), "mixed")
    return av_engine.run(mixed, tmp_path_factory.mktemp("async"), mixed=tuple(mixed))


@pytest.fixture(scope="module")
def eagle3_async(tmp_path_factory, target_folder):
    """vLLM's online estimator where it is taught what the grammar refuses."""
    cells = grid(EAGLE3, "free", "all native", "async") | grid(EAGLE3, "schema", "all fixed native", "async")
    return av_engine.run(cells, tmp_path_factory.mktemp("eagle3_async"))


@pytest.fixture(params=["self_drafting", "draft_model", "ngram", "dspark", "dspark_async", "eagle3_async"])
def engine(request):
    return request.getfixturevalue(request.param)


@pytest.mark.engine
def test_every_policy_ran_and_is_in_its_row(engine):
    for name, folder in engine.items():
        run = ledger.read_table(folder, "runs").iloc[0]
        assert run["outcome"] == "ok", (name, run["reason"])
        assert run["budget_effective"] == run["budget_requested"] != "off"
        assert json.loads(run["provenance"])["interpreted_kernels"] == {}, name


@pytest.mark.engine
def test_verified_is_what_the_worker_verified_at_every_step(engine):
    """The ledger against the tensors that reach the rejection sampler: how many drafts of each request, and which.

    An asynchronous scheduler has begun one step more when a request ends; what that gives is thrown away.
    """
    checked = 0
    for name, folder in engine.items():
        seen = av_engine.probe(folder)
        asynchronous = ledger.read_table(folder, "runs")["scheduling_effective"].iloc[0] == "async"
        last = av_engine.steps(folder).groupby("request_id")["step"].max()
        for step, rows in av_engine.steps(folder).groupby("step"):
            for row in rows.itertuples():
                drafts = seen[step]["drafts"][row.request_id] if step in seen else []
                assert len(drafts) == row.verified + row.padded, (name, step, row.request_id)
                assert drafts[: row.verified] == list(row.draft_token_ids[: row.verified])
                checked += row.verified
            if step in seen:
                ended = {r: d for r, d in seen[step]["drafts"].items() if r not in set(rows["request_id"])}
                assert all(asynchronous and last[request] == step - 1 for request in ended), (name, step)
                beyond = sum(len(drafts) + 1 for drafts in ended.values())
                assert seen[step]["rows"] == rows["verified"].sum() + rows["padded"].sum() + len(rows) + beyond
    assert checked > 300


@pytest.mark.engine
def test_the_policys_budget_is_what_was_verified(engine):
    for name, folder in engine.items():
        av = budget_tables.read([folder])["av_steps"].dropna(subset="budget").set_index("step")
        known = av_engine.steps(folder).groupby("step").size().reindex(av.index, fill_value=0)
        last = av_engine.steps(folder).groupby("request_id")["step"].max().value_counts()
        over = last.reindex(av.index - 1, fill_value=0).to_numpy()  # asynchronously a request's end comes a step later
        assert (av["requests"] - known <= (over if "async" in folder.parent.name else 0)).all(), name
        av = av[known == av["requests"]]
        verified = av_engine.steps(folder).groupby("step")[["verified", "padded", "scheduled"]].sum().loc[av.index]
        assert (verified["verified"] + verified["padded"] == av["budget"]).all(), name
        assert (verified["scheduled"] == av["scheduled"]).all()
        policy = POLICIES[name.partition("+")[2]]
        if policy["policy"] == "native":
            assert (av["budget"] == av["native"]).all()
        else:
            counts = av_engine.steps(folder).query("scheduled > 0").groupby("step")["scheduled"].apply(list)
            wanted = [choose_budget(policy["policy"], policy.get("value"), counts[s], 0, 0) for s in av.index]
            assert av["budget"].tolist() == wanted, name


@pytest.mark.engine
def test_a_budget_does_not_change_the_text(engine):
    """Greedy: what is verified changes the number of steps, not the tokens."""
    texts: dict[str, list[list[int]]] = {}
    for name, folder in engine.items():
        texts.setdefault(name.partition("+")[0], []).append(ledger.read_table(folder, "requests")["token_ids"].tolist())
    for many in texts.values():
        assert all(list(a) == list(b) for other in many[1:] for a, b in zip(many[0], other, strict=True))


@pytest.mark.engine
def test_outputs_under_a_grammar_are_valid_or_cut_by_length(engine):
    judged = 0
    for folder in engine.values():
        requests = ledger.read_table(folder, "requests").dropna(subset="output_class")
        assert set(requests["output_class"]) <= {"valid", "truncated"}, requests[["text", "class_detail"]].to_string()
        judged += len(requests)
    assert judged >= 15


@pytest.mark.engine
def test_three_regimes_in_batches_of_structured_and_free_requests_and_a_prefill(dspark):
    """Report R4: budget none, some and all in steps with and without a grammar, and each of them beside a prefill."""
    regimes, prefills = {"none": 0, "some": 0, "all": 0}, {"none": 0, "some": 0, "all": 0}
    for folder in dspark.values():
        structured = set(ledger.read_table(folder, "requests").dropna(subset="output_class")["request_id"])
        assert structured == {"0", "2", "4"}
        av = budget_tables.read([folder])["av_steps"].dropna(subset="budget").set_index("step")
        for step, rows in av_engine.steps(folder).groupby("step"):
            if step not in av.index:
                continue
            kinds = set(rows["request_id"].isin(structured))
            if len(kinds) == 2:
                budget, scheduled = av.loc[step, ["budget", "scheduled"]]
                regime = "none" if budget == 0 else "all" if budget == scheduled else "some"
                regimes[regime] += 1
                prefills[regime] += bool((rows["request_step"] == 0).any())
    assert min(regimes.values()) > 0, regimes
    assert min(prefills.values()) > 0, prefills


@pytest.mark.engine
@pytest.mark.parametrize("drafter", ["dspark", "dspark_async"])
def test_mask_rows_are_the_schedulers_rows_whatever_was_verified(request, drafter):
    checked = 0
    for name, folder in request.getfixturevalue(drafter).items():
        requests = ledger.read_table(folder, "requests").dropna(subset="output_class")
        structured = set(requests["request_id"])
        masks = av_engine.masks(folder)
        for step, rows in av_engine.steps(folder).groupby("step"):
            own = rows[rows["request_id"].isin(structured)]
            if len(own):
                assert masks[step]["rows"] == own["scheduled"].sum() + len(own), (name, step)
                assert masks[step]["mapped"] == masks[step]["rows"]
                checked += 1
    assert checked > 100


@pytest.mark.engine
def test_the_mapping_of_the_upstream_example(dspark):
    """vllm#52436: three requests, two with two drafts and one prefill, all with a grammar, and a budget of zero."""
    facts = facts_of(dspark)
    assert facts["mapping"] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.engine
def test_cost_tables_are_the_ones_that_vllm_builds(dspark):
    facts = facts_of(dspark)
    assert set(facts["tables"]) == {*costs.names(), "linear(1, 0.3)", "padded"}
    for name, tables in facts["tables"].items():
        curve = costs.CostCurve.model_validate(facts["curves"][name])
        for mine, theirs in zip(curve.tables(12, 200), tables, strict=True):
            assert np.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.engine
def test_a_thousand_steps_at_zero_are_ordinary_steps(target_folder, tmp_path):
    zero = cell(
        DSPARK,
        SCHEMA,
        engine={"runner": "v2", "budget": {"policy": "none"}},
        workload={"concurrency": 2, "prompts": "records", "limit": None, "repeats": 2, "max_tokens": 384},
    )
    ran = engines.run({"zero": zero}, tmp_path)["zero"]
    steps, requests, runs = ran.steps, ran.requests, ran.runs
    assert runs["outcome"].iloc[0] == "ok"
    assert steps["step"].nunique() >= 1000
    assert steps["step"].max() - steps["step"].min() + 1 == steps["step"].nunique()
    assert set(requests["output_class"]) == {"valid"}
    total = semantics.totals(steps, (), ("rfc",), runs=runs).iloc[0]
    assert total["verified"] == total["accepted"] == 0
    assert total["drafted"] == 5 * total["spec_steps"] > 5000
    assert total["mean_acceptance_length"] == 1.0
    begins = steps.groupby("step").filter(lambda rows: (rows["request_step"] == 0).any())
    assert (begins["scheduled"] > 0).sum() > 10  # prefills beside drafts of which none is verified


@pytest.mark.engine
@pytest.mark.parametrize("drafter", ["self_drafting", "ngram", "dspark"])
def test_a_run_at_zero_replays_all_the_others_step_by_step(request, drafter):
    """A complete recording, three requests at once: native, fixed and all others equal the real runs exactly."""
    folders = request.getfixturevalue(drafter)
    for group in sorted(name.removesuffix("+none") for name in folders if name.endswith("+none")):
        known = load([folders[f"{group}+none"]])
        for policy in POLICIES:
            if f"{group}+{policy}" in folders:
                compare(known, folders[f"{group}+{policy}"], f"{group} {policy}")


@pytest.mark.engine
@pytest.mark.parametrize("drafter", ["draft_model", "ngram", "self_drafting"])
def test_a_full_run_replays_every_policy_where_the_drafter_can_be_asked_again(request, drafter):
    """From full verification alone, under a grammar and without, one request at a time and three at once."""
    folders = request.getfixturevalue(drafter)
    for group in sorted(name.removesuffix("+all") for name in folders if name.endswith("+all")):
        full = folders[f"{group}+all"]
        known = load([full], again.ask(full))
        compared = [policy for policy in POLICIES if f"{group}+{policy}" in folders]
        assert compared[0] == "all"
        assert len(compared) > 3
        for policy in compared:
            compare(known, folders[f"{group}+{policy}"], f"{group} {policy}")


@pytest.mark.engine
def test_a_replay_is_priced_as_the_real_run_is(self_drafting):
    known = load([self_drafting["schema+none"]])
    for name in costs.names():
        curve = costs.load(name)
        for policy in ("all", "fraction", "native-curve"):
            folder = self_drafting[f"schema+{policy}"]
            real = budgets.speed(av_engine.steps(folder), budget_tables.read([folder])["av_steps"], curve)
            budget = Budget.model_validate(POLICIES[policy])
            done = replay(known, [budget], costs=curve, arrivals=arrivals(folder, CONCURRENCY)).totals
            assert done["tokens_per_s"].tolist() == [pytest.approx(real)]


@pytest.mark.engine
def test_a_smaller_k_replays_the_run_that_had_it(self_drafting, tmp_path_factory):
    shorter = grid({**SELF, "k": 2}, "schema", "all", **SHORT)
    real = av_engine.run(shorter, tmp_path_factory.mktemp("shorter"))["schema+all"]
    full = self_drafting["schema+all"]
    for known in (load([self_drafting["schema+none"]]), load([full], again.ask(full))):
        compare(known, real, "k=2", k=2)


@pytest.mark.engine
def test_the_estimators_fit_is_made_again_from_the_verdicts(self_drafting):
    folder = self_drafting["long+native"]
    tables = budget_tables.read([folder])
    again = budgets.refit(
        budgets.verdicts(av_engine.steps(folder), tables["av_proposals"]), without_invalid=False
    ).set_index("step")
    assert len(again) > 0
    recorded = tables["av_steps"].set_index("step").loc[again.index]
    assert recorded["refits"].tolist() == list(range(1, len(again) + 1))
    assert np.allclose(again["slope"], recorded["slope"], atol=1e-4)
    assert (again["slope"] != 0.5).all()
    for at in range(3):
        assert np.allclose(again[f"intercept {at}"], [row[at] for row in recorded["intercepts"]], atol=1e-4)


@pytest.mark.engine
def test_only_drafters_that_follow_from_the_text_are_asked_again(dspark):
    with pytest.raises(
        ReplayError, match="dspark cannot be asked again: what it proposes does not follow from the text"
    ):
        again.ask(dspark["mixed+all"])


def compare(known, folder, what, k=None):
    """A replay against the real run: every step, and who was verified in it."""
    content = json.loads(read(folder)["config_requested"])
    content.pop("spec_version")
    asked = parse_cell(content)
    steps = av_engine.steps(folder)
    came = arrivals(folder, asked.workload.concurrency)
    assert len(set(came[: asked.workload.concurrency])) == 1, "the first requests begin together"
    one = replay(known, [asked.engine.budget], k=k, detail=True, arrivals=came)
    assert one.totals["refused"].tolist() == [""], what
    steps["accepted"] = steps[["accepted", "committed"]].min(axis=1)
    columns = ["step", "request_id", "request_step", "drafted", "scheduled", "verified", "accepted", "committed"]
    mine, real = (table[columns].sort_values(["step", "request_id"]) for table in (one.steps, steps))
    if one.totals["inexact"].iloc[0]:  # the estimator was fitted, with verdicts that nobody knows
        mine, real = (table[table["step"] < REFIT_INTERVAL] for table in (mine, real))
    assert len(real) >= 6, what
    mine, real = mine.astype(str), real.astype(str)
    pd.testing.assert_frame_equal(mine.reset_index(drop=True), real.reset_index(drop=True), obj=what)


def arrivals(folder, at_once):
    """Step from which each request was there: the first may have waited for their grammar, the others for a place."""
    first = av_engine.steps(folder).groupby("request_id")["step"].min()
    in_order = [int(first[str(number)]) for number in range(len(first))]
    return [*in_order[:at_once], *[0] * (len(in_order) - at_once)]


def facts_of(folders):
    return json.loads((next(iter(folders.values())).parent / av_engine.FACTS).read_text(encoding="utf-8"))


def read(folder):
    return ledger.read_table(folder, "runs").iloc[0]


@pytest.mark.engine
def test_confidences_are_recorded_for_every_draft_and_the_estimators_state_for_every_step(engine):
    for folder in engine.values():
        tables = budget_tables.read([folder])
        joined = budgets.verdicts(av_engine.steps(folder), tables["av_proposals"])
        drafted = av_engine.steps(folder)["drafted"].sum()
        assert len(joined) == drafted > 0
        assert joined["confidence"].between(0, 1).all()
        assert tables["av_steps"]["step"].tolist() == list(range(len(tables["av_steps"])))
