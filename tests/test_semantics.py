"""Countings: the reconstruction of vllm#64156 row by row, public confusions of counters, and the invariants."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import run_row, simulate, step, steps_frame, together

from specgram_lab import ledger, semantics
from specgram_lab.semantics import Counts, SemanticsError, counted, reconcile, totals


def numbers(row: dict[str, Any], counting: semantics.Counting) -> tuple[int, int, int | None, int]:
    """(spec_step, drafted, verified, accepted) of one step."""
    found = counted(steps_frame(row), counting).iloc[0]
    verified = None if pd.isna(found["verified"]) else int(found["verified"])
    return int(found["spec_step"]), int(found["drafted"]), verified, int(found["accepted"])


# name, step as recorded, old: (drafted, counted), rfc: (drafted, verified, counted)
ROWS = [
    ("A sync", step(accepted=3, scheduling="sync"), (4, 1), (4, 4, 1)),
    ("A async", step(accepted=3), (4, 1), (4, 4, 1)),
    ("B sync", step(accepted=3, admitted=3, scheduling="sync"), (4, 1), (4, 3, 1)),
    ("B async", step(accepted=3, admitted=3), (4, 1), (4, 3, 1)),
    ("C", step(valid=2, accepted=2, scheduling="sync"), (2, 1), (4, 2, 1)),
    ("D", step(valid=2, accepted=2), (2, 1), (4, 4, 1)),
    ("E none", step(valid=2, admitted=0, scheduling="sync"), (2, 1), (4, 0, 1)),
    ("E one", step(valid=2, admitted=1, accepted=1, scheduling="sync"), (2, 1), (4, 1, 1)),
    ("E two", step(valid=2, admitted=2, accepted=1, scheduling="sync"), (2, 1), (4, 2, 1)),
    ("G", step(valid=2, admitted=3, accepted=1), (2, 1), (4, 3, 1)),
    ("H", step(valid=0, scheduling="sync"), (0, 0), (4, 0, 1)),
    ("I", step(valid=0), (0, 1), (4, 4, 1)),
    ("J sync", step(admitted=0, scheduling="sync"), (4, 1), (4, 0, 1)),
    ("J async", step(admitted=0), (4, 1), (4, 0, 1)),
    ("K", step(valid=0, admitted=0), (0, 1), (4, 0, 1)),
]


@pytest.mark.parametrize(("row", "old", "new"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_every_scenario_of_the_rfc_old_and_new(
    row: dict[str, Any], old: tuple[int, int], new: tuple[int, int, int]
) -> None:
    accepted = row["accepted"]
    drafted, spec_step = old
    assert numbers(row, "engine") == (spec_step, drafted, None, accepted)
    assert numbers(row, "rfc") == (new[2], new[0], new[1], accepted)


@pytest.mark.parametrize(
    ("recorded", "counting", "expected"),
    [
        (step(valid=2, accepted=2), "legacy-sync", (1, 2, None, 2)),
        (step(valid=2, accepted=2, scheduling="sync"), "legacy-async", (1, 2, None, 2)),
        (step(valid=0), "legacy-sync", (0, 0, None, 0)),
        (step(valid=0, scheduling="sync"), "legacy-async", (1, 0, None, 0)),
        (step(valid=3, slots=1, accepted=1), "legacy-sync", (1, 1, None, 1)),
        (step(drafted=2, valid=2, slots=4, accepted=2), "legacy-sync", (1, 2, None, 2)),
        (step(drafted=0, slots=0), "legacy-async", (0, 0, None, 0)),
        (step(accepted=0, sampled=0), "legacy-async", (0, 0, None, 0)),
        (step(accepted=0, sampled=0), "rfc", (1, 4, 4, 0)),
    ],
)
def test_the_scheduling_that_was_not_recorded(
    recorded: dict[str, Any], counting: semantics.Counting, expected: tuple[int, int, int | None, int]
) -> None:
    assert numbers(recorded, counting) == expected


def test_fewer_drafted_than_verified_is_named() -> None:
    result = totals(steps_frame(step(valid=2, admitted=3, accepted=1))).set_index("counting")
    assert result.loc["engine", ["drafted", "accepted"]].tolist() == [2, 1]
    assert pd.isna(result.loc["engine", "verified"])
    assert result["breaks"].to_dict() == {
        "engine": "drafted >= verified", "legacy-sync": "", "legacy-async": "drafted >= verified", "rfc": "",
    }  # fmt: skip
    rfc = result.loc["rfc"]
    assert (rfc["drafted"], rfc["verified"], rfc["accepted"]) == (4, 3, 1)
    assert rfc["acceptance_rate"] == 1 / 4
    assert rfc["verified_acceptance_rate"] == pytest.approx(1 / 3)


def test_a_breach_in_one_step_shows_although_the_sums_hide_it() -> None:
    hiding = [step(admitted=1)] * 2
    result = totals(steps_frame(step(valid=2, admitted=3, accepted=1), *hiding), countings=["engine"]).iloc[0]
    assert (result["breaks"], result["breaking_steps"], result["sum_breaks"]) == ("drafted >= verified", 1, "")


def test_a_lost_hand_off_accepts_more_than_it_drafted() -> None:
    lost = step(valid=0) | {"grammar_valid": 4, "accepted": 2, "sampled": 3, "sampled_token_ids": [0, 1, 2]}
    result = totals(steps_frame(lost), countings=["engine"]).iloc[0]
    assert result["breaks"] == "drafted >= accepted, drafted >= verified"
    assert pd.isna(result["acceptance_rate"])
    assert result["warning"] == "this counting has no drafted tokens, the drafter proposed 4"


def test_all_refused_steps_lengthen_the_async_denominator_only() -> None:
    accepting = [step(accepted=2, scheduling="sync")] * 8
    refused = [step(valid=0, scheduling="sync")] * 2
    result = totals(steps_frame(*accepting, *refused)).set_index("counting")["mean_acceptance_length"]
    assert result.to_dict() == {"engine": 3.0, "legacy-sync": 3.0, "legacy-async": 2.6, "rfc": 2.6}


def test_an_engine_with_the_rfc_counters_is_counted_as_rfc() -> None:
    steps = steps_frame(step(valid=2, admitted=3, accepted=1))
    runs = ledger.frame("runs", [run_row(engine_semantics="rfc", scheduling_effective="async")])
    result = totals(steps, runs=runs).set_index("counting")
    assert result.loc["engine", "drafted":"breaks"].equals(result.loc["rfc", "drafted":"breaks"])  # type: ignore[misc]
    assert result.loc["engine", "verified"] == 3


def test_padding_is_no_draft() -> None:
    real = [step(drafted=3, judged=False, accepted=a) for a in (3,) * 6 + (1,) * 5 + (2,)]
    padding = [step(drafted=0, slots=3, judged=False)] * 88
    result = totals(steps_frame(*real, *padding)).set_index("counting")
    rfc, engine = result.loc["rfc"], result.loc["engine"]
    assert (rfc["drafted"], rfc["spec_steps"], rfc["accepted"]) == (36, 12, 25)
    assert rfc["acceptance_rate"] == pytest.approx(25 / 36)
    assert rfc["mean_acceptance_length"] == pytest.approx(1 + 25 / 12)
    assert (engine["drafted"], engine["spec_steps"]) == (300, 100)
    assert engine["acceptance_rate"] == pytest.approx(25 / 300)


def test_nothing_drafted_is_no_result() -> None:
    result = totals(steps_frame(*[step(drafted=0)] * 499, step(drafted=0, slots=3, judged=False)))
    assert result["warning"].unique().tolist() == ["no drafts were proposed in 500 tokens"]
    assert result[["mean_acceptance_length", "acceptance_rate", "verified_acceptance_rate"]].isna().all(axis=None)


def test_a_run_that_ended_early_marks_its_rates() -> None:
    early, whole = simulate("early", partial=True, requests=2), simulate("whole", requests=2)
    both = together(early, whole)
    result = totals(both["steps"], runs=both["runs"], countings=["rfc"]).set_index("run_id")
    assert result["partial"].to_dict() == {"early": True, "whole": False}
    assert result.loc["early", "drafted"] > 0
    assert totals(both["steps"], by=[], runs=both["runs"], countings=["rfc"])["partial"].tolist() == [True]


def test_groups_come_from_steps_or_runs_and_anything_else_is_refused() -> None:
    both = together(simulate("a", drafter="ngram", requests=2), simulate("b", requests=2))
    result = totals(both["steps"], by=["drafter"], runs=both["runs"], countings=["rfc"])
    assert result["drafter"].tolist() == ["draft_model", "ngram"]
    whole = totals(both["steps"], by=(), countings=["rfc"])
    assert result["drafted"].sum() == whole["drafted"].sum() == both["steps"]["drafted"].sum()
    with pytest.raises(SemanticsError, match="no column 'colour', neither in the rows nor"):
        totals(both["steps"], by=["colour"], runs=both["runs"])


def test_an_empty_ledger_gives_an_empty_table_with_all_columns() -> None:
    empty = ledger.frame("steps", [])
    assert totals(empty).empty
    assert list(totals(empty).columns) == list(totals(steps_frame(step())).columns)
    assert totals(empty, by=[]).empty


def test_unknown_countings_and_missing_counts_are_refused() -> None:
    with pytest.raises(SemanticsError, match="no counting 'v0', only engine, legacy-sync, legacy-async, rfc"):
        counted(steps_frame(step()), "v0")  # type: ignore[arg-type]
    with pytest.raises(SemanticsError, match=r"steps.verified is empty in 1 of 1 rows"):
        counted(steps_frame(step()).assign(verified=pd.NA), "rfc")


# What vLLM reports, against its steps

STEPS = [step(valid=2, accepted=1), step(drafted=0), step(valid=0), step(accepted=4)]


def _reporting(**changes: Any) -> list[str]:
    run = run_row(engine_num_drafts=3, engine_draft_tokens=6, engine_accepted_tokens=5)
    request = {
        "run_id": "run", "request_id": "0", "reported_spec_steps": 3, "reported_drafted": 6, "reported_accepted": 5,
        "reported_step_drafted": [2, 0, 4], "reported_step_accepted": [1, 0, 4],
    }  # fmt: skip
    run |= {k: v for k, v in changes.items() if k in run}
    request |= {k: v for k, v in changes.items() if k in request}
    return reconcile(steps_frame(*STEPS), ledger.frame("requests", [request]), ledger.frame("runs", [run]))


def test_an_honest_report_reconciles_in_whatever_order_the_steps_are() -> None:
    assert _reporting() == []
    requests = ledger.frame("requests", [{"run_id": "run", "request_id": "0", "reported_step_drafted": [2, 0, 4]}])
    steps = steps_frame(*STEPS)
    assert reconcile(steps.iloc[::-1], requests, ledger.frame("runs", [run_row()])) == []


def test_a_run_of_which_no_step_was_recorded_is_not_compared() -> None:
    requests = ledger.frame("requests", [{"run_id": "run", "request_id": "0", "reported_drafted": 4}])
    runs = ledger.frame("runs", [run_row(engine_draft_tokens=4)])
    assert reconcile(ledger.frame("steps", []), requests, runs) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"engine_draft_tokens": 8}, "run run: engine_draft_tokens is 8, its steps give 6"),
        ({"reported_accepted": 4}, "request 0 of run run: reported_accepted is 4, its steps give 5"),
        ({"reported_step_drafted": [2, 4, 4]},
         "request 0 of run run: reported_step_drafted is 4 at its counted step 1, the recorded step gives 0"),
        ({"reported_step_accepted": [1, 4]},
         "request 0 of run run: reported_step_accepted has 2 steps, its counted steps are 3"),
    ],
)  # fmt: skip
def test_each_difference_is_one_sentence_with_both_values(change: dict[str, Any], sentence: str) -> None:
    assert _reporting(**change) == [sentence]


def test_what_was_not_reported_is_not_compared_and_counted_as_such() -> None:
    requests = ledger.frame("requests", [{"run_id": "run", "request_id": "0"}])
    runs = ledger.frame("runs", [run_row()])
    assert reconcile(steps_frame(*STEPS), requests, runs) == []
    assert set(semantics.reported(requests, runs).values()) == {0}
    named = requests.assign(reported_spec_steps=3, reported_step_drafted=[[2, 0, 4]])
    given = semantics.reported(named, runs)
    assert (given["reported_spec_steps"], given["reported_step_drafted"], given["reported_drafted"]) == (1, 1, 0)


# Arithmetic that is confused in public


def test_the_bonus_token_is_no_accepted_draft() -> None:
    counts = semantics.from_emitted(40, 10, 3)
    assert (counts.accepted, counts.drafted) == (30, 30)
    assert (counts.acceptance_rate, counts.mean_acceptance_length) == (1.0, 4.0)
    with pytest.raises(SemanticsError, match=r"accepted 40 .* drafted 30: the bonus token .* would be 30"):
        Counts(spec_steps=10, drafted=30, accepted=40)
    for emitted in (9, 41):
        with pytest.raises(SemanticsError, match=r"the bonus token\) to 4 tokens"):
            semantics.from_emitted(emitted, 10, 3)
    with pytest.raises(SemanticsError, match="k >= 1"):
        semantics.from_emitted(10, 10, 0)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"drafted": 4, "accepted": 1, "verified": 5}, "drafted >= verified >= accepted is broken by 4, 5, 1"),
        ({"drafted": 4, "accepted": 3, "verified": 2}, "drafted >= verified >= accepted is broken by 4, 2, 3"),
        ({"drafted": -1, "accepted": 0}, "drafted is -1"),
    ],
)
def test_counts_obey_the_invariant(counts: dict[str, int], message: str) -> None:
    with pytest.raises(SemanticsError, match=message):
        Counts(spec_steps=1, **counts)


def test_counts_without_a_denominator_have_no_rate() -> None:
    nothing = Counts(spec_steps=0, drafted=0, accepted=0, verified=0)
    assert (nothing.mean_acceptance_length, nothing.acceptance_rate, nothing.verified_acceptance_rate) == (None,) * 3
    assert Counts(1, 4, 1, 3).verified_acceptance_rate == pytest.approx(1 / 3)


def test_lengths_with_and_without_bonus_are_never_mixed() -> None:
    assert semantics.with_bonus(3.0, bonus="excluded") == 4.0
    assert semantics.with_bonus(3.0, bonus="included") == 3.0
    with pytest.raises(SemanticsError, match=r"bonus included is at least 1, got 0\.6"):
        semantics.with_bonus(0.6, bonus="included")
    with pytest.raises(SemanticsError, match="at least 0, got nan"):
        semantics.with_bonus(float("nan"), bonus="excluded")
    with pytest.raises(SemanticsError, match="allowed are 'included' and 'excluded'"):
        semantics.with_bonus(3.0, bonus="")  # type: ignore[arg-type]


def test_length_and_rate_are_tied_by_totals_and_not_by_k() -> None:
    semantics.check_length(2.65, 0.55, drafted=300, spec_steps=100)
    semantics.check_length(1.9, 0.5, drafted=18, spec_steps=10)
    with pytest.raises(SemanticsError, match=r"length 3.5 does not fit .* it would be 1.9"):
        semantics.check_length(1 + 0.5 * 5, 0.5, drafted=18, spec_steps=10)
    with pytest.raises(SemanticsError, match="without a spec step"):
        semantics.check_length(1.0, 0.0, drafted=0, spec_steps=0)


def test_position_rates_that_do_not_add_up_name_their_reader() -> None:
    semantics.check_positions(2.60, [0.730, 0.521, 0.355], source="baseline", tolerance=0.01)
    with pytest.raises(SemanticsError, match=r"the /metrics parser: .* 1.86667 is not .* 1 per-position rates = 1.6"):
        semantics.check_positions(1 + 26 / 30, [18 / 30], source="the /metrics parser")


# Properties


@st.composite
def any_step(draw: st.DrawFn, scheduling: str | None = None) -> dict[str, Any]:
    """A step that obeys the ledger's invariants, recorded by either scheduling."""
    drafted = draw(st.integers(0, 6))
    judged = draw(st.booleans())
    valid = draw(st.integers(0, drafted)) if judged else drafted
    how = scheduling or draw(st.sampled_from(["sync", "async"]))
    slots = draw(st.integers(0, 8 if how == "async" else drafted))
    admitted = draw(st.none() | st.integers(0, 6))
    made = step(drafted=drafted, valid=valid, scheduling=how, admitted=admitted, slots=slots, judged=judged)
    if made["padded"] and not judged and draw(st.booleans()):  # taken back where a grammar is in the batch
        made |= {"struck": made["padded"]}
    accepted = draw(st.integers(0, min(made["verified"], valid)))
    sampled = draw(st.sampled_from([accepted + 1] * 4 + [0])) if not accepted else accepted + 1
    return made | {"accepted": accepted, "sampled": sampled, "committed": sampled}


@settings(max_examples=40, deadline=None)
@given(st.lists(any_step(), min_size=1, max_size=12))
def test_rfc_never_breaks_the_invariant_and_never_depends_on_the_scheduling(rows: list[dict[str, Any]]) -> None:
    result = totals(steps_frame(*rows), countings=["rfc", "legacy-sync"])
    assert (result["breaks"] == "").all()
    assert (result["sum_breaks"] == "").all()
    rfc = result[result["counting"] == "rfc"].iloc[0]
    assert rfc["spec_steps"] == sum(row["drafted"] > 0 for row in rows)
    assert rfc["drafted"] >= rfc["verified"] >= rfc["accepted"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["sync", "async"]).flatmap(lambda s: st.tuples(st.just(s), st.lists(any_step(s), max_size=12))))
def test_the_engine_counting_is_the_legacy_counting_of_its_own_scheduling(
    recorded: tuple[str, list[dict[str, Any]]],
) -> None:
    scheduling, rows = recorded
    steps = steps_frame(*rows)
    runs = ledger.frame("runs", [run_row(scheduling_effective=scheduling)])
    legacy: semantics.Counting = "legacy-sync" if scheduling == "sync" else "legacy-async"
    columns = ["spec_step", "drafted", "accepted", "forward"]
    engine = counted(steps, "engine", runs=runs)[columns]
    pd.testing.assert_frame_equal(engine, counted(steps, legacy, runs=runs)[columns])


def test_both_schedulings_of_one_decode_give_the_same_legacy_counters() -> None:
    decodes = [(d, v, a) for d in range(5) for v in range(d + 1) for a in range(v + 1)]
    sync, async_ = (
        steps_frame(*[step(drafted=d, valid=v, accepted=a, scheduling=scheduling) for d, v, a in decodes])
        for scheduling in ("sync", "async")
    )
    assert not sync["scheduled"].equals(async_["scheduled"])
    for counting in semantics.COUNTINGS[1:3]:
        pd.testing.assert_frame_equal(counted(sync, counting), counted(async_, counting))


def test_the_async_counting_can_break_the_invariant() -> None:
    made = simulate("run", scheduling="async", legal=0.6, seed=3)
    result = totals(made["steps"], runs=made["runs"]).set_index("counting")
    assert result.loc["legacy-async", "breaks"] == "drafted >= verified"
    assert result.loc["legacy-async", "sum_breaks"] == "drafted >= verified"
    assert result.loc["rfc", "breaks"] == ""
