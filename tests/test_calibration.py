"""Coverage is counted right, and the estimators cover what was planted on a real engine."""

from __future__ import annotations

import engines
import numpy as np
import pandas as pd
import pytest

from specgram_lab import calibration, capabilities

RUNS = 5


def made_up(runs: int, rates: tuple[float, ...], shift: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Steps whose acceptance follows ``rates`` exactly, 24 requests of 15 steps a run; ``shift`` is added to each."""
    rng = np.random.default_rng(seed)
    rows = []
    for run in range(runs):
        for request in range(24):
            for step in range(15):
                below = rng.random() < np.array(rates) + shift  # one draw: rates are unconditional and nested
                accepted = int(below.sum())
                rows.append({"run_id": str(run), "request_id": str(request), "step": step, "accepted": accepted})
    k = len(rates)
    frame = pd.DataFrame(rows).assign(drafted=k, verified=k, grammar_valid=k, scheduled=k, struck=0, padded=0)
    frame = frame.assign(sampled=frame["accepted"] + 1, committed=frame["accepted"] + 1, judged=False)
    return frame.astype(dict.fromkeys(frame.select_dtypes("number"), "Int64"))


def test_planted_values_follow_from_the_rates():
    values = calibration.planted((0.8, 0.6, 0.3))
    assert values["mean_acceptance_length", None] == pytest.approx(2.7)
    assert values["given_previous_accepted", 2] == pytest.approx(0.5)
    assert values["per_spec_step", 2] == 0.3


def test_intervals_of_unbiased_runs_cover_at_their_nominal_rate():
    found = calibration.estimates(made_up(120, calibration.RATES), seed=7, resamples=500)
    table = calibration.coverage(found, calibration.RATES)
    assert len(table) == 7
    assert table["runs"].eq(120).all()
    assert (table["low"] <= 0.95).all()
    assert (table["coverage"] >= 0.88).all()
    assert table["bias"].abs().max() < 0.02


def test_biased_runs_are_found_out():
    found = calibration.estimates(made_up(60, calibration.RATES, shift=-0.1), seed=7, resamples=500)
    table = calibration.coverage(found, calibration.RATES)
    unconditional = table[table["quantity"] == "per_spec_step"]
    assert (unconditional["high"] < 0.95).all()
    assert unconditional["bias"].to_numpy() == pytest.approx([-0.1] * 3, abs=0.02)


def test_runs_differ_in_their_seeds_only_and_a_runner_that_cannot_do_it_is_refused():
    first, second = calibration.cells(2)
    assert first.model_dump(exclude={"workload"}) == second.model_dump(exclude={"workload"})
    assert second.workload.seed - first.workload.seed > first.workload.limit
    (old,) = calibration.cells(1, engine={"runner": "v1", "device": "cpu"})
    assert "needs Model Runner V2" in str(capabilities.refusal(old))


@pytest.mark.engine
def test_a_real_engine_with_planted_rates_is_estimated_right(tmp_path, target_folder):
    """A few runs: every interval that misses must be rare, and the pooled estimate close."""
    cells = calibration.cells(RUNS, requests=16, max_tokens=32)
    ran = engines.run({cell.cell_id: cell for cell in cells}, tmp_path)
    assert [one.run["reason"] for one in ran.values() if one.run["outcome"] != "ok"] == []
    steps = pd.concat([one.steps for one in ran.values()], ignore_index=True)
    table = calibration.coverage(calibration.estimates(steps, seed=7), calibration.RATES)
    assert (table["covered"] >= RUNS - 2).all(), calibration.to_text(table)
    assert (table["high"] >= 0.95).all() or (table["covered"] >= RUNS - 1).mean() > 0.7, calibration.to_text(table)
    unconditional = table[table["quantity"] == "per_spec_step"]
    assert unconditional["bias"].abs().max() < 0.05, calibration.to_text(table)
