"""The rows of the proposal on the real Model Runner V2 on a CPU, adaptive verification included."""

from __future__ import annotations

import json

import pytest

from specgram_lab import ledger, scenario_runs

pytestmark = pytest.mark.engine
NAMES = scenario_runs.local_names()


@pytest.fixture(scope="module")
def ran(tmp_path_factory, target_folder):
    folder = tmp_path_factory.mktemp("local-scenarios")
    results = scenario_runs.run(NAMES, ["sync", "async"], "local", folder)
    return {(result.scenario, result.scheduling): result for result in results}, folder


@pytest.mark.parametrize("side", ["sync", "async"])
@pytest.mark.parametrize("name", NAMES)
def test_the_real_engine_gives_the_numbers_of_the_file(ran, name, side):
    result = ran[0][name, side]
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.differences == ()


def test_row_g_as_it_was_reported(ran):
    """Drafted 4, verified 3, accepted 1, and the engine's counter says 2: fewer drafted than verified."""
    results, folder = ran
    result = results["row-g", "async"]
    assert result.rfc == {"spec_steps": 1, "drafted": 4, "verified": 3, "accepted": 1}
    assert result.counts is not None
    assert result.counts.engine_draft_tokens == 2
    assert "drafted >= verified" in result.breaks
    run = ledger.read_run(folder / "row-g-async")["runs"].iloc[0]
    assert (run["runner_effective"], run["scheduling_effective"], run["budget_effective"]) == (
        "v2",
        "async",
        "schedule",
    )
    assert "scripted-drafter" in json.loads(run["provenance"])["patches"]


def test_what_was_verified_is_measured_not_the_budget(ran):
    """The steps of row E with one admitted: the slots of the forward pass, and what was left out, add up."""
    step = ledger.read_run(ran[1] / "row-e-async")["steps"].query("drafted > 0").iloc[0]
    assert (step["scheduled"], step["verified"], step["av_skipped"], step["padded"]) == (4, 1, 3, 0)
