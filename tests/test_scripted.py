"""The model-free engine: every scenario gives the numbers that its file states, in both schedulings."""

from __future__ import annotations

import json

import engines
import pytest

from specgram_lab import scenarios, semantics
from specgram_lab.scenarios import Counts

pytestmark = pytest.mark.engine
NAMES = scenarios.scenario_names()


@pytest.fixture(scope="module")
def ran(tmp_path_factory, target_folder):
    cells = {f"{name}-{side}": scenarios.cell(name, side) for name in NAMES for side in ("sync", "async")}
    return engines.run(cells, tmp_path_factory.mktemp("scripted"))


def test_there_are_scenarios():
    assert {"row-a", "row-c", "row-h"} <= set(NAMES)


@pytest.mark.parametrize("side", ["sync", "async"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers_follow_from_the_definitions(ran, name, side):
    one = ran[f"{name}-{side}"]
    assert one.run["outcome"] == "ok", one.run["reason"]
    assert one.run["scheduling_effective"] == side
    expected = scenarios.load_scenario(name).expected[side]
    assert scenarios.differences(expected, scenarios.counts(one.run, one.steps)) == []


@pytest.mark.parametrize("side", ["sync", "async"])
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_counting_is_what_the_engine_reported(ran, name, side):
    one = ran[f"{name}-{side}"]
    assert semantics.reconcile(one.steps, one.requests, one.runs) == []
    assert semantics.reported(one.requests, one.runs)


def test_a_wrong_number_is_named():
    counts = scenarios.load_scenario("row-c").expected["sync"]
    wrong = Counts(**{**counts.model_dump(), "verified": 3})
    assert scenarios.differences(wrong, counts) == ["verified is 2, expected 3"]


@pytest.mark.parametrize("name", NAMES)
def test_the_legacy_counting_of_a_run_in_its_own_scheduling_is_what_the_engine_reported(ran, name):
    for side in ("sync", "async"):
        one = ran[f"{name}-{side}"]
        total = semantics.totals(one.steps, (), (f"legacy-{side}",), runs=one.runs).iloc[0]
        reported = [one.run[f"engine_{key}"] for key in ("num_drafts", "draft_tokens", "accepted_tokens")]
        assert [total[key] for key in ("spec_steps", "drafted", "accepted")] == reported, side


def test_a_sync_scheduler_would_not_have_added_the_padding_of_an_async_one(ran):
    one, theirs = ran["drafter-skipped-async"], ran["drafter-skipped-sync"].run
    total = semantics.totals(one.steps, (), ("legacy-sync",), runs=one.runs).iloc[0]
    assert one.steps["padded"].sum() > 0
    assert (total["spec_steps"], total["drafted"]) == (theirs["engine_num_drafts"], theirs["engine_draft_tokens"])


def test_legacy_countings_tell_the_two_schedulings_of_one_decode(ran):
    """From the sync run alone follows what the async engine reported, and the other way round."""
    for name in ("row-a", "row-c", "row-h"):
        for counting, side in (("legacy-sync", "sync"), ("legacy-async", "async")):
            theirs = ran[f"{name}-{side}"].run
            for recorded in ("sync", "async"):
                one = ran[f"{name}-{recorded}"]
                total = semantics.totals(one.steps, (), (counting,), runs=one.runs).iloc[0]
                assert total["spec_steps"] == theirs["engine_num_drafts"], (name, counting, recorded)
                assert total["drafted"] == theirs["engine_draft_tokens"], (name, counting, recorded)


def test_the_row_says_what_was_asked_and_what_was_switched_on(ran):
    one = ran["row-c-async"]
    provenance = json.loads(one.run["provenance"])
    assert sorted(provenance["patches"]) == ["async-on-cpu", "recorder"]
    assert provenance["cells_before"] > 0
    assert json.loads(one.run["config_requested"])["engine"]["scheduling"] == "async"
    assert (one.folder / "engine.log").is_file()


@pytest.mark.parametrize("side", ["sync", "async"])
def test_it_is_recorded_what_lies_inside_reasoning_and_what_a_grammar_judged(ran, side):
    steps = ran[f"reasoning-end-{side}"].steps
    spec = steps[steps["drafted"] > 0].sort_values("request_id")
    assert list(steps["in_reasoning"]) == [True] * len(steps)  # the end itself lies inside the first draft
    assert list(spec["judged"]) == [True, False]
    assert not ran[f"row-a-{side}"].steps["in_reasoning"].any()
