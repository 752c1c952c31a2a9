"""`mtp`: a multi-token-prediction module inside the target's own checkpoint, in MiMo's layout.

vLLM loads such modules only for some architectures. MiMo's decoder is Llama's but for biases on queries, keys and
values: `carry` writes the target as a MiMo model with zero biases, the module beside it. As vLLM runs it
(``MiMoMTP``, ``MTPSpeculator``): row i reads the target's last state of token i, before the final norm, and the
embedding of token i + 1, stands at position i, sees all rows before it, and drafts token i + 2. Embedding and head are
the target's. vLLM wants the feed-forward part as wide as the target's; the module has `INNER` of those channels, and
`carry` adds the others as zeros, which give nothing.
Budget: 4.0 MB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab import models
from specgram_lab.drafters import batches, features, heads, layout, recipes
from specgram_lab.drafters.block import spread
from specgram_lab.drafters.blocks import Layer, Norm, Shape, initialise, target_norm

PLAN = recipes.Plan(name="mtp", method="mtp", k=1, steps=3000, batch=6, with_aux=True)
INNER = 256
SHAPE = Shape(hidden=576, inner=INNER, heads=9, kv_heads=3, head_dim=64)
EMBEDDED = 0.1
"""Size of the embedding beside the state, whose size is 1, in the layer's residual stream at the start."""
LEAST = 0.05
"""Of the usual size of a hidden dimension, beside all of them: where some are larger by far, others would drown."""
PREFIX = "model.mtp_layers.0."


class Mtp(recipes.Trainee):
    """The training forward over whole sequences."""

    def __init__(self, embedding: Tensor, vocabulary: batches.Vocabulary, plan: recipes.Plan = PLAN) -> None:
        super().__init__()
        self.plan, self.vocabulary = plan, vocabulary
        self.embedding = embedding
        self.token_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        self.hidden_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        self.input_proj = nn.Linear(2 * SHAPE.hidden, SHAPE.hidden, bias=False)
        self.block = Layer(SHAPE)
        self.final_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        initialise(self, plan.seed, 1)
        nn.init.constant_(self.final_layernorm.weight, 1 / float(embedding.norm(dim=-1).mean()))  # logits of size 1

    @torch.no_grad()
    def begin_as_target(self, norm: Tensor, unit: Tensor) -> None:
        """Begin with the target's last state as the layer's, and the target's last ``norm``: what the head reads is
        what it was made for. ``unit`` is the usual size of each dimension of the state; the layer's own norms undo it.
        """
        size = SHAPE.hidden
        relative = (unit / unit.square().mean().sqrt()).clamp(min=LEAST)
        self.final_layernorm.weight.copy_(norm)
        self.input_proj.weight.copy_(torch.cat((torch.eye(size), EMBEDDED * torch.eye(size)), -1))
        for own in (self.block.input_layernorm, self.block.post_attention_layernorm):
            own.weight.copy_(1 / relative)

    def states(self, last: Tensor, following: Tensor) -> Tensor:
        """(batch, rows, hidden), normed, from the target's ``last`` states and the token after each."""
        places = torch.arange(last.shape[1]).expand(last.shape[:2])
        embedded = torch.where(places[..., None] == 0, 0, self.embedding[following])
        read = torch.cat((self.hidden_layernorm(last.float()), self.token_layernorm(embedded)), -1)
        return self.final_layernorm(self.block(self.input_proj(read), places))

    def _before(self, batch: batches.Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Over rows before an anchor: states, greedy labels, and the rows' mask."""
        assert batch.aux is not None
        following = functional.pad(batch.tokens[:, 1:], (0, 1))
        states = self.states(batch.aux[..., -SHAPE.hidden :], following)
        before = functional.pad(recipes.anchor_mask(batch)[:, 1:], (0, 1), value=False)
        return states[before], functional.pad(batch.labels[:, 2:], (0, 2), value=-1)[before], before

    def loss(self, batch: batches.Batch, generator: torch.Generator) -> Tensor:
        """Cross entropy over the vocabulary and the drawn others, which stand for all others."""
        states, _, before = self._before(batch)
        ids, weights = (
            functional.pad(part[:, 2:], (0, 0, 0, 2))[before] for part in (batch.label_ids, batch.label_weights)
        )
        tokens, offsets = heads.competing(self.vocabulary, generator)
        table = self.embedding[tokens]
        total, _ = heads.cross_entropy(
            states, table, heads.nothing(table), offsets, ids, weights, torch.ones(len(states))
        )
        return total / max(1, len(states))

    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """The likeliest of all tokens against the greedy one."""
        states, labels, _ = self._before(batch)
        best = (states @ self.embedding.T).argmax(-1)
        return (best == labels)[:, None], (labels >= 0)[:, None]

    def export(self, folder: Path) -> None:
        """The module alone, under the names that it has in the carried target; `carry` puts both together."""
        weights = {PREFIX + name.removeprefix("block."): value for name, value in self.state_dict().items()}
        for part, count in (("q", SHAPE.heads), ("k", SHAPE.kv_heads), ("v", SHAPE.kv_heads)):
            weights[f"{PREFIX}self_attn.{part}_proj.bias"] = torch.zeros(count * SHAPE.head_dim)
        layout.write(folder, weights, {"architectures": ["MiMoMTPModel"], "target": features.TARGET})


def carry(target: Path, module: Path | None, folder: Path) -> None:
    """Write ``target`` as a MiMo model with zero biases, ``module`` beside it if there is one."""
    weights = layout.read(target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    for layer in range(config["num_hidden_layers"]):
        for part in ("q", "k", "v"):
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            weights[f"{name}.bias"] = torch.zeros(len(weights[f"{name}.weight"]))
    if module is not None:
        weights |= widened(layout.read(module), config["intermediate_size"])
    for key in ("architectures", "model_type", "head_dim", "attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    layout.write(folder, weights, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(target / name, folder / name)


def widened(module: dict[str, Tensor], inner: int) -> dict[str, Tensor]:
    """A module's weights as vLLM loads them, with ``inner`` channels in the feed-forward part."""
    more = inner - INNER
    rows = {f"{PREFIX}mlp.{part}.weight": (0, 0, 0, more) for part in ("gate_proj", "up_proj")}
    return {
        name: functional.pad(value, rows.get(name, (0, more) if name.endswith("down_proj.weight") else (0, 0)))
        for name, value in module.items()
    }


def load(folder: Path, embedding: Tensor) -> Mtp:
    """The training forward of a module, on the target's last layer."""
    weights = {name.removeprefix(PREFIX): value for name, value in layout.read(folder).items()}
    model = Mtp(embedding, batches.Vocabulary.of(torch.arange(4096), len(embedding)))
    outer = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    own = {n if n.startswith(outer) else f"block.{n}": v for n, v in weights.items() if not n.endswith("bias")}
    model.load_state_dict(own)
    return model.eval()


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> Mtp:
    """A new one; the tokens that are taken most often are met in every step, the others drawn."""
    made = Mtp(embedding, batches.Vocabulary.frequent(sequences, len(embedding)))
    unit = spread(sequences)[-SHAPE.hidden :]
    made.begin_as_target(target_norm(models.ensure(features.TARGET)), unit)
    return made
