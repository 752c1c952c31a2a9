"""Scenarios: what the target says, what the drafter proposes at each step, what adaptive verification admits.

A scenario is a YAML file in ``data/scenarios`` that drives the model-free engine, so that every count is known
beforehand. Drafts are written as texts, each of which is one token of the tokenizer; ``=`` stands for the next
token that the target says (and, past the first of them, for the one after it, and so on).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import yaml
from pydantic import Field, JsonValue, ValidationError, model_validator

from specgram_lab.paths import DATA, data_file
from specgram_lab.spec import Cell, Drafter, Engine, Grammar, Model, SpecError, Workload, explain

Side = Literal["sync", "async"]


class Counts(Model):
    """Totals over the steps of a scenario: what the ledger holds, and what the engine itself reported."""

    drafted: int
    grammar_valid: int
    scheduled: int
    verified: int
    accepted: int
    spec_steps: int
    engine_drafts: int
    engine_draft_tokens: int
    engine_accepted: int


class ScriptedRequest(Model):
    """One request. ``drafts`` has one list a decode step; past its end the drafter proposes nothing.

    ``admits`` has one number a decode step: how many of the scheduled drafts AV lets into the forward pass; past
    its end, or without it, all. ``says`` is the target's output; ``ends`` appends the end-of-sequence token.
    """

    says: str
    ends: bool = False
    prompt: str = "x"
    grammar: Grammar = Grammar()
    max_tokens: Annotated[int, Field(ge=1)] = 16
    drafts: tuple[tuple[str, ...], ...] = ()
    admits: tuple[int, ...] = ()


class Scenario(Model):
    """A few requests, what is expected of them, and why."""

    name: str
    about: str
    k: Annotated[int, Field(ge=1)] = 4
    requests: tuple[ScriptedRequest, ...]
    expected: dict[Side, Counts] = {}
    why: str = ""
    undecided: str = ""
    max_model_len: Annotated[int, Field(ge=16)] = 256
    options: dict[str, JsonValue] = {}

    @model_validator(mode="after")
    def _drafts_fit(self) -> Scenario:
        for number, request in enumerate(self.requests):
            longest = max(map(len, request.drafts), default=0)
            if longest > self.k:
                raise SpecError(f"request {number} drafts {longest} tokens in a step, k is {self.k}")
        return self


def load_scenario(name: str, base: Path | None = None) -> Scenario:
    """A scenario by name or path.

    Raises:
        SpecError: with the file's name and what is wrong.
    """
    path = data_file("scenarios", name, base)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise SpecError(f"{path}: a scenario is a mapping, got {type(content).__name__}")
    content.setdefault("name", path.stem)
    try:
        return Scenario.model_validate(content, strict=False)
    except ValidationError as error:
        raise SpecError(f"{path}: {explain(error)}") from None


def scenario_names() -> list[str]:
    """Names of all scenarios in ``data/scenarios``."""
    return sorted(path.stem for path in (DATA / "scenarios").glob("*.yaml"))


def cell(name: str, scheduling: Side, engine: Literal["scripted", "local"] = "scripted", **options: Any) -> Cell:
    """The cell that runs a scenario; ``options`` are further fields of `specgram_lab.spec.Engine`."""
    scenario = load_scenario(name)
    return Cell(
        drafter=Drafter(method="scripted", k=scenario.k),
        workload=Workload(scenario=name, concurrency=max(4, len(scenario.requests))),
        engine=Engine(kind=engine, scheduling=scheduling, **options),
    )


def counts(run: pd.Series, steps: pd.DataFrame) -> Counts:
    """What a run of a scenario gave, in the terms of its expectation."""
    total = steps[["drafted", "grammar_valid", "scheduled", "verified", "accepted"]].sum()
    return Counts(
        **{name: int(value) for name, value in total.items()},
        spec_steps=int((steps["drafted"] > 0).sum()),
        engine_drafts=int(run["engine_num_drafts"]),
        engine_draft_tokens=int(run["engine_draft_tokens"]),
        engine_accepted=int(run["engine_accepted_tokens"]),
    )


def differences(expected: Counts, found: Counts) -> list[str]:
    """Each count that is not as expected, with both values."""
    pairs = zip(expected, found, strict=True)
    return [f"{name} is {got}, expected {wanted}" for (name, wanted), (_, got) in pairs if wanted != got]
