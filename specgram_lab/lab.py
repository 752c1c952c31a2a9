"""What a notebook calls: a grid of cells, run and collected, with a progress bar; rows of all cells in one place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import TypeAdapter, ValidationError
from tqdm.auto import tqdm

from specgram_lab import ledger
from specgram_lab.notebooks import close
from specgram_lab.run import Ended, Progress, is_done, run_cells, writing
from specgram_lab.spec import Cell, SpecError, explain, parse_cell

if TYPE_CHECKING:
    from specgram_lab.sweeps.definition import Sweep

__all__ = ["Results", "close", "collect", "grid", "parameters", "read", "run", "sweep", "with_preset"]

Executor = Callable[[Sequence[tuple[Cell, Path]], Progress, Ended], object]
"""What runs cells in their folders, as `specgram_lab.run.run_cells` does."""


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


def with_preset(name: str, drafters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments of `grid` for a notebook that takes a preset's name: the preset's drafter beside none, its target and
    engine; without a name, ``drafters`` alone.

    Raises:
        SpecError: there is no such preset.
    """
    from specgram_lab import presets

    if not name:
        return {"drafters": drafters}
    parts = presets.load(name).parts
    engine = {key: value for key, value in parts["engine"].items() if key != "runner"}
    return {"drafters": [{"method": "none"}, parts["drafter"]], "target": parts["target"], "engine": engine}


def run(
    cells: Iterable[Cell], folder: str | Path, executor: Executor = run_cells, ended: Ended | None = None
) -> Results:
    """Run what is not finished in ``folder`` yet, then collect all of it.

    Shows a bar in a notebook or terminal, and one plain line per finished cell in a log.

    Args:
        cells: what to run.
        folder: where their tables go.
        executor: what runs them; by itself one engine after another in processes of this machine.
        ended: called with the folder and the outcome of every cell that ends.
    """
    folder = Path(folder)
    work = [(cell, folder.absolute() / "cells" / cell.cell_id) for cell in cells]
    if not work:
        raise SpecError("there is no cell to run")
    names = {path: cell.cell_id for cell, path in work}
    left = [(cell, path) for cell, path in work if not is_done(cell, path)]
    live = sys.stderr.isatty() or in_notebook()
    with writing(folder), tqdm(total=len(work), initial=len(work) - len(left), unit="cell", disable=not live) as bar:

        def progress(path: Path, finished: int, total: int) -> None:
            bar.set_description(f"{names[path]} {finished}/{total}", refresh=True)

        def through(path: Path, outcome: str) -> None:
            bar.update()
            if not live:
                print(f"{names[path]}: {outcome}", flush=True)
            if ended is not None:
                ended(path, outcome)

        if left:
            executor(left, progress, through)
        return collect([path for _, path in work], folder)


def sweep(
    definition: Sweep | Mapping[str, Any] | str | Path, folder: str | Path, executor: Executor | None = None
) -> Results:
    """Run what is missing of a sweep, with a bar and, in a notebook, a table that fills; then collect all of it.

    Args:
        definition: a `Sweep`, the same as plain data, or the path of its YAML.
        folder: where the tables go; the folder is the record of what is done.
        executor: as in `run`; by itself as many engines at once as this machine has room for.

    Raises:
        SpecError: the definition is wrong, or differs from the one that finished cells in ``folder`` were made with.
        OutputFolderError: the folder cannot be written, or another runner works in it.
    """
    from specgram_lab.sweeps import definition as definitions
    from specgram_lab.sweeps import runner

    if isinstance(definition, str | Path):
        definition = definitions.load(Path(definition))
    elif not isinstance(definition, definitions.Sweep):
        definition = definitions.parse(dict(definition))
    return runner.run(definition, Path(folder), executor=executor)


def in_notebook() -> bool:
    """Whether a Jupyter kernel shows what this process displays."""
    shell = sys.modules.get("IPython")
    return "ipykernel" in sys.modules and shell is not None and shell.get_ipython() is not None


def collect(cells: Sequence[Path], folder: Path) -> Results:
    """The tables of ``cells`` as one, written to ``folder`` as well."""
    tables = {name: ledger.read_tables(cells, name) for name in ledger.TABLES}
    for name, table in tables.items():
        ledger.write_table(folder, name, table)
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
