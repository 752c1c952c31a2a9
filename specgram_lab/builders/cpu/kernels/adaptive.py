# ruff: noqa: N803 - parameters are named as the Triton kernels name theirs
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, warn-return-any=False
"""Native kernels of the online acceptance estimator that adaptive verification asks."""

from __future__ import annotations

from typing import Any

import numpy as np

from specgram_lab.builders.cpu.kernels.numeric import NEGATIVE_INFINITY, jit, max_and_sumexp, memory


@jit
def _accumulate(
    steps,
    info,
    grad,
    requests,
    num_sampled,
    num_rejected,
    features,
    features_stride,
    predictions,
    predictions_stride,
    counts,
    num_reqs,
):
    for step in range(steps):
        a, b, c = np.float32(0.0), np.float32(0.0), np.float32(0.0)
        g0, g1, observed = np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for batch in range(num_reqs):
            accepted = max(np.int64(num_sampled[batch]) - 1, np.int64(0))
            if step > accepted or step >= accepted + np.int64(num_rejected[batch]):
                continue
            request = np.int64(requests[batch])
            feature = np.float32(features[request * features_stride + step])
            prediction = np.float32(predictions[request * predictions_stride + step])
            weight = prediction * (np.float32(1.0) - prediction)
            residual = (np.float32(1.0) if step < accepted else np.float32(0.0)) - prediction
            a += weight * feature * feature
            b += weight * feature
            c += weight
            g0 += residual * feature
            g1 += residual
            observed += np.float32(1.0)
        info[step * 3] += a
        info[step * 3 + 1] += b
        info[step * 3 + 2] += c
        grad[step * 2] += g0
        grad[step * 2 + 1] += g1
        counts[step] += observed


def accumulate(
    grid: Any,
    info_ptr,
    grad_ptr,
    idx_mapping_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    features_ptr,
    features_stride,
    pred_ptr,
    pred_stride,
    counts_ptr,
    num_reqs,
    BLOCK_R,
) -> None:
    """Add this step's graded drafts to the normal equations of the logistic fit."""
    _accumulate(
        grid[0],
        memory(info_ptr),
        memory(grad_ptr),
        memory(idx_mapping_ptr),
        memory(num_sampled_ptr),
        memory(num_rejected_ptr),
        memory(features_ptr),
        features_stride,
        memory(pred_ptr),
        pred_stride,
        memory(counts_ptr),
        num_reqs,
    )


@jit
def _refit(slope, intercepts, info, info_stride, grad, grad_stride, counts, steps, ridge, damping):
    a, g0, shrink, coupling, total = ridge, np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for k in range(steps):
        b, c = info[k * info_stride + 1], info[k * info_stride + 2] + ridge
        a += info[k * info_stride]
        g0 += grad[k * grad_stride]
        shrink += b * b / c
        coupling += b * grad[k * grad_stride + 1] / c
        total += counts[k]
    step = (g0 - coupling) / (a - shrink)
    step = step * (total / (total + damping))
    if not (step == step and slope[0] + step >= 0.0):
        step = np.float32(0.0)
    for k in range(steps):
        b, c = info[k * info_stride + 1], info[k * info_stride + 2] + ridge
        change = (grad[k * grad_stride + 1] - b * step) / c
        change = change * (counts[k] / (counts[k] + damping))
        if change == change:
            intercepts[k] += change
        for column in range(3):
            info[k * info_stride + column] = 0.0
        grad[k * grad_stride] = 0.0
        grad[k * grad_stride + 1] = 0.0
        counts[k] = 0.0
    slope[0] += step


def refit(
    grid: Any,
    slope_ptr,
    intercepts_ptr,
    info_ptr,
    info_row_stride,
    grad_ptr,
    grad_row_stride,
    counts_ptr,
    NUM_SPECULATIVE_STEPS,
    L2,
    DAMPING,
    BLOCK,
) -> None:
    """One damped Newton step for the shared slope and the intercepts; clears the sums."""
    _refit(
        memory(slope_ptr),
        memory(intercepts_ptr),
        memory(info_ptr),
        info_row_stride,
        memory(grad_ptr),
        grad_row_stride,
        memory(counts_ptr),
        NUM_SPECULATIVE_STEPS,
        np.float32(L2),
        np.float32(DAMPING),
    )


@jit
def _local_stats(
    rows,
    blocks,
    block_size,
    maxima,
    max_stride,
    sums,
    sum_stride,
    logits,
    stride,
    requests,
    requests_stride,
    temperatures,
    vocab,
):
    for row in range(rows):
        request = np.int64(requests[row * requests_stride])
        if request < 0:
            for block in range(blocks):
                maxima[row * max_stride + block] = NEGATIVE_INFINITY
                sums[row * sum_stride + block] = 0.0
            continue
        temperature = np.float32(temperatures[request])
        divisor = temperature if temperature > 0.0 else np.float32(1.0)
        line = logits[row * stride : row * stride + vocab]
        for block in range(blocks):
            value, total = max_and_sumexp(line, block * block_size, min((block + 1) * block_size, vocab), divisor)
            maxima[row * max_stride + block] = value
            sums[row * sum_stride + block] = total


def local_max_sumexp(
    grid: Any,
    local_max_ptr,
    local_max_stride,
    local_sumexp_ptr,
    local_sumexp_stride,
    logits_ptr,
    logits_stride,
    idx_mapping_ptr,
    idx_mapping_stride,
    temperature_ptr,
    num_tokens,
    vocab_size,
    BLOCK_SIZE,
) -> None:
    """Maximum and sum of exponentials of every block of the drafter's scaled logits."""
    _local_stats(
        min(grid[0], num_tokens),
        grid[1],
        BLOCK_SIZE,
        memory(local_max_ptr),
        local_max_stride,
        memory(local_sumexp_ptr),
        local_sumexp_stride,
        memory(logits_ptr),
        logits_stride,
        memory(idx_mapping_ptr),
        idx_mapping_stride,
        memory(temperature_ptr),
        vocab_size,
    )


@jit
def _predict(
    rows,
    features,
    features_stride,
    predictions,
    predictions_stride,
    confidence,
    confidence_stride,
    slope,
    intercepts,
    maxima,
    max_stride,
    sums,
    sum_stride,
    requests,
    requests_stride,
    draft_steps,
    blocks,
    step_per_row,
    steps,
    limit,
):
    for row in range(rows):
        request = np.int64(requests[row * requests_stride])
        if request < 0:
            continue
        step = np.int64(draft_steps[row if step_per_row else 0])
        batch = row // steps if step_per_row else row
        maximum = NEGATIVE_INFINITY
        for block in range(blocks):
            if maxima[row * max_stride + block] > maximum:
                maximum = maxima[row * max_stride + block]
        total = np.float32(0.0)
        for block in range(blocks):
            total += sums[row * sum_stride + block] * np.exp(maxima[row * max_stride + block] - maximum)
        feature = -np.log(max(total - np.float32(1.0), np.float32(0.0)))
        feature = min(max(feature, -limit), limit)
        features[request * features_stride + step] = feature
        odds = slope[0] * feature + intercepts[step]
        probability = np.float32(1.0) / (np.float32(1.0) + np.exp(-odds))
        predictions[request * predictions_stride + step] = probability
        confidence[batch * confidence_stride + step] = probability


def predict(
    grid: Any,
    features_ptr,
    features_stride,
    pred_ptr,
    pred_stride,
    conf_ptr,
    conf_stride,
    slope_ptr,
    intercepts_ptr,
    local_max_ptr,
    local_max_stride,
    local_sumexp_ptr,
    local_sumexp_stride,
    idx_mapping_ptr,
    idx_mapping_stride,
    step_ptr,
    num_tokens,
    vocab_num_blocks,
    per_token_step,
    NUM_SPECULATIVE_STEPS,
    MAX_LOG_ODDS,
    PADDED_VOCAB_NUM_BLOCKS,
) -> None:
    """Acceptance probability of every draft from the log-odds of the drafter's most likely token."""
    _predict(
        min(grid[0], num_tokens),
        memory(features_ptr),
        features_stride,
        memory(pred_ptr),
        pred_stride,
        memory(conf_ptr),
        conf_stride,
        memory(slope_ptr),
        memory(intercepts_ptr),
        memory(local_max_ptr),
        local_max_stride,
        memory(local_sumexp_ptr),
        local_sumexp_stride,
        memory(idx_mapping_ptr),
        idx_mapping_stride,
        memory(step_ptr),
        vocab_num_blocks,
        bool(per_token_step),
        NUM_SPECULATIVE_STEPS,
        np.float32(MAX_LOG_ODDS),
    )


_ESTIMATOR = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator."
KERNELS = {
    _ESTIMATOR + "_accumulate_kernel": accumulate,
    _ESTIMATOR + "_refit_kernel": refit,
    _ESTIMATOR + "_local_max_sumexp_kernel": local_max_sumexp,
    _ESTIMATOR + "_predict_kernel": predict,
}
