"""The command ``specgram``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from specgram_lab import cli_scenarios
from specgram_lab.servers import commands as server_commands

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(cli_scenarios.app, name="scenarios")
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def lab() -> None:
    """A lab for speculative decoding under grammars: real engines, named patches, one ledger per run."""


@app.command()
def run(
    spec: Annotated[Path, typer.Argument(help="A cell as YAML.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the tables; a finished one is not run again.")],
) -> None:
    """Run one cell on a real engine and show what came out."""
    from specgram_lab import tables
    from specgram_lab.lab import read
    from specgram_lab.run import run_cell
    from specgram_lab.spec import load_cell

    row = run_cell(load_cell(spec), out, _progress if sys.stderr.isatty() else None)
    results = read(out)
    typer.echo(tables.to_text(tables.summary(results.tables)))
    if row["outcome"] != "ok":
        typer.echo(f"{row['outcome']}: {row['reason']}", err=True)
        raise typer.Exit(1)


def _progress(folder: Path, finished: int, total: int) -> None:
    print(f"\r{folder.name}: {finished}/{total} requests", end="", file=sys.stderr, flush=True)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a cell, or of a collected grid.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="For pasting into a discussion.")] = False,
) -> None:
    """Show what came out of a run, as a table."""
    from specgram_lab import tables
    from specgram_lab.lab import read

    results = read(folder)
    if results.runs.empty:
        typer.echo(f"{folder} holds no finished run", err=True)
        raise typer.Exit(1)
    table = tables.summary(results.tables)
    typer.echo(tables.to_markdown(table) if markdown else tables.to_text(table))


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Say what is installed, what can run here, and why the rest cannot."""
    from specgram_lab import doctor as examine

    report = examine.examine()
    typer.echo(json.dumps(report, indent=1) if as_json else examine.to_text(report))


@app.command()
def notebook(
    path: Annotated[Path, typer.Argument(help="A notebook with a cell tagged parameters.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the executed copy, tables and figures.")],
    values: Annotated[Path | None, typer.Option("-f", "--file", help="Parameters as YAML.")] = None,
) -> None:
    """Run a notebook with parameters through papermill; a finished cell is not run again."""
    import yaml

    from specgram_lab import notebooks, tables
    from specgram_lab.lab import read
    from specgram_lab.spec import SpecError

    given = yaml.safe_load(values.read_text(encoding="utf-8")) if values else {}
    if not isinstance(given, dict):
        raise SpecError(f"{values} holds no mapping of parameters")
    done = notebooks.execute(path, out, given)
    results = read(out)
    if not results.runs.empty:
        typer.echo(tables.to_text(tables.summary(results.tables)) + "\n")
    if done.outcome != "ok":
        typer.echo(f"{path.name}: {done.outcome}: {done.reason} (see {out / path.stem}.log)", err=True)
        raise typer.Exit(1)
    typer.echo(f"{path.name} took {done.seconds:.0f} s and wrote")
    for kind in ("*.ipynb", "*.parquet", "*.svg", "*.png"):
        for file in sorted(out.glob(kind)):
            typer.echo(f"  {file}")


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A target by name.")] = "smollm2-135m") -> None:
    """Fetch and convert a target, unless it is there."""
    from specgram_lab import models

    typer.echo(models.ensure(name))


server_commands.add_to(app)


def main() -> None:
    """Run the command; what was wrong with the input is one sentence, and exit code 2."""
    from specgram_lab.ledger import LedgerError
    from specgram_lab.models import ModelError
    from specgram_lab.paths import DataNotFoundError
    from specgram_lab.run import OutputFolderError
    from specgram_lab.servers.exposition import MetricsError
    from specgram_lab.servers.log import LogError
    from specgram_lab.spec import SpecError

    try:
        app()
    except (SpecError, DataNotFoundError, ModelError, OutputFolderError, LedgerError, LogError, MetricsError) as error:
        print(f"specgram: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
