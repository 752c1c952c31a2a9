# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels behind logprobs: log-softmax at chosen tokens, ranks, token lists, NaN counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from specgram_lab.builders.cpu.kernels.numeric import as_float, float_key, jit, max_and_sumexp, memory


@jit
def _log_softmax(rows, out, logits, stride, ids, ids_stride, count, vocab):
    for row in range(rows):
        line = logits[row * stride : row * stride + vocab]
        maximum, total = max_and_sumexp(line, 0, vocab, np.float32(1.0))
        shift = np.log(total)
        for i in range(count):
            out[row * count + i] = as_float(line[ids[row * ids_stride + i]]) - maximum - shift


def topk_log_softmax(
    grid: Any,
    output_ptr,
    logits_ptr,
    logits_stride,
    topk_ids_ptr,
    topk_ids_stride,
    topk,
    vocab_size,
    BLOCK_SIZE,
    TOPK_BLOCK_SIZE,
) -> None:
    """Log-probabilities of the listed tokens of every row."""
    _log_softmax(
        grid[0],
        memory(output_ptr),
        memory(logits_ptr),
        logits_stride,
        memory(topk_ids_ptr),
        topk_ids_stride,
        topk,
        vocab_size,
    )


@jit
def _ranks(rows, out, logits, stride, tokens, vocab, padded):
    for row in range(rows):
        base = row * stride
        # Keys compare as the floats do, except that NaN is above nothing in either.
        threshold = as_float(logits[base + tokens[row]])
        key, count = float_key(threshold), 0
        if threshold == threshold:
            for i in range(base, base + vocab):
                value = as_float(logits[i])
                count += float_key(value) >= key and value == value
        # The kernel fills its last block with -inf and counts that, too, where the chosen token is masked.
        out[row] = count + (padded - vocab if threshold == -np.inf else 0)


def ranks(grid: Any, output_ptr, logits_ptr, logits_stride, token_ids_ptr, vocab_size, BLOCK_SIZE) -> None:
    """How many tokens of each row are at least as likely as the chosen one."""
    _ranks(
        grid[0],
        memory(output_ptr),
        memory(logits_ptr),
        logits_stride,
        memory(token_ids_ptr),
        vocab_size,
        -(-vocab_size // BLOCK_SIZE) * BLOCK_SIZE,
    )


@jit
def _fill(
    rows,
    out,
    out_stride,
    valid,
    valid_stride,
    sampled,
    topk,
    topk_stride,
    requests,
    counts,
    custom,
    custom_stride,
    num_topk,
    columns,
):
    for row in range(rows):
        request = np.int64(requests[row])
        out[row * out_stride] = sampled[row]
        valid[row * valid_stride] = 1
        if counts[request] > 0:
            for i in range(min(np.int64(counts[request]), columns)):
                out[row * out_stride + 1 + i] = custom[request * custom_stride + i]
                valid[row * valid_stride + 1 + i] = 1
        else:
            for i in range(min(num_topk, columns)):
                out[row * out_stride + 1 + i] = topk[row * topk_stride + i]
                valid[row * valid_stride + 1 + i] = 1


def fill_logprob_token_ids(
    grid: Any,
    out_token_ids_ptr,
    out_token_ids_stride,
    out_valid_mask_ptr,
    out_valid_mask_stride,
    sampled_token_ids_ptr,
    topk_indices_ptr,
    topk_indices_stride,
    expanded_idx_mapping_ptr,
    num_per_req_token_ids_ptr,
    per_req_token_ids_ptr,
    per_req_token_ids_stride,
    NUM_TOPK,
    PADDED_COLS,
) -> None:
    """The sampled token, then a request's own list of tokens or else the most likely ones."""
    _fill(
        grid[0],
        memory(out_token_ids_ptr),
        out_token_ids_stride,
        memory(out_valid_mask_ptr),
        out_valid_mask_stride,
        memory(sampled_token_ids_ptr),
        memory(topk_indices_ptr),
        topk_indices_stride,
        memory(expanded_idx_mapping_ptr),
        memory(num_per_req_token_ids_ptr),
        memory(per_req_token_ids_ptr),
        per_req_token_ids_stride,
        NUM_TOPK,
        PADDED_COLS,
    )


@jit
def _prompt_tokens(num_reqs, out, query_start, requests, computed, tokens, stride):
    for batch in range(num_reqs):
        request, start = np.int64(requests[batch]), np.int64(query_start[batch])
        for i in range(query_start[batch + 1] - start):
            out[start + i] = tokens[request * stride + computed[request] + 1 + i]


def prompt_logprobs_token_ids(
    grid: Any,
    prompt_logprobs_token_ids_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    num_computed_tokens_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    BLOCK_SIZE,
) -> None:
    """The token that follows each scheduled prompt token."""
    _prompt_tokens(
        grid[0],
        memory(prompt_logprobs_token_ids_ptr),
        memory(query_start_loc_ptr),
        memory(idx_mapping_ptr),
        memory(num_computed_tokens_ptr),
        memory(all_token_ids_ptr),
        all_token_ids_stride,
    )


@jit
def _count_nans(rows, logits, stride, out, vocab):
    for row in range(rows):
        count = 0
        for i in range(row * stride, row * stride + vocab):
            value = as_float(logits[i])
            count += value != value
        out[row] = count


def num_nans(grid: Any, logits_ptr, logits_stride, num_nans_ptr, vocab_size, BLOCK_SIZE) -> None:
    """NaN logits per row."""
    _count_nans(grid[0], memory(logits_ptr), logits_stride, memory(num_nans_ptr), vocab_size)


@jit
def _compact(
    rows,
    logits,
    row_stride,
    column_stride,
    cu_logits,
    num_sampled,
    ids,
    ids_stride,
    packed,
    packed_stride,
    counts,
    vocab,
    limit,
    per_request,
):
    for row in range(rows):
        request, slot = row // per_request, row % per_request
        if slot >= num_sampled[request]:
            counts[row] = 0
            continue
        base, count = (np.int64(cu_logits[request]) + slot) * row_stride, 0
        for byte in range((vocab + 7) // 8):
            bits = 0
            for i in range(8 * byte, min(8 * byte + 8, vocab)):
                value = as_float(logits[base + i * column_stride])
                if value > -np.inf and value < np.inf:
                    bits |= 1 << (i - 8 * byte)
                    if count < limit:
                        ids[row * ids_stride + count] = i
                    count += 1
            packed[row * packed_stride + byte] = bits
        counts[row] = count


def compact_sampling_mask(
    grid: Any,
    logits_ptr,
    logits_row_stride,
    logits_col_stride,
    cu_num_logits_ptr,
    num_sampled_tokens_ptr,
    token_ids_ptr,
    token_ids_row_stride,
    packed_mask_ptr,
    packed_mask_row_stride,
    counts_ptr,
    vocab_size,
    max_num_kept,
    ROWS_PER_REQUEST,
    BLOCK_SIZE,
) -> None:
    """Tokens that sampling could have chosen: the first ids, all as bits, and their number."""
    _compact(
        grid[0],
        memory(logits_ptr),
        logits_row_stride,
        logits_col_stride,
        memory(cu_num_logits_ptr),
        memory(num_sampled_tokens_ptr),
        memory(token_ids_ptr),
        token_ids_row_stride,
        memory(packed_mask_ptr),
        packed_mask_row_stride,
        memory(counts_ptr),
        vocab_size,
        max_num_kept,
        ROWS_PER_REQUEST,
    )


_SAMPLE = "vllm.v1.worker.gpu.sample."
KERNELS = {
    _SAMPLE + "logprob._topk_log_softmax_kernel": topk_log_softmax,
    _SAMPLE + "logprob._ranks_kernel": ranks,
    _SAMPLE + "logprob._fill_logprob_token_ids_kernel": fill_logprob_token_ids,
    _SAMPLE + "prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_logprobs_token_ids,
    _SAMPLE + "output._compact_sampling_mask_kernel": compact_sampling_mask,
    "vllm.v1.worker.gpu.metrics.logits._num_nans_kernel": num_nans,
}
