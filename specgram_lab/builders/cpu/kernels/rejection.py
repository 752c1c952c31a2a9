# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels of the rejection sampler: statistics of the logits, acceptance, resampling."""

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
    max_and_sumexp,
    memory,
    nothing,
)
from specgram_lab.builders.cpu.kernels.random import (
    GUMBEL32_LIMIT,
    gumbel32,
    gumbel32_bound,
    murmur_hash,
    murmur_prefix,
    philox_uniform,
    uniform64,
)

_SECOND_DOMAIN = 0x9E3779B9
WHOLE_TARGET, WITHOUT_DRAFT_TOKEN, DRAFT_RESIDUAL = 0, 1, 2
"""What a rejected or bonus token is drawn from: the target, the target less one token, max(p - q, 0)."""


@jit
def _stats(
    rows,
    blocks,
    block_size,
    argmax,
    argmax_stride,
    t_max,
    t_max_stride,
    t_sum,
    t_sum_stride,
    d_max,
    d_max_stride,
    d_sum,
    d_sum_stride,
    target,
    target_stride,
    draft,
    draft_stride_0,
    draft_stride_1,
    requests,
    local,
    temperatures,
    vocab,
    steps,
    has_draft,
):
    one = np.float32(1.0)
    for row in range(rows):
        step = np.int64(local[row])
        if step >= steps:
            continue
        request = np.int64(requests[row])
        temperature = np.float32(temperatures[request])
        line = target[row * target_stride : row * target_stride + vocab]
        offset = request * draft_stride_0 + step * draft_stride_1
        for block in range(blocks):
            start, stop = block * block_size, min((block + 1) * block_size, vocab)
            if temperature == 0.0:
                value, index = block_argmax(line, start, stop)
                t_max[row * t_max_stride + block] = value
                argmax[row * argmax_stride + block] = start + index
                continue
            value, total = max_and_sumexp(line, start, stop, one)
            t_max[row * t_max_stride + block] = value
            t_sum[row * t_sum_stride + block] = total
            if has_draft:
                value, total = max_and_sumexp(draft[offset : offset + vocab], start, stop, temperature)
                d_max[row * d_max_stride + block] = value
                d_sum[row * d_sum_stride + block] = total


def compute_local_logits_stats(
    grid: Any,
    target_local_argmax_ptr,
    target_local_argmax_stride,
    target_local_max_ptr,
    target_local_max_stride,
    target_local_sumexp_ptr,
    target_local_sumexp_stride,
    draft_local_max_ptr,
    draft_local_max_stride,
    draft_local_sumexp_ptr,
    draft_local_sumexp_stride,
    target_logits_ptr,
    target_logits_stride,
    draft_logits_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    temp_ptr,
    vocab_size,
    num_speculative_steps,
    BLOCK_SIZE,
    HAS_DRAFT_LOGITS,
) -> None:
    """Per block of the vocabulary: argmax for greedy rows, maximum and sum of exponentials for the others."""
    target = memory(target_logits_ptr)
    draft = memory(draft_logits_ptr) if HAS_DRAFT_LOGITS else target[:0]
    _stats(
        grid[0],
        grid[1],
        BLOCK_SIZE,
        memory(target_local_argmax_ptr),
        target_local_argmax_stride,
        memory(target_local_max_ptr),
        target_local_max_stride,
        memory(target_local_sumexp_ptr),
        target_local_sumexp_stride,
        memory(draft_local_max_ptr),
        draft_local_max_stride,
        memory(draft_local_sumexp_ptr),
        draft_local_sumexp_stride,
        target,
        target_logits_stride,
        draft,
        draft_logits_stride_0,
        draft_logits_stride_1,
        memory(expanded_idx_mapping_ptr),
        memory(expanded_local_pos_ptr),
        memory(temp_ptr),
        vocab_size,
        num_speculative_steps,
        bool(HAS_DRAFT_LOGITS),
    )


@numba.njit(inline="always")
def logsumexp(maxima, max_stride, sums, sum_stride, row, blocks):
    """log of the sum of exponentials of a row, from its blocks' maxima and sums."""
    maximum = NEGATIVE_INFINITY
    for block in range(blocks):
        value = maxima[row * max_stride + block]
        if value > maximum:
            maximum = value
    total = np.float32(0.0)
    for block in range(blocks):
        total += sums[row * sum_stride + block] * np.exp(maxima[row * max_stride + block] - maximum)
    return maximum + np.log(total)


@numba.njit(inline="always")
def _target_argmax(maxima, max_stride, argmax, argmax_stride, row, blocks):
    best, where = NEGATIVE_INFINITY, 0
    for block in range(blocks):
        value = maxima[row * max_stride + block]
        if value > best:
            best, where = value, block
    return np.int64(argmax[row * argmax_stride + where])


@jit
def _reject(
    num_reqs,
    sampled,
    sampled_stride,
    accepted_steps,
    t_lse_out,
    d_lse_out,
    target,
    target_stride,
    argmax,
    argmax_stride,
    t_max,
    t_max_stride,
    t_sum,
    t_sum_stride,
    drafted,
    draft,
    draft_stride_0,
    draft_stride_1,
    d_max,
    d_max_stride,
    d_sum,
    d_sum_stride,
    cu_logits,
    requests,
    temperatures,
    seeds,
    positions,
    rates,
    log_p,
    mass,
    mass_stride,
    blocks,
    has_draft,
    synthetic,
    by_block,
):
    for batch in range(num_reqs):
        request, first = np.int64(requests[batch]), np.int64(cu_logits[batch])
        num_drafts = np.int64(cu_logits[batch + 1]) - first - 1
        seed, temperature = np.int64(seeds[request]), np.float32(temperatures[request])
        greedy = temperature == 0.0
        accepted = np.int64(0)
        t_lse, d_lse = np.float32(0.0), np.float32(0.0)
        for i in range(num_drafts):
            row = first + i
            valid = drafted[row + 1] >= 0
            token = max(np.int64(0), np.int64(drafted[row + 1]))
            if not greedy and not valid:
                break
            u = philox_uniform(seed, np.int64(positions[row]))
            if by_block and not greedy:
                prefix = np.exp(np.float32(log_p[row]))
                threshold = prefix
                following = np.int64(drafted[row + 2]) if i < num_drafts - 1 else np.int64(-1)
                if following >= 0:
                    if has_draft:
                        rest = np.float32(0.0)
                        for block in range(blocks):
                            rest += mass[(row + 1) * mass_stride + block]
                    else:
                        lse = logsumexp(t_max, t_max_stride, t_sum, t_sum_stride, row + 1, blocks)
                        logit = as_float(target[(row + 1) * target_stride + following])
                        rest = prefix * (np.float32(1.0) - np.exp(logit - lse))
                    bottom = rest + np.float32(1.0) - prefix
                    threshold = rest / bottom if bottom > 0.0 else np.float32(1.0)
                if u <= threshold:
                    accepted = np.int64(i + 1)
                sampled[batch * sampled_stride + i] = token
                continue
            if greedy:
                best = _target_argmax(t_max, t_max_stride, argmax, argmax_stride, row, blocks)
                accept = valid and (u < rates[i] if synthetic else best == token)
                sampled[batch * sampled_stride + i] = token if accept else best
            else:
                t_lse = logsumexp(t_max, t_max_stride, t_sum, t_sum_stride, row, blocks)
                t_logprob = as_float(target[row * target_stride + token]) - t_lse
                d_logprob, d_lse = np.float32(0.0), np.float32(0.0)
                if has_draft:
                    d_lse = logsumexp(d_max, d_max_stride, d_sum, d_sum_stride, row, blocks)
                    logit = as_float(draft[request * draft_stride_0 + i * draft_stride_1 + token])
                    d_logprob = logit / temperature - d_lse
                accept = u < rates[i] if synthetic else t_logprob > np.log(u) + d_logprob
                sampled[batch * sampled_stride + i] = token
            if not accept:
                break
            accepted += 1
        accepted_steps[batch] = accepted
        if by_block and not greedy and accepted < num_drafts:
            t_lse = logsumexp(t_max, t_max_stride, t_sum, t_sum_stride, first + accepted, blocks)
            if has_draft:
                d_lse = logsumexp(d_max, d_max_stride, d_sum, d_sum_stride, first + accepted, blocks)
        t_lse_out[batch] = t_lse
        d_lse_out[batch] = d_lse


def rejection(
    grid: Any,
    sampled_ptr,
    sampled_stride,
    rejected_steps_ptr,
    target_rejected_logsumexp_ptr,
    draft_rejected_logsumexp_ptr,
    target_logits_ptr,
    target_logits_stride,
    target_local_argmax_ptr,
    target_local_argmax_stride,
    target_local_max_ptr,
    target_local_max_stride,
    target_local_sumexp_ptr,
    target_local_sumexp_stride,
    draft_sampled_ptr,
    draft_logits_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    draft_local_max_ptr,
    draft_local_max_stride,
    draft_local_sumexp_ptr,
    draft_local_sumexp_stride,
    cu_num_logits_ptr,
    idx_mapping_ptr,
    temp_ptr,
    seed_ptr,
    pos_ptr,
    synthetic_conditional_rates_ptr,
    cumulative_log_p_ptr,
    local_residual_mass_ptr,
    local_residual_mass_stride,
    vocab_num_blocks,
    PADDED_VOCAB_NUM_BLOCKS,
    HAS_DRAFT_LOGITS,
    SYNTHETIC_MODE,
    USE_BLOCK_VERIFICATION,
) -> None:
    """Accept each request's drafts up to the first rejection (or the longest accepted block)."""
    target = memory(target_logits_ptr)
    absent = nothing(torch.float32)
    _reject(
        grid[0],
        memory(sampled_ptr),
        sampled_stride,
        memory(rejected_steps_ptr),
        memory(target_rejected_logsumexp_ptr),
        memory(draft_rejected_logsumexp_ptr),
        target,
        target_logits_stride,
        memory(target_local_argmax_ptr),
        target_local_argmax_stride,
        memory(target_local_max_ptr),
        target_local_max_stride,
        memory(target_local_sumexp_ptr),
        target_local_sumexp_stride,
        memory(draft_sampled_ptr),
        memory(draft_logits_ptr) if HAS_DRAFT_LOGITS else target[:0],
        draft_logits_stride_0,
        draft_logits_stride_1,
        memory(draft_local_max_ptr),
        draft_local_max_stride,
        memory(draft_local_sumexp_ptr),
        draft_local_sumexp_stride,
        memory(cu_num_logits_ptr),
        memory(idx_mapping_ptr),
        memory(temp_ptr),
        memory(seed_ptr),
        memory(pos_ptr),
        memory(synthetic_conditional_rates_ptr) if SYNTHETIC_MODE else absent,
        memory(cumulative_log_p_ptr) if USE_BLOCK_VERIFICATION else absent,
        absent if local_residual_mass_ptr is None else memory(local_residual_mass_ptr),
        local_residual_mass_stride,
        vocab_num_blocks,
        bool(HAS_DRAFT_LOGITS),
        bool(SYNTHETIC_MODE),
        bool(USE_BLOCK_VERIFICATION),
    )


@jit
def _residual_argmax32(target, draft, start, stop, mode, excluded, t_lse, d_lse, log_p, temperature, prefix):
    """Gumbel-max draw from one block of the residual; see sampling.noised_argmax32 for the skipping."""
    best, where = NEGATIVE_INFINITY, 0
    for i in range(start, stop):
        logit = as_float(target[i])
        if mode == DRAFT_RESIDUAL:
            logit = (logit - t_lse) + log_p
        elif mode == WITHOUT_DRAFT_TOKEN and i == excluded:
            continue
        if not logit + GUMBEL32_LIMIT > best:
            continue
        hashed = murmur_hash(prefix, np.uint32(i))
        if not logit + gumbel32_bound(hashed) > best:
            continue
        if mode == DRAFT_RESIDUAL:
            ratio = np.exp((as_float(draft[i]) / temperature - d_lse) - logit)
            if not ratio < 1.0:
                continue
            logit = logit + np.log1p(-ratio)
        value = logit + gumbel32(hashed)
        if value > best:
            best, where = value, i - start
    return best, where


@jit
def _residual_argmax64(target, draft, start, stop, mode, excluded, t_lse, d_lse, log_p, temperature, prefix, second):
    """As :func:`_residual_argmax32`, with float64 noise."""
    best, where = -np.inf, 0
    for i in range(start, stop):
        logit = as_float(target[i])
        if mode == DRAFT_RESIDUAL:
            logit = (logit - t_lse) + log_p
            ratio = np.exp((as_float(draft[i]) / temperature - d_lse) - logit)
            if not ratio < 1.0:
                continue
            logit = logit + np.log1p(-ratio)
        elif mode == WITHOUT_DRAFT_TOKEN and i == excluded:
            continue
        uniform = uniform64(murmur_hash(prefix, np.uint32(i)), murmur_hash(second, np.uint32(i)))
        value = np.float64(logit) - np.log(-np.log(uniform))
        if value > best:
            best, where = value, i - start
    return best, where


@jit
def _resample(
    num_reqs,
    blocks,
    block_size,
    argmax,
    argmax_stride,
    maxima,
    max_stride,
    target,
    target_stride,
    t_lse,
    draft,
    draft_stride_0,
    draft_stride_1,
    d_lse,
    steps,
    cu_logits,
    requests,
    drafted,
    temperatures,
    seeds,
    positions,
    log_p,
    vocab,
    has_draft,
    double,
    by_block,
):
    for batch in range(num_reqs):
        step = np.int64(steps[batch])
        row = np.int64(cu_logits[batch]) + step
        request = np.int64(requests[row])
        temperature = np.float32(temperatures[request])
        bonus = row == np.int64(cu_logits[batch + 1]) - 1
        if temperature == 0.0 and not bonus:
            continue
        excluded = np.int64(0) if bonus else np.int64(drafted[row + 1])
        mode = DRAFT_RESIDUAL if has_draft else WITHOUT_DRAFT_TOKEN
        if bonus or excluded < 0:
            mode = WHOLE_TARGET
        shift = np.float32(0.0)
        if by_block and step > 0 and mode == DRAFT_RESIDUAL:
            shift = np.float32(log_p[row - 1])
        line = target[row * target_stride : row * target_stride + vocab]
        offset = request * draft_stride_0 + step * draft_stride_1
        proposal = draft[offset : offset + vocab] if mode == DRAFT_RESIDUAL else draft[:0]
        prefix = murmur_prefix(np.int64(seeds[request]), np.int64(positions[row]), 0)
        second = murmur_prefix(np.int64(seeds[request]), np.int64(positions[row]), _SECOND_DOMAIN)
        for block in range(blocks):
            start, stop = block * block_size, min((block + 1) * block_size, vocab)
            if temperature == 0.0:
                value, index = block_argmax(line, start, stop)
                maxima[batch * max_stride + block] = value
            elif double:
                wide, index = _residual_argmax64(
                    line,
                    proposal,
                    start,
                    stop,
                    mode,
                    excluded,
                    t_lse[batch],
                    d_lse[batch],
                    shift,
                    temperature,
                    prefix,
                    second,
                )
                maxima[batch * max_stride + block] = wide
            else:
                value, index = _residual_argmax32(
                    line, proposal, start, stop, mode, excluded, t_lse[batch], d_lse[batch], shift, temperature, prefix
                )
                maxima[batch * max_stride + block] = value
            argmax[batch * argmax_stride + block] = start + index


def resample(
    grid: Any,
    resampled_local_argmax_ptr,
    resampled_local_argmax_stride,
    resampled_local_max_ptr,
    resampled_local_max_stride,
    target_logits_ptr,
    target_logits_stride,
    target_rejected_logsumexp_ptr,
    draft_logits_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    draft_rejected_logsumexp_ptr,
    rejected_step_ptr,
    cu_num_logits_ptr,
    expanded_idx_mapping_ptr,
    draft_sampled_ptr,
    temp_ptr,
    seed_ptr,
    pos_ptr,
    cumulative_log_p_ptr,
    contexts_ptr,
    contexts_stride,
    watermarking_ptr,
    watermarking_skip_mask_ptr,
    watermark_key_0,
    watermark_key_1,
    vocab_size,
    BLOCK_SIZE,
    HAS_DRAFT_LOGITS,
    USE_FP64,
    USE_BLOCK_VERIFICATION,
    CONTEXT_WIDTH,
    WATERMARK,
    DEDUPLICATE_CONTEXTS,
) -> None:
    """Draw the token after the accepted drafts, block by block of the vocabulary."""
    if WATERMARK:
        raise Interpreted("watermarked sampling is not covered by the native kernels")
    target = memory(target_logits_ptr)
    _resample(
        grid[0],
        grid[1],
        BLOCK_SIZE,
        memory(resampled_local_argmax_ptr),
        resampled_local_argmax_stride,
        memory(resampled_local_max_ptr),
        resampled_local_max_stride,
        target,
        target_logits_stride,
        memory(target_rejected_logsumexp_ptr),
        memory(draft_logits_ptr) if HAS_DRAFT_LOGITS else target[:0],
        draft_logits_stride_0,
        draft_logits_stride_1,
        memory(draft_rejected_logsumexp_ptr),
        memory(rejected_step_ptr),
        memory(cu_num_logits_ptr),
        memory(expanded_idx_mapping_ptr),
        memory(draft_sampled_ptr),
        memory(temp_ptr),
        memory(seed_ptr),
        memory(pos_ptr),
        memory(cumulative_log_p_ptr) if USE_BLOCK_VERIFICATION else nothing(torch.float32),
        vocab_size,
        bool(HAS_DRAFT_LOGITS),
        bool(USE_FP64),
        bool(USE_BLOCK_VERIFICATION),
    )


@jit
def _insert(
    num_reqs,
    sampled,
    sampled_stride,
    num_sampled,
    argmax,
    argmax_stride,
    maxima,
    max_stride,
    blocks,
    cu_logits,
    requests,
    temperatures,
):
    for batch in range(num_reqs):
        count = np.int64(num_sampled[batch])
        row = np.int64(cu_logits[batch]) + count
        num_sampled[batch] = count + 1
        if temperatures[requests[row]] == 0.0 and row != np.int64(cu_logits[batch + 1]) - 1:
            continue
        best, where = -np.inf, 0
        for block in range(blocks):
            value = np.float64(maxima[batch * max_stride + block])
            if value > best:
                best, where = value, block
        sampled[batch * sampled_stride + count] = argmax[batch * argmax_stride + where]


def insert_resampled(
    grid: Any,
    sampled_ptr,
    sampled_stride,
    num_sampled_ptr,
    resampled_local_argmax_ptr,
    resampled_local_argmax_stride,
    resampled_local_max_ptr,
    resampled_local_max_stride,
    resample_num_blocks,
    cu_num_logits_ptr,
    expanded_idx_mapping_ptr,
    temp_ptr,
    PADDED_RESAMPLE_NUM_BLOCKS,
) -> None:
    """Append the winner over all blocks to each request's accepted drafts."""
    _insert(
        grid[0],
        memory(sampled_ptr),
        sampled_stride,
        memory(num_sampled_ptr),
        memory(resampled_local_argmax_ptr),
        resampled_local_argmax_stride,
        memory(resampled_local_max_ptr),
        resampled_local_max_stride,
        resample_num_blocks,
        memory(cu_num_logits_ptr),
        memory(expanded_idx_mapping_ptr),
        memory(temp_ptr),
    )


_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils."
KERNELS = {
    _UTILS + "_compute_local_logits_stats_kernel": compute_local_logits_stats,
    _UTILS + "_rejection_kernel": rejection,
    _UTILS + "_resample_kernel": resample,
    _UTILS + "_insert_resampled_kernel": insert_resampled,
}
