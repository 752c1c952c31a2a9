"""`draft_model`: a narrow Llama of its own with the target's tokenizer, its embedding begun from the target's.

vLLM loads a plain draft model whole and shares nothing with the target, so that the table of 49,152 tokens is nearly
all of its size. Its rows begin as the first principal components of the target's; the head is the same table.
Only tokens that the corpus holds are trained. The others keep a short row, which gives them a logit near 0, and the
loss counts them all as one more competitor.
Budget: 11.0 MB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab.drafters import batches, features, heads, layout, recipes
from specgram_lab.drafters.blocks import Layer, Norm, Shape, initialise

PLAN = recipes.Plan(
    name="draft_model", method="draft_model", k=3, steps=10000, batch=8, with_aux=False, learning_rate=3e-3,
    weight_decay=0.05,
)  # fmt: skip
SHAPE = Shape(hidden=96, inner=384, heads=3, kv_heads=3, head_dim=64, rope_theta=10000.0)
LAYERS = 4
DROPOUT = 0.1
TRAINED_ROW, OTHER_ROW = 0.1, 0.02
"""Root mean square of a row of the table: at the start where it is trained, for good where it is not."""


class DraftModel(recipes.Trainee):
    """The training forward: tokens in, logits over the trained tokens out."""

    def __init__(self, embedding: Tensor, vocabulary: batches.Vocabulary, plan: recipes.Plan = PLAN) -> None:
        super().__init__()
        self.plan, self.vocabulary = plan, vocabulary
        self.layers = nn.ModuleList(Layer(SHAPE) for _ in range(LAYERS))
        self.norm = Norm(SHAPE.hidden, SHAPE.eps)
        initialise(self, plan.seed, LAYERS)
        start = principal(embedding, SHAPE.hidden)
        self.register_buffer("others", OTHER_ROW * start)
        self.rows = nn.Parameter(TRAINED_ROW * start[vocabulary.kept])
        self.competitor = torch.tensor(math.log(max(1, len(embedding) - len(vocabulary.kept))))

    def embed(self, tokens: Tensor) -> Tensor:
        """The input rows of ``tokens``."""
        mapped = self.vocabulary.to_draft[tokens]
        return torch.where(mapped[..., None] >= 0, self.rows[mapped.clamp(min=0)], self.others[tokens])

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(batch, tokens, hidden), normed: what the head reads."""
        x = functional.dropout(self.embed(tokens), DROPOUT, self.training)
        for layer in self.layers:
            x = functional.dropout(layer(x, positions), DROPOUT, self.training)
        return self.norm(x)

    def logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(batch, tokens, kept): for the token that follows each."""
        return self.hidden(tokens, positions) @ self.rows.T

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """Cross entropy at every place whose next token belongs to the answer."""
        following = batch.labels[:, 1:] >= 0
        hidden = self.hidden(batch.tokens, batch.positions)[:, :-1][following]
        ids, weights = batch.label_ids[:, 1:][following], batch.label_weights[:, 1:][following]
        table = torch.cat((self.rows, self.rows.new_zeros(1, SHAPE.hidden)))  # the last row's logit is 0
        offsets = functional.pad(self.competitor[None], (len(self.rows), 0))
        total, _ = heads.cross_entropy(
            hidden, heads.nothing(table), table, offsets, ids, weights, torch.ones(len(hidden))
        )
        return total / max(1, len(hidden))

    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """With the true tokens before it, a draft is what it is after accepted drafts."""
        best = self.vocabulary.kept[self.logits(batch.tokens, batch.positions).argmax(-1)]
        good = (best[:, :-1] == batch.labels[:, 1:]).int()
        there = (batch.labels[:, 1:] >= 0).int()
        mask = recipes.anchor_mask(batch)[:, :-1]
        k = self.plan.k
        return recipes.shifted(good, k, 0)[mask].bool(), recipes.shifted(there, k, 0)[mask].bool()

    def export(self, folder: Path) -> None:
        """A Llama checkpoint whose head is its embedding."""
        table = self.others.clone()
        table[self.vocabulary.kept] = self.rows.detach()
        weights = {f"model.{name}": value for name, value in layout.plain(self, "layers", "norm").items()}
        weights["model.embed_tokens.weight"] = table
        layout.write(folder, weights, layout.llama_config(SHAPE, LAYERS, len(table)))


def load(folder: Path) -> DraftModel:
    """The training forward of a checkpoint; every token counts as trained."""
    weights = layout.read(folder)
    table = weights.pop("model.embed_tokens.weight")
    model = DraftModel(table, batches.Vocabulary.of(torch.arange(len(table)), len(table)))
    model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()} | {"rows": table, "others": table})
    return model.eval()


def principal(embedding: Tensor, size: int) -> Tensor:
    """The rows of ``embedding`` in their first ``size`` principal directions, each of root mean square 1."""
    centred = embedding - embedding.mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    rows = centred @ vectors[:, values.argsort(descending=True)[:size]]
    return rows / rows.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> DraftModel:
    """A new one; it trains every token that occurs in a prompt or an answer."""
    return DraftModel(embedding, batches.Vocabulary.seen(sequences, len(embedding)))
