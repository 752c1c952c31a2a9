"""What recorded runs say about every draft that could have been proposed: what `specgram_lab.av.replay` walks on.

At temperature 0 the target's text does not depend on what is verified, and a drafter's proposal is a function of the
text before it. A budget only moves the places at which steps begin. So the question is: for which prefixes of the
output is the proposal known?

- Where a step of a recorded run began, the whole draft is: tokens, grammar-valid length, confidences. A run with the
  budget ``none`` begins a step after every token and is a complete recording, for every drafter at its own k.
- A draft model, or runner V2's n-gram drafter, can be asked again (`specgram_lab.av.again`), and the grammar about its
  drafts: a run of any budget is a complete recording then.
- All others (EAGLE, MTP: their next token depends on hidden states that verification renews; DFlash, DSpark: blocks)
  are known where a step began, and nowhere else.

Where a replay needs more than that it stops, and says what recording would answer it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from specgram_lab import ledger
from specgram_lab.av import tables as budget_tables
from specgram_lab.spec import BLOCKS, Cell, parse_cell

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float32]

ASKABLE = frozenset({"draft_model", "ngram", "ngram_gpu"})
STEPWISE = frozenset({"eagle3", "mtp"})

UNKNOWN = -1


class ReplayError(ValueError):
    """A replay that would not be exact, said in one sentence."""


@dataclass(frozen=True)
class Again:
    """What drafter and grammar say of one request when they are asked again; row ``at - 1`` is after ``at`` tokens.

    ``drafts`` and ``confidences`` are (length - 1, k); ``confidences`` as in `Recording`, log-odds with ``estimated``.
    ``close``: in a bfloat16 engine a token of the draft may be another. ``valid``: the grammar-valid length.
    """

    drafts: Ints
    confidences: Reals
    close: Bools
    valid: Ints
    estimated: bool


@dataclass(frozen=True)
class Recording:
    """Runs of one cell, apart from its budget, as flat tables: row ``offsets[r] + j`` is the draft of request r after j
    output tokens, j from 1.

    ``match`` is how many leading tokens of the draft are the text's next ones; with ``certain`` false it may be more.
    ``valid`` is the draft's grammar-valid length, `UNKNOWN` where nobody asked. ``confidences`` are the head's, or with
    ``estimated`` the log-odds that vLLM's online estimator turns into them; NaN where unknown. ``close`` marks drafts
    that were asked again, and may be others in a bfloat16 engine.
    """

    cell: Cell
    max_batched_tokens: int
    requests: tuple[str, ...]
    prompt_tokens: Ints
    lengths: Ints
    offsets: Ints
    drafted: Ints
    match: Ints
    certain: Bools
    valid: Ints
    confidences: Reals
    close: Bools
    estimated: bool
    arrivals: Ints
    """Engine step in which each request was first there; later ones wait for a free place anyway."""

    def with_k(self, k: int) -> Recording:
        """The same with a smaller k: the first k tokens of every draft.

        Raises:
            ReplayError: a larger k, or a drafter whose drafts of another length are other drafts.
        """
        own, method = self.cell.drafter.k, self.cell.drafter.method
        if k == own:
            return self
        if k > own or k < 1:
            raise ReplayError(f"recorded with k={own}: k={k} would need tokens that nobody proposed")
        if method in BLOCKS:
            raise ReplayError(
                f"{method} proposes a block at once: with k={k} it would propose other tokens than with k={own}"
            )
        changed = {
            "drafted": np.minimum(self.drafted, k),
            "match": np.minimum(self.match, k),
            "certain": self.certain | (self.match >= k),
            "valid": np.minimum(self.valid, k),
            "confidences": self.confidences[:, :k],
        }
        return Recording(**{**vars(self), **changed})


def load(folders: Sequence[Path], again: Mapping[str, Again] | None = None) -> Recording:
    """What the runs in ``folders`` (cells' folders, alike but for their budgets) know together.

    Args:
        folders: where their tables lie.
        again: what the drafter says where no step began, from `specgram_lab.av.again.ask`.

    Raises:
        ReplayError: the runs cannot be replayed at all, or not together.
    """
    runs = [Run.read(folder) for folder in folders]
    if not runs:
        raise ReplayError("there is no run to replay")
    first = runs[0]
    check(runs)
    k, grammar = first.cell.drafter.k, first.cell.grammar.kind != "none"
    lengths = np.array([len(tokens) for tokens in first.texts.values()], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths + 1)[:-1]))
    size = int(lengths.sum() + len(lengths))
    made: dict[str, Any] = {
        "drafted": np.full(size, k, dtype=np.int64),
        "match": np.zeros(size, dtype=np.int64),
        "certain": np.zeros(size, dtype=bool),
        "valid": np.full(size, UNKNOWN if grammar else k, dtype=np.int64),
        "confidences": np.full((size, k), np.nan, dtype=np.float32),
        "close": np.zeros(size, dtype=bool),
    }
    again = again or {}
    estimated = any(run.estimated for run in runs) or any(one.estimated for one in again.values())
    for number, request in enumerate(first.texts):
        known = _Known(max((run.said(request) for run in runs), key=len))
        for run in runs:
            known.add(run, request)
        known.fill(made, int(offsets[number]), int(lengths[number]), request, again.get(request))
    return Recording(
        cell=first.cell,
        max_batched_tokens=first.max_batched_tokens,
        requests=tuple(first.texts),
        prompt_tokens=np.array(first.prompt_tokens, dtype=np.int64),
        lengths=lengths,
        offsets=offsets,
        estimated=estimated,
        arrivals=_arrivals(runs, first.cell.workload.concurrency),
        **made,
    )


@dataclass(frozen=True)
class Run:
    """One run as read: its steps and proposals by request."""

    cell: Cell
    row: pd.Series[Any]
    max_batched_tokens: int
    texts: dict[str, list[int]]
    prompt_ids: list[str]
    prompt_tokens: list[int]
    steps: dict[str, pd.DataFrame]
    proposals: dict[tuple[str, int], Reals]
    estimated: bool

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The only run in ``folder``; raises `ReplayError` if there is none, or it ended otherwise than ok."""
        tables = ledger.read_run(folder) | budget_tables.read([folder])
        if tables["runs"].empty:
            raise ReplayError(f"there is no run in {folder}")
        row = tables["runs"].iloc[0]
        if row["outcome"] != "ok" or tables["steps"].empty:
            raise ReplayError(
                f"run {row['run_id']} ended as {row['outcome']}, with {len(tables['steps'])} recorded steps"
            )
        content = json.loads(row["config_requested"])
        content.pop("spec_version")
        requests, proposals = tables["requests"], tables["av_proposals"]
        estimated = bool(proposals["features"].notna().any())
        column = "features" if estimated else "confidences"
        keys = zip(proposals["request_id"], proposals["step"], strict=True)
        return cls(
            cell=parse_cell(content),
            row=row,
            max_batched_tokens=int(json.loads(row["config_effective"])["max_num_batched_tokens"]),
            texts={
                r: [] if ids is None else [int(t) for t in ids]
                for r, ids in zip(requests["request_id"], requests["token_ids"], strict=True)
            },
            prompt_ids=[str(name) for name in requests["prompt_id"]],
            prompt_tokens=[int(n) for n in requests["prompt_tokens"]],
            steps={str(r): part.sort_values("step") for r, part in tables["steps"].groupby("request_id", sort=False)},
            proposals={
                (r, int(s)): np.asarray(v, np.float32) for (r, s), v in zip(keys, proposals[column], strict=True)
            },
            estimated=estimated,
        )

    def said(self, request: str) -> list[int]:
        """The text, and what the last step gave beyond its end."""
        last = self.steps[request].iloc[-1]
        return self.texts[request] + [int(t) for t in last["sampled_token_ids"][last["committed"] :]]


class _Known:
    """What is known of one request: the drafts where steps began."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.drafts: dict[int, tuple[list[int], int]] = {}
        self.confidences: dict[int, Reals] = {}

    def add(self, run: Run, request: str) -> None:
        """Take in the request's steps in one run."""
        at, before = 0, -1
        steps = run.steps[request]
        names = ("step", "drafted", "grammar_valid", "scheduled", "committed", "draft_token_ids")
        for step, drafted, valid, scheduled, committed, ids in zip(*(steps[name] for name in names), strict=True):
            if drafted:
                if scheduled != valid:
                    raise ReplayError(
                        f"step {step} of request {request} scheduled {scheduled} of {valid} valid drafts: length or"
                        " token budget cut them, and would cut others elsewhere"
                    )
                self.drafts[at] = ([int(token) for token in ids], int(valid))
                if (request, before) in run.proposals:
                    self.confidences[at] = run.proposals[request, before]
            at, before = at + int(committed), int(step)
        if at != len(run.texts[request]):
            raise ReplayError(
                f"the steps of request {request} give {at} tokens, its output has {len(run.texts[request])}"
            )

    def fill(self, made: dict[str, Any], offset: int, length: int, request: str, again: Again | None) -> None:
        """Write the rows of this request, one for each prefix of the output."""
        for at in range(1, length):
            row = offset + at
            asked = None if again is None else ([int(t) for t in again.drafts[at - 1]], int(again.valid[at - 1]))
            known = self.drafts.get(at, asked)
            if again is not None:
                made["confidences"][row] = again.confidences[at - 1] if known == asked else np.nan
                made["close"][row] = again.close[at - 1] and at not in self.drafts
                if known != asked and not again.close[at - 1]:
                    raise ReplayError(
                        f"asked again after {at} tokens of request {request} the drafter proposes {asked},"
                        f" recorded is {known} (tokens, grammar-valid length): they are not the run's own"
                    )
            if known is None:
                continue
            draft, made["valid"][row] = known
            made["drafted"][row] = len(draft)
            made["match"][row], made["certain"][row] = self._compare(at, draft)
            if at in self.confidences:
                made["confidences"][row, : len(self.confidences[at])] = self.confidences[at]

    def _compare(self, at: int, draft: list[int]) -> tuple[int, bool]:
        follows = self.text[at : at + len(draft)]
        for depth, (token, wanted) in enumerate(zip(draft, follows, strict=False)):
            if token != wanted:
                return depth, True
        return len(follows), len(follows) == len(draft)


def check(runs: Sequence[Run]) -> None:
    """Raise `ReplayError` if the runs cannot be replayed, or are not runs of the same thing."""
    first = runs[0]
    for run in runs:
        cell, name = run.cell, run.row["run_id"]
        method = cell.drafter.method
        if cell.workload.temperature > 0:
            raise ReplayError(
                f"run {name} sampled at temperature {cell.workload.temperature:g}:"
                " another budget would draw other tokens"
            )
        if cell.drafter.rejection != "standard":
            raise ReplayError(f"run {name} had its acceptance planted ({cell.drafter.rejection}), not found")
        if method not in ASKABLE | BLOCKS | STEPWISE:
            raise ReplayError(f"run {name}: the drafts of {method} are no function of the text")
        if run.row["scheduling_effective"] != "sync":
            raise ReplayError(f"run {name} was asynchronous: there, what is scheduled depends on when outputs arrive")
        if asked(cell) != asked(first.cell):
            raise ReplayError(f"runs {first.row['run_id']} and {name} differ in more than their budget")
        lost = [request for request, tokens in run.texts.items() if not tokens]
        if lost:
            raise ReplayError(f"request {lost[0]} of run {name} has no output")
        for request, tokens in run.texts.items():
            if tokens != first.texts.get(request):
                raise ReplayError(f"request {request} has another output in run {name} than in {first.row['run_id']}")


def asked(cell: Cell) -> str:
    """What runs that are replayed together have in common: all that a cell asks but its budget."""
    content = cell.model_dump(mode="json", exclude={"limits": True, "engine": {"budget", "record"}})
    content["engine"]["patches"] = [name for name in content["engine"]["patches"] if name != "av-ngram"]
    return json.dumps(content, sort_keys=True)


def _arrivals(runs: Sequence[Run], concurrency: int) -> Ints:
    """First engine step of the requests that found a free place at once; 0 for all others."""
    first = [int(part["step"].iloc[0]) for part in (runs[0].steps[request] for request in runs[0].texts)]
    return np.array([*first[:concurrency], *[0] * (len(first) - concurrency)], dtype=np.int64)[: len(first)]
