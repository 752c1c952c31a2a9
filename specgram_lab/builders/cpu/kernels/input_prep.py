# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels that lay out a batch: staged writes, block tables, positions, token ids, bookkeeping."""

from __future__ import annotations

from typing import Any

import numpy as np

from specgram_lab.builders.cpu.kernels.numeric import Interpreted, int32_at, jit, memory, nothing

_UNBOUNDED = 1 << 40
"""Size claimed for arrays behind raw addresses; numba does not check bounds."""


@jit
def _write_rows(out, stride, rows, starts, contents, ends):
    first = 0
    for i in range(rows.size):
        base = np.int64(rows[i]) * stride + starts[i]
        for j in range(first, ends[i]):
            out[base + j - first] = contents[j]
        first = ends[i]


@jit
def _write_grouped_rows(addresses, strides, rows, starts, contents, ends, groups):
    first = 0
    for i in range(rows.size):
        out = int32_at(addresses[groups[i]], _UNBOUNDED)
        base = np.int64(rows[i]) * strides[groups[i]] + starts[i]
        for j in range(first, ends[i]):
            out[base + j - first] = contents[j]
        first = ends[i]


def apply_write(
    grid: Any,
    output_ptr,
    output_stride,
    write_indices_ptr,
    write_starts_ptr,
    write_contents_ptr,
    write_cu_lens_ptr,
    write_group_ids_ptr,
    BLOCK_SIZE,
    MULTI_GROUP,
) -> None:
    """Copy staged runs of elements into rows of one tensor, or of one tensor per KV-cache group."""
    rows, starts = memory(write_indices_ptr)[: grid[0]], memory(write_starts_ptr)
    contents, ends = memory(write_contents_ptr), memory(write_cu_lens_ptr)
    if MULTI_GROUP:
        _write_grouped_rows(
            memory(output_ptr), memory(output_stride), rows, starts, contents, ends, memory(write_group_ids_ptr)
        )
    else:
        _write_rows(memory(output_ptr), output_stride, rows, starts, contents, ends)


@jit
def _gather_tables(requests, sources, targets, strides, num_blocks, num_blocks_stride, num_reqs, padded, groups):
    for group in range(groups):
        stride = np.int64(strides[group])
        source, target = int32_at(sources[group], _UNBOUNDED), int32_at(targets[group], _UNBOUNDED)
        for batch in range(padded):
            if batch >= num_reqs:
                for i in range(stride):
                    target[batch * stride + i] = 0
                continue
            request = np.int64(requests[batch])
            for i in range(num_blocks[group * num_blocks_stride + request]):
                target[batch * stride + i] = source[request * stride + i]


def gather_block_tables(
    grid: Any,
    batch_idx_to_req_idx,
    src_block_table_ptrs,
    dst_block_table_ptrs,
    block_table_strides,
    num_blocks_ptr,
    num_blocks_stride,
    num_reqs,
    BLOCK_SIZE,
) -> None:
    """Copy the block-table rows of the batch's requests together and clear the padding rows."""
    _gather_tables(
        memory(batch_idx_to_req_idx),
        memory(src_block_table_ptrs),
        memory(dst_block_table_ptrs),
        memory(block_table_strides),
        memory(num_blocks_ptr),
        num_blocks_stride,
        num_reqs,
        grid[1],
        grid[0],
    )


@jit
def _slot_mappings(
    groups,
    num_reqs,
    max_tokens,
    requests,
    query_start,
    positions,
    tables,
    strides,
    block_sizes,
    enabled,
    slots,
    slots_stride,
    pad,
):
    for group in range(groups):
        table = int32_at(tables[group], _UNBOUNDED)
        stride, block_size = np.int64(strides[group]), np.int64(block_sizes[group])
        base = group * slots_stride
        for batch in range(num_reqs):
            request = np.int64(requests[batch])
            for i in range(query_start[batch], query_start[batch + 1]):
                if request < 0 or not enabled[group]:
                    slots[base + i] = pad
                else:
                    position = np.int64(positions[i])
                    block = np.int64(table[request * stride + position // block_size])
                    slots[base + i] = block * block_size + position % block_size
        for i in range(query_start[num_reqs], max_tokens):
            slots[base + i] = pad


def compute_slot_mappings(
    grid: Any,
    max_num_tokens,
    idx_mapping,
    query_start_loc,
    pos,
    block_table_ptrs,
    block_table_strides,
    block_sizes,
    slot_mapping_enabled,
    dcp_sharded,
    slot_mappings_ptr,
    slot_mappings_stride,
    cp_rank,
    CP_SIZE,
    CP_INTERLEAVE,
    PAD_ID,
    TRITON_BLOCK_SIZE,
) -> None:
    """KV-cache slot of every token of the batch, PAD_ID past its end; without context parallelism."""
    if CP_SIZE != 1:
        raise Interpreted("context parallelism is not covered by the native kernels")
    _slot_mappings(
        grid[0],
        grid[1] - 1,
        max_num_tokens,
        memory(idx_mapping),
        memory(query_start_loc),
        memory(pos),
        memory(block_table_ptrs),
        memory(block_table_strides),
        memory(block_sizes),
        memory(slot_mapping_enabled),
        memory(slot_mappings_ptr),
        slot_mappings_stride,
        PAD_ID,
    )


@jit
def _prefill_inputs(
    num_reqs, input_ids, ahead, ahead_stride, num_ahead, requests, query_start, tokens, stride, prefill_lens, computed
):
    for batch in range(num_reqs):
        request = np.int64(requests[batch])
        done, prefill = computed[request], prefill_lens[request]
        if done >= prefill:
            continue
        start, row = query_start[batch], request * stride
        length = query_start[batch + 1] - start
        for i in range(length):
            input_ids[start + i] = tokens[row + done + i]
        for i in range(num_ahead):
            position = done + length + i
            ahead[i * ahead_stride + request] = tokens[row + position] if position < prefill else 0


def prepare_prefill_inputs(
    grid: Any,
    input_ids_ptr,
    next_prefill_tokens_ptr,
    next_prefill_tokens_stride,
    num_lookahead,
    idx_mapping_ptr,
    query_start_loc_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    prefill_lens_ptr,
    num_computed_tokens_ptr,
    BLOCK_SIZE,
    LOOKAHEAD_BLOCK,
) -> None:
    """Copy the scheduled prompt tokens, and the few after them, of requests still in prefill."""
    _prefill_inputs(
        grid[0],
        memory(input_ids_ptr),
        memory(next_prefill_tokens_ptr),
        next_prefill_tokens_stride,
        num_lookahead,
        memory(idx_mapping_ptr),
        memory(query_start_loc_ptr),
        memory(all_token_ids_ptr),
        all_token_ids_stride,
        memory(prefill_lens_ptr),
        memory(num_computed_tokens_ptr),
    )


@jit
def _positions(num_reqs, positions, seq_lens, requests, query_start, computed, max_reqs):
    for batch in range(num_reqs):
        done = computed[requests[batch]]
        start = query_start[batch]
        length = query_start[batch + 1] - start
        seq_lens[batch] = done + length
        for i in range(length):
            positions[start + i] = done + i
    for batch in range(num_reqs, max_reqs):
        seq_lens[batch] = 0


def prepare_pos_seq_lens(
    grid: Any,
    pos_ptr,
    seq_lens_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    num_computed_tokens_ptr,
    max_num_reqs,
    BLOCK_SIZE,
) -> None:
    """Positions of the scheduled tokens and sequence lengths after this step, zero for padding."""
    _positions(
        grid[0] - 1,
        memory(pos_ptr),
        memory(seq_lens_ptr),
        memory(idx_mapping_ptr),
        memory(query_start_loc_ptr),
        memory(num_computed_tokens_ptr),
        max_num_reqs,
    )


@jit
def _combine(
    num_reqs,
    input_ids,
    requests,
    last_sampled,
    query_start,
    seq_lens,
    prefill_lens,
    drafts,
    drafts_stride,
    cu_logits,
    logits_indices,
    num_new,
    block,
):
    for batch in range(num_reqs):
        request = np.int64(requests[batch])
        first = cu_logits[batch]
        num_logits = cu_logits[batch + 1] - first
        end = query_start[batch + 1]
        for i in range(min(num_logits, block)):
            logits_indices[first + i] = end - num_logits + i
        seq_len, prefill = seq_lens[batch], prefill_lens[request]
        if seq_len <= prefill:
            continue
        if num_new > 0 and seq_len - num_logits >= prefill:
            input_ids[end - num_logits] = last_sampled[request]
        num_drafts = num_logits - num_new
        for i in range(min(num_drafts, block)):
            input_ids[end - num_drafts + i] = drafts[request * drafts_stride + i]


def combine_sampled_and_draft_tokens(
    grid: Any,
    input_ids_ptr,
    idx_mapping_ptr,
    last_sampled_tokens_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    prefill_len_ptr,
    draft_tokens_ptr,
    draft_tokens_stride,
    cu_num_logits_ptr,
    logits_indices_ptr,
    BLOCK_SIZE,
    NUM_NEW_SAMPLED_TOKENS=1,
) -> None:
    """Put the last sampled token and the drafts into the input, and say which rows get logits."""
    _combine(
        grid[0],
        memory(input_ids_ptr),
        memory(idx_mapping_ptr),
        memory(last_sampled_tokens_ptr),
        memory(query_start_loc_ptr),
        memory(seq_lens_ptr),
        memory(prefill_len_ptr),
        memory(draft_tokens_ptr),
        draft_tokens_stride,
        memory(cu_num_logits_ptr),
        memory(logits_indices_ptr),
        NUM_NEW_SAMPLED_TOKENS,
        BLOCK_SIZE,
    )


@jit
def _sampled_and_rejected(num_reqs, num_sampled, num_rejected, seq_lens, cu_logits, requests, prefill_lens):
    for batch in range(num_reqs):
        if seq_lens[batch] < prefill_lens[requests[batch]]:
            num_sampled[batch] = 0
            num_rejected[batch] = 0
        else:
            num_rejected[batch] = cu_logits[batch + 1] - cu_logits[batch] - num_sampled[batch]


def get_num_sampled_and_rejected(
    grid: Any, num_sampled_ptr, num_rejected_ptr, seq_lens_ptr, cu_num_logits_ptr, idx_mapping_ptr, prefill_len_ptr
) -> None:
    """Rejected drafts per request; a request in the middle of its prefill has sampled nothing."""
    _sampled_and_rejected(
        grid[0],
        memory(num_sampled_ptr),
        memory(num_rejected_ptr),
        memory(seq_lens_ptr),
        memory(cu_num_logits_ptr),
        memory(idx_mapping_ptr),
        memory(prefill_len_ptr),
    )


@jit
def _update(
    num_reqs,
    requests,
    computed,
    last_sampled,
    counts,
    counts_stride,
    sampled,
    sampled_stride,
    num_sampled,
    num_rejected,
    query_start,
    tokens,
    tokens_stride,
    total_len,
):
    for batch in range(num_reqs):
        request = np.int64(requests[batch])
        if request < 0:
            continue
        total, count = np.int64(total_len[request]), np.int64(num_sampled[batch])
        if count > 0:
            last_sampled[request] = sampled[batch * sampled_stride + count - 1]
            total_len[request] = total + count
        for i in range(count):
            token = np.int64(sampled[batch * sampled_stride + i])
            tokens[request * tokens_stride + total + i] = token
            if counts.size > 0:
                counts[request * counts_stride + token] += 1
        length = query_start[batch + 1] - query_start[batch] if query_start.size > 0 else 0
        computed[request] += length - num_rejected[batch]


def post_update(
    grid: Any,
    idx_mapping_ptr,
    num_computed_tokens_ptr,
    last_sampled_tokens_ptr,
    output_bin_counts_ptr,
    output_bin_counts_stride,
    sampled_tokens_ptr,
    sampled_tokens_stride,
    num_sampled_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    total_len_ptr,
) -> None:
    """Append the sampled tokens to their requests and move the computed length on."""
    counts = nothing() if output_bin_counts_ptr is None else memory(output_bin_counts_ptr)
    query_start = nothing() if query_start_loc_ptr is None else memory(query_start_loc_ptr)
    _update(
        grid[0],
        memory(idx_mapping_ptr),
        memory(num_computed_tokens_ptr),
        memory(last_sampled_tokens_ptr),
        counts,
        output_bin_counts_stride,
        memory(sampled_tokens_ptr),
        sampled_tokens_stride,
        memory(num_sampled_ptr),
        memory(num_rejected_ptr),
        query_start,
        memory(all_token_ids_ptr),
        all_token_ids_stride,
        memory(total_len_ptr),
    )


@jit
def _advance(num_reqs, requests, computed, query_start):
    for batch in range(num_reqs):
        computed[requests[batch]] += query_start[batch + 1] - query_start[batch]


def post_update_num_computed_tokens(grid: Any, idx_mapping_ptr, num_computed_tokens_ptr, query_start_loc_ptr) -> None:
    """Move the computed length on by the query length."""
    _advance(grid[0], memory(idx_mapping_ptr), memory(num_computed_tokens_ptr), memory(query_start_loc_ptr))


@jit
def _expand(num_reqs, requests, expanded, local, cu_logits, block):
    for batch in range(num_reqs):
        first = cu_logits[batch]
        for i in range(min(cu_logits[batch + 1] - first, block)):
            expanded[first + i] = requests[batch]
            local[first + i] = i


def expand_idx_mapping(
    grid: Any, idx_mapping_ptr, expanded_idx_mapping_ptr, expanded_local_pos_ptr, cu_num_logits_ptr, BLOCK_SIZE
) -> None:
    """Request and position within the request of every logits row."""
    _expand(
        grid[0],
        memory(idx_mapping_ptr),
        memory(expanded_idx_mapping_ptr),
        memory(expanded_local_pos_ptr),
        memory(cu_num_logits_ptr),
        BLOCK_SIZE,
    )


KERNELS = {
    "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel": apply_write,
    "vllm.v1.worker.gpu.block_table._gather_block_tables_kernel": gather_block_tables,
    "vllm.v1.worker.gpu.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    "vllm.v1.worker.gpu.input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    "vllm.v1.worker.gpu.input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
    "vllm.v1.worker.gpu.input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
    "vllm.v1.worker.gpu.input_batch._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
    "vllm.v1.worker.gpu.input_batch._post_update_kernel": post_update,
    "vllm.v1.worker.gpu.input_batch._post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
    "vllm.v1.worker.gpu.input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
}
