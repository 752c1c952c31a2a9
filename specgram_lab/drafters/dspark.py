"""`dspark`: a block of drafts from one pass over the target's hidden states, a Markov head, a confidence head.

As vLLM runs it (``Qwen3DSparkForCausalLM``, ``DSparkSpeculator``): the anchor is the last token that the target gave;
the context's keys and values come from the target's hidden states of all tokens before it; the queries are the anchor
and k - 1 mask tokens, which see the context and each other; the query at offset i predicts the token at i + 1. The
Markov head adds to each prediction's logits a low-rank term of the token before it, left to right. Embedding and
head are the target's: a reduced vocabulary of 4,096 tokens would miss one token in ten of the held-out answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab.drafters import batches, features, layout, recipes
from specgram_lab.drafters.blocks import Layer, Norm, Shape, initialise

PLAN = recipes.Plan(
    name="dspark", method="dspark", k=5, steps=900, batch=8, learning_rate=1e-3, with_aux=True,
    set_aside=10,
)  # fmt: skip
SHAPE = Shape(hidden=576, inner=512, heads=9, kv_heads=3, head_dim=64, qk_norm=True)
LAYERS = 1
RANK = 24
MASK_TOKEN = 16
"""A token that the tokenizer reserves and no text holds."""
ANCHORS = 24
"""Anchors a sequence and step; which ones is drawn."""
DECAY = 0.8
"""A draft counts so much less than the one before it, in the loss."""
CONFIDENCE = 0.1
"""Weight of the confidence head's loss; it moves nothing but the head."""
RIDGE = 1e-3
"""How much the last fit of the confidence head holds on to where training left it."""
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
        self.proj = nn.Linear(SHAPE.hidden + RANK, 1)


class DSpark(recipes.Trainee):
    """The training forward, for many anchors of a sequence at once."""

    def __init__(
        self, embedding: Tensor, vocabulary: batches.Vocabulary, spread: Tensor, plan: recipes.Plan = PLAN
    ) -> None:
        super().__init__()
        self.plan, self.vocabulary = plan, vocabulary
        self.embedding = embedding
        self.others = (vocabulary.to_draft < 0).nonzero().flatten()
        self.fc = nn.Linear(len(features.AUX_LAYERS) * SHAPE.hidden, SHAPE.hidden, bias=False)
        self.hidden_norm = Norm(SHAPE.hidden, SHAPE.eps)
        self.layers = nn.ModuleList(Layer(SHAPE) for _ in range(LAYERS))
        self.norm = Norm(SHAPE.hidden, SHAPE.eps)
        self.markov_head = MarkovHead(len(embedding))
        self.confidence_head = ConfidenceHead()
        initialise(self, plan.seed, LAYERS)
        nn.init.constant_(self.norm.weight, 1 / float(embedding.norm(dim=-1).mean()))  # logits of size 1
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        nn.init.zeros_(self.confidence_head.proj.weight)
        nn.init.zeros_(self.confidence_head.proj.bias)
        self.register_buffer("spread", spread)

    def context(self, aux: Tensor) -> Tensor:
        """What the layers' keys and values are made from. Training sees each hidden dimension at unit spread; the
        exported ``fc`` holds that scale."""
        return self.hidden_norm(self.fc(aux.float() / self.spread))

    def backbone(self, context: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """(batch, anchors, k, hidden), normed: what heads read.

        Args:
            context: (batch, tokens, hidden), from `context`.
            tokens: (batch, tokens).
            anchors: (batch, anchors), places in ``tokens``.
        """
        count, k = anchors.shape[1], self.plan.k
        places = torch.arange(tokens.shape[1]).expand(tokens.shape)
        queries = torch.full((*anchors.shape, k), MASK_TOKEN)
        queries[..., 0] = tokens.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(k)).flatten(1)
        x = self.embedding[queries].flatten(1, 2)
        before = places[:, None, :] < anchors[:, :, None]
        own = torch.eye(count, dtype=torch.bool).repeat_interleave(k, 0).repeat_interleave(k, 1)
        mask = torch.cat((before.repeat_interleave(k, 1), own.expand(len(tokens), -1, -1)), -1)
        for layer in self.layers:
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            keys, values = attention.keys_values(context, places)
            own_keys, own_values = attention.keys_values(normed, positions)
            keys, values = torch.cat((keys, own_keys), 1), torch.cat((values, own_values), 1)
            x = x + attention.attend(attention.queries(normed, positions), keys, values, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (count, k))

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        """(..., k, vocabulary), given the token ``before`` each draft, (..., k)."""
        return hidden @ self.embedding.T + self.markov_head.markov_w2(self.markov_head.markov_w1(before))

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """(..., k), before the sigmoid."""
        joined = torch.cat((hidden.float(), self.markov_head.markov_w1(before)), -1)
        return self.confidence_head.proj(joined).squeeze(-1)

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """Cross entropy of the drafts, later ones weighing less, and the confidence head's own loss."""
        assert batch.aux is not None
        anchors, real = draw(batch, generator)
        hidden = self.backbone(self.context(batch.aux), batch.tokens, anchors)
        before, labels, place = self._places(batch, anchors)
        kept = self.vocabulary.kept
        logits = hidden @ self.embedding[kept].T
        logits = logits + self.markov_head.markov_w1(before) @ self.markov_head.markov_w2.weight[kept].T
        beyond = recipes.drawn_logit(hidden, self.embedding, self.others, generator)
        rows = torch.arange(len(anchors))[:, None, None]
        each = recipes.soft_cross_entropy(
            logits, batch.label_ids[rows, place], batch.label_weights[rows, place], beyond
        )
        valid = (self._valid(batch, labels, place) & real[..., None]).float()
        weights = valid * DECAY ** torch.arange(self.plan.k)
        drafts = (each * weights).sum() / weights.sum().clamp(min=1)
        good = kept[logits.argmax(-1)] == labels
        reached = valid * functional.pad(good.float().cumprod(-1), (1, 0), value=1.0)[..., :-1]
        sure = functional.binary_cross_entropy_with_logits(
            self.confidence(hidden.detach(), before).float(), good.float(), reduction="none"
        )
        return drafts + CONFIDENCE * (sure * reached).sum() / reached.sum().clamp(min=1)

    def _places(self, batch: batches.Batch, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each draft: the token before it, its greedy label (-1 past the end), its place."""
        steps = torch.arange(self.plan.k)
        last = batch.tokens.shape[1] - 1
        place = anchors[..., None] + steps + 1
        rows = torch.arange(len(anchors))[:, None, None]
        before = batch.tokens[rows, (place - 1).clamp(max=last)]
        inside = place < batch.lengths[:, None, None]
        place = place.clamp(max=last)
        return before, torch.where(inside, batch.labels[rows, place], -1), place

    @staticmethod
    def _valid(batch: batches.Batch, labels: Tensor, place: Tensor) -> Tensor:
        """Drafts that can be foreseen: inside the answer, and all before them were the greedy tokens."""
        rows = torch.arange(len(labels))[:, None, None]
        greedy = (batch.tokens[rows, place] == labels).int().cumprod(-1)
        return (labels >= 0) & functional.pad(greedy, (1, 0), value=1)[..., :-1].bool()

    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """Every token of the answers but the last is an anchor."""
        _, _, good, valid = self._all(batch)
        return good, valid

    def _all(self, batch: batches.Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Over every anchor: what heads read, the token before each draft, whether the draft is right, whether it can
        be foreseen."""
        assert batch.aux is not None
        mask = recipes.anchor_mask(batch)
        most = int(mask.sum(-1).max())
        anchors = (batch.prompts[:, None] + torch.arange(most)).clamp(max=batch.tokens.shape[1] - 1)
        real = torch.arange(most) < mask.sum(-1, keepdim=True)
        hidden = self.backbone(self.context(batch.aux), batch.tokens, anchors)
        before, labels, place = self._places(batch, anchors)
        good = self.logits(hidden[real], before[real]).argmax(-1) == labels[real]
        return hidden[real], before[real], good, self._valid(batch, labels, place)[real]

    def _reached(self, sequences: Sequence[features.Sequence], size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
        """Over all drafts whose predecessors were right: what the confidence head reads, whether the draft is right,
        its position from 0."""
        found = []
        for begin in range(0, len(sequences), size):
            batch = batches.collate(sequences[begin : begin + size], self.vocabulary, with_aux=True)
            hidden, before, good, valid = self._all(batch)
            reached = valid & functional.pad(good.int().cumprod(-1), (1, 0), value=1)[..., :-1].bool()
            joined = torch.cat((hidden.float(), self.markov_head.markov_w1(before)), -1)
            places = torch.arange(self.plan.k).expand(good.shape)
            found.append((joined[reached], good[reached], places[reached]))
        read, good, positions = (torch.cat(part) for part in zip(*found, strict=True))
        return read, good, positions

    def finish(self, sequences: Sequence[features.Sequence]) -> None:
        """Fit the confidence head anew on sequences that the drafts were not trained on: on the others it would learn
        how well the drafter knows them by heart."""
        with torch.inference_mode():
            read, good, _ = self._reached(sequences)
        read, good = read.clone(), good.clone().float()
        head = self.confidence_head.proj
        start = head.weight.detach().clone()
        optimiser = torch.optim.LBFGS(head.parameters(), max_iter=60, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            miss = functional.binary_cross_entropy_with_logits(head(read).squeeze(-1), good)
            total = miss + RIDGE * (head.weight - start).square().sum()
            total.backward()
            return total

        optimiser.step(closure)

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

    def export(self, folder: Path) -> None:
        """A ``Qwen3DSparkModel`` checkpoint; embedding and head are left to the target."""
        weights = layout.plain(self, "layers", "norm", "hidden_norm", "markov_head", "confidence_head")
        weights["fc.weight"] = self.fc.weight.detach() / self.spread
        config = layout.dspark_config(
            SHAPE,
            LAYERS,
            len(self.embedding),
            aux_layers=features.AUX_LAYERS,
            rank=RANK,
            mask=MASK_TOKEN,
            block=self.plan.k,
        )
        layout.write(folder, weights, config)


def load(folder: Path, embedding: Tensor) -> DSpark:
    """The training forward of a checkpoint."""
    weights = layout.read(folder)
    vocabulary = batches.Vocabulary.of(torch.arange(len(embedding)), len(embedding))
    model = DSpark(embedding, vocabulary, torch.ones(weights["fc.weight"].shape[1]))
    model.load_state_dict(weights | {"spread": model.spread})
    return model.eval()


def draw(batch: batches.Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`ANCHORS` places of each answer, drawn without repetition; False where the answer has no more."""
    scores = torch.rand(batch.tokens.shape, generator=generator)
    mask = recipes.anchor_mask(batch)
    chosen = torch.where(mask, scores, scores - 2).topk(min(ANCHORS, batch.tokens.shape[1]), -1)
    return chosen.indices, chosen.values >= 0


def spread(sequences: Sequence[features.Sequence], most: int = 400) -> Tensor:
    """Root mean square of each hidden dimension over the first ``most`` sequences, the first token left out: it has
    states of a size that no other has."""
    rows = torch.cat([s.aux[1:].float() for s in sequences[:most]])
    return rows.square().mean(0).sqrt().clamp(min=1e-3)


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> DSpark:
    """A new one; the tokens that the corpus holds are met in every step, the others drawn."""
    return DSpark(embedding, batches.Vocabulary.seen(sequences, len(embedding)), spread(sequences))
