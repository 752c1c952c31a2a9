"""The loss at an output head, without the logits of all rows in memory: they come and go in pieces that a cache holds.

A drafter's head is as wide as the target's vocabulary, and what a training step spends is spent here: on a CPU half of
it on moving logits. Each piece of rows gives its loss and its gradients at once, so that nothing is kept for later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from specgram_lab.drafters import batches

ROWS = 128
DRAWN = 512
"""Tokens outside the vocabulary of training that each step's loss draws as competitors, where a head knows them all."""


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, fixed: Tensor, learned: Tensor, offsets: Tensor, ids: Tensor, weights: Tensor,
        importance: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        to_states = torch.empty_like(states, dtype=torch.float32)
        to_learned = torch.zeros_like(learned, dtype=torch.float32)
        best = torch.empty(len(states), dtype=torch.long)
        table, low = torch.cat((fixed.bfloat16(), learned.bfloat16()), -1), states.bfloat16()
        beside = low[:, fixed.shape[1] :].contiguous()
        total = 0.0
        for begin in range(0, len(states), ROWS):
            part = slice(begin, begin + ROWS)
            logits = (low[part] @ table.T).float()
            best[part] = logits.argmax(-1)
            top = logits.add_(offsets).amax(-1)
            mass = weights[part].sum(-1)
            picked = (logits.gather(-1, ids[part]) * weights[part]).sum(-1)
            shares = logits.sub_(top[:, None]).exp()
            norm = shares.sum(-1)
            total += float((importance[part] * (mass * (top + norm.log()) - picked)).sum())
            shares.mul_((mass / norm)[:, None]).scatter_add_(1, ids[part], -weights[part])
            slope = shares.mul_(importance[part, None]).bfloat16()
            to_states[part] = slope @ table
            if learned.shape[1]:
                to_learned += slope.T @ beside[part]
        ctx.save_for_backward(to_states, to_learned)
        ctx.mark_non_differentiable(best)
        return states.new_tensor(total, dtype=torch.float32), best

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _best: Tensor) -> tuple[Tensor | None, ...]:
        to_states, to_learned = ctx.saved_tensors
        return grad * to_states, None, grad * to_learned, None, None, None, None


def cross_entropy(
    states: Tensor, fixed: Tensor, learned: Tensor, offsets: Tensor, ids: Tensor, weights: Tensor, importance: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy against weighted candidates, summed over rows, and the row of the head that each finds
    likeliest (one token, whatever it stands for).

    Args:
        states: (rows, width), what the head reads.
        fixed: (tokens, width of it), the part of the head that is not trained: the target's.
        learned: (tokens, the rest of width), the part that is; either may have no width.
        offsets: (tokens,), added to the logits: how many tokens one row of the head stands for, as a logarithm.
        ids: (rows, candidates), places in the head.
        weights: (rows, candidates); a row's need not add up to 1.
        importance: (rows,), what the loss of each is multiplied by.
    """
    found: tuple[Tensor, Tensor] = _CrossEntropy.apply(states, fixed, learned, offsets, ids, weights, importance)
    return found


def competing(vocabulary: batches.Vocabulary, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(tokens, offsets): which tokens compete in a step of training: all of the vocabulary, at the places of their
    draft ids, and behind them `DRAWN` of the others, each of which stands for its share of those."""
    others = (vocabulary.to_draft < 0).nonzero().flatten()
    chosen = others[torch.randint(len(others), (DRAWN,), generator=generator)]
    weight = torch.full((DRAWN,), math.log(len(others) / DRAWN))
    return torch.cat((vocabulary.kept, chosen)), torch.cat((torch.zeros(len(vocabulary.kept)), weight))


def nothing(table: Tensor) -> Tensor:
    """A part of a head that has no width, beside ``table``."""
    return table.new_zeros(len(table), 0)
