# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels of the logits processors: penalties, logit bias, bad words; trace replay; cache zeroing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specgram_lab.builders.cpu.kernels.numeric import Interpreted, int32_at, jit, memory

_UNBOUNDED = 1 << 40


def _float32_only(logits: torch.Tensor) -> np.ndarray:
    """The memory of float32 logits; the sampler copies logits to float32 before it changes them."""
    if logits.dtype is not torch.float32:
        raise Interpreted("only float32 logits are processed natively")
    return memory(logits)


@jit
def _penalties(
    rows,
    logits,
    stride,
    requests,
    tokens,
    local,
    repetition,
    frequency,
    presence,
    prompt_bits,
    prompt_stride,
    counts,
    counts_stride,
    vocab,
):
    drafted = np.zeros(vocab, np.int32)
    for row in range(rows):
        request = np.int64(requests[row])
        repeat, often, once = repetition[request], frequency[request], presence[request]
        if repeat == 1.0 and often == 0.0 and once == 0.0:
            continue
        first = row - np.int64(local[row])
        for i in range(local[row]):
            token = np.int64(tokens[first + i + 1])
            if 0 <= token < vocab:
                drafted[token] += 1
        for i in range(vocab):
            count = counts[request * counts_stride + i] + drafted[i]
            logit = logits[row * stride + i]
            if repeat != 1.0:
                in_prompt = (prompt_bits[request * prompt_stride + i // 32] >> np.int32(i % 32)) & 1
                scale = repeat if in_prompt or count > 0 else np.float32(1.0)
                logit = logit * (np.float32(1.0) / scale if logit > 0 else scale)
            logit = logit - often * np.float32(count)
            logits[row * stride + i] = logit - once * np.float32(count > 0)
        for i in range(local[row]):
            token = np.int64(tokens[first + i + 1])
            if 0 <= token < vocab:
                drafted[token] = 0


def penalties(
    grid: Any,
    logits_ptr,
    logits_stride,
    expanded_idx_mapping_ptr,
    token_ids_ptr,
    expanded_local_pos_ptr,
    repetition_penalty_ptr,
    frequency_penalty_ptr,
    presence_penalty_ptr,
    prompt_bin_mask_ptr,
    prompt_bin_mask_stride,
    output_bin_counts_ptr,
    output_bin_counts_stride,
    vocab_size,
    BLOCK_SIZE,
) -> None:
    """Repetition, frequency and presence penalties, counting the drafts before each row as output."""
    _penalties(
        grid[0],
        _float32_only(logits_ptr),
        logits_stride,
        memory(expanded_idx_mapping_ptr),
        memory(token_ids_ptr),
        memory(expanded_local_pos_ptr),
        memory(repetition_penalty_ptr),
        memory(frequency_penalty_ptr),
        memory(presence_penalty_ptr),
        memory(prompt_bin_mask_ptr),
        prompt_bin_mask_stride,
        memory(output_bin_counts_ptr),
        output_bin_counts_stride,
        vocab_size,
    )


@jit
def _bincount(
    rows, requests, tokens, stride, prompt_lens, prefill_lens, prompt_bits, prompt_stride, counts, counts_stride
):
    for row in range(rows):
        request = np.int64(requests[row])
        for i in range(prefill_lens[request]):
            token = np.int64(tokens[request * stride + i])
            if i < prompt_lens[request]:
                bit = np.int32(np.uint32(1) << np.uint32(token % 32))
                prompt_bits[request * prompt_stride + token // 32] |= bit
            else:
                counts[request * counts_stride + token] += 1


def bincount(
    grid: Any,
    expanded_idx_mapping_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    prompt_len_ptr,
    prefill_len_ptr,
    prompt_bin_mask_ptr,
    prompt_bin_mask_stride,
    output_bin_counts_ptr,
    output_bin_counts_stride,
    BLOCK_SIZE,
) -> None:
    """Mark the tokens of the prompt and count those of an output that is already there."""
    _bincount(
        grid[0],
        memory(expanded_idx_mapping_ptr),
        memory(all_token_ids_ptr),
        all_token_ids_stride,
        memory(prompt_len_ptr),
        memory(prefill_len_ptr),
        memory(prompt_bin_mask_ptr),
        prompt_bin_mask_stride,
        memory(output_bin_counts_ptr),
        output_bin_counts_stride,
    )


@jit
def _bias(
    rows,
    logits,
    stride,
    vocab,
    requests,
    num_allowed,
    allowed,
    allowed_stride,
    num_bias,
    bias_ids,
    bias_ids_stride,
    bias,
    bias_stride,
    positions,
    min_lens,
    num_stop,
    restore,
    stop_ids,
    stop_stride,
    check,
):
    for row in range(rows):
        request = np.int64(requests[row])
        line = logits[row * stride : row * stride + vocab]
        count = np.int64(num_allowed[request])
        if count > 0:
            base = request * allowed_stride
            saved = np.empty(count, np.float32)
            for i in range(count):
                saved[i] = line[allowed[base + i]]
            line[:] = -np.inf
            for i in range(count):
                line[allowed[base + i]] = saved[i]
        count = np.int64(num_bias[request])
        if count > 0:
            # All are read before any is written, as the kernel does: a token listed twice is biased once.
            read = np.empty(count, np.float32)
            for i in range(count):
                read[i] = line[bias_ids[request * bias_ids_stride + i]]
            for i in range(count):
                line[bias_ids[request * bias_ids_stride + i]] = read[i] + bias[request * bias_stride + i]
        count = np.int64(num_stop[request])
        if count <= 0 or positions[row] + 1 >= min_lens[request]:
            continue
        base = request * stop_stride
        kept = np.empty(count, np.float32)
        for i in range(count):
            kept[i] = line[stop_ids[base + i]]
        for i in range(count):
            line[stop_ids[base + i]] = -np.inf
        if check and restore[request]:
            any_left = False
            for i in range(vocab):
                if line[i] > -np.inf:
                    any_left = True
                    break
            if not any_left:
                for i in range(count):
                    if kept[i] > -np.inf and kept[i] < np.inf:
                        line[stop_ids[base + i]] = kept[i]


def bias(
    grid: Any,
    logits_ptr,
    logits_stride,
    vocab_size,
    expanded_idx_mapping_ptr,
    num_allowed_token_ids_ptr,
    allowed_token_ids_ptr,
    allowed_token_ids_stride,
    num_logit_bias_ptr,
    bias_token_ids_ptr,
    bias_token_ids_stride,
    bias_ptr,
    bias_stride,
    pos_ptr,
    min_lens_ptr,
    num_stop_token_ids_ptr,
    restore_when_all_masked_ptr,
    stop_token_ids_ptr,
    stop_token_ids_stride,
    BLOCK_SIZE,
    LOGITS_BLOCK_SIZE,
    CHECK_ALL_MASKED_ROWS,
) -> None:
    """Allowed tokens, logit bias, and no stop token before the minimum length."""
    _bias(
        grid[0],
        _float32_only(logits_ptr),
        logits_stride,
        vocab_size,
        memory(expanded_idx_mapping_ptr),
        memory(num_allowed_token_ids_ptr),
        memory(allowed_token_ids_ptr),
        allowed_token_ids_stride,
        memory(num_logit_bias_ptr),
        memory(bias_token_ids_ptr),
        bias_token_ids_stride,
        memory(bias_ptr),
        bias_stride,
        memory(pos_ptr),
        memory(min_lens_ptr),
        memory(num_stop_token_ids_ptr),
        memory(restore_when_all_masked_ptr),
        memory(stop_token_ids_ptr),
        stop_token_ids_stride,
        bool(CHECK_ALL_MASKED_ROWS),
    )


@jit
def _bad_words(
    rows,
    logits,
    stride,
    requests,
    words,
    words_stride,
    offsets,
    offsets_stride,
    num_words,
    tokens,
    tokens_stride,
    prompt_lens,
    total_lens,
    input_ids,
    local,
):
    for row in range(rows):
        request, ahead = np.int64(requests[row]), np.int64(local[row])
        written = np.int64(total_lens[request]) - np.int64(prompt_lens[request])
        output = request * tokens_stride + np.int64(prompt_lens[request])
        for word in range(num_words[request]):
            start = np.int64(offsets[request * offsets_stride + word])
            end = np.int64(offsets[request * offsets_stride + word + 1])
            prefix = end - start - 1
            if prefix > written + ahead:
                continue
            matched = True
            for i in range(prefix):
                position = written + ahead - prefix + i
                if position >= written:
                    actual = np.int64(input_ids[row - ahead + position - written + 1])
                else:
                    actual = np.int64(tokens[output + position])
                if words[request * words_stride + start + i] != actual:
                    matched = False
                    break
            if matched:
                logits[row * stride + words[request * words_stride + end - 1]] = -np.inf


def bad_words(
    grid: Any,
    logits_ptr,
    logits_stride,
    expanded_idx_mapping_ptr,
    bad_word_token_ids_ptr,
    bad_word_token_ids_stride,
    bad_word_offsets_ptr,
    bad_word_offsets_stride,
    num_bad_words_ptr,
    all_token_ids_ptr,
    all_token_ids_stride,
    prompt_len_ptr,
    total_len_ptr,
    input_ids_ptr,
    expanded_local_pos_ptr,
) -> None:
    """Mask the last token of every bad word whose other tokens were just written or drafted."""
    _bad_words(
        grid[0],
        _float32_only(logits_ptr),
        logits_stride,
        memory(expanded_idx_mapping_ptr),
        memory(bad_word_token_ids_ptr),
        bad_word_token_ids_stride,
        memory(bad_word_offsets_ptr),
        bad_word_offsets_stride,
        memory(num_bad_words_ptr),
        memory(all_token_ids_ptr),
        all_token_ids_stride,
        memory(prompt_len_ptr),
        memory(total_len_ptr),
        memory(input_ids_ptr),
        memory(expanded_local_pos_ptr),
    )


@jit
def _replay(num_reqs, sampled, requests, trace, trace_stride, trace_len, total_len, prompt_len):
    for batch in range(num_reqs):
        request = np.int64(requests[batch])
        if request < 0 or trace_len[request] <= 0:
            continue
        step = np.int64(total_len[request]) - np.int64(prompt_len[request])
        if 0 <= step < trace_len[request]:
            sampled[batch] = trace[request * trace_stride + step]


def trace_replay(
    grid: Any,
    sampled_ptr,
    idx_mapping_ptr,
    trace_token_ids_ptr,
    trace_token_ids_stride,
    trace_len_ptr,
    total_len_ptr,
    prompt_len_ptr,
) -> None:
    """Replace sampled tokens by those of a request's recorded trace."""
    _replay(
        grid[0],
        memory(sampled_ptr),
        memory(idx_mapping_ptr),
        memory(trace_token_ids_ptr),
        trace_token_ids_stride,
        memory(trace_len_ptr),
        memory(total_len_ptr),
        memory(prompt_len_ptr),
    )


@jit
def _zero(addresses, strides, sizes, blocks, num_blocks, segments):
    for segment in range(segments):
        words = int32_at(addresses[segment], _UNBOUNDED)
        for i in range(num_blocks):
            base = np.int64(blocks[i]) * np.int64(strides[segment])
            words[base : base + np.int64(sizes[segment])] = 0


def zero_kv_blocks(
    grid: Any, seg_addrs_ptr, seg_block_strides_ptr, seg_page_sizes_ptr, block_ids_ptr, BLOCK_SIZE
) -> None:
    """Clear KV-cache blocks in every segment of the cache."""
    _zero(
        memory(seg_addrs_ptr),
        memory(seg_block_strides_ptr),
        memory(seg_page_sizes_ptr),
        memory(block_ids_ptr),
        grid[0],
        grid[1],
    )


_SAMPLE = "vllm.v1.worker.gpu.sample."
KERNELS = {
    _SAMPLE + "penalties._penalties_kernel": penalties,
    _SAMPLE + "penalties._bincount_kernel": bincount,
    _SAMPLE + "logit_bias._bias_kernel": bias,
    _SAMPLE + "bad_words._bad_words_kernel": bad_words,
    _SAMPLE + "trace_replay._trace_replay_kernel": trace_replay,
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": zero_kv_blocks,
}
