"""The sub-command ``specgram builds``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from specgram_lab.builds import Build

app = typer.Typer(no_args_is_help=True, help="Other vLLM builds, each in an environment of its own.")
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Version = Annotated[str, typer.Argument(help="A release, such as 0.28.0.")]
STATES = {
    "own": "the lab's own environment",
    "installed": "installed",
    "interrupted": "interrupted; specgram builds add makes it anew",
    "absent": "not installed",
}


def to_json(build: Build) -> dict[str, object]:
    """Plain data."""
    python = str(build.python) if build.usable else None
    return {
        "version": build.version,
        "state": build.state,
        "usable": build.usable,
        "scripted_only": build.scripted_only,
        "python": python,
    }


@app.command("list")
def list_builds(as_json: JsonFlag = False) -> None:
    """Every build that the lab knows, and whether it is here."""
    from specgram_lab import builds

    found = builds.listed()
    if as_json:
        typer.echo(json.dumps([to_json(build) for build in found], indent=1))
        return
    for build in found:
        kind = "sources of the CUDA wheel, for the scripted engine only" if build.scripted_only else "CPU"
        typer.echo(f"{build.version}  {STATES[build.state]} ({kind})")


@app.command()
def add(version: Version, as_json: JsonFlag = False) -> None:
    """Install a build unless it is there; one that was interrupted is made anew."""
    from specgram_lab import builds

    build = builds.add(version, lambda text: typer.echo(text, err=True))
    typer.echo(json.dumps(to_json(build), indent=1) if as_json else f"vLLM {version}: {build.python}")


@app.command()
def remove(version: Version, as_json: JsonFlag = False) -> None:
    """Delete a build's environment."""
    from specgram_lab import builds

    removed = builds.remove(version)
    if as_json:
        typer.echo(json.dumps({"version": version, "removed": removed}))
    else:
        typer.echo(f"vLLM {version} {'removed' if removed else 'was not installed'}")
