"""The table of mask rows, build by build, reproduced from the installed builds and held against what is known."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from specgram_lab import builds, models, scenarios
from specgram_lab.builders import options
from specgram_lab.paths import DATA

FILE = DATA / "mask_rows.yaml"
SCENARIO = "row-a"
LIMIT_S = 180


@dataclass(frozen=True)
class Rows:
    """What one build gives for each kind of draft, and what the file expects."""

    build: str
    patches: tuple[str, ...]
    found: dict[str, str]
    expected: dict[str, str]

    @property
    def ok(self) -> bool:
        """All rows are as expected."""
        return self.found == self.expected

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "ok": self.ok}


def known() -> list[tuple[str, tuple[str, ...], dict[str, str]]]:
    """Build, patches and rows of every entry of the file."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return [(build, tuple(e.get("patches", ())), e["rows"]) for e in entries for build in e["builds"]]


def table(versions: Sequence[str]) -> list[Rows]:
    """Ask each of these builds, also with the patches that the file names.

    Raises:
        BuildError: one is not installed, is not in the file, or gives no rows.
    """
    for version in versions:
        builds.interpreter(version)
        if version not in {build for build, _, _ in known()}:
            raise builds.BuildError(f"{FILE.name} says nothing of vLLM {version}")
    models.ensure("smollm2-135m")
    return [Rows(build, on, _ask(build, on, rows), rows) for build, on, rows in known() if build in versions]


def _ask(version: str, patches: tuple[str, ...], rows: dict[str, str]) -> dict[str, str]:
    cell = scenarios.cell(SCENARIO, "sync", record=False, patches=patches, build=version)
    with tempfile.TemporaryDirectory(prefix="specgram-rows-") as scratch:
        wanted = options.environment(cell, "cpu", Path(scratch))
        environment = {key: value for key, value in {**os.environ, **wanted}.items() if value != ""}
        command = [builds.interpreter(version), "-m", "specgram_lab.builders.bitmask_rows", *rows]
        done = subprocess.run(
            command, env=environment, cwd=scratch, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    if done.returncode != 0:
        words = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise builds.BuildError(f"vLLM {version} gives no mask rows: {words}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def to_text(found: Sequence[Rows]) -> str:
    """One line a build, one column a kind of draft."""
    kinds = list(found[0].found) if found else []
    names = [" + ".join((rows.build, *rows.patches)) for rows in found]
    lines = ["  ".join(["build".ljust(24), *(kind.ljust(14) for kind in kinds)]).rstrip()]
    for name, rows in zip(names, found, strict=True):
        line = "  ".join([name.ljust(24), *(rows.found[kind].ljust(14) for kind in kinds)]).rstrip()
        lines.append(line if rows.ok else f"{line}  NOT AS EXPECTED: {rows.expected}")
    return "\n".join([*lines, "", "C constrained, U open, . no slot; draft: v accepted, x refused, - struck out"])
