# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernel for top-k and top-p: the kept set exactly, where the Triton kernel searches a pivot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specgram_lab.builders.cpu.kernels.numeric import Interpreted, jit, memory, nothing

_NEGLIGIBLE = np.float32(12.0)
"""Logits this far below the maximum are left out of the first sort: e**-12 of the best token's probability."""


@jit
def _keep_k(values, k):
    """Smallest of the `k` largest values, and how many equal to it belong to them."""
    cut = np.partition(values, values.size - k)[values.size - k]
    above = 0
    for value in values:
        above += value > cut
    return cut, k - above


@jit
def _keep_p(values, ties, floor, p):
    """Smallest value of the most likely set with mass `p`, and how many equal to it belong to the set.

    `values` holds the surviving logits; of those equal to `floor` only `ties` survived top-k.
    """
    maximum = values.max()
    mass = 0.0
    kept = 0
    for value in values:
        if value > floor:
            mass += np.exp(np.float64(value - maximum))
            kept += value >= maximum - _NEGLIGIBLE
    mass += ties * np.exp(np.float64(floor - maximum)) if floor > -np.inf else 0.0
    near = np.empty(values.size, np.float32)
    for attempt in range(2):
        # First the likely tokens alone; all of them only if those do not reach the mass.
        limit = maximum - _NEGLIGIBLE if attempt == 0 else -np.inf
        count = 0
        for value in values:
            if value > floor and value >= limit:
                near[count] = value
                count += 1
        ordered = np.sort(near[:count])[::-1]
        total = 0.0
        for i in range(count):
            total += np.exp(np.float64(ordered[i] - maximum))
            if total >= p * mass:
                equal = 1
                while i - equal >= 0 and ordered[i - equal] == ordered[i]:
                    equal += 1
                return ordered[i], equal
    for tie in range(ties):
        total += np.exp(np.float64(floor - maximum))
        if total >= p * mass:
            return floor, tie + 1
    return floor, ties


@jit
def _truncate(rows, logits, stride, top_k, top_p, vocab, mask_value, with_k, with_p):
    buffer = np.empty(vocab, np.float32)
    for row in range(rows):
        line = logits[row * stride : row * stride + vocab]
        count = 0
        for i in range(vocab):
            if line[i] > -np.inf:
                buffer[count] = line[i]
                count += 1
        if count == 0:
            continue
        values = buffer[:count]
        cut, ties = np.float32(-np.inf), 0
        if with_k and 0 < top_k[row] < count:
            cut, ties = _keep_k(values, np.int64(top_k[row]))
        if with_p and top_p[row] < 1.0:
            cut, ties = _keep_p(values, ties, cut, np.float64(top_p[row]))
        if cut == -np.inf:
            continue
        for i in range(vocab):
            if line[i] == cut and ties > 0:
                ties -= 1
            elif not line[i] > cut:
                line[i] = mask_value


def topk_topp(
    grid: Any,
    LOGITS,
    LOGITS_STRIDE_0,
    BUFFER,
    PERCENTILE_TO_STD_TABLE,
    NORMAL_CDF_TO_SIGMA_TABLE,
    K,
    P,
    BATCH_SIZE,
    VOCAB_SIZE,
    MASK_VALUE,
    BLOCK_SIZE,
    BLOCK_SIZE_TRUNC,
    TOPK_ENABLED,
    TOPP_ENABLED,
    SPLIT_COVERS_PONLY,
) -> None:
    """Mask everything outside the top k, then outside the most likely set of mass p, in place.

    Of equal logits at the border the first ones stay. The Triton kernel stops its search after 18 halvings and
    may keep a few tokens more; this keeps the set that it searches for. In the interpreter the kernel does not
    run at all: its row index is a plain integer there and has no ``.to``.
    """
    if LOGITS.dtype is not torch.float32 or SPLIT_COVERS_PONLY:
        raise Interpreted("only float32 logits without the split pipeline are truncated natively")
    _truncate(
        BATCH_SIZE,
        memory(LOGITS),
        LOGITS_STRIDE_0,
        memory(K) if TOPK_ENABLED else nothing(),
        memory(P) if TOPP_ENABLED else nothing(torch.float32),
        VOCAB_SIZE,
        np.float32(MASK_VALUE),
        bool(TOPK_ENABLED),
        bool(TOPP_ENABLED),
    )


KERNELS = {"vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel": topk_topp}
