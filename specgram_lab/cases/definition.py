"""The reports R0 to R4 as cases: what runs on which build, the verdict that is expected, and why.

A case is a YAML file in ``data/cases``. Each of its runs is one cell on each of the builds it names; what came out is
held against the run's expectation by `specgram_lab.cases.runs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from specgram_lab import builds, scenarios
from specgram_lab.paths import DATA
from specgram_lab.spec import Cell, Model, SpecError, explain, parse_cell, read_yaml

FOLDER = DATA / "cases"
SOME = "some"


class Expected(Model):
    """The verdict of a run.

    ``draft_probe`` and ``commit`` count FSM events by where they happen, ``died`` the requests that ended with an
    error, ``valid`` those whose output obeys its grammar, of all ``of``. ``lines`` counts the engine's log lines by a
    text that they hold; a line that is about a refusal and not named here is not expected. Where a real drafter
    proposes, how many they are is its own: `SOME` is one or more. ``reason`` is a text in the reason of an outcome that
    is not ok. ``counts``: every count is what the scenario's file expects. ``classes`` are the classes of the outputs
    where they matter.
    """

    outcome: Literal["ok", "unsupported", "engine_failed"] = "ok"
    reason: str = ""
    draft_probe: int | Literal["some"] = 0
    commit: int = 0
    died: int = 0
    valid: int | None = None
    of: Annotated[int, Field(ge=1)] = 1
    lines: dict[str, int | Literal["some"]] = Field(default_factory=dict)
    counts: bool = False
    classes: dict[str, int] = Field(default_factory=dict)


class Run(Model):
    """One run of a case: a scenario on the scripted engine, with its drafts or without, or a cell of its own.

    ``means`` is what the verdict says to somebody who meets the report, in one sentence.
    """

    name: str
    builds: tuple[str, ...]
    scenario: str | None = None
    cell: dict[str, Any] = Field(default_factory=dict)
    scheduling: scenarios.Side = "sync"
    patches: tuple[str, ...] = ()
    engine: dict[str, Any] = Field(default_factory=dict)
    drafts: bool = True
    expected: Expected
    means: str

    @field_validator("builds")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for version in value:
            if version not in builds.VERSIONS:
                raise SpecError(f"build {version} is none of {', '.join(builds.VERSIONS)}")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Run:
        if (self.scenario is None) == (not self.cell):
            raise SpecError(f"run {self.name!r} needs either a scenario or a cell")
        return self

    def cell_on(self, version: str) -> Cell:
        """The cell that runs on ``version``."""
        options = {"build": version, "patches": self.patches, **self.engine}
        if self.scenario is None:
            content = {**self.cell, "engine": {**self.cell.get("engine", {}), "scheduling": self.scheduling, **options}}
            return parse_cell(content)
        return scenarios.cell(self.scenario, self.scheduling, "scripted", drafts=self.drafts, **options)


class Case(Model):
    """A report: what it is, where it was made, and its runs in the order in which they tell the story."""

    name: str
    title: str
    about: str
    references: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def builds(self) -> list[str]:
        """The builds that a run of the case names, in the order of their releases."""
        named = {version for run in self.runs for version in run.builds}
        return [version for version in builds.VERSIONS if version in named]


def names() -> list[str]:
    """Names of all cases."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Case:
    """A case by name, or from a file.

    Raises:
        SpecError: there is none of that name, or its file cannot be used.
    """
    path = Path(name) if Path(name).is_file() else FOLDER / f"{name.upper()}.yaml"
    if not path.is_file():
        raise SpecError(f"no case {name!r}: it is neither a file nor one of {', '.join(names())}")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise SpecError(f"{path}: a case is a mapping, got {type(content).__name__}")
    content.setdefault("name", path.stem)
    try:
        case = Case.model_validate(content, strict=False)
        for run in case.runs:
            run.cell_on(run.builds[0])
    except ValidationError as error:
        raise SpecError(f"{path}: {explain(error)}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    return case
