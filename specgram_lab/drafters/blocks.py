"""Layers as vLLM computes them for Llama and Qwen3 drafters, in plain torch, under the checkpoints' own names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder layer. ``inputs`` is what the attention reads, where that is wider than ``hidden``."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 100000.0
    eps: float = 1e-5
    qk_norm: bool = False
    inputs: int | None = None


class Norm(nn.Module):
    """RMSNorm; computed in float32, as vLLM does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.float()).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding in the neox style (first half against second half).

    Args:
        x: (batch, tokens, heads, head_dim).
        positions: (batch, tokens).
        theta: the base of the frequencies.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; `project` and `attend` are apart so that keys may come from elsewhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, inputs = shape.heads * shape.head_dim, shape.inputs or shape.hidden
        self.shape = shape
        self.q_proj = nn.Linear(inputs, wide, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        if shape.qk_norm:
            self.q_norm = Norm(shape.head_dim, shape.eps)
            self.k_norm = Norm(shape.head_dim, shape.eps)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """(batch, tokens, heads, head_dim), normed where the layer norms, rotated."""
        q = self.q_proj(x).unflatten(-1, (self.shape.heads, self.shape.head_dim))
        return rotate(self.q_norm(q) if self.shape.qk_norm else q, positions, self.shape.rope_theta)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values, (batch, tokens, kv_heads, head_dim) each."""
        size = (self.shape.kv_heads, self.shape.head_dim)
        k, v = self.k_proj(x).unflatten(-1, size), self.v_proj(x).unflatten(-1, size)
        return rotate(self.k_norm(k) if self.shape.qk_norm else k, positions, self.shape.rope_theta), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention and output projection; ``mask`` is true where a query sees a key, None for a causal square."""
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=None if mask is None else mask[:, None], is_causal=mask is None, enable_gqa=True,
        )  # fmt: skip
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """The gated feed-forward part with SiLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As in Llama and Qwen."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer of Llama (or of Qwen3, with ``qk_norm``)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """The layer over a whole sequence; causal without a ``mask``."""
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, positions)
        x = x + self.self_attn.attend(self.self_attn.queries(normed, positions), keys, values, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def initialise(module: nn.Module, seed: int, layers: int) -> None:
    """Normal weights of size 0.02; projections back into the residual stream smaller, with the depth."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            scale = 0.02 / (2 * layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def target_embedding(folder: Path) -> Tensor:
    """The target's embedding table, which is its output head as well, in float32."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return file.get_tensor("model.embed_tokens.weight").float()


def target_norm(folder: Path) -> Tensor:
    """The weight of the target's last norm."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return file.get_tensor("model.norm.weight").float()
