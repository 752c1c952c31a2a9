"""The sub-command ``specgram scenarios``."""

from __future__ import annotations

import json
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Scripted decodes whose every count is known beforehand.")


class Scheduling(StrEnum):
    """Which scheduling to run."""

    SYNC = "sync"
    ASYNC = "async"
    BOTH = "both"


class EngineName(StrEnum):
    """Which engine to run on."""

    SCRIPTED = "scripted"
    LOCAL = "local"


@app.command("run")
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Names or files of scenarios; all without one.")] = None,
    scheduling: Annotated[Scheduling, typer.Option("--scheduling", help="Sync, async or both.")] = Scheduling.BOTH,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="Model-free, or real weights on Model Runner V2.")
    ] = EngineName.SCRIPTED,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Keep the tables of every run in this folder.")] = None,
) -> None:
    """Run scenarios and hold every count against what their files expect; exit code 1 where one differs."""
    from specgram_lab import scenario_runs, scenarios

    given = [str(Path(name).absolute()) if Path(name).is_file() else name for name in names or ()]
    chosen = given or (scenario_runs.local_names() if engine == "local" else scenarios.scenario_names())
    sides = list(scenarios.SIDES) if scheduling == "both" else [side for side in scenarios.SIDES if side == scheduling]
    with tempfile.TemporaryDirectory(prefix="specgram-scenarios-") as scratch:
        results = scenario_runs.run(chosen, sides, engine.value, out or Path(scratch))
    if as_json:
        typer.echo(json.dumps([result.to_json() for result in results], indent=1))
    else:
        typer.echo(scenario_runs.to_text(results))
    if not all(result.ok for result in results):
        raise typer.Exit(1)
