"""Replays held against real runs: from one run with budget all, what every other budget did on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from specgram_lab import lab
from specgram_lab.av import again
from specgram_lab.av.recording import ASKABLE, Recording, ReplayError, Run, asked, load
from specgram_lab.av.replay import replay

COUNTS = ("drafted", "verified", "accepted")
_COLUMNS = ["step", "request_id", "scheduled", *COUNTS, "committed"]


def held(results: lab.Results, compared: pd.DataFrame) -> pd.DataFrame:
    """Each run of a drafter that can be asked again, as the replay of the run with budget all has it, and as it was.

    Args:
        results: runs of several budgets, among them ``all``.
        compared: `specgram_lab.av.report.table` of them.

    Returns:
        drafter, grammar, concurrency, budget and ``texts``, as given; ``engine_steps``, drafted, verified and accepted
        (of the outputs' own tokens), each followed by the ``replayed`` one; ``equal_steps``, the engine steps in which
        everything is the same; ``narrow`` steps, in which rounding may decide; ``refused``, why a replay stopped.
    """
    sync = compared[compared["drafter"].isin(ASKABLE) & (compared["scheduling"] == "sync")]
    runs = {run_id: Run.read(results.folder / "cells" / run_id) for run_id in sync["run_id"]}
    rows = []
    for _, group in sync.groupby([asked(runs[run_id].cell) for run_id in sync["run_id"]], sort=False):
        full = group[group["budget"] == "all"]["run_id"]
        if full.empty:
            continue
        known = _known(results.folder / "cells" / full.iloc[0])
        for run in group.to_dict("records"):
            about = {name: run[name] for name in ("drafter", "grammar", "concurrency", "budget", "texts")}
            rows.append(about | ({"refused": known} if isinstance(known, str) else _row(known, runs[run["run_id"]])))
    return pd.DataFrame(rows)


def _known(folder: Path) -> Recording | str:
    """What the run and its drafter, asked again, know; or why it cannot be asked."""
    try:
        return load([folder], again.ask(folder))
    except ReplayError as fault:
        return str(fault)


def _row(known: Recording, real: Run) -> dict[str, Any]:
    done = replay(known, [real.cell.engine.budget], detail=True)
    total = done.totals.iloc[0]
    steps = pd.concat(real.steps.values())
    steps = steps.assign(accepted=steps[["accepted", "committed"]].min(axis=1))
    row: dict[str, Any] = {}
    for name, value in {"engine_steps": steps["step"].nunique(), **steps[list(COUNTS)].sum()}.items():
        row |= {name: int(value), f"{name} replayed": total[name]}
    row["equal_steps"] = _equal(done.steps, steps)
    return row | {"narrow": total["narrow"], "refused": total["refused"]}


def _equal(replayed: pd.DataFrame, real: pd.DataFrame) -> int:
    """Engine steps whose rows are all the same."""
    tables = (table[_COLUMNS].sort_values(["step", "request_id"]) for table in (replayed, real))
    mine, theirs = ({step: part.to_numpy().tolist() for step, part in table.groupby("step")} for table in tables)
    return sum(mine.get(step) == rows for step, rows in theirs.items())
