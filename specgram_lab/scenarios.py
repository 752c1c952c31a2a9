"""Scenarios: what the target says, what the drafter proposes at each step, what adaptive verification admits.

A scenario is a YAML file in ``data/scenarios`` that drives the model-free engine, so that every count is known
beforehand. Drafts are written as texts, each of which is one token of the tokenizer; ``=`` stands for the next
token that the target says (and, past the first of them, for the one after it, and so on).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import pandas as pd
from pydantic import Field, ValidationError, model_validator

from specgram_lab.paths import DATA, data_file
from specgram_lab.spec import Budget, Cell, Drafter, Engine, Grammar, Model, SpecError, Workload, explain, read_yaml

Side = Literal["sync", "async"]
SIDES: Final[tuple[Side, ...]] = get_args(Side)
KV_BLOCK_TOKENS = 16
"""Tokens in a block of the scripted engine's KV cache."""


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


class Preference(Model):
    """A token that the target likes best at the output's positions ``at`` to ``at + times - 1``.

    It says it there wherever the grammar's mask lets it, and goes on with its words behind it.
    """

    token: str
    at: Annotated[int, Field(ge=0)]
    times: Annotated[int, Field(ge=1)] = 1


class ScriptedRequest(Model):
    """One request. ``drafts`` has one list a decode step; past its end the drafter proposes nothing.

    A decode step is every step after the one that ends the prompt, also the one that recomputes a preempted request.
    ``admits`` has one number a decode step: how many of the scheduled drafts AV lets into the forward pass; past
    its end, or without it, all. ``says`` is the target's output; ``ends`` appends the end-of-sequence token.
    ``lost`` are decode steps whose draft the worker verifies and the scheduler never sees (vllm#54437): asynchronous
    scheduling is then left with its placeholders.
    ``obeys``: where the grammar's mask forbids what the target says, it says the allowed token with the lowest id, as
    a real target, whose logits the mask changes, says another one; such a target can be given a ``preference``.
    """

    says: str
    ends: bool = False
    prompt: str = "x"
    grammar: Grammar = Grammar()
    max_tokens: Annotated[int, Field(ge=1)] = 16
    drafts: tuple[tuple[str, ...], ...] = ()
    admits: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    obeys: bool = False
    preference: Preference | None = None

    @model_validator(mode="after")
    def _masked(self) -> ScriptedRequest:
        if self.preference is not None and not self.obeys:
            raise SpecError("preference belongs to a request that obeys the grammar")
        return self


class Setting(Model):
    """What a scenario needs of the engine beyond its k.

    ``concurrency`` is the engine's ``max_num_seqs``; ``max_num_batched_tokens`` the token budget of a step (vLLM keeps
    one slot a request for a standalone draft model, which the scripted drafter stands for); ``kv_blocks`` how many
    blocks of `KV_BLOCK_TOKENS` tokens the KV cache has, one of which vLLM keeps for itself; ``reasoning`` puts in the
    reasoning parser of `specgram_lab.builders.reasoning`; ``qwen3`` vLLM's own of that name, over a tokenizer in which
    unused marks bear the names of Qwen3's (`specgram_lab.builders.marks`). Reasoning begins with the output.
    """

    concurrency: Annotated[int, Field(ge=1)] = 4
    max_model_len: Annotated[int, Field(ge=16)] = 256
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    kv_blocks: Annotated[int, Field(ge=2)] | None = None
    reasoning: bool | Literal["qwen3"] = False

    @property
    def reasoning_end(self) -> str | None:
        """The text of the token that ends reasoning; None without reasoning."""
        return {False: None, True: "<issue_closed>", "qwen3": "</think>"}[self.reasoning]


class Scenario(Model):
    """A few requests, what is expected of them, and why.

    ``undecided`` says where vllm#64156 leaves the numbers open, and the reading chosen. ``local``: the real Model
    Runner V2 can run it too (one request, drafts of full length, the token budget of AV as in ``admits``). With a ``k``
    of 0 there is no speculation.
    """

    name: str
    about: str
    k: Annotated[int, Field(ge=0)] = 4
    requests: tuple[ScriptedRequest, ...]
    expected: dict[Side, Counts] = Field(default_factory=dict)
    why: str = ""
    undecided: str = ""
    setting: Setting = Setting()
    local: bool = False

    @model_validator(mode="after")
    def _drafts_fit(self) -> Scenario:
        if len(self.requests) > self.setting.concurrency:
            raise SpecError(f"{len(self.requests)} requests do not fit into concurrency {self.setting.concurrency}")
        if self.local and len(self.requests) > 1:
            raise SpecError(f"a local scenario has one request, this one has {len(self.requests)}")
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
    content = read_yaml(path)
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


def cell(
    name: str,
    scheduling: Side,
    engine: Literal["scripted", "local"] = "scripted",
    *,
    drafts: bool = True,
    **options: Any,
) -> Cell:
    """The cell that runs a scenario, with its drafts or without speculation.

    ``options`` are further fields of `specgram_lab.spec.Engine`.
    """
    scenario = load_scenario(name)
    k = scenario.k if drafts else 0
    options.setdefault("max_num_batched_tokens", scenario.setting.max_num_batched_tokens)
    if engine == "local":
        options = {"runner": "v2", "budget": Budget(policy="schedule"), **options}
    return Cell(
        drafter=Drafter(method="scripted" if k else "none", k=k),
        workload=Workload(scenario=str(name), concurrency=scenario.setting.concurrency),
        engine=Engine(kind=engine, scheduling=scheduling, **options),
    )


def counts(run: pd.Series, steps: pd.DataFrame) -> Counts:
    """What a run of a scenario gave, in the terms of its expectation."""
    total = steps[["drafted", "grammar_valid", "scheduled", "verified", "accepted"]].sum()
    return Counts(
        **{str(name): int(value) for name, value in total.items()},
        spec_steps=int((steps["drafted"] > 0).sum()),
        engine_drafts=int(run["engine_num_drafts"]),
        engine_draft_tokens=int(run["engine_draft_tokens"]),
        engine_accepted=int(run["engine_accepted_tokens"]),
    )


def differences(expected: Counts, found: Counts) -> list[str]:
    """Each count that is not as expected, with both values."""
    pairs = zip(expected, found, strict=True)
    return [f"{name} is {got}, expected {wanted}" for (name, wanted), (_, got) in pairs if wanted != got]
