# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels of drafters with one module per draft position (multi-module MTP)."""

from __future__ import annotations

from typing import Any

import numpy as np

from specgram_lab.builders.cpu.kernels.numeric import jit, memory


@jit
def _buffers(
    num_reqs,
    last_indices,
    input_ids,
    positions,
    out_seq_lens,
    target_ids,
    target_positions,
    cached,
    cached_stride,
    overrides,
    overrides_stride,
    requests,
    last_sampled,
    ahead,
    ahead_stride,
    num_sampled,
    num_rejected,
    seq_lens,
    query_start,
    max_reqs,
    steps,
):
    for batch in range(num_reqs):
        request, start = np.int64(requests[batch]), np.int64(query_start[batch])
        rejected = np.int64(num_rejected[batch])
        again = max(np.int64(0), rejected - 1)
        count = np.int64(query_start[batch + 1]) - start - rejected
        out_seq_lens[batch] = np.int64(seq_lens[batch]) - again
        sampled = num_sampled[batch] > 0
        for i in range(1, steps):
            future = np.int64(ahead[i * ahead_stride + request])
            overrides[batch * overrides_stride + i - 1] = np.int64(-1) if sampled else future
        for i in range(1, count):
            input_ids[start + again - 1 + i] = target_ids[start + i]
        last = start + again + count - 1
        last_indices[batch] = last
        input_ids[last] = np.int64(last_sampled[request]) if sampled else np.int64(ahead[request])
        for i in range(count):
            positions[start + again + i] = target_positions[start + i]
        for i in range(again):
            input_ids[start + i] = cached[request * cached_stride + steps - 1 - again + i]
            positions[start + i] = np.int64(target_positions[start]) - again + i
    for i in range(num_reqs, max_reqs + 1):
        query_start[i] = query_start[num_reqs]
    for i in range(num_reqs, max_reqs):
        out_seq_lens[i] = 0
        last_indices[i] = 0


def prepare_input_buffers(
    grid: Any,
    last_token_indices_ptr,
    draft_input_ids_ptr,
    draft_positions_ptr,
    draft_seq_lens_ptr,
    target_input_ids_ptr,
    target_positions_ptr,
    cached_draft_input_ids_ptr,
    cached_draft_input_ids_stride0,
    draft_input_id_overrides_ptr,
    draft_input_id_overrides_stride0,
    idx_mapping_ptr,
    last_sampled_ptr,
    next_prefill_tokens_ptr,
    next_prefill_tokens_stride0,
    num_sampled_ptr,
    num_rejected_ptr,
    target_seq_lens_ptr,
    query_start_loc_ptr,
    max_num_reqs,
    num_speculative_steps,
    BLOCK_SIZE,
) -> None:
    """The target's tokens shifted left, behind the cached tokens whose drafts were rejected."""
    _buffers(
        grid[0],
        memory(last_token_indices_ptr),
        memory(draft_input_ids_ptr),
        memory(draft_positions_ptr),
        memory(draft_seq_lens_ptr),
        memory(target_input_ids_ptr),
        memory(target_positions_ptr),
        memory(cached_draft_input_ids_ptr),
        cached_draft_input_ids_stride0,
        memory(draft_input_id_overrides_ptr),
        draft_input_id_overrides_stride0,
        memory(idx_mapping_ptr),
        memory(last_sampled_ptr),
        memory(next_prefill_tokens_ptr),
        next_prefill_tokens_stride0,
        memory(num_sampled_ptr),
        memory(num_rejected_ptr),
        memory(target_seq_lens_ptr),
        memory(query_start_loc_ptr),
        max_num_reqs,
        num_speculative_steps,
    )


@jit
def _hidden(
    num_reqs,
    out,
    out_stride,
    hidden,
    hidden_stride,
    cached,
    cached_stride_0,
    cached_stride_1,
    embeds,
    embeds_stride,
    cached_embeds,
    embeds_stride_0,
    embeds_stride_1,
    requests,
    num_rejected,
    query_start,
    steps,
    size,
    max_query,
    with_embeds,
):
    for batch in range(num_reqs):
        request, start = np.int64(requests[batch]), np.int64(query_start[batch])
        rejected = np.int64(num_rejected[batch])
        again = max(np.int64(0), rejected - 1)
        count = min(np.int64(query_start[batch + 1]) - start - rejected, max_query)
        for i in range(count):
            to, source = (start + again + i) * out_stride, (start + i) * hidden_stride
            out[to : to + size] = hidden[source : source + size]
        for i in range(again):
            slot = steps - 1 - again + i
            to, source = (start + i) * out_stride, request * cached_stride_0 + slot * cached_stride_1
            out[to : to + size] = cached[source : source + size]
            if with_embeds:
                to, source = (start + i) * embeds_stride, request * embeds_stride_0 + slot * embeds_stride_1
                embeds[to : to + size] = cached_embeds[source : source + size]


def prepare_hidden_states(
    grid: Any,
    draft_input_hidden_states_ptr,
    draft_input_hidden_states_stride0,
    target_hidden_states_ptr,
    target_hidden_states_stride0,
    cached_target_hidden_states_ptr,
    cached_target_hidden_states_stride0,
    cached_target_hidden_states_stride1,
    input_embeds_ptr,
    input_embeds_stride0,
    cached_draft_input_embeds_ptr,
    cached_draft_input_embeds_stride0,
    cached_draft_input_embeds_stride1,
    idx_mapping_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    num_speculative_steps,
    hidden_size,
    BLOCK_SIZE_Q,
    BLOCK_SIZE_H,
    USE_INPUT_EMBEDS,
) -> None:
    """Hidden states (and embeddings) in the layout of :func:`prepare_input_buffers`."""
    out = memory(draft_input_hidden_states_ptr)
    cached = out[:0] if cached_target_hidden_states_ptr is None else memory(cached_target_hidden_states_ptr)
    embeds = memory(input_embeds_ptr) if USE_INPUT_EMBEDS else out[:0]
    cached_embeds = memory(cached_draft_input_embeds_ptr) if USE_INPUT_EMBEDS else out[:0]
    _hidden(
        grid[0],
        out,
        draft_input_hidden_states_stride0,
        memory(target_hidden_states_ptr),
        target_hidden_states_stride0,
        cached,
        cached_target_hidden_states_stride0,
        cached_target_hidden_states_stride1,
        embeds,
        input_embeds_stride0,
        cached_embeds,
        cached_draft_input_embeds_stride0,
        cached_draft_input_embeds_stride1,
        memory(idx_mapping_ptr),
        memory(num_rejected_ptr),
        memory(query_start_loc_ptr),
        num_speculative_steps,
        hidden_size,
        grid[1] * BLOCK_SIZE_Q,
        bool(USE_INPUT_EMBEDS),
    )


@jit
def _pad(groups, num_reqs, slots, stride, query_start, last_indices, pad):
    for group in range(groups):
        for batch in range(num_reqs):
            for i in range(np.int64(last_indices[batch]) + 1, np.int64(query_start[batch + 1])):
                slots[group * stride + i] = pad


def pad_trailing_draft_slots(
    grid: Any, slot_mappings_ptr, slot_mappings_stride0, query_start_loc_ptr, last_token_indices_ptr, PAD_ID, BLOCK_SIZE
) -> None:
    """Keep the rows after a request's last token from being written to the KV cache."""
    _pad(
        grid[0],
        grid[1],
        memory(slot_mappings_ptr),
        slot_mappings_stride0,
        memory(query_start_loc_ptr),
        memory(last_token_indices_ptr),
        PAD_ID,
    )


@jit
def _cache(
    num_reqs,
    input_ids,
    embeds,
    embeds_stride,
    hidden,
    hidden_stride,
    cached_ids,
    cached_ids_stride,
    cached_embeds,
    embeds_stride_0,
    embeds_stride_1,
    cached,
    cached_stride_0,
    cached_stride_1,
    requests,
    last_indices,
    query_start,
    steps,
    size,
    with_embeds,
):
    for batch in range(num_reqs):
        request = np.int64(requests[batch])
        if request < 0:
            continue
        last = np.int64(last_indices[batch])
        window = last - (steps - 1) + 1
        for i in range(max(window, np.int64(query_start[batch])), last + 1):
            slot = i - window
            cached_ids[request * cached_ids_stride + slot] = input_ids[i]
            if with_embeds:
                to = request * embeds_stride_0 + slot * embeds_stride_1
                cached_embeds[to : to + size] = embeds[i * embeds_stride : i * embeds_stride + size]
            to = request * cached_stride_0 + slot * cached_stride_1
            cached[to : to + size] = hidden[i * hidden_stride : i * hidden_stride + size]


def cache_inputs(
    grid: Any,
    draft_input_ids_ptr,
    draft_input_embeds_ptr,
    draft_input_embeds_stride0,
    draft_input_hidden_states_ptr,
    draft_input_hidden_states_stride0,
    cached_draft_input_ids_ptr,
    cached_draft_input_ids_stride0,
    cached_draft_input_embeds_ptr,
    cached_draft_input_embeds_stride0,
    cached_draft_input_embeds_stride1,
    cached_target_hidden_states_ptr,
    cached_target_hidden_states_stride0,
    cached_target_hidden_states_stride1,
    idx_mapping_ptr,
    last_token_indices_ptr,
    query_start_loc_ptr,
    num_speculative_steps,
    hidden_size,
    BLOCK_SIZE,
    USE_INPUT_EMBEDS,
) -> None:
    """Remember the last inputs of every request: rejected drafts make them needed again."""
    hidden = memory(draft_input_hidden_states_ptr)
    _cache(
        grid[0],
        memory(draft_input_ids_ptr),
        memory(draft_input_embeds_ptr) if USE_INPUT_EMBEDS else hidden[:0],
        draft_input_embeds_stride0,
        hidden,
        draft_input_hidden_states_stride0,
        memory(cached_draft_input_ids_ptr),
        cached_draft_input_ids_stride0,
        memory(cached_draft_input_embeds_ptr) if USE_INPUT_EMBEDS else hidden[:0],
        cached_draft_input_embeds_stride0,
        cached_draft_input_embeds_stride1,
        memory(cached_target_hidden_states_ptr),
        cached_target_hidden_states_stride0,
        cached_target_hidden_states_stride1,
        memory(idx_mapping_ptr),
        memory(last_token_indices_ptr),
        memory(query_start_loc_ptr),
        num_speculative_steps,
        hidden_size,
        bool(USE_INPUT_EMBEDS),
    )


@jit
def _shift_ids(num_reqs, input_ids, requests, query_start, last_indices, drafts):
    for batch in range(num_reqs):
        if requests[batch] < 0:
            continue
        last = np.int64(last_indices[batch])
        for i in range(np.int64(query_start[batch]), last):
            input_ids[i] = input_ids[i + 1]
        input_ids[last] = drafts[batch]


def shift_input_ids(
    grid: Any, input_ids_ptr, idx_mapping_ptr, query_start_loc_ptr, last_token_indices_ptr, draft_tokens_ptr, BLOCK_SIZE
) -> None:
    """Shift a request's tokens left by one and close them with its draft."""
    _shift_ids(
        grid[0],
        memory(input_ids_ptr),
        memory(idx_mapping_ptr),
        memory(query_start_loc_ptr),
        memory(last_token_indices_ptr),
        memory(draft_tokens_ptr),
    )


@jit
def _shift_embeds(num_reqs, embeds, stride, drafts, drafts_stride, requests, query_start, last_indices, size):
    for batch in range(num_reqs):
        if requests[batch] < 0:
            continue
        last = np.int64(last_indices[batch])
        for i in range(np.int64(query_start[batch]), last):
            embeds[i * stride : i * stride + size] = embeds[(i + 1) * stride : (i + 1) * stride + size]
        embeds[last * stride : last * stride + size] = drafts[batch * drafts_stride : batch * drafts_stride + size]


def shift_input_embeds(
    grid: Any,
    input_embeds_ptr,
    input_embeds_stride0,
    draft_embeds_ptr,
    draft_embeds_stride0,
    idx_mapping_ptr,
    query_start_loc_ptr,
    last_token_indices_ptr,
    hidden_size,
    BLOCK_SIZE_Q,
    BLOCK_SIZE_H,
) -> None:
    """As :func:`shift_input_ids`, for embeddings."""
    _shift_embeds(
        grid[0],
        memory(input_embeds_ptr),
        input_embeds_stride0,
        memory(draft_embeds_ptr),
        draft_embeds_stride0,
        memory(idx_mapping_ptr),
        memory(query_start_loc_ptr),
        memory(last_token_indices_ptr),
        hidden_size,
    )


_MTP = "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator."
KERNELS = {
    _MTP + "_prepare_input_buffers_kernel": prepare_input_buffers,
    _MTP + "_prepare_input_hidden_states_and_embeddings_kernel": prepare_hidden_states,
    _MTP + "_pad_trailing_draft_slots_kernel": pad_trailing_draft_slots,
    _MTP + "_cache_inputs_kernel": cache_inputs,
    _MTP + "_shift_input_ids_kernel": shift_input_ids,
    _MTP + "_shift_input_embeds_kernel": shift_input_embeds,
}
