# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels of the block drafters (DFlash, DFlash2, DSpark)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specgram_lab.builders.cpu.kernels.numeric import Interpreted, jit, memory
from specgram_lab.builders.cpu.kernels.random import (
    DRAFT_NOISE_SALT,
    gumbel32,
    murmur_hash,
    murmur_prefix,
    uniform64,
)

_SECOND_DOMAIN = 0x9E3779B9


@jit
def _slot(position, table, row, stride, block_size, pad):
    """KV slot of a position; block 0 is the null block and must not be written."""
    block = np.int64(table[row * stride + min(position // block_size, stride - 1)])
    return block * block_size + position % block_size if block != 0 else np.int64(pad)


@jit
def _prepare(
    num_reqs,
    span,
    input_ids,
    positions,
    query_start,
    seq_lens,
    query_slots,
    context_positions,
    context_slots,
    sample_indices,
    sample_positions,
    sample_requests,
    temperatures_out,
    seeds_out,
    target_positions,
    target_start,
    requests,
    last_sampled,
    next_prefill,
    num_sampled,
    num_rejected,
    temperatures,
    seeds,
    table,
    table_stride,
    mask_token,
    block_size,
    queries,
    steps,
    max_reqs,
    max_tokens,
    max_len,
    from_anchor,
    pad,
):
    first_sample = 0 if from_anchor else 1
    for batch in range(num_reqs):
        request = np.int64(requests[batch])
        start, end = np.int64(target_start[batch]), np.int64(target_start[batch + 1])
        valid_end = end - np.int64(num_rejected[batch])
        bonus = np.int64(last_sampled[request] if num_sampled[batch] > 0 else next_prefill[request])
        last = np.int64(target_positions[valid_end - 1])
        for i in range(start, min(end, start + span)):
            position, slot = np.int64(0), np.int64(pad)
            if i < valid_end:
                position = np.int64(target_positions[i])
                slot = _slot(position, table, batch, table_stride, block_size, pad)
            context_positions[i] = position
            context_slots[i] = slot
        base = batch * queries
        for j in range(min(queries, span - (valid_end - start))):
            position = last + 1 + j
            input_ids[base + j] = bonus if j == 0 else mask_token
            positions[base + j] = min(position, max_len - 1)
            query_slots[base + j] = _slot(position, table, batch, table_stride, block_size, pad)
            if j >= first_sample:
                sample = batch * steps + j - first_sample
                sample_indices[sample] = base + j
                sample_positions[sample] = position + 1 if from_anchor else position
                sample_requests[sample] = request
        query_start[batch] = base
        seq_lens[batch] = min(last + 1 + queries, max_len)
        temperatures_out[request] = temperatures[request]
        seeds_out[request] = seeds[request]
    for i in range(num_reqs, max_reqs + 1):
        query_start[i] = num_reqs * queries
    for i in range(num_reqs, max_reqs):
        seq_lens[i] = 0
    for i in range(num_reqs * steps, max_reqs * steps):
        sample_indices[i] = 0
        sample_positions[i] = 0
        sample_requests[i] = -1
    for i in range(num_reqs * queries, max_tokens):
        query_slots[i] = pad


def prepare_dflash_inputs(
    grid: Any,
    out_input_ids_ptr,
    out_query_positions_ptr,
    out_query_start_loc_ptr,
    out_seq_lens_ptr,
    out_query_slot_mapping_ptr,
    out_context_positions_ptr,
    out_context_slot_mapping_ptr,
    out_sample_indices_ptr,
    out_sample_pos_ptr,
    out_sample_idx_mapping_ptr,
    out_temperature_ptr,
    out_seeds_ptr,
    target_positions_ptr,
    target_query_start_loc_ptr,
    idx_mapping_ptr,
    last_sampled_ptr,
    next_prefill_tokens_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    temperature_ptr,
    seeds_ptr,
    block_table_ptr,
    block_table_stride,
    parallel_drafting_token_id,
    block_size,
    num_query_per_req,
    num_speculative_steps,
    max_num_reqs,
    max_num_tokens,
    max_model_len,
    cp_rank,
    SAMPLE_FROM_ANCHOR,
    PAD_SLOT_ID,
    CP_SIZE,
    CP_INTERLEAVE,
    BLOCK_SIZE,
) -> None:
    """Context rows, query rows and sampling rows of a block drafter, with padding for all buffers."""
    if CP_SIZE != 1:
        raise Interpreted("context parallelism is not covered by the native kernels")
    _prepare(
        grid[0],
        grid[1] * BLOCK_SIZE,
        memory(out_input_ids_ptr),
        memory(out_query_positions_ptr),
        memory(out_query_start_loc_ptr),
        memory(out_seq_lens_ptr),
        memory(out_query_slot_mapping_ptr),
        memory(out_context_positions_ptr),
        memory(out_context_slot_mapping_ptr),
        memory(out_sample_indices_ptr),
        memory(out_sample_pos_ptr),
        memory(out_sample_idx_mapping_ptr),
        memory(out_temperature_ptr),
        memory(out_seeds_ptr),
        memory(target_positions_ptr),
        memory(target_query_start_loc_ptr),
        memory(idx_mapping_ptr),
        memory(last_sampled_ptr),
        memory(next_prefill_tokens_ptr),
        memory(num_sampled_ptr),
        memory(num_rejected_ptr),
        memory(temperature_ptr),
        memory(seeds_ptr),
        memory(block_table_ptr),
        block_table_stride,
        parallel_drafting_token_id,
        block_size,
        num_query_per_req,
        num_speculative_steps,
        max_num_reqs,
        max_num_tokens,
        max_model_len,
        bool(SAMPLE_FROM_ANCHOR),
        PAD_SLOT_ID,
    )


@jit
def _walk(
    num_rows,
    scores,
    candidates,
    positions,
    requests,
    temperatures,
    seeds,
    tokens,
    realized,
    steps,
    top_k,
    probabilistic,
    double,
):
    for row in range(num_rows):
        request = np.int64(requests[row * steps])
        if request < 0:
            continue
        temperature = np.float32(temperatures[request]) if probabilistic else np.float32(0.0)
        seed, previous = np.int64(seeds[request]), 0
        for step in range(steps):
            flat = row * steps + step
            position = np.int64(positions[flat]) - 1 + DRAFT_NOISE_SALT
            prefix, second = murmur_prefix(seed, position, 0), murmur_prefix(seed, position, _SECOND_DOMAIN)
            best, winner = -np.inf, 0
            for i in range(top_k):
                score = np.float32(scores[(flat * top_k + previous) * top_k + i])
                realized[flat * top_k + i] = score
                value = np.float64(score)
                if temperature != 0.0:
                    key = np.uint32(candidates[flat * top_k + i])
                    if double:
                        uniform = uniform64(murmur_hash(prefix, key), murmur_hash(second, key))
                        value = value / np.float64(temperature) - np.log(-np.log(uniform))
                    else:
                        value = np.float64(score / temperature + gumbel32(murmur_hash(prefix, key)))
                if value > best:
                    best, winner = value, i
            tokens[flat] = candidates[flat * top_k + winner]
            previous = winner


def selector_walk(
    grid: Any,
    scores_ptr,
    candidate_ptr,
    sample_pos_ptr,
    req_state_ptr,
    temperature_ptr,
    seeds_ptr,
    tokens_ptr,
    realized_scores_ptr,
    num_steps,
    top_k,
    BLOCK_K,
    SAMPLE_PROBABILISTIC,
    USE_FP64,
) -> None:
    """Walk DFlash2's candidate lattice: each step's scores depend on the candidate chosen before it."""
    if scores_ptr.dtype is not torch.float32:
        raise Interpreted("only float32 selector scores are walked natively")
    _walk(
        grid[0],
        memory(scores_ptr),
        memory(candidate_ptr),
        memory(sample_pos_ptr),
        memory(req_state_ptr),
        memory(temperature_ptr),
        memory(seeds_ptr),
        memory(tokens_ptr),
        memory(realized_scores_ptr),
        num_steps,
        top_k,
        bool(SAMPLE_PROBABILISTIC),
        bool(USE_FP64),
    )


@jit
def _cache(rows, logits, cached, candidates, scores, requests, stride_0, stride_1, steps, top_k):
    for flat in range(rows):
        request = np.int64(requests[flat])
        if request < 0:
            continue
        step = flat % steps
        base, old = request * stride_0 + step * stride_1, (request * steps + step) * top_k
        for i in range(top_k):
            logits[base + cached[old + i]] = -np.inf
        for i in range(top_k):
            token = candidates[flat * top_k + i]
            logits[base + token] = scores[flat * top_k + i]
            cached[old + i] = token


def cache_draft_logits(
    grid: Any,
    draft_logits_ptr,
    cached_candidate_ptr,
    candidate_ptr,
    scores_ptr,
    req_state_ptr,
    draft_logits_stride_0,
    draft_logits_stride_1,
    num_steps,
    top_k,
    BLOCK_K,
) -> None:
    """Replace the last step's candidates by this step's in the otherwise -inf draft logits."""
    if draft_logits_ptr.dtype is not torch.float32:
        raise Interpreted("only float32 draft logits are cached natively")
    _cache(
        grid[0],
        memory(draft_logits_ptr),
        memory(cached_candidate_ptr),
        memory(candidate_ptr),
        memory(scores_ptr),
        memory(req_state_ptr),
        draft_logits_stride_0,
        draft_logits_stride_1,
        num_steps,
        top_k,
    )


KERNELS = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": prepare_dflash_inputs,
    "vllm.v1.worker.gpu.spec_decode.dflash2.speculator._selector_walk_kernel": selector_walk,
    "vllm.v1.worker.gpu.spec_decode.dflash2.speculator._cache_draft_logits_kernel": cache_draft_logits,
}
