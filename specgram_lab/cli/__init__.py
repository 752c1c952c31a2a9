"""The command ``specgram``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from specgram_lab.cli import builds, cases, drafters, scenarios, servers, sweeps

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(scenarios.app, name="scenarios")
app.add_typer(drafters.app, name="drafters")
app.add_typer(builds.app, name="builds")
app.add_typer(cases.app, name="case")
app.command("cases")(cases.list_cases)
app.add_typer(sweeps.app, name="sweep")
app.command("batch")(sweeps.batch)
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
def doctor(
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="Look into this vLLM wheel or source folder; nothing of it is run.")
    ] = None,
    server_command: Annotated[
        str | None, typer.Option("--server-command", help="'vllm serve ...', or a file with it.")
    ] = None,
    speculative_config: Annotated[str | None, typer.Option("--speculative-config", help="As given to vLLM.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option("--reasoning-parser")] = None,
    tool_call_parser: Annotated[str | None, typer.Option("--tool-call-parser")] = None,
    runner: Annotated[str | None, typer.Option("--runner", help="Model runner, v1 or v2.")] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option("--pipeline-parallel-size", min=1)] = None,
    async_scheduling: Annotated[bool | None, typer.Option("--async-scheduling/--no-async-scheduling")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda, if it is not the build's own.")] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="A pair of data/presets: its command, and what is missing here.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say which fixes vLLM contains, by its code, and what follows for a server; else also what can run here."""
    from specgram_lab import doctor as examine
    from specgram_lab.fixes import command, report

    if preset is not None:
        from specgram_lab import presets

        pair = presets.examine(preset)
        typer.echo(json.dumps(pair, indent=1) if as_json else presets.to_text(pair))
        return

    given = command.of_options(
        server_command, speculative_config, reasoning_parser=reasoning_parser, tool_parser=tool_call_parser,
        runner=runner, pipeline_parallel=pipeline_parallel_size, async_scheduling=async_scheduling, device=device,
    )  # fmt: skip
    fixes = examine.of_build(wheel, given)
    if fixes and not as_json:
        typer.echo(report.to_text(fixes))
    rest = {} if wheel or given else examine.examine()
    if as_json:
        typer.echo(json.dumps({"fixes": fixes} | rest, indent=1))
    elif rest:
        typer.echo("\n" + examine.to_text(rest))


@app.command()
def notebook(
    path: Annotated[Path, typer.Argument(help="A notebook with a cell tagged parameters.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the executed copy, tables and figures.")],
    values: Annotated[Path | None, typer.Option("-f", "--file", help="Parameters as YAML.")] = None,
) -> None:
    """Run a notebook with parameters through papermill; a finished cell is not run again."""
    from specgram_lab import notebooks, tables
    from specgram_lab.lab import read
    from specgram_lab.spec import SpecError, read_yaml
    from specgram_lab.sweeps.runner import terminable

    given = (read_yaml(values) if values else None) or {}
    if not isinstance(given, dict):
        raise SpecError(f"{values} holds no mapping of parameters")
    with terminable():
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


servers.add_to(app)


def main() -> None:
    """Run the command; what was wrong with the input is one sentence, and exit code 2."""
    from specgram_lab.builds import BuildError
    from specgram_lab.fixes.configuration import ConfigurationError
    from specgram_lab.fixes.source import SourceError
    from specgram_lab.ledger import LedgerError
    from specgram_lab.models import ModelError
    from specgram_lab.paths import DataNotFoundError
    from specgram_lab.run import OutputFolderError
    from specgram_lab.servers.exposition import MetricsError
    from specgram_lab.servers.log import LogError
    from specgram_lab.spec import SpecError

    try:
        app()
    except (
        SpecError, DataNotFoundError, ModelError, OutputFolderError, LedgerError, LogError, MetricsError, BuildError,
        ConfigurationError, SourceError,
    ) as error:  # fmt: skip
        print(f"specgram: {error}", file=sys.stderr)
        sys.exit(2)
