# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels of the autoregressive drafters: own draft model, EAGLE and MTP, n-gram lookup."""

from __future__ import annotations

from typing import Any

import numpy as np

from specgram_lab.builders.cpu.kernels.numeric import jit, memory


@jit
def _standalone(
    num_reqs,
    target_ids,
    target_positions,
    last_sampled,
    requests,
    input_ids,
    positions,
    last_indices,
    out_start,
    out_seq_lens,
    query_start,
    seq_lens,
    num_rejected,
    max_reqs,
    max_len,
):
    total = np.int64(0)
    for batch in range(num_reqs):
        start, end = np.int64(query_start[batch]), np.int64(query_start[batch + 1])
        valid = end - start - np.int64(num_rejected[batch])
        first = np.int64(target_positions[start])
        base = start + batch
        for i in range(end - start + 1):
            token = np.int64(target_ids[start + i]) if i < valid else np.int64(0)
            input_ids[base + i] = np.int64(last_sampled[requests[batch]]) if i == valid else token
            positions[base + i] = min(first + i, max_len - 1)
        last_indices[batch] = base + valid
        out_start[batch] = base
        out_seq_lens[batch] = min(np.int64(seq_lens[batch]) + 1, max_len)
        total = base + end - start + 1
    for i in range(num_reqs, max_reqs + 1):
        out_start[i] = total
    for i in range(num_reqs, max_reqs):
        out_seq_lens[i] = 0
        last_indices[i] = 0


def standalone_prefill(
    grid: Any,
    target_input_ids_ptr,
    target_positions_ptr,
    last_sampled_ptr,
    idx_mapping_ptr,
    out_input_ids_ptr,
    out_positions_ptr,
    last_token_indices_ptr,
    out_query_start_loc_ptr,
    out_seq_lens_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_rejected_ptr,
    max_num_reqs,
    max_model_len,
    BLOCK_SIZE,
) -> None:
    """Accepted tokens, the correction token, and blanks for the rejected ones, one row longer per request."""
    _standalone(
        grid[0],
        memory(target_input_ids_ptr),
        memory(target_positions_ptr),
        memory(last_sampled_ptr),
        memory(idx_mapping_ptr),
        memory(out_input_ids_ptr),
        memory(out_positions_ptr),
        memory(last_token_indices_ptr),
        memory(out_query_start_loc_ptr),
        memory(out_seq_lens_ptr),
        memory(query_start_loc_ptr),
        memory(seq_lens_ptr),
        memory(num_rejected_ptr),
        max_num_reqs,
        max_model_len,
    )


@jit
def _dependent_prefill(
    num_reqs,
    last_indices,
    draft_step,
    input_ids,
    positions,
    out_start,
    out_seq_lens,
    target_ids,
    target_positions,
    requests,
    last_sampled,
    next_prefill,
    num_sampled,
    num_rejected,
    query_start,
    seq_lens,
    max_reqs,
):
    for batch in range(num_reqs):
        request, start = np.int64(requests[batch]), np.int64(query_start[batch])
        length = np.int64(query_start[batch + 1]) - start - np.int64(num_rejected[batch])
        for i in range(1, length):
            input_ids[start + i - 1] = target_ids[start + i]
        last = start + length - 1
        last_indices[batch] = last
        input_ids[last] = np.int64(last_sampled[request] if num_sampled[batch] > 0 else next_prefill[request])
        for i in range(length):
            positions[start + i] = target_positions[start + i]
        out_start[batch] = start
        out_seq_lens[batch] = seq_lens[batch]
    draft_step[0] = 0
    for i in range(num_reqs, max_reqs + 1):
        out_start[i] = query_start[num_reqs]
    for i in range(num_reqs, max_reqs):
        out_seq_lens[i] = 0
        last_indices[i] = 0


def dependent_prefill(
    grid: Any,
    last_token_indices_ptr,
    draft_current_step_ptr,
    draft_input_ids_ptr,
    draft_positions_ptr,
    draft_query_start_loc_ptr,
    draft_seq_lens_ptr,
    target_input_ids_ptr,
    target_positions_ptr,
    idx_mapping_ptr,
    last_sampled_ptr,
    next_prefill_tokens_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    max_num_reqs,
    BLOCK_SIZE,
) -> None:
    """The target's tokens shifted left by one, closed with the token sampled last (EAGLE, MTP)."""
    _dependent_prefill(
        grid[0],
        memory(last_token_indices_ptr),
        memory(draft_current_step_ptr),
        memory(draft_input_ids_ptr),
        memory(draft_positions_ptr),
        memory(draft_query_start_loc_ptr),
        memory(draft_seq_lens_ptr),
        memory(target_input_ids_ptr),
        memory(target_positions_ptr),
        memory(idx_mapping_ptr),
        memory(last_sampled_ptr),
        memory(next_prefill_tokens_ptr),
        memory(num_sampled_ptr),
        memory(num_rejected_ptr),
        memory(query_start_loc_ptr),
        memory(seq_lens_ptr),
        max_num_reqs,
    )


@jit
def _dependent_decode(
    num_reqs,
    drafts,
    drafts_stride,
    target_lens,
    num_rejected,
    input_ids,
    positions,
    sample_positions,
    query_start,
    seq_lens,
    max_len,
    max_reqs,
    advance,
):
    for batch in range(num_reqs):
        input_ids[batch] = drafts[batch * drafts_stride]
        sample_positions[batch] += 1
        length = np.int64(target_lens[batch]) - np.int64(num_rejected[batch])
        if advance:
            positions[batch] = min(np.int64(positions[batch]) + 1, max_len - 1)
            length = min(length + 1, max_len)
        seq_lens[batch] = length
    for i in range(max_reqs + 1):
        query_start[i] = min(i, num_reqs)
    for i in range(num_reqs, max_reqs):
        seq_lens[i] = 0


def dependent_decode(
    grid: Any,
    draft_tokens_ptr,
    draft_tokens_stride,
    target_seq_lens_ptr,
    num_rejected_ptr,
    input_ids_ptr,
    positions_ptr,
    sample_src_positions_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    max_model_len,
    max_num_reqs,
    BLOCK_SIZE,
    ADVANCE_DRAFT_POSITIONS,
) -> None:
    """Inputs of the first one-token drafting step."""
    _dependent_decode(
        grid[0] - 1,
        memory(draft_tokens_ptr),
        draft_tokens_stride,
        memory(target_seq_lens_ptr),
        memory(num_rejected_ptr),
        memory(input_ids_ptr),
        memory(positions_ptr),
        memory(sample_src_positions_ptr),
        memory(query_start_loc_ptr),
        memory(seq_lens_ptr),
        max_model_len,
        max_num_reqs,
        bool(ADVANCE_DRAFT_POSITIONS),
    )


@jit
def _update_drafts(
    num_reqs,
    out,
    out_stride,
    next_hidden,
    next_stride,
    input_ids,
    positions,
    sample_positions,
    seq_lens,
    drafts,
    draft_step,
    hidden,
    hidden_stride,
    hidden_size,
    max_len,
    steps,
    advance,
):
    step = np.int64(draft_step[0])
    for batch in range(num_reqs):
        out[batch * out_stride + step] = drafts[batch]
        if step >= steps - 1:
            continue
        sample_positions[batch] += 1
        input_ids[batch] = drafts[batch]
        for i in range(hidden_size):
            next_hidden[batch * next_stride + i] = hidden[batch * hidden_stride + i]
        if advance:
            positions[batch] = min(np.int64(positions[batch]) + 1, max_len - 1)
            seq_lens[batch] = min(np.int64(seq_lens[batch]) + 1, max_len)


def update_draft_inputs(
    grid: Any,
    output_draft_tokens_ptr,
    output_draft_tokens_stride,
    next_input_hidden_states_ptr,
    next_input_hidden_states_stride,
    input_ids_ptr,
    positions_ptr,
    sample_src_positions_ptr,
    seq_lens_ptr,
    draft_tokens_ptr,
    current_draft_step_ptr,
    hidden_states_ptr,
    hidden_states_stride,
    hidden_size,
    max_model_len,
    num_speculative_steps,
    BLOCK_SIZE,
    ADVANCE_DRAFT_POSITIONS,
) -> None:
    """Keep the sampled drafts and, unless they were the last, make them the next step's input."""
    _update_drafts(
        grid[0],
        memory(output_draft_tokens_ptr),
        output_draft_tokens_stride,
        memory(next_input_hidden_states_ptr),
        next_input_hidden_states_stride,
        memory(input_ids_ptr),
        memory(positions_ptr),
        memory(sample_src_positions_ptr),
        memory(seq_lens_ptr),
        memory(draft_tokens_ptr),
        memory(current_draft_step_ptr),
        memory(hidden_states_ptr),
        hidden_states_stride,
        hidden_size,
        max_model_len,
        num_speculative_steps,
        bool(ADVANCE_DRAFT_POSITIONS),
    )


@jit
def _scan(
    num_reqs,
    blocks,
    tokens,
    stride,
    requests,
    total_len,
    num_sampled,
    scratch,
    scratch_stride,
    limit,
    shortest,
    longest,
    block_size,
):
    for batch in range(num_reqs):
        row, length = np.int64(requests[batch]) * stride, np.int64(total_len[requests[batch]])
        for block in range(blocks):
            scratch[batch * scratch_stride + block] = 0
        if num_sampled[batch] <= 0 or length < shortest:
            continue
        for position in range(min(length - shortest, blocks * block_size)):
            # Longest suffix of the sequence that occurs at this position. The kernel compares the first n of
            # every length n anew; a match of length n says nothing about shorter ones, so this does too.
            for n in range(min(longest, length - 1 - position), shortest - 1, -1):
                matched = True
                for j in range(n):
                    if tokens[row + position + j] != tokens[row + length - n + j]:
                        matched = False
                        break
                if matched:
                    where = batch * scratch_stride + position // block_size
                    scratch[where] = max(np.int64(scratch[where]), n * (limit + 1) + position + 1)
                    break


def ngram_scan(
    grid: Any,
    token_ids_ptr,
    token_ids_stride,
    idx_mapping_ptr,
    total_len_ptr,
    num_sampled_ptr,
    scratch_ptr,
    scratch_stride,
    L,
    MIN_N,
    MAX_N,
    MAX_N_PO2,
    BLOCK_L,
) -> None:
    """Per block of positions, the longest (then rightmost) earlier occurrence of the sequence's suffix."""
    _scan(
        grid[0],
        grid[1],
        memory(token_ids_ptr),
        token_ids_stride,
        memory(idx_mapping_ptr),
        memory(total_len_ptr),
        memory(num_sampled_ptr),
        memory(scratch_ptr),
        scratch_stride,
        L,
        MIN_N,
        MAX_N,
        BLOCK_L,
    )


@jit
def _finalize(
    num_reqs,
    tokens,
    stride,
    requests,
    total_len,
    num_sampled,
    last_sampled,
    scratch,
    scratch_stride,
    drafts,
    limit,
    blocks,
    steps,
):
    for batch in range(num_reqs):
        request = np.int64(requests[batch])
        score = np.int64(0)
        for block in range(blocks):
            score = max(score, np.int64(scratch[batch * scratch_stride + block]))
        start = np.int64(0)
        if score > 0:
            n = (score - 1) // (limit + 1)
            start = score - 1 - n * (limit + 1) + n
        available = max(np.int64(total_len[request]) - start, np.int64(0))
        usable = num_sampled[batch] > 0 and score > 0
        for i in range(steps):
            found = usable and i < available
            token = np.int64(tokens[request * stride + min(start + i, limit - 1)]) if found else np.int64(0)
            drafts[batch * steps + i] = token if found else np.int64(last_sampled[request])


def ngram_finalize(
    grid: Any,
    token_ids_ptr,
    token_ids_stride,
    idx_mapping_ptr,
    total_len_ptr,
    num_sampled_ptr,
    last_sampled_ptr,
    scratch_ptr,
    scratch_stride,
    drafts_ptr,
    L,
    N_BLOCKS,
    K,
    K_PO2,
    N_BLOCKS_PO2,
) -> None:
    """Draft what followed the best occurrence; the last sampled token fills up."""
    _finalize(
        grid[0],
        memory(token_ids_ptr),
        token_ids_stride,
        memory(idx_mapping_ptr),
        memory(total_len_ptr),
        memory(num_sampled_ptr),
        memory(last_sampled_ptr),
        memory(scratch_ptr),
        scratch_stride,
        memory(drafts_ptr),
        L,
        N_BLOCKS,
        K,
    )


_DECODE = "vllm.v1.worker.gpu.spec_decode."
KERNELS = {
    _DECODE + "standalone_ar.speculator._prepare_prefill_inputs_kernel": standalone_prefill,
    _DECODE + "target_dependent_ar.speculator._prepare_prefill_inputs_kernel": dependent_prefill,
    _DECODE + "target_dependent_ar.speculator._prepare_decode_inputs_kernel": dependent_decode,
    _DECODE + "target_dependent_ar.speculator._update_draft_inputs_kernel": update_draft_inputs,
    _DECODE + "ngram.speculator._ngram_scan_kernel": ngram_scan,
    _DECODE + "ngram.speculator._ngram_finalize_kernel": ngram_finalize,
}
