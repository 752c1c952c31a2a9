"""What recorded runs say about every draft that could have been proposed: what `specgram_lab.av.replay` walks on.

At temperature 0 the target's text does not depend on what is verified, and a drafter's proposal is a function of the
text before it. A budget only moves the places at which steps begin. So the question is: for which prefixes of the
output is the proposal known?

- Where a step of a recorded run began, the whole draft is: tokens, grammar-valid length, confidences. A run with the
  budget ``none`` begins a step after every token and is a complete recording, for every drafter at its own k.
- A draft model is a chain (``CHAINED``): its i-th token is what it says after the text and the first i - 1 of the
  draft. A draft whose first tokens are the text's own therefore holds the beginning of the drafts of the next places
  too. A step that accepted a < k tokens says so for all places up to the next step's. After one that accepted all k
  there is a hole: what the drafter would say in the place of the bonus token was never asked. With the target as its
  own draft model and no grammar it is the text itself; under a grammar it is not known.
- An n-gram drafter can be asked again (`specgram_lab.av.lookup`) when the prompts' tokens are given. What the grammar
  would have said of such a draft is still known only where the draft was recorded.
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
from specgram_lab.av import lookup
from specgram_lab.av import tables as budget_tables
from specgram_lab.spec import BLOCKS, Cell, parse_cell

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float32]

CHAINED = frozenset({"draft_model"})
NGRAM = frozenset({"ngram", "ngram_gpu"})
STEPWISE = frozenset({"eagle3", "mtp"})

UNKNOWN = -1


class ReplayError(ValueError):
    """A replay that would not be exact, said in one sentence."""


@dataclass(frozen=True)
class Recording:
    """Runs of one cell, apart from its budget, as flat tables: row ``offsets[r] + j`` is the draft of request r after j
    output tokens, j from 1.

    ``match`` is how many leading tokens of the draft are the text's next ones; with ``certain`` false it may be more.
    ``valid`` is the draft's grammar-valid length, `UNKNOWN` where nobody asked. ``confidences`` are the head's, or with
    ``estimated`` the log-odds that vLLM's online estimator turns into them; NaN where unknown.
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


def load(folders: Sequence[Path], prompts: Mapping[str, Sequence[int]] | None = None) -> Recording:
    """What the runs in ``folders`` (cells' folders, alike but for their budgets) know together.

    Args:
        folders: where their tables lie.
        prompts: token ids of each request's prompt; with them an n-gram drafter is asked again.

    Raises:
        ReplayError: the runs cannot be replayed at all, or not together.
    """
    runs = [_Run.read(folder) for folder in folders]
    if not runs:
        raise ReplayError("there is no run to replay")
    first = runs[0]
    _check(runs)
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
    }
    for number, request in enumerate(first.texts):
        known = _Known(first.cell, max((run.said(request) for run in runs), key=len))
        for run in runs:
            known.add(run, request)
        known.fill(made, int(offsets[number]), int(lengths[number]), (prompts or {}).get(request))
    return Recording(
        cell=first.cell,
        max_batched_tokens=first.max_batched_tokens,
        requests=tuple(first.texts),
        prompt_tokens=np.array(first.prompt_tokens, dtype=np.int64),
        lengths=lengths,
        offsets=offsets,
        estimated=any(run.estimated for run in runs),
        arrivals=_arrivals(runs, first.cell.workload.concurrency),
        **made,
    )


@dataclass(frozen=True)
class _Run:
    """One run as read: its steps and proposals by request."""

    cell: Cell
    row: pd.Series[Any]
    max_batched_tokens: int
    texts: dict[str, list[int]]
    prompt_tokens: list[int]
    steps: dict[str, pd.DataFrame]
    proposals: dict[tuple[str, int], Reals]
    estimated: bool

    @classmethod
    def read(cls, folder: Path) -> _Run:
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
                r: [int(t) for t in ids] for r, ids in zip(requests["request_id"], requests["token_ids"], strict=True)
            },
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
    """What is known of one request: drafts where steps began, and what a draft model says after each prefix."""

    def __init__(self, cell: Cell, text: list[int]) -> None:
        self.cell = cell
        self.text = text
        self.drafts: dict[int, tuple[list[int], int]] = {}
        self.confidences: dict[int, Reals] = {}
        self.says: dict[int, int] = {}
        self.feature: dict[int, np.float32] = {}

    def add(self, run: _Run, request: str) -> None:
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
                self._draft(at, [int(t) for t in ids], int(valid), run.proposals.get((request, before)), run.estimated)
            at, before = at + int(committed), int(step)
        if at != len(run.texts[request]):
            raise ReplayError(
                f"the steps of request {request} give {at} tokens, its output has {len(run.texts[request])}"
            )

    def _draft(self, at: int, draft: list[int], valid: int, confidences: Reals | None, estimated: bool) -> None:
        self.drafts[at] = (draft, valid)
        if confidences is not None:
            self.confidences[at] = confidences
        if self.cell.drafter.method not in CHAINED:
            return
        for depth, token in enumerate(draft):
            self.says[at + depth] = token
            if confidences is not None and estimated:
                self.feature[at + depth] = confidences[depth]
            if at + depth >= len(self.text) or token != self.text[at + depth]:
                break

    def fill(self, made: dict[str, Any], offset: int, length: int, prompt: Sequence[int] | None) -> None:
        """Write the rows of this request, one for each prefix of the output."""
        drafter = self.cell.drafter
        asked: Ints | None = None
        if prompt is not None and drafter.method in NGRAM and self.cell.engine.runner == "v2":
            low, high = drafter.effective_lookup or (0, 0)
            whole = np.asarray([*prompt, *self.text], dtype=np.int64)
            places = range(len(prompt) + 1, len(prompt) + length)
            asked = lookup.propose(whole, places, drafter.k, low, high)
            sums = np.cumsum(whole)[[place - 1 for place in places]]
            ranks = lookup.confidence(sums, np.asarray(places, dtype=np.int64))
            made["confidences"][offset + 1 : offset + length] = ranks[:, None]
        itself = drafter.model == "target" and self.cell.grammar.kind == "none"
        for at in range(1, length):
            row = offset + at
            if at in self.drafts:
                draft, made["valid"][row] = self.drafts[at]
                made["drafted"][row] = len(draft)
                if asked is not None and list(asked[at - 1]) != draft:
                    raise ReplayError(
                        f"asked again after {at} tokens the n-gram drafter proposes {list(asked[at - 1])},"
                        f" recorded is {draft}: the prompts given are not the run's"
                    )
                made["match"][row], made["certain"][row] = self._compare(at, draft)
                if at in self.confidences:
                    made["confidences"][row, : len(self.confidences[at])] = self.confidences[at]
            elif asked is not None:
                made["match"][row], made["certain"][row] = self._compare(at, [int(t) for t in asked[at - 1]])
            else:
                self._chain(made, row, at, itself)

    def _compare(self, at: int, draft: list[int]) -> tuple[int, bool]:
        follows = self.text[at : at + len(draft)]
        for depth, (token, wanted) in enumerate(zip(draft, follows, strict=False)):
            if token != wanted:
                return depth, True
        return len(follows), len(follows) == len(draft)

    def _chain(self, made: dict[str, Any], row: int, at: int, itself: bool) -> None:
        depth, k = 0, self.cell.drafter.k
        while depth < k and at + depth < len(self.text):
            said = self.says.get(at + depth, self.text[at + depth] if itself else None)
            if at + depth in self.feature:
                made["confidences"][row, depth] = self.feature[at + depth]
            if said != self.text[at + depth]:
                made["certain"][row] = said is not None
                break
            depth += 1
        made["match"][row] = depth
        made["certain"][row] |= depth == k


def _check(runs: Sequence[_Run]) -> None:
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
        if method not in CHAINED | NGRAM | BLOCKS | STEPWISE:
            raise ReplayError(f"run {name}: the drafts of {method} are no function of the text")
        if run.row["scheduling_effective"] != "sync":
            raise ReplayError(f"run {name} was asynchronous: there, what is scheduled depends on when outputs arrive")
        if _asked(cell) != _asked(first.cell):
            raise ReplayError(f"runs {first.row['run_id']} and {name} differ in more than their budget")
        lost = [request for request, tokens in run.texts.items() if not tokens]
        if lost:
            raise ReplayError(f"request {lost[0]} of run {name} has no output")
        for request, tokens in run.texts.items():
            if tokens != first.texts.get(request):
                raise ReplayError(f"request {request} has another output in run {name} than in {first.row['run_id']}")


def _asked(cell: Cell) -> str:
    content = cell.model_dump(mode="json", exclude={"limits": True, "engine": {"budget", "record"}})
    content["engine"]["patches"] = [name for name in content["engine"]["patches"] if name != "av-ngram"]
    return json.dumps(content, sort_keys=True)


def _arrivals(runs: Sequence[_Run], concurrency: int) -> Ints:
    """First engine step of the requests that found a free place at once; 0 for all others."""
    first = [int(part["step"].iloc[0]) for part in (runs[0].steps[request] for request in runs[0].texts)]
    return np.array([*first[:concurrency], *[0] * (len(first) - concurrency)], dtype=np.int64)[: len(first)]
