"""The sub-commands ``specgram sweep`` and ``specgram batch``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Grids of cells that end in a full table, resumed where they stopped.")
WELL = frozenset({"ok", "unsupported"})
"""Outcomes that leave the exit code at 0: what cannot run here was said beforehand."""
SHOWN = 40
"""Cells up to which a sweep's table is printed."""
File = Annotated[Path, typer.Argument(help="A sweep as YAML.")]
Folder = Annotated[Path, typer.Argument(help="The folder of a sweep.")]


class Executor(StrEnum):
    """What runs the cells."""

    LOCAL = "local"
    RAY = "ray"


@app.command()
def plan(
    file: File,
    out: Annotated[
        Path | None, typer.Option("--out", help="The sweep's folder: what is finished there counts.")
    ] = None,
) -> None:
    """Say how many cells a sweep has, which cannot run here and why, and how long it takes."""
    from specgram_lab import ledger
    from specgram_lab.sweeps import definition, executors, runner
    from specgram_lab.sweeps import plan as plans

    made = plans.plan(definition.load(file))
    finished = None
    if out is not None and (out / runner.CELLS).is_file():
        finished = ledger.read_tables([out / "cells" / one.cell.cell_id for one in made.cells], "runs")
    guess = plans.estimate(made, finished)
    typer.echo(plans.to_text(made, guess, executors.room(made.sweep.resources)))


@app.command()
def run(
    file: File,
    out: Annotated[Path, typer.Option("--out", help="The folder that is the record; what is finished is kept.")],
    executor: Annotated[Executor, typer.Option("--executor", help="This machine, or a Ray cluster.")] = Executor.LOCAL,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Engines at once on this machine.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Of the Ray cluster; else RAY_ADDRESS, else here.")
    ] = None,
    again: Annotated[list[str] | None, typer.Option("--again", help="An outcome whose cells run again.")] = None,
    drop_changed: Annotated[
        bool, typer.Option("--drop-changed", help="Leave finished cells out whose definition has changed.")
    ] = False,
) -> None:
    """Run what is missing of a sweep; exit code 1 where a cell failed (one that is unsupported did not)."""
    from specgram_lab.sweeps import cluster, definition, executors, runner

    sweep = definition.load(file)
    local = executors.Local(workers or executors.room(sweep.resources), sweep.resources)
    results = runner.run(
        sweep,
        out,
        executor=cluster.Ray(sweep.resources, address) if executor is Executor.RAY else local,
        again=again or (),
        changed="drop" if drop_changed else "refuse",
    )
    _show(results.folder)


@app.command()
def status(folder: Folder) -> None:
    """Say how a sweep stands, also while it runs."""
    from specgram_lab.sweeps import runner

    typer.echo(runner.status(folder))


@app.command()
def collect(folder: Folder) -> None:
    """Make the tables anew from all cells; those that have not run have their rows, too."""
    from specgram_lab.sweeps import runner

    runner.collect(folder)
    _show(folder)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(help="A sweep's folder, or labels: scheduling=sync,k=4.")],
    second: Annotated[str, typer.Argument(help="The same; the difference is second - first.")],
    folder: Annotated[Path | None, typer.Option("--in", help="The sweep that the labels are of.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the table to this file, too.")] = None,
) -> None:
    """Hold two sides against each other, prompt by prompt, with intervals and in words."""
    from specgram_lab.sweeps import compare as comparing

    table = comparing.compare(comparing.side(first, folder), comparing.side(second, folder))
    if csv is not None:
        table.to_csv(csv, index=False)
    typer.echo(comparing.to_text(table, first, second))


def _show(folder: Path) -> None:
    from specgram_lab import lab, tables
    from specgram_lab.sweeps import runner

    results = lab.read(folder)
    if len(results.runs) <= SHOWN:
        typer.echo(tables.to_text(tables.summary(results.tables)))
    else:
        typer.echo(runner.status(folder))
    failed = results.runs[~results.runs["outcome"].isin(WELL)]
    if len(failed):
        typer.echo(f"{len(failed)} of {len(results.runs)} cells failed", err=True)
        raise typer.Exit(1)


def batch(
    file: Annotated[Path, typer.Argument(help="A batch as YAML: notebooks x parameter sets.")],
    out: Annotated[Path, typer.Option("--out", help="Gets a folder an entry, and index.html.")],
) -> None:
    """Run notebooks with sets of parameters; exit code 1 where one failed. What is well is not run again."""
    from specgram_lab.sweeps import batch as batches

    name, entries = batches.load(file)
    made = batches.run(name, entries, out, lambda e, kind: typer.echo(f"{e.notebook.name}, {e.set_name}: {kind}"))
    typer.echo(out / "index.html")
    failed = [one for one in made if one.outcome != "ok"]
    for one in failed:
        typer.echo(f"{one.notebook}, {one.set_name}: {one.outcome}: {one.reason}", err=True)
    if failed:
        raise typer.Exit(1)
