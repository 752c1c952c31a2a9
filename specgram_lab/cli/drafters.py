"""The sub-command ``specgram drafters``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Drafters trained for the small target: list, train, evaluate.")
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_drafters(as_json: JsonFlag = False) -> None:
    """The drafters that are there, with what their cards say."""
    from specgram_lab.drafters import registry

    rows = registry.listing()
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        typer.echo("no drafter is here yet: specgram drafters train NAME makes one")
        return
    typer.echo(f"{'name':<12} {'k':>2} {'JSON schema':>12} {'free text':>10} {'MB':>6}")
    for row in rows:
        lengths = [f"{v:.3f}" if v is not None else "-" for v in (row["mal_json_schema"], row["mal_free_text"])]
        typer.echo(f"{row['name']:<12} {row['k']!s:>2} {lengths[0]:>12} {lengths[1]:>10} {row['bytes'] / 1e6:>6.1f}")


@app.command("data")
def make_data(rounds: Annotated[int, typer.Option("--rounds", min=1, max=24, help="How much of it.")] = 24) -> None:
    """Let the target answer the training and held-out prompts, its states beside; goes on where it was."""
    from specgram_lab.drafters import data

    raise typer.Exit(data.generate(rounds))


@app.command("train")
def train(
    name: Annotated[str, typer.Argument(help="Which recipe.")],
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch.")] = 2,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the checkpoint; data/drafters/NAME.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Stop early, to go on later.")] = None,
) -> None:
    """Train a drafter on the data that is there; goes on where it was interrupted."""
    command = [sys.executable, "-m", "specgram_lab.drafters.train", name, "--threads", str(threads)]
    command += ["--out", str(out)] if out else []
    command += ["--steps", str(steps)] if steps else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command("evaluate")
def evaluate(
    names: Annotated[list[str] | None, typer.Argument(help="Which ones; all that are there without one.")] = None,
    as_json: JsonFlag = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for the tables.")] = Path("results/drafters"),
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of each kind.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Write the figures into the cards.")] = False,
) -> None:
    """Measure acceptance on the held-out prompts at temperature 0, on Model Runner V2."""
    from specgram_lab.drafters import evaluate as measure
    from specgram_lab.drafters import registry
    from specgram_lab.run import writing
    from specgram_lab.sweeps.runner import locked, terminable

    chosen = measure.chosen(names or [])
    with writing(out), locked(out), terminable():
        results = {name: measure.evaluate(name, out.absolute(), limit) for name in chosen}
    if keep:
        for name, kinds in results.items():
            where = registry.folder(name)
            registry.write_card(where, registry.card(where) | {"measured": kinds})
    typer.echo(json.dumps(results, indent=1) if as_json else measure.to_text(results))
    if not all(one["outcome"] == "ok" for kinds in results.values() for one in kinds.values()):
        raise typer.Exit(1)
