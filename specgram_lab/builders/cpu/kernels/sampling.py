# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels of the sampler: temperature, Gumbel-max sampling, min-p, the grammar bitmask."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from specgram_lab.builders.cpu.kernels.numeric import (
    NEGATIVE_INFINITY,
    Interpreted,
    as_float,
    block_argmax,
    jit,
    memory,
    nothing,
    stored_infinity,
)
from specgram_lab.builders.cpu.kernels.random import (
    DRAFT_NOISE_SALT,
    GUMBEL32_LIMIT,
    gumbel32,
    gumbel32_bound,
    murmur_hash,
    murmur_prefix,
    uniform64,
)

_SECOND_DOMAIN = 0x9E3779B9


@jit
def _temperature(logits, stride, requests, temperatures, vocab, rows):
    for row in range(rows):
        temperature = np.float32(temperatures[requests[row]])
        if temperature == 0.0 or temperature == 1.0:
            continue
        base = row * stride
        for i in range(base, base + vocab):
            logits[i] = logits[i] / temperature


def temperature(
    grid: Any, logits_ptr, logits_stride, expanded_idx_mapping_ptr, temperature_ptr, vocab_size, BLOCK_SIZE
) -> None:
    """Divide float32 logits by their request's temperature, in place."""
    if logits_ptr.dtype is not torch.float32:
        raise Interpreted("only float32 logits are scaled natively")
    _temperature(
        memory(logits_ptr),
        logits_stride,
        memory(expanded_idx_mapping_ptr),
        memory(temperature_ptr),
        vocab_size,
        grid[0],
    )


@jit
def noised_argmax32(row, start, stop, divisor, prefix):
    """Argmax of ``row[start:stop] / divisor`` plus float32 Gumbel noise, and its index from `start`.

    Most elements cannot win: those that even the largest possible noise leaves below the best so far are
    skipped before hashing, and those that their hash's bound leaves below before taking logarithms. Rounding
    is monotone, so neither skip changes the result.
    """
    best, where = NEGATIVE_INFINITY, 0
    for i in range(start, stop):
        logit = as_float(row[i]) / divisor
        if not logit + GUMBEL32_LIMIT > best:
            continue
        hashed = murmur_hash(prefix, np.uint32(i))
        if not logit + gumbel32_bound(hashed) > best:
            continue
        value = logit + gumbel32(hashed)
        if value > best:
            best, where = value, i - start
    return best, where


@jit
def noised_argmax64(row, start, stop, divisor, prefix, second_prefix):
    """As :func:`noised_argmax32`, with float64 noise."""
    best, where = -np.inf, 0
    for i in range(start, stop):
        logit = np.float64(as_float(row[i]) / divisor)
        if not logit > -np.inf:
            continue
        uniform = uniform64(murmur_hash(prefix, np.uint32(i)), murmur_hash(second_prefix, np.uint32(i)))
        value = logit - np.log(-np.log(uniform))
        if value > best:
            best, where = value, i - start
    return best, where


@jit
def _gumbel(
    rows,
    blocks,
    argmax,
    argmax_stride,
    maxima,
    max_stride,
    cache,
    cache_stride_0,
    cache_stride_1,
    columns,
    source,
    source_stride,
    logits,
    stride,
    requests,
    seeds,
    positions,
    temperatures,
    vocab,
    block_size,
    drafting,
    scaled,
    double,
    column_per_row,
):
    for row in range(rows):
        request = np.int64(requests[row])
        temperature = np.float32(temperatures[request]) if request >= 0 else np.float32(0.0)
        seed = np.int64(seeds[request]) if request >= 0 else np.int64(0)
        if cache.size > 0 and request >= 0:
            column = np.int64(columns[row] if column_per_row else columns[0])
            to, start = request * cache_stride_0 + column * cache_stride_1, row * source_stride
            cache[to : to + vocab] = source[start : start + vocab]
        position = np.int64(positions[row]) + (DRAFT_NOISE_SALT if drafting else 0)
        prefix = murmur_prefix(seed, position, 0)
        second = murmur_prefix(seed, position, _SECOND_DOMAIN)
        divisor = temperature if scaled and temperature != 0.0 else np.float32(1.0)
        line = logits[row * stride : row * stride + vocab]
        for block in range(blocks):
            start, stop = block * block_size, min((block + 1) * block_size, vocab)
            if temperature == 0.0:
                value, index = block_argmax(line, start, stop)
                maxima[row * max_stride + block] = value
            elif double:
                wide, index = noised_argmax64(line, start, stop, divisor, prefix, second)
                maxima[row * max_stride + block] = wide
            else:
                value, index = noised_argmax32(line, start, stop, divisor, prefix)
                maxima[row * max_stride + block] = value
            argmax[row * argmax_stride + block] = start + index


def gumbel_sample(
    grid: Any,
    local_argmax_ptr,
    local_argmax_stride,
    local_max_ptr,
    local_max_stride,
    logits_cache_ptr,
    logits_cache_stride_0,
    logits_cache_stride_1,
    logits_cache_col_ptr,
    logits_cache_source_ptr,
    logits_cache_source_stride,
    logits_ptr,
    logits_stride,
    expanded_idx_mapping_ptr,
    seeds_ptr,
    pos_ptr,
    temp_ptr,
    vocab_size,
    BLOCK_SIZE,
    IS_DRAFTING,
    APPLY_TEMPERATURE,
    USE_FP64,
    PER_TOKEN_COL,
) -> None:
    """Per block of the vocabulary, the Gumbel-max winner (plain argmax at temperature 0) and its score.

    Writes the drafter's logits into the cache that the rejection sampler reads, where there is one.
    """
    logits = memory(logits_ptr)
    if logits_cache_ptr is None:
        cache = source = logits[:0]
        columns = nothing(torch.int64)
    else:
        cache, source, columns = memory(logits_cache_ptr), memory(logits_cache_source_ptr), memory(logits_cache_col_ptr)
    _gumbel(
        grid[0],
        grid[1],
        memory(local_argmax_ptr),
        local_argmax_stride,
        memory(local_max_ptr),
        local_max_stride,
        cache,
        logits_cache_stride_0,
        logits_cache_stride_1,
        columns,
        source,
        logits_cache_source_stride,
        logits,
        logits_stride,
        memory(expanded_idx_mapping_ptr),
        memory(seeds_ptr),
        memory(pos_ptr),
        memory(temp_ptr),
        vocab_size,
        BLOCK_SIZE,
        bool(IS_DRAFTING),
        bool(APPLY_TEMPERATURE),
        bool(USE_FP64),
        bool(PER_TOKEN_COL),
    )


@jit
def _min_p(rows, logits, stride, requests, min_p, vocab):
    for row in range(rows):
        share = np.float32(min_p[requests[row]])
        if share == 0.0:
            continue
        line = logits[row * stride : row * stride + vocab]
        maximum, _ = block_argmax(line, 0, vocab)
        threshold = maximum + np.log(share)
        for i in range(vocab):
            if as_float(line[i]) < threshold:
                line[i] = stored_infinity(logits)


def min_p(grid: Any, logits_ptr, logits_stride, expanded_idx_mapping_ptr, min_p_ptr, vocab_size, BLOCK_SIZE) -> None:
    """Mask tokens whose probability is below a share of the most likely token's, in place."""
    _min_p(grid[0], memory(logits_ptr), logits_stride, memory(expanded_idx_mapping_ptr), memory(min_p_ptr), vocab_size)


@numba.njit(inline="always")
def _mask_word(logits, base, word, count, infinity):
    """Mask `count` logits from `base` whose bit in `word` is clear."""
    if word == np.uint32(0):
        for bit in range(count):
            logits[base + bit] = infinity
    elif word != np.uint32(0xFFFFFFFF):
        for bit in range(count):
            if not (word >> np.uint32(bit)) & np.uint32(1):
                logits[base + bit] = infinity


@jit
def _bitmask(masks, logits, stride, mapping, cu_logits, bitmask, bitmask_stride, vocab, mask_stride):
    infinity = stored_infinity(logits)
    for i in range(masks):
        request, position = mapping[i] // mask_stride, mapping[i] % mask_stride
        first = np.int64(cu_logits[request])
        if position >= cu_logits[request + 1] - first:
            continue
        base, words = (first + position) * stride, i * bitmask_stride
        for word in range((vocab + 31) // 32):
            # Triton reads no words past the row; its interpreter fills zeros, which mask everything.
            bits = np.uint32(bitmask[words + word]) if word < bitmask_stride else np.uint32(0)
            _mask_word(logits, base + 32 * word, bits, min(32, vocab - 32 * word), infinity)


def apply_grammar_bitmask(
    grid: Any,
    logits_ptr,
    logits_stride,
    logits_indices_ptr,
    cu_num_logits_ptr,
    bitmask_ptr,
    bitmask_stride,
    vocab_size,
    MASK_STRIDE,
    BLOCK_SIZE,
) -> None:
    """Set to -inf, in place, the logits of the tokens that a row's grammar forbids."""
    _bitmask(
        grid[0],
        memory(logits_ptr),
        logits_stride,
        memory(logits_indices_ptr),
        memory(cu_num_logits_ptr),
        memory(bitmask_ptr),
        bitmask_stride,
        vocab_size,
        MASK_STRIDE,
    )


KERNELS = {
    "vllm.v1.worker.gpu.sample.gumbel._temperature_kernel": temperature,
    "vllm.v1.worker.gpu.sample.gumbel._gumbel_sample_kernel": gumbel_sample,
    "vllm.v1.worker.gpu.sample.min_p._min_p_kernel": min_p,
    "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
}
