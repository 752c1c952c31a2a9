"""Estimates: against scipy and textbook values, on simulated data of known truth, and at their edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import simulate, step, steps_frame, together
from scipy import stats as scipy_stats

from specgram_lab import ledger, semantics, stats
from specgram_lab.stats import Estimate, StatsError, rate, ratio_of_sums


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def clusters(generator: np.random.Generator, n: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Accepted and drafted tokens of n requests whose mean rate is 0.6, whatever they drafted."""
    drafted = generator.integers(10, 60, n)
    return generator.binomial(drafted, generator.beta(6, 4, n)), drafted


def bounds(made: Estimate) -> tuple[float, float]:
    assert made.low is not None
    assert made.high is not None
    return made.low, made.high


def test_the_value_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    made = ratio_of_sums("rate", [1, 90], [10, 100], rng=rng())
    assert made.value == 91 / 110
    assert (made.numerator, made.denominator, made.n) == (91, 110, 2)
    assert ratio_of_sums("length", [10, 20], [10, 10], rng=rng(), plus=1).value == 2.5


@pytest.mark.parametrize("interval", ["bca", "percentile"])
def test_the_interval_is_scipys(interval: Any) -> None:
    above, below = clusters(rng(4), 25)
    method = {"bca": "BCa", "percentile": "percentile"}[interval]
    theirs = scipy_stats.bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, n_resamples=20_000,
        method=method, rng=rng(1),
    ).confidence_interval  # fmt: skip
    ours = bounds(ratio_of_sums("rate", above, below, rng=rng(2), interval=interval, resamples=20_000))
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.004)


def test_bca_moves_a_skewed_interval_as_scipy_does() -> None:
    above, below = (
        np.array([0, 0, 0, 0, 0, 1, 0, 0, 9, 2, 0, 1]),
        np.array([30, 8, 30, 30, 9, 30, 7, 30, 30, 30, 8, 30]),
    )
    theirs = scipy_stats.bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, n_resamples=20_000,
        method="BCa", rng=rng(1),
    ).confidence_interval  # fmt: skip
    ours = bounds(ratio_of_sums("rate", above, below, rng=rng(2), resamples=20_000))
    plain = bounds(ratio_of_sums("rate", above, below, rng=rng(2), resamples=20_000, interval="percentile"))
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.004)
    assert ours[1] > plain[1] + 0.02


@pytest.mark.parametrize("interval", ["bca", "percentile"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(interval: Any) -> None:
    generator = rng(11)
    held = 0
    for _ in range(300):
        low, high = bounds(ratio_of_sums("rate", *clusters(generator), rng=generator, interval=interval, resamples=500))
        held += low <= 0.6 <= high
    assert 0.90 <= held / 300 <= 0.98


def test_resampling_steps_instead_of_requests_would_be_too_sure() -> None:
    made = simulate("run", grammar="none", requests=12, steps=40, seed=5)
    tight = stats.estimates(made["steps"], seed=0, countings=["rfc"], cluster=["request_id", "step"])
    honest = stats.estimates(made["steps"], seed=0, countings=["rfc"])
    width = [float((one["high"] - one["low"]).iloc[0]) for one in (tight, honest)]
    assert width[0] < 0.8 * width[1]


def test_the_seed_is_used_and_nothing_else() -> None:
    data = clusters(rng(3))
    assert ratio_of_sums("rate", *data, rng=rng(1)) == ratio_of_sums("rate", *data, rng=rng(1))
    assert bounds(ratio_of_sums("rate", *data, rng=rng(1))) != bounds(ratio_of_sums("rate", *data, rng=rng(2)))
    made = simulate("run")["steps"]
    first, again, other = (stats.estimates(made, seed=seed, countings=["rfc"]) for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(first, again)
    assert (first["low"] != other["low"]).any()
    assert first["method"].iloc[0] == "BCa bootstrap over requests, 95%, 4000 resamples, seed 1"
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()
    stats.estimates(made, seed=1, countings=["rfc"])
    assert np.random.get_state()[1].tolist() == state


def test_a_groups_interval_does_not_depend_on_its_neighbours() -> None:
    both = together(simulate("a"), simulate("b", seed=1))
    alone = stats.estimates(both["steps"].query("run_id == 'b'"), seed=7, countings=["rfc"])
    beside = stats.estimates(both["steps"], seed=7, countings=["rfc"]).query("run_id == 'b'")
    pd.testing.assert_frame_equal(alone, beside.reset_index(drop=True))


@pytest.mark.parametrize(
    ("above", "below", "value", "reason"),
    [
        ([], [], None, "the denominator is 0 over all requests"),
        ([0, 0], [0, 0], None, "the denominator is 0 over all requests"),
        ([3], [4], 0.75, "an interval needs 2 requests, there is 1"),
        ([3, 0], [4, 0], 0.75, "an interval needs 2 requests, there is 1"),
        ([3, 1], [4, 0], 1.0, "one of 2 requests has the whole denominator"),
        ([4, 8], [4, 8], 1.0, "all 2 requests agree exactly, resampling them shows no spread"),
    ],
)
def test_without_spread_there_is_no_interval_but_a_reason(
    above: list[int], below: list[int], value: float | None, reason: str
) -> None:
    made = ratio_of_sums("rate", above, below, rng=rng())
    assert (made.value, made.low, made.high, made.reason) == (value, None, None, reason)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12), st.sampled_from(["bca", "percentile"]))
def test_intervals_of_shares_stay_between_0_and_1(pairs: list[tuple[int, int]], interval: Any) -> None:
    above, below = [min(p) for p in pairs], [max(p) for p in pairs]
    made = ratio_of_sums("rate", above, below, rng=rng(), interval=interval, resamples=200)
    assert (made.low is None) == bool(made.reason)
    if made.low is not None and made.high is not None:
        assert 0 <= made.low <= made.high <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"interval": "t"}, "bca or percentile"), ({"confidence": 95}, r"in \(0, 1\)"), ({"resamples": 0}, "at least 1")],
)
def test_impossible_options_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StatsError, match=message):
        ratio_of_sums("rate", [1, 2], [3, 4], rng=rng(), **change)


@pytest.mark.parametrize(
    ("ends", "reason", "message"),
    [((0.1, None), "", "one end"), ((0.3, 0.2), "", "low comes first"), ((None, None), "", "gives no reason")],
)
def test_an_estimate_says_all_or_says_why(ends: tuple[Any, Any], reason: str, message: str) -> None:
    with pytest.raises(StatsError, match=message):
        Estimate("rate", 0.2, *ends, 3, "requests", "method", reason=reason)


# Rare rates


def test_wilson_is_the_textbook_interval_and_names_its_denominator() -> None:
    made = rate(3, 1000, event="fsm_events", per="verified_token")
    theirs = scipy_stats.binomtest(3, 1000).proportion_ci(0.95, method="wilson")
    assert bounds(made) == pytest.approx((theirs.low, theirs.high))
    assert (made.name, made.n, made.n_of) == ("fsm_events_per_verified_token", 1000, "verified tokens")
    assert rate(3, 1000, event="e", per="t", confidence=0.99).high > made.high  # type: ignore[operator]


def test_none_seen_is_not_none_possible() -> None:
    made = rate(0, 50, event="fsm_events", per="request")
    assert (made.value, made.low) == (0, 0)
    assert made.high == pytest.approx(0.0714, abs=1e-4)
    assert rate(50, 50, event="fsm_events", per="request").high == 1


@pytest.mark.parametrize(
    ("events", "trials", "reason"), [(0, 0, "there are no tokens"), (3, 2, "3 events are more than 2 tokens")]
)
def test_a_rate_that_is_none_says_so(events: int, trials: int, reason: str) -> None:
    made = rate(events, trials, event="e", per="token")
    assert (made.low, made.reason) == (None, reason)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(StatsError, match="neither can be negative"):
        rate(-1, 2, event="e", per="t")


def test_fsm_events_are_counted_by_phase_with_every_denominator() -> None:
    steps = steps_frame(*[step(accepted=1)] * 5, *[step(accepted=1, request_id="1", step=9 + n) for n in range(5)])
    event = {"run_id": "run", "request_id": "0", "phase": "draft-probe"}
    events = ledger.frame("fsm_events", [event | {"step": 1}, event | {"step": 2}])
    made = stats.fsm_rates(events, steps).set_index(["phase", "name"])
    probe, commit = made.loc["draft-probe"], made.loc["commit"]
    assert probe["numerator"].tolist() == [2, 2, 1]
    assert probe["denominator"].tolist() == [40, 40, 2]
    assert commit["numerator"].tolist() == [0, 0, 0]
    assert (commit["high"] > 0).all()


# Pairs


def test_pairs_see_a_small_change_that_two_separate_intervals_hide() -> None:
    generator = rng(8)
    drafted = np.full(25, 40)
    base = generator.binomial(40, generator.beta(3, 3, 25))
    better = np.minimum(base + generator.integers(0, 4, 25), 40)
    made = stats.paired("rate", np.c_[base, drafted], np.c_[better, drafted], rng=rng())
    assert bounds(made)[0] > 0
    separate = [bounds(ratio_of_sums("rate", one, drafted, rng=rng())) for one in (base, better)]
    assert separate[0][1] > separate[1][0]


def test_a_paired_ratio_of_a_thing_with_itself_is_1() -> None:
    table = np.c_[clusters(rng(1))]
    same = stats.paired("rate", table, table, rng=rng(), kind="ratio")
    assert (same.value, same.low) == (1.0, None)
    double = stats.paired("rate", table, np.c_[2 * table[:, 0], table[:, 1]], rng=rng(), kind="ratio")
    assert double.value == pytest.approx(2)


def test_pairs_must_match() -> None:
    with pytest.raises(StatsError, match="2 clusters cannot be paired with 1"):
        stats.paired("rate", [[1, 2], [1, 2]], [[1, 2]], rng=rng())
    with pytest.raises(StatsError, match="not 'quotient'"):
        stats.paired("rate", [[1, 2]], [[1, 2]], rng=rng(), kind="quotient")  # type: ignore[arg-type]


def test_runs_are_compared_request_by_request() -> None:
    both = together(simulate("a", requests=6), simulate("b", requests=8, keep=0.3))
    made = stats.compare(both["steps"], "a", "b", seed=0, on=["prompt_id"], requests=both["requests"])
    assert made["unpaired"].tolist() == [2, 2, 2]
    assert made["n"].tolist() == [6, 6, 6]
    assert (made["high"] < 0).all()
    with pytest.raises(StatsError, match="no steps of run c"):
        stats.compare(both["steps"], "a", "c", seed=0)
    old = stats.compare(both["steps"], "a", "b", seed=0, counting="engine").set_index("name")
    assert old.loc["verified_acceptance_rate", "reason"] == "this counting has no verified tokens"


# Frames from a ledger


def test_estimates_have_the_values_of_the_totals() -> None:
    both = together(simulate("a", drafter="ngram"), simulate("b", scheduling="async", admitted=2))
    for by in (["run_id"], ["drafter"], []):
        made = stats.estimates(both["steps"], seed=0, by=by, runs=both["runs"], resamples=50)
        sums = semantics.totals(both["steps"], by=by, runs=both["runs"]).set_index([*by, "counting"])
        for name in stats.QUANTITIES:
            values = made[made["name"] == name].set_index([*by, "counting"])["value"]
            pd.testing.assert_series_equal(values, sums[name].reindex(values.index), check_names=False)


def test_nothing_drafted_and_no_verified_counter_are_reasons_and_no_zeros() -> None:
    none = simulate("none", drafter="none", requests=2, steps=3)
    made = stats.estimates(none["steps"], seed=0)
    assert made["value"].isna().all()
    assert set(made["reason"]) == {"no drafts were proposed in 6 tokens"}
    legacy = stats.estimates(simulate("a")["steps"], seed=0, countings=["engine"]).set_index("name")
    assert legacy.loc["verified_acceptance_rate", "reason"] == "this counting has no verified tokens"
    assert pd.isna(legacy.loc["verified_acceptance_rate", "value"])


def test_greedy_repeats_can_be_resampled_as_one_prompt_and_early_ends_are_marked() -> None:
    one = simulate("a", requests=6, partial=True)
    by_prompt = stats.estimates(
        one["steps"], seed=0, cluster=["prompt_id"], runs=one["runs"],
        requests=one["requests"].assign(prompt_id=["p", "p", "p", "q", "q", "q"]), countings=["rfc"],
    )  # fmt: skip
    assert by_prompt[["n", "n_of"]].drop_duplicates().to_numpy().tolist() == [[2, "prompts"]]
    assert by_prompt["partial"].all()
    with pytest.raises(semantics.SemanticsError, match="no column 'prompt_id'"):
        stats.estimates(one["steps"], seed=0, cluster=["prompt_id"])


def test_steps_of_runs_that_were_left_out_are_in_no_group() -> None:
    both = together(simulate("a", drafter="ngram", requests=3), simulate("b", requests=3))
    only = both["runs"].query("run_id == 'b'")
    made = [
        stats.estimates(both["steps"], seed=0, by=["drafter"], runs=only),
        stats.per_position(both["steps"], seed=0, by=["drafter"], runs=only),
        stats.fsm_rates(both["fsm_events"], both["steps"], by=["drafter"], runs=only),
        semantics.totals(both["steps"], by=["drafter"], runs=only),
        semantics.fates(both["steps"], by=["drafter"], runs=only),
    ]
    assert [one["drafter"].unique().tolist() for one in made] == [["draft_model"]] * 5
    drafted = both["steps"].query("run_id == 'b'")["drafted"].sum()
    assert made[3]["drafted"].iloc[-1] == made[4]["tokens"].iloc[0] == drafted


def test_an_empty_ledger_gives_empty_tables() -> None:
    steps, events = ledger.frame("steps", []), ledger.frame("fsm_events", [])
    for made in (stats.estimates(steps, seed=0), stats.per_position(steps, seed=0), stats.fsm_rates(events, steps)):
        assert made.empty
        assert "value" in made


# Positions


def test_three_definitions_of_acceptance_at_a_position() -> None:
    rows = [step(accepted=2), step(accepted=0, admitted=1), step(drafted=1, accepted=1), step(drafted=0)]
    made = stats.per_position(steps_frame(*rows), seed=0).set_index(["definition", "position"])
    counts = made[["numerator", "denominator"]].astype(int).agg(tuple, axis=1)
    assert counts["per_spec_step"].tolist() == [(2, 3), (1, 3), (0, 3), (0, 3)]
    assert counts["given_verified"].tolist() == [(2, 3), (1, 1), (0, 1), (0, 1)]
    assert counts["given_previous_accepted"].tolist() == [(2, 3), (1, 2), (0, 1), (0, 0)]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(["ngram", "draft_model"]), st.none() | st.integers(0, 4))
def test_positions_add_up_to_the_length_and_multiply_to_each_other(
    seed: int, drafter: str, admitted: int | None
) -> None:
    made = simulate("run", drafter=drafter, admitted=admitted, requests=4, steps=8, seed=seed)
    positions = stats.per_position(made["steps"], seed=0, resamples=20).set_index(["definition", "position"])["value"]
    length = semantics.totals(made["steps"], countings=["rfc"])["mean_acceptance_length"].iloc[0]
    plain = positions["per_spec_step"].astype(float)
    semantics.check_positions(length, plain.tolist(), source="the ledger")
    chained = positions["given_previous_accepted"].astype("Float64").cumprod().fillna(0).astype(float)
    np.testing.assert_allclose(chained, plain)
    assert (positions["given_verified"].fillna(1) >= plain.to_numpy()).all()
