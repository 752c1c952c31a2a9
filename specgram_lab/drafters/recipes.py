"""What every recipe has in common: its sizes, and how well a module drafts on sequences that it is shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specgram_lab.drafters import batches, features

FEW, MANY = 16, 4096
"""Sizes of what is no hidden space: a rank, and a vocabulary."""


@dataclass(frozen=True)
class Plan:
    """How a drafter is trained. ``k`` is the number of drafts that it is trained and measured for."""

    name: str
    method: str
    k: int
    steps: int
    batch: int
    with_aux: bool
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.01
    set_aside: int = 0
    """One of so many groups of prompts is not trained on; `Trainee.finish` sees those. 0: none."""
    seed: int = 7


class Trainee(nn.Module, ABC):
    """A drafter while it is trained. Its state dict is what is saved between sessions."""

    plan: Plan
    vocabulary: batches.Vocabulary

    def optimisers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices between hidden spaces, which takes half the steps that AdamW takes; AdamW for the
        rest: norms, tables, and maps into a few dimensions."""
        layers = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]
        matrices = [weight for weight in layers if min(weight.shape) > FEW and max(weight.shape) <= MANY]
        known = {id(weight) for weight in matrices}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in known]
        rate, decay = self.plan.learning_rate, self.plan.weight_decay
        return [
            torch.optim.Muon(matrices, rate, decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, rate, betas=(0.9, 0.98), weight_decay=decay),
        ]

    @abstractmethod
    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """The mean loss of a batch; ``generator`` draws what is drawn."""

    @abstractmethod
    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """(n, k) flags: whether draft i of an anchor is the greedy token, given that all before it were; and (n, k):
        whether there is such a token at all. One row for each token of the answers but the last."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write config.json and model.safetensors as vLLM loads them."""

    def report(self, sequences: Sequence[features.Sequence]) -> dict[str, Any]:  # noqa: ARG002
        """What else a card says, from held-out sequences."""
        return {}

    def finish(self, sequences: Sequence[features.Sequence]) -> None:
        """What is to be done once after the last step, with the sequences set aside; by default nothing."""


def shifted(rows: Tensor, k: int, fill: float) -> Tensor:
    """(batch, tokens) to (batch, tokens, k): element i of a row is the value i places later, ``fill`` past the end."""
    padded = torch.nn.functional.pad(rows, (0, k), value=fill)
    return padded.unfold(1, k, 1)[:, : rows.shape[1]]


def anchor_mask(batch: batches.Batch) -> Tensor:
    """True where a token of the answer stands that another one follows."""
    places = batch.positions
    return (places >= batch.prompts[:, None]) & (places < batch.lengths[:, None] - 1)


def walked(good: Tensor, sizes: Sequence[int]) -> Tensor:
    """Which anchors an engine comes by: the first of each sequence, then always the one behind what was accepted.

    Not every token is an anchor: an engine drafts where its last draft ended, which is where drafting is hard.

    Args:
        good: (anchors, k), whether draft i of an anchor is right; sequence after sequence.
        sizes: anchors of each.
    """
    accepted = good.int().cumprod(-1).sum(-1).tolist()
    chosen = torch.zeros(len(good), dtype=torch.bool)
    begin = 0
    for size in sizes:
        place = begin
        while place < begin + size:
            chosen[place] = True
            place += accepted[place] + 1
        begin += size
    return chosen


@torch.inference_mode()
def acceptance(trainee: Trainee, sequences: Sequence[features.Sequence], size: int = 4) -> dict[str, list[float]]:
    """Mean acceptance length, then the share accepted at each position, by kind of grammar, at an engine's steps."""
    found: dict[str, list[float]] = {}
    for kind in sorted({s.kind for s in sequences}):
        chosen = [s for s in sequences if s.kind == kind]
        steps = []
        for begin in range(0, len(chosen), size):
            batch = batches.collate(chosen[begin : begin + size], trainee.vocabulary, trainee.plan.with_aux)
            with torch.autocast("cpu", torch.bfloat16):  # as an engine computes, and a third of the time
                right, there = trainee.right(batch)
            steps.append((right & there)[walked(right & there, anchor_mask(batch).sum(-1).tolist())])
        accepted = torch.cat(steps).int().cumprod(-1).float()
        found[kind] = [1 + float(accepted.sum(-1).mean()), *accepted.mean(0).tolist()]
    return found
