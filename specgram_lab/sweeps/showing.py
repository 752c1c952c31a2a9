"""A sweep's table in a notebook, filled while its cells end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from specgram_lab import lab
from specgram_lab.run import Ended
from specgram_lab.sweeps.plan import Plan

EVERY_S = 1.0
WAITING = "to run"


class Filling:
    """Cells by the value of the first axis and by outcome."""

    def __init__(self, made: Plan, known: Mapping[str, str | None]) -> None:
        axis = next(iter(made.sweep.axes))
        self.axis = axis
        self.rows = {one.cell.cell_id: one.where[axis] for one in made.cells}
        self.outcomes = {run_id: known.get(run_id) or WAITING for run_id in self.rows}

    def through(self, run_id: str, outcome: str) -> None:
        """A cell has ended."""
        self.outcomes[run_id] = outcome

    def table(self) -> pd.DataFrame:
        """One row a value of the first axis, a column an outcome, the number of cells."""
        rows, outcomes = pd.Series(self.rows, name=self.axis), pd.Series(self.outcomes, name="cells")
        return pd.crosstab(rows, outcomes).reindex(list(dict.fromkeys(self.rows.values())))


@contextlib.contextmanager
def filling(made: Plan, known: Mapping[str, str | None]) -> Iterator[Ended | None]:
    """In a notebook: a table that follows the cells of ``made`` to their end; what to tell of each. Else nothing.

    ``known`` holds the outcome of every cell, None of those that are to run.
    """
    if not lab.in_notebook():
        yield None
        return
    from IPython.display import display

    found = Filling(made, known)
    shown = display(found.table(), display_id=True)  # type: ignore[no-untyped-call]
    last = time.monotonic()

    def ended(path: Path, kind: str) -> None:
        nonlocal last
        found.through(path.name, kind)
        if time.monotonic() - last >= EVERY_S:
            last = time.monotonic()
            shown.update(found.table())

    try:
        yield ended
    finally:
        shown.update(found.table())
