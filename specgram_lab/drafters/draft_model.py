"""`draft_model`: a small Llama of its own as wide as the target, with the target's tokenizer and embedding.

vLLM loads a plain draft model whole and shares nothing with the target; a table of 49,152 tokens takes 57 MB. What is
trained and kept is the layers and the last norm; embedding and head are the target's, frozen, and
`specgram_lab.drafters.compose` puts both together in the cache folder.
Budget: 9.0 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from specgram_lab.drafters import batches, features, heads, layout, recipes
from specgram_lab.drafters.blocks import Layer, Norm, Shape, initialise

PLAN = recipes.Plan(name="draft_model", method="draft_model", k=3, steps=4000, batch=6, with_aux=False)
SHAPE = Shape(hidden=576, inner=768, heads=9, kv_heads=3, head_dim=64)
LAYERS = 2
EMBEDDING = "model.embed_tokens.weight"


class DraftModel(recipes.Trainee):
    """The training forward: tokens in, what the head reads out."""

    def __init__(self, embedding: Tensor, vocabulary: batches.Vocabulary, plan: recipes.Plan = PLAN) -> None:
        super().__init__()
        self.plan, self.vocabulary = plan, vocabulary
        self.embedding = embedding
        self.layers = nn.ModuleList(Layer(SHAPE) for _ in range(LAYERS))
        self.norm = Norm(SHAPE.hidden, SHAPE.eps)
        initialise(self, plan.seed, LAYERS)
        nn.init.constant_(self.norm.weight, 1 / float(embedding.norm(dim=-1).mean()))  # logits of size 1

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(batch, tokens, hidden), normed: what the head reads."""
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(batch, tokens, vocabulary): for the token that follows each."""
        return self.hidden(tokens, positions) @ self.embedding.T

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """Cross entropy at every place whose next token belongs to the answer."""
        following = batch.labels[:, 1:] >= 0
        hidden = self.hidden(batch.tokens, batch.positions)[:, :-1][following]
        ids, weights = batch.label_ids[:, 1:][following], batch.label_weights[:, 1:][following]
        tokens, offsets = heads.competing(self.vocabulary, generator)
        table = self.embedding[tokens]
        total, _ = heads.cross_entropy(
            hidden, table, heads.nothing(table), offsets, ids, weights, torch.ones(len(hidden))
        )
        return total / max(1, len(hidden))

    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """With the true tokens before it, a draft is what it is after accepted drafts."""
        best = self.logits(batch.tokens, batch.positions).argmax(-1)
        good = (best[:, :-1] == batch.labels[:, 1:]).int()
        there = (batch.labels[:, 1:] >= 0).int()
        mask = recipes.anchor_mask(batch)[:, :-1]
        k = self.plan.k
        return recipes.shifted(good, k, 0)[mask].bool(), recipes.shifted(there, k, 0)[mask].bool()

    def export(self, folder: Path) -> None:
        """The layers and the norm under the names of a Llama whose head is its embedding."""
        weights = {f"model.{name}": value for name, value in layout.plain(self, "layers", "norm").items()}
        config = layout.llama_config(SHAPE, LAYERS, len(self.embedding))
        layout.write(folder, weights, config | {"target": features.TARGET})


def complete(target: Path, module: Path, folder: Path) -> None:
    """Write the draft model as vLLM loads it: ``module`` with the embedding of ``target``."""
    weights = layout.read(module) | {EMBEDDING: layout.read(target)[EMBEDDING]}
    layout.write(folder, weights, layout.llama_config(SHAPE, LAYERS, len(weights[EMBEDDING])))


def load(folder: Path, embedding: Tensor) -> DraftModel:
    """The training forward of what `DraftModel.export` wrote."""
    model = DraftModel(embedding, batches.Vocabulary.of(torch.arange(len(embedding)), len(embedding)))
    model.load_state_dict({name.removeprefix("model."): value for name, value in layout.read(folder).items()})
    return model.eval()


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> DraftModel:
    """A new one; the tokens that are taken most often are met in every step, the others drawn."""
    return DraftModel(embedding, batches.Vocabulary.frequent(sequences, len(embedding)))
