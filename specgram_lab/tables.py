"""Runs as a short table: for the terminal and, as Markdown, for a discussion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd

from specgram_lab.semantics import totals
from specgram_lab.twins import diverged

COLUMNS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("run", ""),
    "outcome": ("outcome", ""),
    "drafter": ("drafter", ""),
    "k": ("k", "d"),
    "grammar": ("grammar", ""),
    "whitespace": ("blanks", ""),
    "scheduling": ("sched", ""),
    "spec_steps": ("steps", "d"),
    "drafted": ("drafted", "d"),
    "grammar_invalid": ("invalid", "d"),
    "verified": ("verified", "d"),
    "accepted": ("accepted", "d"),
    "mean_acceptance_length": ("length", ".2f"),
    "acceptance_rate": ("of drafted", ".1%"),
    "verified_acceptance_rate": ("of verified", ".1%"),
    "fsm_draft_probe": ("probe", "d"),
    "fsm_commit": ("commit", "d"),
    "valid_outputs": ("valid", ""),
    "output_tokens_per_s": ("tok/s", ".1f"),
}
"""Column of `summary`, its heading and its number format."""

LEGEND: Final = (
    "blanks: what the grammar allows between JSON tokens; steps: spec steps; invalid: drafted tokens that the grammar "
    "refuses; length: mean acceptance length, bonus included; of drafted, of verified: accepted; "
    "probe, commit: FSM events by phase; valid: valid / judged outputs"
)


def summary(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row a run, in the order of ``runs``; drafted, verified and accepted are those of the rfc counting.

    Args:
        tables: runs, requests, steps and fsm_events, as `ledger.read_run` gives them.

    Returns:
        `COLUMNS` and ``notes`` (a list of sentences: why a run or a number is missing, what was asked and not done,
        the engine's own counters where no step was recorded, as of a server).
        ``output_tokens_per_s`` is empty, with its reason in the notes, where an output was shortened or invalid: that
        would be the speed of something else.
    """
    runs = tables["runs"]
    by_run = {name: dict(list(tables[name].groupby("run_id"))) for name in ("requests", "steps", "fsm_events")}
    rows = [
        _row(run, {name: own.get(run["run_id"], tables[name].iloc[:0]) for name, own in by_run.items()})
        for _, run in runs.iterrows()
    ]
    differing = diverged(runs, tables["requests"]).groupby("run_id")["diverged"].agg(["sum", "size"])
    for row, run_id in zip(rows, runs["run_id"], strict=True):
        count, size = differing.loc[run_id] if run_id in differing.index else (0, 0)
        if count:
            row["notes"].append(f"{count} of {size} outputs differ from those of the run without a drafter (diverged)")
    kinds = {key: {"d": "Int64", "": "string"}.get(form, "Float64") for key, (_, form) in COLUMNS.items()}
    return pd.DataFrame(rows, columns=[*COLUMNS, "notes"]).astype(kinds)


def _row(run: pd.Series[Any], own: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    requests, steps, phases = own["requests"], own["steps"], own["fsm_events"]["phase"]
    judged = requests["output_class"].dropna()
    judged = judged[judged != "not_judged"]
    row: dict[str, Any] = {key: run[key] for key in ("outcome", "drafter", "k", "grammar", "whitespace")}
    row |= {"run": run["run_id"], "scheduling": run["scheduling_effective"]}
    notes = _notes(run)
    if len(steps):
        counts = totals(steps, countings=["rfc"]).iloc[0]
        row |= {key: counts[key] for key in COLUMNS if key in counts}
        row["grammar_invalid"] = int((steps["drafted"] - steps["grammar_valid"]).sum())
        row["fsm_draft_probe"] = int((phases == "draft-probe").sum())
        row["fsm_commit"] = int((phases == "commit").sum())
        notes += [counts["warning"]] if counts["warning"] and run["drafter"] != "none" else []
    elif pd.notna(run["engine_num_drafts"]):
        notes.append(_own_counters(run))
    if len(judged):
        row["valid_outputs"] = f"{int((judged == 'valid').sum())}/{len(judged)}"
        if len(judged) < len(requests):
            notes.append(f"{len(requests) - len(judged)} of {len(requests)} outputs were not judged")
    row["output_tokens_per_s"], why = _speed(run, requests, judged)
    return row | {"notes": [*notes, why] if why and len(requests) else notes}


def _own_counters(run: pd.Series[Any]) -> str:
    steps, drafted, accepted = (
        int(run[f"engine_{name}"]) for name in ("num_drafts", "draft_tokens", "accepted_tokens")
    )
    length = f", mean acceptance length {1 + accepted / steps:.2f}" if steps else ""
    rate = f", {accepted / drafted:.1%} of drafted" if drafted else ""
    return (
        f"no step was recorded; the engine's own counters ({run['engine_semantics']}) say: {steps} spec steps, "
        f"{drafted} drafted, {accepted} accepted{length}{rate}"
    )


def to_text(table: pd.DataFrame) -> str:
    """`summary` in columns of fixed width, the notes of each run, a legend; a column without a value is left out."""
    headings, rows, right = _cells(table)
    widths = [max(len(row[at]) for row in [headings, *rows]) for at in range(len(headings))]
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in [headings, *rows]
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    notes = [
        f"{_short(run)}: {note}" for run, notes in zip(table["run"], table["notes"], strict=True) for note in notes
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes, "", LEGEND])


def to_markdown(table: pd.DataFrame) -> str:
    """`summary` as a Markdown table, its notes as a list below it."""
    headings, rows, right = _cells(table)
    lines = [_pipes(headings), _pipes(["---:" if r else "---" for r in right]), *(_pipes(row) for row in rows)]
    notes = [
        f"- `{_short(run)}`: {_escape(note)}"
        for run, notes in zip(table["run"], table["notes"], strict=True)
        for note in notes
    ]
    return "\n".join([*lines, "", *notes, *([""] if notes else []), LEGEND])


def _speed(run: pd.Series[Any], requests: pd.DataFrame, judged: pd.Series[str]) -> tuple[float | None, str]:
    """Output tokens a second, or why there is no such number."""
    if run["outcome"] != "ok" or run["partial"] is True:
        return None, "no tok/s: the run did not end well"
    lost = int(requests["finish_reason"].isin(["error", "rejected"]).sum())
    if lost:
        return None, f"no tok/s: {lost} of {len(requests)} requests ended in an error or were refused"
    if pd.notna(run["prompts"]) and len(requests) < run["prompts"]:
        return None, f"no tok/s: {len(requests)} of {run['prompts']} requests are there"
    wrong = judged[judged != "valid"].value_counts().sort_index()
    if len(wrong):
        classes = ", ".join(f"{number} {name}" for name, number in wrong.items())
        return None, f"no tok/s: {int(wrong.sum())} of {len(judged)} outputs are not valid ({classes})"
    if pd.isna(run["generate_s"]) or pd.isna(run["output_tokens"]) or run["generate_s"] <= 0:
        return None, "no tok/s: the run has no duration or no token count"
    return float(run["output_tokens"]) / float(run["generate_s"]), ""


def _notes(run: pd.Series[Any]) -> list[str]:
    notes = [str(run["reason"])] if pd.notna(run["reason"]) and run["reason"] else []
    notes += (
        ["partial: the run ended before its last request did"] if run["partial"] is True or run["partial"] == 1 else []
    )
    for what in ("runner", "scheduling", "budget"):
        asked, got = run[f"{what}_requested"], run[f"{what}_effective"]
        if pd.notna(asked) and pd.notna(got) and asked != got:
            notes.append(f"asked for {what} {asked}, ran with {got}")
    warnings = run["warnings"]
    return notes + (
        [str(text) for text in warnings] if warnings is not None and not isinstance(warnings, float) else []
    )


def _cells(table: pd.DataFrame) -> tuple[list[str], list[list[str]], list[bool]]:
    shown = {key: look for key, look in COLUMNS.items() if key == "run" or bool(table[key].notna().any())}
    right = [bool(form) or key == "valid_outputs" for key, (_, form) in shown.items()]
    rows = [[_cell(key, form, row[key]) for key, (_, form) in shown.items()] for _, row in table.iterrows()]
    return [heading for heading, _ in shown.values()], rows, right


def _cell(key: str, form: str, value: Any) -> str:
    if pd.isna(value):
        return ""
    return _short(value) if key == "run" else format(value, form)


def _short(run_id: str) -> str:
    """The 12 hex digits of a cell id, or the id itself."""
    return re.sub(r"^.*-([0-9a-f]{12})$", r"\1", str(run_id))


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
