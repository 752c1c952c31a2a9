"""What a notebook calls: a grid of cells, run and collected, with a progress bar; rows of all cells in one place."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import TypeAdapter, ValidationError
from tqdm.auto import tqdm

from specgram_lab import ledger
from specgram_lab.notebooks import close
from specgram_lab.run import run_cells
from specgram_lab.spec import Cell, SpecError, explain, parse_cell

__all__ = ["Results", "close", "collect", "grid", "parameters", "read", "run"]


@dataclass(frozen=True)
class Results:
    """The four tables of a grid, each with the rows of all cells; ``folder`` is where they lie as parquet."""

    folder: Path
    runs: pd.DataFrame
    requests: pd.DataFrame
    steps: pd.DataFrame
    fsm_events: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """All four by name."""
        return {name: getattr(self, name) for name in ledger.TABLES}

    @property
    def failed(self) -> pd.DataFrame:
        """The rows of ``runs`` that are not ok."""
        return self.runs[self.runs["outcome"] != "ok"]


def grid(
    *,
    drafters: Sequence[Mapping[str, Any]],
    grammars: Sequence[Mapping[str, Any]],
    workload: Mapping[str, Any],
    schedulings: Sequence[str] = ("sync",),
    runners: Sequence[str] = ("v1",),
    target: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every combination as a cell, in an order that lets neighbours share an engine.

    Each argument holds what stands under that name in a cell's YAML; combinations that cannot run stay in the list
    and become rows with a reason. Cells that are equal appear once.

    Raises:
        SpecError: a value that no cell can have.
    """
    cells: dict[str, Cell] = {}
    for runner, scheduling, drafter, grammar in product(runners, schedulings, drafters, grammars):
        content: dict[str, Any] = {
            "target": dict(target or {}),
            "drafter": dict(drafter),
            "grammar": dict(grammar),
            "workload": dict(workload),
            "engine": {**(engine or {}), "runner": runner, "scheduling": scheduling},
        }
        cell = parse_cell(content)
        cells.setdefault(cell.cell_id, cell)
    return list(cells.values())


def run(cells: Iterable[Cell], folder: str | Path) -> Results:
    """Run what is not finished in ``folder`` yet, then collect all of it.

    Shows a bar in a notebook or terminal, and one plain line per finished cell in a log.
    """
    folder = Path(folder)
    work = [(cell, folder / "cells" / cell.cell_id) for cell in cells]
    if not work:
        raise SpecError("there is no cell to run")
    names = {path.absolute(): cell.cell_id for cell, path in work}
    live = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(total=len(work), unit="cell", disable=not live) as bar:

        def progress(path: Path, finished: int, total: int) -> None:
            bar.set_description(f"{names[path]} {finished}/{total}", refresh=True)

        def ended(path: Path, outcome: str) -> None:
            bar.update()
            if not live:
                print(f"{names[path]}: {outcome}", flush=True)

        run_cells(work, progress, ended)
    return collect([path for _, path in work], folder)


def collect(cells: Sequence[Path], folder: Path) -> Results:
    """The tables of ``cells`` as one, written to ``folder`` as well."""
    tables = {}
    for name in ledger.TABLES:
        parts = [part for path in cells if not (part := ledger.read_table(path, name)).empty]
        tables[name] = pd.concat(parts, ignore_index=True) if parts else ledger.frame(name, [])
        ledger.write_table(folder, name, tables[name])
    return Results(folder=folder, **tables)


def read(folder: str | Path) -> Results:
    """The collected tables of an earlier run, or those of a single cell."""
    return Results(folder=Path(folder), **ledger.read_run(Path(folder)))


def parameters(given: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Check the parameters of a notebook: all there, none unknown, of the stated types. Returns them.

    papermill only logs a parameter that the notebook does not know, and guesses types on its command line.

    Raises:
        SpecError: naming the parameter.
    """
    unknown = sorted(set(given) - set(types))
    if unknown:
        raise SpecError(f"unknown parameter {', '.join(unknown)}; the notebook takes {', '.join(sorted(types))}")
    checked = {}
    for name, kind in types.items():
        if name not in given:
            raise SpecError(f"parameter {name} is missing")
        try:
            checked[name] = TypeAdapter(kind).validate_python(given[name], strict=True)
        except ValidationError as error:
            raise SpecError(f"parameter {name}: {explain(error)}") from None
    return checked
