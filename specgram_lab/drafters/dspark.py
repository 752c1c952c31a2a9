"""`dspark`: a block of drafts from one pass over the target's hidden states, a Markov head, a confidence head.

As vLLM runs it (``Qwen3DSparkForCausalLM``, ``DSparkSpeculator``): like `specgram_lab.drafters.block`, with k queries,
the anchor and k - 1 mask tokens; the query at offset i predicts the token at i + 1. The Markov head adds to each
prediction's logits a low-rank term of the token before it, left to right. Embedding and head are the target's: a
reduced vocabulary of 4,096 tokens would miss one token in ten of the held-out answers.
Budget: 7.9 MB.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab.drafters import batches, block, features, heads, layout, recipes

PLAN = recipes.Plan(
    name="dspark", method="dspark", k=5, steps=5000, batch=6, with_aux=True, set_aside=10,
)  # fmt: skip
RANK = 16
CONFIDENCE = 0.1
"""Weight of the confidence head's loss; it moves nothing but the head."""
RIDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""How much the last fit of the confidence head may hold on to where training left it."""
FOLDS = 5
BINS = 10


class MarkovHead(nn.Module):
    """The low-rank term of the token before."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(whole, RANK)
        self.markov_w2 = nn.Linear(RANK, whole, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a draft's acceptance, given that the ones before it were accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(block.SHAPE.hidden + RANK, 1)


class DSpark(block.BlockDrafter):
    """The anchor drafts its successor; training walks the true tokens."""

    first = 0
    markov_head: MarkovHead
    confidence_head: ConfidenceHead

    def __init__(
        self, embedding: Tensor, vocabulary: batches.Vocabulary, unit: Tensor, plan: recipes.Plan = PLAN
    ) -> None:
        super().__init__(embedding, vocabulary, unit, plan)
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        nn.init.zeros_(self.confidence_head.proj.weight)
        nn.init.zeros_(self.confidence_head.proj.bias)

    def heads(self, whole: int) -> None:
        """The Markov head and the confidence head."""
        self.markov_head = MarkovHead(whole)
        self.confidence_head = ConfidenceHead()

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """(..., k, vocabulary), given the token ``before`` each draft, (..., k)."""
        return hidden @ self.embedding.T + self.markov_head.markov_w2(self.markov_head.markov_w1(before))

    def drafts(self, hidden: Tensor, anchor: Tensor, before: Tensor) -> Tensor:  # noqa: ARG002
        """The likeliest token after each token before."""
        return self.logits(hidden, before).argmax(-1)

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """(..., k), before the sigmoid."""
        joined = torch.cat((hidden.float(), self.markov_head.markov_w1(before)), -1)
        return self.confidence_head.proj(joined).squeeze(-1)

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """Cross entropy of the drafts and the confidence head's own loss."""
        assert batch.aux is not None
        anchors, real = block.draw(batch, generator)
        hidden = self.backbone(self.context(features.tapped(batch.aux, block.TAPS)), batch.tokens, anchors)
        before, labels, place = self.places(batch, anchors)
        tokens, offsets = heads.competing(self.vocabulary, generator)
        joined = torch.cat((hidden.float(), self.markov_head.markov_w1(before)), -1)
        valid = self.valid(batch, labels, place) & real[..., None]
        head = (self.embedding[tokens], self.markov_head.markov_w2.weight[tokens], offsets)
        drafts, best = self.cross_entropy(batch, joined, head, place, valid)
        good = torch.zeros_like(valid)
        good[valid] = tokens[best] == labels[valid]
        reached = valid & functional.pad(good.int().cumprod(-1), (1, 0), value=1)[..., :-1].bool()
        sure = functional.binary_cross_entropy_with_logits(
            self.confidence(hidden.detach(), before).float(), good.float(), reduction="none"
        )
        return drafts + CONFIDENCE * (sure * reached).sum() / reached.sum().clamp(min=1)

    def _reached(self, sequences: Sequence[features.Sequence], size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
        """Over the drafts of an engine's steps whose predecessors were right: what the confidence head reads, whether
        the draft is right, its position from 0."""
        found = []
        for begin in range(0, len(sequences), size):
            batch = batches.collate(sequences[begin : begin + size], self.vocabulary, with_aux=True)
            with torch.autocast("cpu", torch.bfloat16):
                hidden, before, good, valid = self.all_anchors(batch)
            steps = recipes.walked(good & valid, recipes.anchor_mask(batch).sum(-1).tolist())
            hidden, before, good, valid = hidden[steps], before[steps], good[steps], valid[steps]
            reached = valid & functional.pad(good.int().cumprod(-1), (1, 0), value=1)[..., :-1].bool()
            joined = torch.cat((hidden.float(), self.markov_head.markov_w1(before)), -1)
            places = torch.arange(self.plan.k).expand(good.shape)
            found.append((joined[reached], good[reached], places[reached]))
        read, good, positions = (torch.cat(part) for part in zip(*found, strict=True))
        return read, good, positions

    def finish(self, sequences: Sequence[features.Sequence]) -> None:
        """Fit the confidence head anew on greedy answers that the drafts were not trained on, at an engine's steps: on
        the others it would learn how well the drafter knows them by heart, and at every token how easy most are.

        How much it holds on to where training left it is chosen by what it then says of other groups of prompts: the
        ridge with the least cross entropy over `FOLDS` parts, each judged by a fit to the rest.
        """
        folds: dict[int, list[features.Sequence]] = {}
        for one in sequences:
            if one.greedy:
                folds.setdefault(zlib.crc32(f"fold {one.group}".encode()) % FOLDS, []).append(one)
        with torch.inference_mode():
            found = {part: self._reached(some) for part, some in folds.items()}
        parts = torch.cat([torch.full((len(good),), part) for part, (_, good, _) in found.items()])
        read = torch.cat([read for read, _, _ in found.values()]).clone()
        good = torch.cat([good for _, good, _ in found.values()]).float()
        head = self.confidence_head.proj
        start = {key: value.clone() for key, value in head.state_dict().items()}
        misses = []
        for ridge in RIDGES:
            total = 0.0
            for part in parts.unique():
                _fit(head, start, read[parts != part], good[parts != part], ridge)
                total += _miss(head, read[parts == part], good[parts == part]).item() * int((parts == part).sum())
            misses.append(total)
        _fit(head, start, read, good, RIDGES[misses.index(min(misses))])

    def report(self, sequences: Sequence[features.Sequence]) -> dict[str, Any]:
        """Calibration of the confidence head at each position: samples, mean confidence, share right, expected
        calibration error over ten bins of equal width, and the bins (samples, mean confidence, share right)."""
        with torch.inference_mode():
            read, good, positions = self._reached(sequences)
            sure = self.confidence_head.proj(read).squeeze(-1).sigmoid()
        rows = []
        for position in range(self.plan.k):
            p, y = sure[positions == position], good[positions == position].float()
            which = (p * BINS).long().clamp(max=BINS - 1)
            bins = [
                (int(n), round(float(p[which == b].mean()), 4), round(float(y[which == b].mean()), 4))
                for b in range(BINS)
                if (n := (which == b).sum()) > 0
            ]
            error = sum(n * abs(c - a) for n, c, a in bins) / max(1, len(p))
            rows.append(
                {"n": len(p), "confidence": round(float(p.mean()), 4), "right": round(float(y.mean()), 4),
                 "expected_calibration_error": round(error, 4), "bins": bins}
            )  # fmt: skip
        return {"calibration": rows}

    def config(self, whole: int) -> dict[str, Any]:
        """A ``Qwen3DSparkModel``."""
        return layout.dspark_config(
            block.SHAPE, block.LAYERS, whole, taps=block.TAPS, rank=RANK, mask=block.MASK_TOKEN, block=self.plan.k
        )


def _miss(head: nn.Linear, read: Tensor, good: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(head(read).squeeze(-1), good)


def _fit(head: nn.Linear, start: dict[str, Tensor], read: Tensor, good: Tensor, ridge: float) -> None:
    """Logistic regression from ``start``, with a price on the distance from its weight."""
    head.load_state_dict(start)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        total = _miss(head, read, good) + ridge * (head.weight - start["weight"]).square().sum()
        total.backward()
        return total

    optimiser.step(closure)


def load(folder: Path, embedding: Tensor) -> DSpark:
    """The training forward of a checkpoint."""
    return block.restore(DSpark, folder, embedding)


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> DSpark:
    """A new one; the tokens that are taken most often are met in every step, the others drawn."""
    return DSpark(embedding, batches.Vocabulary.frequent(sequences, len(embedding)), block.spread(sequences))
