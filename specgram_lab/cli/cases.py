"""The commands ``specgram cases`` and ``specgram case``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The reports R0 to R4, reproduced before and after their fixes.")
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Builds = Annotated[
    list[str] | None, typer.Option("--build", help="Only this build, which must be installed; can be repeated.")
]


def list_cases(as_json: JsonFlag = False) -> None:
    """The reports that can be run as cases, and the builds that each names."""
    from specgram_lab import cases

    found = [cases.load(name) for name in cases.names()]
    if as_json:
        typer.echo(json.dumps([case.model_dump(mode="json", exclude={"runs"}) for case in found], indent=1))
        return
    for case in found:
        typer.echo(f"{case.name}  {case.title}\n    builds {', '.join(case.builds)}; {', '.join(case.references)}")


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="R0 to R4, or a case's file.")],
    build: Builds = None,
    as_json: JsonFlag = False,
    out: Annotated[Path | None, typer.Option("--out", help="Keep the tables and logs of every run here.")] = None,
) -> None:
    """Run a case before and after its fix; exit code 1 where a verdict is not the one that its file states."""
    from specgram_lab import cases
    from specgram_lab.builds import BuildError
    from specgram_lab.cases import runs, tables

    case = cases.load(name)
    here, absent = runs.usable(case, build or ())
    if not here:
        raise BuildError(f"no build of case {case.name} is installed here: specgram builds add {case.builds[0]}")
    with tempfile.TemporaryDirectory(prefix="specgram-case-") as scratch:
        verdicts = runs.run([case], here, out or Path(scratch))
    if as_json:
        content = {"case": case.name, "not_installed": absent, "verdicts": [one.to_json() for one in verdicts]}
        typer.echo(json.dumps(content, indent=1))
    else:
        typer.echo(tables.to_text(case, verdicts, absent))
    if not all(one.ok for one in verdicts):
        raise typer.Exit(1)


@app.command()
def rows(build: Builds = None, as_json: JsonFlag = False) -> None:
    """Which rows of the grammar's mask each installed build constrains, for drafts of several kinds and k = 4."""
    from specgram_lab import builds
    from specgram_lab.cases import bitmask

    wanted = build or [one.version for one in builds.listed() if one.usable]
    found = bitmask.table(wanted)
    typer.echo(json.dumps([one.to_json() for one in found], indent=1) if as_json else bitmask.to_text(found))
    if not all(one.ok for one in found):
        raise typer.Exit(1)
