"""The table of runs: what is shown, what is left blank and why."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from ledgers import run_row, simulate, together

from specgram_lab import ledger, tables


def notes(made: dict[str, pd.DataFrame]) -> list[str]:
    return list(tables.summary(made)["notes"].iloc[0])


def without_steps(**run: Any) -> dict[str, pd.DataFrame]:
    empty = {name: ledger.frame(name, []) for name in ("requests", "steps", "fsm_events")}
    return {"runs": ledger.frame("runs", [run_row(**run)]), **empty}


def test_a_run_is_one_row_of_rfc_counts() -> None:
    made = simulate("run", scheduling="async", admitted=3)
    row = tables.summary(made).iloc[0]
    steps = made["steps"]
    assert row["drafted"] == steps["drafted"].sum()
    assert row["grammar_invalid"] == steps["drafted"].sum() - steps["grammar_valid"].sum()
    assert row["verified"] == steps["verified"].sum()
    assert row["acceptance_rate"] == steps["accepted"].sum() / steps["drafted"].sum()
    assert row["fsm_draft_probe"] == len(made["fsm_events"])
    assert row["fsm_commit"] == 0
    assert row["valid_outputs"] == "8/8"
    assert row["output_tokens_per_s"] == made["runs"]["output_tokens"].iloc[0] / 2.0
    assert row["notes"] == []


def test_failures_are_rows_with_their_reason_and_no_numbers() -> None:
    both = together(
        without_steps(run_id="dead", outcome="engine_failed", reason="the engine ended with 1"), simulate("b")
    )
    table = tables.summary(both)
    assert table["run"].tolist() == ["dead", "b"]
    assert table.loc[0, "spec_steps":"output_tokens_per_s"].isna().all()  # type: ignore[misc]
    assert table["notes"].tolist() == [["the engine ended with 1"], []]


def test_an_engine_that_never_drafted_is_noticed_but_not_where_nothing_should_draft() -> None:
    assert notes(simulate("run", drafter="ngram", k=0, requests=2)) == ["no drafts were proposed in 40 tokens"]
    assert notes(simulate("run", drafter="none", requests=2)) == []


@pytest.mark.parametrize(
    ("column", "value", "note"),
    [
        ("output_class", "truncated", "no tok/s: 1 of 8 outputs are not valid (1 truncated)"),
        ("finish_reason", "error", "no tok/s: 1 of 8 requests ended in an error or were refused"),
    ],
)
def test_shortened_or_invalid_outputs_have_no_speed(column: str, value: str, note: str) -> None:
    made = simulate("run")
    made["requests"].loc[2, column] = value
    assert pd.isna(tables.summary(made)["output_tokens_per_s"].iloc[0])
    assert notes(made) == [note]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (
            {"partial": True},
            ["partial: the run ended before its last request did", "no tok/s: the run did not end well"],
        ),
        ({"outcome": "timeout", "reason": "900 s"}, ["900 s", "no tok/s: the run did not end well"]),
        ({"prompts": 10}, ["no tok/s: 8 of 10 requests are there"]),
        ({"generate_s": None}, ["no tok/s: the run has no duration or no token count"]),
        ({"scheduling_requested": "async"}, ["asked for scheduling async, ran with sync"]),
        ({"warnings": ["min_tokens is long"]}, ["min_tokens is long"]),
    ],
)
def test_what_a_reader_must_know_is_a_note(run: dict[str, Any], expected: list[str]) -> None:
    assert notes(simulate("run", **run)) == expected


def test_without_recorded_steps_the_engines_own_counters_are_told_and_fill_no_column() -> None:
    made = without_steps(
        engine="server", engine_num_drafts=10, engine_draft_tokens=40, engine_accepted_tokens=15,
        engine_semantics="pre-64156",
    )  # fmt: skip
    row = tables.summary(made).iloc[0]
    assert row[["spec_steps", "drafted", "verified", "accepted", "acceptance_rate"]].isna().all()
    assert notes(made)[0] == (
        "no step was recorded; the engine's own counters (pre-64156) say: 10 spec steps, 40 drafted, 15 accepted, "
        "mean acceptance length 2.50, 37.5% of drafted"
    )


def test_an_engine_that_reported_no_counters_has_no_such_note() -> None:
    assert not any("counters" in note for note in notes(without_steps(engine="server")))


def test_outputs_that_nobody_judged_are_not_valid_ones() -> None:
    made = simulate("run")
    made["requests"].loc[:2, "output_class"] = "not_judged"
    assert tables.summary(made)["valid_outputs"].iloc[0] == "5/5"
    assert notes(made) == ["3 of 8 outputs were not judged"]


def test_text_lines_up_and_drops_what_no_run_has() -> None:
    made = together(simulate("local-v1-0123456789ab", drafter="ngram", grammar="none"), simulate("b", grammar="none"))
    lines = tables.to_text(tables.summary(made)).splitlines()
    assert lines[2].startswith("0123456789ab  ok")
    assert " valid" not in lines[0]
    ends = [line.index("%") for line in lines[2:4]]
    assert ends[0] == ends[1]
    assert len({len(line) for line in lines[:4]}) == 1


def test_markdown_has_the_same_cells_and_escapes_pipes() -> None:
    made = simulate("run", warnings=["a | b\nc"], whitespace="any")
    lines = tables.to_markdown(tables.summary(made)).splitlines()
    assert {line.count("|") for line in lines[:3]} == {len(tables.COLUMNS) + 1}
    assert lines[1].count("---:") == 13
    assert "- `run`: a \\| b c" in lines


def test_no_runs_make_an_empty_table() -> None:
    empty = tables.summary({name: ledger.frame(name, []) for name in ledger.TABLES})
    assert empty.empty
    assert tables.to_text(empty).splitlines()[0] == "run"
    assert tables.to_markdown(empty).splitlines()[0] == "| run |"
