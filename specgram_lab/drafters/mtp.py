"""`mtp`: a multi-token-prediction module inside the target's own checkpoint, in MiMo's layout.

vLLM loads such modules only for some architectures. MiMo's decoder is Llama's but for biases on queries, keys and
values: `carry` writes the target as a MiMo model with zero biases, the module beside it. As vLLM runs it
(``MiMoMTP``, ``MTPSpeculator``): row i reads the target's last state of token i, before the final norm, and the
embedding of token i + 1, stands at position i, sees all rows before it, and drafts token i + 2. Embedding and head are
the target's. So is most of the module's feed-forward part: what is trained and kept is a low-rank change to the
target's last one, which `carry` adds up; vLLM wants it as wide as the target's, and whole it would take 5.3 MB.
Budget: 3.6 MB.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from specgram_lab import models
from specgram_lab.drafters import batches, features, layout, recipes
from specgram_lab.drafters.blocks import Layer, Norm, Shape, initialise, target_layer, target_norm

PLAN = recipes.Plan(name="mtp", method="mtp", k=1, steps=8000, batch=16, learning_rate=1e-3, with_aux=True)
SHAPE = Shape(hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64)
"""The target's own: vLLM reads one config for both."""
RANK = 32
"""Of the change to each of the feed-forward part's three matrices."""
CHANGED = ("gate_proj", "up_proj", "down_proj")
STATE, EMBEDDED = 20.0, 5.0
"""Sizes of the two in the layer's residual stream at the start; in the target that stream has about 20 there."""
PREFIX = "model.mtp_layers.0."


class Changed(nn.Module):
    """A matrix of the target's and a low-rank change to it; the change alone is trained and saved."""

    base: Tensor

    def __init__(self, wide: int, inputs: int) -> None:
        super().__init__()
        self.register_buffer("base", torch.zeros(wide, inputs), persistent=False)
        self.change_in = nn.Parameter(torch.zeros(RANK, inputs))
        self.change_out = nn.Parameter(torch.zeros(wide, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """As a linear layer."""
        return functional.linear(x, self.base) + functional.linear(
            functional.linear(x, self.change_in), self.change_out
        )


class Mtp(recipes.Trainee):
    """The training forward over whole sequences."""

    def __init__(self, embedding: Tensor, vocabulary: batches.Vocabulary, plan: recipes.Plan = PLAN) -> None:
        super().__init__()
        self.plan, self.vocabulary = plan, vocabulary
        self.embedding = embedding
        self.others = (vocabulary.to_draft < 0).nonzero().flatten()
        self.token_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        self.hidden_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        self.input_proj = nn.Linear(2 * SHAPE.hidden, SHAPE.hidden, bias=False)
        self.block = Layer(SHAPE)
        for name in CHANGED:
            wide, inputs = getattr(self.block.mlp, name).weight.shape
            setattr(self.block.mlp, name, Changed(wide, inputs))
        self.final_layernorm = Norm(SHAPE.hidden, SHAPE.eps)
        initialise(self, plan.seed, 1)
        for name in CHANGED:
            nn.init.zeros_(getattr(self.block.mlp, name).change_out)
        nn.init.constant_(self.final_layernorm.weight, 1 / float(embedding.norm(dim=-1).mean()))  # logits of size 1

    def rest_on(self, layer: dict[str, Tensor]) -> None:
        """Put the target's feed-forward part under the change to it; ``layer`` as `target_layer` gives it."""
        for name in CHANGED:
            getattr(self.block.mlp, name).base.copy_(layer[f"mlp.{name}.weight"])

    @torch.no_grad()
    def begin_as_target(self, target: Path) -> None:
        """Begin with the target's last layer and norm, reading its state beside the embedding."""
        layer = target_layer(target, features.AUX_LAYERS[-1])
        self.rest_on(layer)
        kept = {name: value for name, value in layer.items() if not name.startswith("mlp.")}
        self.block.load_state_dict({**self.block.state_dict(), **kept})
        self.final_layernorm.weight.copy_(target_norm(target))
        self.input_proj.weight.zero_()
        size = SHAPE.hidden
        self.input_proj.weight[:, :size] = STATE * torch.eye(size)
        self.input_proj.weight[:, size:] = EMBEDDED * torch.eye(size)

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
        beyond = recipes.drawn_logit(states, self.embedding, self.others, generator)
        logits = states @ self.embedding[self.vocabulary.kept].T
        return recipes.soft_cross_entropy(logits, ids, weights, beyond).mean()

    def right(self, batch: batches.Batch) -> tuple[Tensor, Tensor]:
        """The likeliest of all tokens against the greedy one."""
        states, labels, _ = self._before(batch)
        best = (states @ self.embedding.T).argmax(-1)
        return (best == labels)[:, None], (labels >= 0)[:, None]

    def export(self, folder: Path) -> None:
        """The module alone, under the names that it has in the carried target; `carry` puts both together."""
        weights = {PREFIX + name.removeprefix("block."): value for name, value in self.state_dict().items()}
        for part, heads in (("q", SHAPE.heads), ("k", SHAPE.kv_heads), ("v", SHAPE.kv_heads)):
            weights[f"{PREFIX}self_attn.{part}_proj.bias"] = torch.zeros(heads * SHAPE.head_dim)
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
        weights |= whole(layout.read(module), target_layer(target, features.AUX_LAYERS[-1]))
    for key in ("architectures", "model_type", "head_dim", "attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(key, None)
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    layout.write(folder, weights, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(target / name, folder / name)


def whole(module: dict[str, Tensor], layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module's weights as vLLM loads them: every change added to the target's ``layer`` that it belongs to."""
    made = {name: value for name, value in module.items() if ".change_" not in name}
    for part in CHANGED:
        name = f"{PREFIX}mlp.{part}"
        made[f"{name}.weight"] = (
            layer[f"mlp.{part}.weight"] + module[f"{name}.change_out"] @ module[f"{name}.change_in"]
        )
    return made


def load(folder: Path, embedding: Tensor) -> Mtp:
    """The training forward of a module, on the target's last layer."""
    weights = {name.removeprefix(PREFIX): value for name, value in layout.read(folder).items()}
    model = Mtp(embedding, batches.Vocabulary.of(torch.arange(4096), len(embedding)))
    outer = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    own = {n if n.startswith(outer) else f"block.{n}": v for n, v in weights.items() if not n.endswith("bias")}
    model.load_state_dict(own)
    model.rest_on(target_layer(models.ensure(features.TARGET), features.AUX_LAYERS[-1]))
    return model.eval()


def make(sequences: Sequence[features.Sequence], embedding: Tensor) -> Mtp:
    """A new one; the tokens that are taken most often are met in every step, the others drawn."""
    made = Mtp(embedding, batches.Vocabulary.frequent(sequences, len(embedding)))
    made.begin_as_target(models.ensure(features.TARGET))
    return made


if __name__ == "__main__":  # python -m specgram_lab.drafters.mtp TARGET MODULE OUT
    carry(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
