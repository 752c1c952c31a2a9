"""Greedy speculative decoding with adaptive verification in plain Python: what a replay must agree with.

Texts, drafts, grammar and confidences are pure functions of the text so far. Everything is done by loops over
requests, the slow way, so that it shares nothing with `specgram_lab.av.replay`.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specgram_lab import ledger
from specgram_lab.av import tables as budget_tables
from specgram_lab.av.recording import Again
from specgram_lab.patches.budget import choose_budget
from specgram_lab.spec import Budget, Cell

MAX_BATCHED = 512


@dataclass(frozen=True)
class World:
    """A target, a drafter and a grammar. ``chained``: the drafter says one token after another, as a draft model."""

    seed: int
    k: int
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    chained: bool = True
    grammar: bool = False
    right: float = 0.7

    def _draw(self, *key: Any) -> random.Random:
        return random.Random(zlib.crc32(repr((self.seed, *key)).encode()))

    def text(self, request: int) -> list[int]:
        """The output."""
        draw = self._draw("text", request)
        return [draw.randrange(50) for _ in range(self.lengths[request] + self.k + 1)]

    def draft(self, request: int, at: int) -> list[int]:
        """What is proposed after ``at`` output tokens."""
        text = self.text(request)
        if not self.chained:
            draw = self._draw("block", request, at)
            return [t if draw.random() < self.right else t + 100 for t in text[at : at + self.k]]
        draft: list[int] = []
        while len(draft) < self.k:
            place = at + len(draft)
            on_text = draft == text[at:place]
            draw = self._draw("says", request, place, *([] if on_text else [at, tuple(draft)]))
            draft.append(text[place] if on_text and draw.random() < self.right else draw.randrange(50) + 100)
        return draft

    def valid(self, request: int, at: int) -> int:
        """Grammar-valid length: the text's own tokens are, of the others every second."""
        draft, text = self.draft(request, at), self.text(request)
        if not self.grammar:
            return len(draft)
        for depth, token in enumerate(draft):
            if draft[: depth + 1] != text[at : at + depth + 1] and token % 2:
                return depth
        return len(draft)

    def confidences(self, request: int, at: int) -> list[float]:
        """Of the draft's tokens; of a chain they belong to what was said before."""
        return [self._draw("sure", request, at, depth).uniform(0.2, 0.99) for depth in range(self.k)]


@dataclass
class Place:
    """A running request."""

    request: int
    at: int = 0
    steps: int = 0
    stale: list[float] | None = None
    proposed_after: int = -1


def decode(world: World, budget: Budget, concurrency: int) -> list[dict[str, Any]]:
    """Rows of the ledger's ``steps`` (and ``confidences``, ``proposed_after``) of a synchronous engine."""
    rows: list[dict[str, Any]] = []
    waiting, running, step = list(range(len(world.lengths))), [], 0
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(Place(waiting.pop(0)))
        scheduled = [world.valid(p.request, p.at) if p.at else 0 for p in running]
        admitted = admit(world, budget, running, scheduled)
        for place, slots, verified in zip(list(running), scheduled, admitted, strict=True):
            text, length = world.text(place.request), world.lengths[place.request]
            draft = world.draft(place.request, place.at) if place.at else []
            accepted = 0
            while accepted < verified and draft[accepted] == text[place.at + accepted]:
                accepted += 1
            given = text[place.at : place.at + accepted + 1]
            committed = min(len(given), length - place.at)
            rows.append({
                "step": step, "request_id": str(place.request), "request_step": place.steps, "in_reasoning": False,
                "judged": world.grammar and bool(draft), "drafted": len(draft), "scheduled": slots, "struck": 0,
                "grammar_valid": world.valid(place.request, place.at) if draft else 0, "verified": verified,
                "padded": 0, "av_skipped": slots - verified, "accepted": accepted, "sampled": len(given),
                "committed": committed,
                "draft_token_ids": draft, "sampled_token_ids": given, "proposed_after": place.proposed_after,
                "confidences": world.confidences(place.request, place.at) if draft else None,
            })  # fmt: skip
            place.stale = world.confidences(place.request, place.at) if place.at else None
            place.at, place.steps, place.proposed_after = place.at + committed, place.steps + 1, step
            if place.at >= length:
                running.remove(place)
        step += 1
    return rows


def admit(world: World, budget: Budget, running: list[Place], scheduled: list[int]) -> list[int]:
    """Verified drafts of each request."""
    native = argmax(world, budget, running, scheduled) if budget.policy == "native" else 0
    policy = "all" if budget.policy == "off" else budget.policy
    wanted = choose_budget(policy, budget.value, scheduled, native, 0)
    slots = []
    for number, (place, count) in enumerate(zip(running, scheduled, strict=True)):
        survival = 1.0
        for depth in range(count):
            survival *= world.confidences(place.request, place.at)[depth]
            slots.append((-survival, number))
    best = sorted(slots)[:wanted]
    return [sum(number == at for _, number in best) for at in range(len(running))]


def argmax(world: World, budget: Budget, running: list[Place], scheduled: list[int]) -> int:
    """vLLM's own choice over a + b * tokens."""
    base, slope = budget.verify_cost
    scores = []
    for place, count in zip(running, scheduled, strict=True):
        survival = 1.0
        for depth in range(count):
            survival *= place.stale[depth] if place.stale else 1.0
            scores.append(survival)
    scores.sort(reverse=True)
    others = sum(world.prompts[p.request] if not p.at else 1 for p in running)
    worth = [(len(running) + sum(scores[:b])) / (base + slope * (others + b)) for b in range(len(scores) + 1)]
    return worth.index(max(worth))


def write(folder: Path, world: World, cell: Cell, rows: list[dict[str, Any]]) -> Path:
    """A cell's folder with the tables of a run."""
    names = set(ledger.STEPS.names)
    steps = [{key: value for key, value in row.items() if key in names} | {"run_id": cell.cell_id} for row in rows]
    ledger.write_table(folder, "steps", ledger.frame("steps", steps))
    requests = [
        {"run_id": cell.cell_id, "request_id": str(r), "prompt_tokens": world.prompts[r],
         "token_ids": world.text(r)[: world.lengths[r]]}
        for r in range(len(world.lengths))
    ]  # fmt: skip
    ledger.write_table(folder, "requests", ledger.frame("requests", requests))
    run = {
        "run_id": cell.cell_id, "outcome": "ok", "scheduling_effective": "sync", "config_requested": cell.canonical(),
        "config_effective": json.dumps({"max_num_batched_tokens": MAX_BATCHED}),
    }  # fmt: skip
    ledger.write_table(folder, "runs", ledger.frame("runs", [run]))
    proposals = [
        {"step": row["proposed_after"], "request_id": row["request_id"], "confidences": row["confidences"]}
        for row in rows
        if row["confidences"]
    ]
    budget_tables.write(folder, cell.cell_id, [], proposals)
    return folder


def asked_again(world: World) -> dict[str, Again]:
    """What the drafter and the grammar say after every token of every output."""
    found = {}
    for request, length in enumerate(world.lengths):
        places = range(1, length)
        drafts = [world.draft(request, at) for at in places]
        sure = [world.confidences(request, at) for at in places]
        found[str(request)] = Again(
            drafts=np.array(drafts, dtype=np.int64).reshape(-1, world.k),
            confidences=np.array(sure, dtype=np.float32).reshape(-1, world.k),
            close=np.zeros(len(places), dtype=bool),
            valid=np.array([world.valid(request, at) for at in places], dtype=np.int64),
            estimated=False,
        )
    return found


def rewrite(folder: Path, name: str, **columns: Any) -> None:
    """Change columns of a table that was written."""
    path = folder / f"{name}.parquet"
    table = pq.read_table(path)
    rows = [row | columns for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
