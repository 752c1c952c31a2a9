"""What `dflash`, `dflash2` and `dspark` share: one layer that drafts a whole block from the target's hidden states.

As vLLM runs them (``DFlashQwen3Model``, ``DFlashSpeculator``): the anchor is the last token that the target gave; the
context's keys and values come from the target's hidden states of all tokens before it, joined by ``fc`` and normed;
the queries are the anchor and mask tokens, at its position and the ones after it; they see the context and each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab.drafters import batches, features, heads, layout, recipes
from specgram_lab.drafters.blocks import Layer, Norm, Shape, initialise

SHAPE = Shape(hidden=576, inner=448, heads=9, kv_heads=3, head_dim=64, qk_norm=True)
LAYERS = 1
TAPS = (18, 29)
"""Which of `features.AUX_LAYERS` they read: a third one costs each of them 1.3 MB."""
MASK_TOKEN = 16
"""A token that the tokenizer reserves and no text holds."""
ANCHORS = 32
"""Anchors a sequence and step; which ones is drawn."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution whose absolute values have the median 1."""
DECAY = 0.8
"""A draft counts so much less than the one before it, in the loss."""


Drafter = TypeVar("Drafter", bound="BlockDrafter")


class BlockDrafter(recipes.Trainee):
    """The training forward, for many anchors of a sequence at once."""

    first = 1
    """The query that gives the first draft: 0 where the anchor itself drafts its successor, 1 where the first mask
    token drafts the token at its own place."""

    def __init__(
        self, embedding: Tensor, vocabulary: batches.Vocabulary, unit: Tensor, plan: recipes.Plan | None = None
    ) -> None:
        super().__init__()
        assert plan is not None
        self.plan, self.vocabulary = plan, vocabulary
        self.embedding = embedding
        self.fc = nn.Linear(len(TAPS) * SHAPE.hidden, SHAPE.hidden, bias=False)
        self.hidden_norm = Norm(SHAPE.hidden, SHAPE.eps)
        self.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))
        self.norm = Norm(SHAPE.hidden, SHAPE.eps)
        self.heads(len(embedding))
        initialise(self, plan.seed, LAYERS)
        nn.init.constant_(self.norm.weight, 1 / float(embedding.norm(dim=-1).mean()))  # logits of size 1
        self.register_buffer("spread", unit)

    def layer(self) -> Layer:
        """One decoder layer."""
        return Layer(SHAPE)

    def heads(self, whole: int) -> None:
        """Make what stands behind the last norm, beside the target's head; ``whole`` is the size of its vocabulary."""

    def context(self, aux: Tensor) -> Tensor:
        """What the layers' keys and values are made from, given the states of `TAPS` side by side. Training sees each
        hidden dimension at unit spread; the exported ``fc`` holds that scale."""
        return self.hidden_norm(self.fc(aux.float() / self.spread))

    def backbone(self, context: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """(batch, anchors, k, hidden), normed: what heads read.

        Args:
            context: (batch, tokens, hidden), from `context`.
            tokens: (batch, tokens).
            anchors: (batch, anchors), places in ``tokens``.
        """
        count, wide = anchors.shape[1], self.plan.k + self.first
        places = torch.arange(tokens.shape[1]).expand(tokens.shape)
        queries = torch.full((*anchors.shape, wide), MASK_TOKEN)
        queries[..., 0] = tokens.gather(1, anchors)
        positions = (anchors[..., None] + torch.arange(wide)).flatten(1)
        x = self.embedding[queries].flatten(1, 2)
        before = places[:, None, :] < anchors[:, :, None]
        own = torch.eye(count, dtype=torch.bool).repeat_interleave(wide, 0).repeat_interleave(wide, 1)
        mask = torch.cat((before.repeat_interleave(wide, 1), own.expand(len(tokens), -1, -1)), -1)
        for layer in self.layers:
            x = self.through(layer, x, positions, context, places, mask)
        return self.norm(x).unflatten(1, (count, wide))[:, :, self.first :]

    def through(
        self, layer: nn.Module, x: Tensor, positions: Tensor, context: Tensor, places: Tensor, mask: Tensor
    ) -> Tensor:
        """One layer over all blocks of a sequence, (batch, anchors * block, hidden)."""
        x = x + self.attended(layer, layer.input_layernorm(x), positions, context, places, mask)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    @staticmethod
    def attended(
        layer: nn.Module, normed: Tensor, positions: Tensor, context: Tensor, places: Tensor, mask: Tensor
    ) -> Tensor:
        """The layer's attention: ``normed`` rows look at the context before their anchor and at their own block."""
        attention = layer.self_attn
        keys, values = attention.keys_values(context, places)
        own_keys, own_values = attention.keys_values(normed, positions)
        keys, values = torch.cat((keys, own_keys), 1), torch.cat((values, own_values), 1)
        return attention.attend(attention.queries(normed, positions), keys, values, mask)

    @abstractmethod
    def drafts(self, hidden: Tensor, anchor: Tensor, before: Tensor) -> Tensor:
        """(..., k): the drafts as vLLM would take them, given the ``anchor``, (...); ``before``, (..., k), are the true
        tokens before each, which are the drafts before it wherever those were right."""

    def places(self, batch: batches.Batch, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    def valid(batch: batches.Batch, labels: Tensor, place: Tensor) -> Tensor:
        """Drafts that can be foreseen: inside the answer, and all before them were the greedy tokens."""
        rows = torch.arange(len(labels))[:, None, None]
        greedy = (batch.tokens[rows, place] == labels).int().cumprod(-1)
        return (labels >= 0) & functional.pad(greedy, (1, 0), value=1)[..., :-1].bool()

    def cross_entropy(
        self, batch: batches.Batch, states: Tensor, head: tuple[Tensor, Tensor, Tensor], place: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean over ``valid`` drafts, later ones weighing less, and the row of the head that each finds likeliest.

        ``head`` is what `heads.cross_entropy` takes: the target's part, the drafter's own, the offsets.
        """
        rows, places = torch.arange(len(place))[:, None, None].expand(place.shape)[valid], place[valid]
        ids, weights = batch.label_ids[rows, places], batch.label_weights[rows, places]
        importance = (DECAY ** torch.arange(self.plan.k)).expand(place.shape)[valid]
        total, best = heads.cross_entropy(states[valid], *head, ids, weights, importance)
        return total / importance.sum().clamp(min=1), best

    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """Every token of the answers but the last is an anchor."""
        _, _, good, valid = self.all_anchors(batch)
        return good, valid

    def all_anchors(self, batch: batches.Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Over every anchor: what heads read, the token before each draft, whether the draft is right, whether it can
        be foreseen."""
        assert batch.aux is not None
        mask = recipes.anchor_mask(batch)
        most = int(mask.sum(-1).max())
        anchors = (batch.prompts[:, None] + torch.arange(most)).clamp(max=batch.tokens.shape[1] - 1)
        real = torch.arange(most) < mask.sum(-1, keepdim=True)
        hidden = self.backbone(self.context(features.tapped(batch.aux, TAPS)), batch.tokens, anchors)
        before, labels, place = self.places(batch, anchors)
        hidden, before = hidden[real], before[real]
        good = self.drafts(hidden, before[:, 0], before) == labels[real]
        return hidden, before, good, self.valid(batch, labels, place)[real]

    def export(self, folder: Path) -> None:
        """Config and weights; embedding and head are left to the target."""
        weights = layout.plain(self, *(name for name, _ in self.named_children() if name != "fc"))
        weights["fc.weight"] = self.fc.weight.detach() / self.spread
        layout.write(folder, weights, self.config(len(self.embedding)))

    @abstractmethod
    def config(self, whole: int) -> dict[str, Any]:
        """The checkpoint's config.json for a vocabulary of ``whole`` tokens."""


def restore(kind: type[Drafter], folder: Path, embedding: Tensor) -> Drafter:
    """The training forward of a checkpoint. Its ``fc`` holds the spread that training divided by."""
    weights = layout.read(folder)
    model = kind(
        embedding, batches.Vocabulary.of(torch.arange(len(embedding)), len(embedding)),
        torch.ones(weights["fc.weight"].shape[1]),
    )  # fmt: skip
    model.load_state_dict(weights | {"spread": model.spread})
    model.eval()
    return model


def draw(batch: batches.Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`ANCHORS` places of each answer, drawn without repetition; False where the answer has no more."""
    scores = torch.rand(batch.tokens.shape, generator=generator)
    mask = recipes.anchor_mask(batch)
    chosen = torch.where(mask, scores, scores - 2).topk(min(ANCHORS, batch.tokens.shape[1]), -1)
    return chosen.indices, chosen.values >= 0


def spread(sequences: Sequence[features.Sequence], most: int = 400) -> Tensor:
    """The usual size of each hidden dimension over the first ``most`` sequences: the median, not the mean, because a
    few tokens (the first, line ends) have states of a size that no other has."""
    rows = torch.cat([features.tapped(s.aux[1:], TAPS).float() for s in sequences[:most]])
    return (rows.abs().median(0).values * NORMAL).clamp(min=1e-3)
