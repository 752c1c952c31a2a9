# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels around the rejection sampler: gathering drafts, flattening samples, block verification."""

from __future__ import annotations

from typing import Any

import numpy as np

from specgram_lab.builders.cpu.kernels.numeric import as_float, exp32, jit, memory
from specgram_lab.builders.cpu.kernels.rejection import logsumexp


@jit
def _flatten(num_reqs, flat, sampled, stride, num_sampled, cu_logits):
    for batch in range(num_reqs):
        for i in range(num_sampled[batch]):
            flat[cu_logits[batch] + i] = sampled[batch * stride + i]


def flatten_sampled(
    grid: Any, flat_sampled_ptr, sampled_ptr, sampled_stride, num_sampled_ptr, cu_num_logits_ptr
) -> None:
    """Lay the sampled tokens of all requests out by logits row."""
    _flatten(
        grid[0],
        memory(flat_sampled_ptr),
        memory(sampled_ptr),
        sampled_stride,
        memory(num_sampled_ptr),
        memory(cu_num_logits_ptr),
    )


@jit
def _gather(count, drafted, out_positions, input_ids, positions, indices, requests, local, prefill_lens):
    for row in range(count):
        token, position = indices[row], positions[indices[row]]
        # A draft in a step that starts within the prefill is a placeholder and must be rejected.
        placeholder = local[row] > 0 and position - local[row] < prefill_lens[requests[row]]
        drafted[row] = -1 if placeholder else input_ids[token]
        out_positions[row] = position


def gather_draft_sampled(
    grid: Any,
    draft_sampled_ptr,
    pos_ptr,
    input_ids_ptr,
    positions_ptr,
    logits_indices_ptr,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    prefill_len_ptr,
    num_logits,
    BLOCK_SIZE,
) -> None:
    """Input token and position of every logits row; -1 for drafts that stand within a prefill."""
    _gather(
        num_logits,
        memory(draft_sampled_ptr),
        memory(pos_ptr),
        memory(input_ids_ptr),
        memory(positions_ptr),
        memory(logits_indices_ptr),
        memory(expanded_idx_mapping_ptr),
        memory(expanded_local_pos_ptr),
        memory(prefill_len_ptr),
    )


@jit
def _cumulative(
    num_reqs,
    out,
    target,
    target_stride,
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
    blocks,
    has_draft,
):
    for batch in range(num_reqs):
        request, first = np.int64(requests[batch]), np.int64(cu_logits[batch])
        temperature = np.float32(temperatures[request])
        if temperature == 0.0:
            continue
        log_p = np.float32(0.0)
        for step in range(np.int64(cu_logits[batch + 1]) - first - 1):
            row = first + step
            token = np.int64(drafted[row + 1])
            if token >= 0:
                gain = as_float(target[row * target_stride + token]) - logsumexp(
                    t_max, t_max_stride, t_sum, t_sum_stride, row, blocks
                )
                if has_draft:
                    logit = as_float(draft[request * draft_stride_0 + step * draft_stride_1 + token]) / temperature
                    gain = gain - (logit - logsumexp(d_max, d_max_stride, d_sum, d_sum_stride, row, blocks))
                log_p = min(log_p + gain, np.float32(0.0))
            out[row] = log_p


def compute_cumulative_log_p(
    grid: Any,
    cumulative_log_p_ptr,
    target_logits_ptr,
    target_logits_stride,
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
    vocab_num_blocks,
    PADDED_VOCAB_NUM_BLOCKS,
    HAS_DRAFT_LOGITS,
) -> None:
    """log of the running joint ratio of target to draft, capped at 1 after every draft."""
    target = memory(target_logits_ptr)
    _cumulative(
        grid[0],
        memory(cumulative_log_p_ptr),
        target,
        target_logits_stride,
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
        vocab_num_blocks,
        bool(HAS_DRAFT_LOGITS),
    )


@jit
def _residual_mass(
    rows,
    blocks,
    block_size,
    out,
    out_stride,
    log_p,
    target,
    target_stride,
    t_max,
    t_max_stride,
    t_sum,
    t_sum_stride,
    draft,
    draft_stride_0,
    draft_stride_1,
    d_max,
    d_max_stride,
    d_sum,
    d_sum_stride,
    drafted,
    requests,
    local,
    temperatures,
    vocab,
    steps,
    stat_blocks,
):
    for row in range(rows - 1):
        step, request = np.int64(local[row]), np.int64(requests[row])
        if step == 0 or step >= steps or drafted[row + 1] < 0:
            continue
        temperature = np.float32(temperatures[request])
        if temperature == 0.0:
            continue
        t_lse = logsumexp(t_max, t_max_stride, t_sum, t_sum_stride, row, stat_blocks)
        d_lse = logsumexp(d_max, d_max_stride, d_sum, d_sum_stride, row, stat_blocks)
        ratio = np.exp(np.float32(log_p[row - 1]))
        t_base, d_base = row * target_stride, request * draft_stride_0 + step * draft_stride_1
        for block in range(blocks):
            total = 0.0
            for i in range(block * block_size, min((block + 1) * block_size, vocab)):
                from_target = ratio * exp32(as_float(target[t_base + i]) - t_lse)
                from_draft = exp32(as_float(draft[d_base + i]) / temperature - d_lse)
                total += max(from_target - from_draft, np.float32(0.0))
            out[row * out_stride + block] = total


def compute_local_residual_mass(
    grid: Any,
    local_residual_mass_ptr,
    local_residual_mass_stride,
    cumulative_log_p_ptr,
    target_logits_ptr,
    target_logits_stride,
    target_local_max_ptr,
    target_local_max_stride,
    target_local_sumexp_ptr,
    target_local_sumexp_stride,
    draft_logits_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    draft_local_max_ptr,
    draft_local_max_stride,
    draft_local_sumexp_ptr,
    draft_local_sumexp_stride,
    draft_sampled_ptr,
    expanded_idx_mapping_ptr,
    expanded_local_pos_ptr,
    temp_ptr,
    vocab_size,
    num_speculative_steps,
    vocab_num_blocks,
    BLOCK_SIZE,
    PADDED_VOCAB_NUM_BLOCKS,
) -> None:
    """Per block of the vocabulary, the sum of max(p * target - draft, 0) that block verification needs."""
    _residual_mass(
        grid[0],
        grid[1],
        BLOCK_SIZE,
        memory(local_residual_mass_ptr),
        local_residual_mass_stride,
        memory(cumulative_log_p_ptr),
        memory(target_logits_ptr),
        target_logits_stride,
        memory(target_local_max_ptr),
        target_local_max_stride,
        memory(target_local_sumexp_ptr),
        target_local_sumexp_stride,
        memory(draft_logits_ptr),
        draft_logits_stride_0,
        draft_logits_stride_1,
        memory(draft_local_max_ptr),
        draft_local_max_stride,
        memory(draft_local_sumexp_ptr),
        draft_local_sumexp_stride,
        memory(draft_sampled_ptr),
        memory(expanded_idx_mapping_ptr),
        memory(expanded_local_pos_ptr),
        memory(temp_ptr),
        vocab_size,
        num_speculative_steps,
        vocab_num_blocks,
    )


_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler."
_UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils."
KERNELS = {
    _SAMPLER + "_flatten_sampled_kernel": flatten_sampled,
    _SAMPLER + "_gather_draft_sampled_kernel": gather_draft_sampled,
    _UTILS + "_compute_cumulative_log_p_kernel": compute_cumulative_log_p,
    _UTILS + "_compute_local_residual_mass_kernel": compute_local_residual_mass,
}
