"""`eagle3`: one wide decoder layer that goes on from the target's hidden states, token by token.

As vLLM runs it (``Eagle3LlamaForCausalLM``, ``EagleSpeculator``): row i reads the target's hidden states of token i and
the embedding of token i + 1, stands at position i, sees all rows before it, and drafts token i + 2. The next draft of
the chain reads the layer's own output (before the final norm) in place of the target's hidden states, the drafted
token, and stands one further on; it sees the target's rows and the chain's own. Training walks all chains of a
sequence at once, with the true tokens in place of drafts. Embedding and head are the target's.
Budget: 6.0 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab import models
from specgram_lab.drafters import batches, features, heads, layout, recipes
from specgram_lab.drafters.block import DECAY, TAPS, spread
from specgram_lab.drafters.blocks import Attention, Mlp, Norm, Shape, initialise, target_norm

PLAN = recipes.Plan(name="eagle3", method="eagle3", k=3, steps=3000, batch=6, with_aux=True)
SHAPE = Shape(hidden=576, inner=512, heads=9, kv_heads=3, head_dim=64, inputs=2 * 576)


class Midlayer(nn.Module):
    """The layer that reads two vectors a row; names as in checkpoints of EAGLE-3."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        self.hidden_norm = Norm(SHAPE.hidden, SHAPE.eps)
        self.self_attn = Attention(SHAPE)
        self.post_attention_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        self.mlp = Mlp(SHAPE)


class Eagle3(recipes.Trainee):
    """The training forward, for all chains of a sequence at once."""

    def __init__(
        self, embedding: Tensor, vocabulary: batches.Vocabulary, unit: Tensor, plan: recipes.Plan = PLAN
    ) -> None:
        super().__init__()
        self.plan, self.vocabulary = plan, vocabulary
        self.embedding = embedding
        self.fc = nn.Linear(len(TAPS) * SHAPE.hidden, SHAPE.hidden, bias=False)
        self.midlayer = Midlayer()
        self.norm = Norm(SHAPE.hidden, SHAPE.eps)
        initialise(self, plan.seed, 1)
        nn.init.constant_(self.norm.weight, 1 / float(embedding.norm(dim=-1).mean()))  # logits of size 1
        self.register_buffer("spread", unit)

    @torch.no_grad()
    def begin_as_target(self, norm: Tensor) -> None:
        """Begin with the target's last state as the layer's, and the target's last ``norm``: what the head reads is
        what it was made for, and training has to learn one token's step."""
        size = self.spread[-SHAPE.hidden :]
        self.fc.weight.zero_()
        self.fc.weight[:, -SHAPE.hidden :] = torch.diag(size / size.square().mean().sqrt())
        self.norm.weight.copy_(norm)

    def chains(self, aux: Tensor, following: Tensor, depth: int, first: int = 0) -> Tensor:
        """(batch, rows from the first on, depth, hidden), normed: what the head reads at each place of a row's chain.

        Args:
            aux: (batch, rows, taps * hidden), the target's.
            following: (batch, rows, depth), the token one further than the row, and those after it.
            depth: drafts a chain.
            first: the first row that has a chain; the rows before it are only looked at.
        """
        rows = aux.shape[1]
        layer, attention = self.midlayer, self.midlayer.self_attn
        state = self.fc(aux.float() / self.spread)
        places = torch.arange(rows).expand(aux.shape[:2])
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()[first:]
        own = torch.eye(rows - first, dtype=torch.bool)
        keys, values, masks, drafts = [], [], [], []
        for step in range(depth):
            if step == 1:
                following, places = following[:, first:], places[:, first:]
            read = torch.cat(
                (layer.input_layernorm(self.embedding[following[..., step]]), layer.hidden_norm(state)), -1
            )
            k, v = attention.keys_values(read, places + step)
            if not step:
                state, read, seen = state[:, first:], read[:, first:], places[:, first:]
            keys.append(k)
            values.append(v)
            masks.append(own if step else causal)
            mask = torch.cat(masks, -1).expand(len(aux), -1, -1)
            mixed = attention.attend(
                attention.queries(read, seen + step), torch.cat(keys, 1), torch.cat(values, 1), mask
            )
            state = state + mixed
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            drafts.append(self.norm(state))
        return torch.stack(drafts, 2)

    def _chains(self, batch: batches.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Over rows before an anchor: what the head reads (n, k, hidden), the greedy labels, the drafts' places."""
        assert batch.aux is not None
        k = self.plan.k
        following = recipes.shifted(functional.pad(batch.tokens[:, 1:], (0, 1)), k, 0)
        mask = recipes.anchor_mask(batch)
        before = functional.pad(mask[:, 1:], (0, 1), value=False)
        first = int(batch.prompts.min()) - 1
        states = functional.pad(
            self.chains(features.tapped(batch.aux, TAPS), following, k, first), (0, 0, 0, 0, first, 0)
        )
        labels = recipes.shifted(functional.pad(batch.labels[:, 2:], (0, 2), value=-1), k, -1)
        return states[before], labels[before], before

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """Cross entropy along the chains, later drafts weighing less."""
        states, labels, before = self._chains(batch)
        k = self.plan.k
        ids = functional.pad(batch.label_ids[:, 2:], (0, 0, 0, 2 + k)).unfold(1, k, 1)[:, : before.shape[1]][before]
        shares = functional.pad(batch.label_weights[:, 2:], (0, 0, 0, 2 + k)).unfold(1, k, 1)
        shares = shares[:, : before.shape[1]][before]
        there = labels >= 0
        importance = (DECAY ** torch.arange(k)).expand(there.shape)[there]
        tokens, offsets = heads.competing(self.vocabulary, generator)
        table = self.embedding[tokens]
        total, _ = heads.cross_entropy(
            states[there], table, heads.nothing(table), offsets,
            ids.transpose(1, 2)[there], shares.transpose(1, 2)[there], importance,
        )  # fmt: skip
        return total / importance.sum().clamp(min=1)

    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """Each chain with the true tokens before a draft, which is what it is after accepted drafts."""
        states, labels, _ = self._chains(batch)
        good = (states @ self.embedding.T).argmax(-1) == labels
        return good, labels >= 0

    def export(self, folder: Path) -> None:
        """A ``LlamaForCausalLMEagle3`` checkpoint; embedding and head are left to the target."""
        weights = layout.plain(self, "midlayer", "norm")
        weights["fc.weight"] = self.fc.weight.detach() / self.spread
        layout.write(folder, weights, layout.eagle3_config(SHAPE, len(self.embedding), TAPS))


def load(folder: Path, embedding: Tensor) -> Eagle3:
    """The training forward of a checkpoint."""
    weights = layout.read(folder)
    vocabulary = batches.Vocabulary.of(torch.arange(len(embedding)), len(embedding))
    model = Eagle3(embedding, vocabulary, torch.ones(weights["fc.weight"].shape[1]))
    model.load_state_dict(weights | {"spread": model.spread})
    return model.eval()


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> Eagle3:
    """A new one; the tokens that are taken most often are met in every step, the others drawn."""
    made = Eagle3(embedding, batches.Vocabulary.frequent(sequences, len(embedding)), spread(sequences))
    made.begin_as_target(target_norm(models.ensure(features.TARGET)))
    return made
