"""`dflash2`: `dflash` with convolutions along the block and a walk through candidates that depend on each other.

As vLLM runs it (``DFlash2Qwen3ForCausalLM``, ``DFlash2Speculator``): the layer's attention and feed-forward part each
stand between two causal convolutions over the block's rows, whose coefficients are a fixed part for every channel and
a part for every group of channels that depends on the row. The head gives each place `TOP` candidates; a candidate's
score is its logit plus a low-rank product of the token before it, the row's state and itself; drafts are taken left
to right, each the best after the one before. Embedding and head are the target's.
Budget: 6.7 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab.drafters import batches, block, features, heads, layout, recipes
from specgram_lab.drafters.blocks import Layer

PLAN = recipes.Plan(name="dflash2", method="dflash2", k=5, steps=5000, batch=6, with_aux=True)
KERNEL = 2
"""Rows that a convolution sees: its own and the one before."""
GROUP = 16
"""Channels that share the row's part of a coefficient."""
RANK = 8
TOP = 8
"""Candidates a place."""
ALONE = 0.3
"""Weight of the loss without the token before: what makes a candidate one of the `TOP`."""


class Convolution(nn.Module):
    """Two grouped convolutions along the block, before and behind a part of the layer, from one projection."""

    def __init__(self) -> None:
        super().__init__()
        hidden = block.SHAPE.hidden
        self.base_kernel = nn.Parameter(torch.zeros(2, KERNEL, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * KERNEL * (hidden // GROUP), bias=False)

    def coefficients(self, x: Tensor) -> Tensor:
        """(..., rows, side, tap, hidden), from the rows that enter, (..., rows, hidden)."""
        own = self.kernel_projection(x).unflatten(-1, (2, KERNEL, -1))
        return self.base_kernel + own.repeat_interleave(GROUP, -1)

    @staticmethod
    def apply(x: Tensor, coefficients: Tensor) -> Tensor:
        """``x`` (..., rows, hidden) with ``coefficients`` (..., rows, tap, hidden); rows are one block's."""
        mixed = coefficients[..., 0, :] * x
        for tap in range(1, KERNEL):
            mixed = mixed + coefficients[..., tap, :] * functional.pad(x, (0, 0, tap, 0))[..., :-tap, :]
        return mixed


class ConvolvedLayer(Layer):
    """A decoder layer of Qwen3 with convolutions around its two parts."""

    def __init__(self) -> None:
        super().__init__(block.SHAPE)
        self.attention_conv = Convolution()
        self.mlp_conv = Convolution()


class Selector(nn.Module):
    """What one token says about the next, given the row's state."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(whole, RANK))
        self.successor_codebook = nn.Parameter(torch.zeros(whole, RANK))
        self.hidden_projection = nn.Linear(block.SHAPE.hidden, RANK, bias=False)

    def left(self, hidden: Tensor, before: Tensor) -> Tensor:
        """(..., rank): what the successors' codes are multiplied with."""
        return self.predecessor_codebook[before] * self.hidden_projection(hidden)


class DFlash2(block.BlockDrafter):
    """The walk of true tokens while training, the walk of candidates for drafts."""

    candidate_selector: Selector

    def __init__(
        self, embedding: Tensor, vocabulary: batches.Vocabulary, unit: Tensor, plan: recipes.Plan = PLAN
    ) -> None:
        super().__init__(embedding, vocabulary, unit, plan)
        for layer in self.layers:
            for part in (layer.attention_conv, layer.mlp_conv):
                nn.init.ones_(part.base_kernel[:, 0])  # begins as the identity
        nn.init.zeros_(self.candidate_selector.successor_codebook)
        nn.init.ones_(self.candidate_selector.predecessor_codebook)

    def layer(self) -> Layer:
        """With its convolutions."""
        return ConvolvedLayer()

    def heads(self, whole: int) -> None:
        """The candidates' selector."""
        self.candidate_selector = Selector(whole)

    def through(
        self, layer: nn.Module, x: Tensor, positions: Tensor, context: Tensor, places: Tensor, mask: Tensor
    ) -> Tensor:
        """One layer over all blocks of a sequence; convolutions stay inside a block."""
        wide = self.plan.k + self.first

        def blocks(rows: Tensor) -> Tensor:
            return rows.unflatten(1, (-1, wide))

        normed = blocks(layer.input_layernorm(x))
        kernel = layer.attention_conv.coefficients(normed)
        entered = layer.attention_conv.apply(normed, kernel[..., 0, :, :]).flatten(1, 2)
        mixed = self.attended(layer, entered, positions, context, places, mask)
        x = x + layer.attention_conv.apply(blocks(mixed), kernel[..., 1, :, :]).flatten(1, 2)
        normed = blocks(layer.post_attention_layernorm(x))
        kernel = layer.mlp_conv.coefficients(normed)
        made = layer.mlp(layer.mlp_conv.apply(normed, kernel[..., 0, :, :]))
        return x + layer.mlp_conv.apply(made, kernel[..., 1, :, :]).flatten(1, 2)

    def candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, logits) of the head's likeliest tokens at each place, (..., k, top) each."""
        best = (hidden @ self.embedding.T).topk(TOP, -1)
        return best.indices, best.values

    def scores(self, hidden: Tensor, ids: Tensor, logits: Tensor, before: Tensor) -> Tensor:
        """(..., k, top): of each candidate, given the token ``before`` its place, (..., k)."""
        left = self.candidate_selector.left(hidden, before)
        return logits + (left[..., None, :] * self.candidate_selector.successor_codebook[ids]).sum(-1)

    def drafts(self, hidden: Tensor, anchor: Tensor, before: Tensor) -> Tensor:  # noqa: ARG002
        """The walk from the anchor, left to right."""
        ids, logits = self.candidates(hidden)
        last, taken = anchor, []
        for step in range(self.plan.k):
            scores = self.scores(hidden[..., step, :], ids[..., step, :], logits[..., step, :], last)
            last = ids[..., step, :].gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
            taken.append(last)
        return torch.stack(taken, -1)

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """Cross entropy of the drafts after the true token before each, and without it."""
        assert batch.aux is not None
        anchors, real = block.draw(batch, generator)
        hidden = self.backbone(self.context(features.tapped(batch.aux, block.TAPS)), batch.tokens, anchors)
        before, labels, place = self.places(batch, anchors)
        tokens, offsets = heads.competing(self.vocabulary, generator)
        table, selector = self.embedding[tokens], self.candidate_selector
        joined = torch.cat((hidden.float(), selector.left(hidden, before)), -1)
        valid = self.valid(batch, labels, place) & real[..., None]
        after, _ = self.cross_entropy(
            batch, joined, (table, selector.successor_codebook[tokens], offsets), place, valid
        )
        alone, _ = self.cross_entropy(batch, hidden, (table, heads.nothing(table), offsets), place, valid)
        return (1 - ALONE) * after + ALONE * alone

    def config(self, whole: int) -> dict[str, Any]:
        """A ``DFlash2DraftModel`` whose queries see each other whatever their order."""
        return layout.block_config(
            "DFlash2DraftModel", block.SHAPE, block.LAYERS, whole, block.TAPS, block.MASK_TOKEN, causal=False,
            conv_kernel_size=KERNEL, conv_group_size=GROUP, selector_rank=RANK, selector_top_k=TOP,
        )  # fmt: skip


def load(folder: Path, embedding: Tensor) -> DFlash2:
    """The training forward of a checkpoint."""
    return block.restore(DFlash2, folder, embedding)


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> DFlash2:
    """A new one; the tokens that are taken most often are met in every step, the others drawn."""
    return DFlash2(embedding, batches.Vocabulary.frequent(sequences, len(embedding)), block.spread(sequences))
