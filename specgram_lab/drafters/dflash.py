"""`dflash`: a block of drafts from one pass over the target's hidden states, each draft on its own.

As vLLM runs it (``DFlashQwen3ForCausalLM``, ``DFlashSpeculator``): like `specgram_lab.drafters.block`, with 1 + k
queries, the anchor and k mask tokens; the mask token at offset i drafts the token at its own place, the anchor drafts
nothing. No draft knows which token the one before it took. Embedding and head are the target's.
Budget: 4.7 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgram_lab.drafters import batches, block, features, heads, layout, recipes

PLAN = recipes.Plan(name="dflash", method="dflash", k=5, steps=5000, batch=6, with_aux=True)


class DFlash(block.BlockDrafter):
    """The block's mask tokens, read by the target's head."""

    def __init__(
        self, embedding: Tensor, vocabulary: batches.Vocabulary, unit: Tensor, plan: recipes.Plan = PLAN
    ) -> None:
        super().__init__(embedding, vocabulary, unit, plan)

    def drafts(self, hidden: Tensor, anchor: Tensor, before: Tensor) -> Tensor:  # noqa: ARG002
        """The likeliest token at each place."""
        return (hidden @ self.embedding.T).argmax(-1)

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """Cross entropy of the drafts."""
        assert batch.aux is not None
        anchors, real = block.draw(batch, generator)
        hidden = self.backbone(self.context(features.tapped(batch.aux, block.TAPS)), batch.tokens, anchors)
        _, labels, place = self.places(batch, anchors)
        tokens, offsets = heads.competing(self.vocabulary, generator)
        table = self.embedding[tokens]
        valid = self.valid(batch, labels, place) & real[..., None]
        return self.cross_entropy(batch, hidden, (table, heads.nothing(table), offsets), place, valid)[0]

    def config(self, whole: int) -> dict[str, Any]:
        """A ``DFlashDraftModel`` whose queries see each other whatever their order."""
        return layout.block_config(
            "DFlashDraftModel", block.SHAPE, block.LAYERS, whole, block.TAPS, block.MASK_TOKEN, causal=False
        )


def load(folder: Path, embedding: Tensor) -> DFlash:
    """The training forward of a checkpoint."""
    return block.restore(DFlash, folder, embedding)


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> DFlash:
    """A new one; the tokens that are taken most often are met in every step, the others drawn."""
    return DFlash(embedding, batches.Vocabulary.frequent(sequences, len(embedding)), block.spread(sequences))
