"""Sampling kernels against the interpreter: tokens equal for equal seeds, masks equal."""

import numpy as np
import pytest
import torch
from batches import SLOTS, batch
from differential import checked
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31 - 1)
VOCAB = 2500


def sampling_state(b):
    temperature = torch.from_numpy(b.rng.choice([0.0, 0.3, 1.0, 1.7], SLOTS)).float()
    seeds = torch.from_numpy(b.rng.integers(-(2**63), 2**63 - 1, SLOTS))
    return temperature, seeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS, drafting=st.booleans(), scaled=st.booleans())
def test_gumbel_sample(dtype, double, seed, drafting, scaled):
    from vllm.v1.worker.gpu.sample import gumbel

    b = batch(seed)
    temperature, seeds = sampling_state(b)
    rows = b.num_logits
    with checked("vllm.v1.worker.gpu.sample.gumbel") as launches:
        gumbel.gumbel_sample(
            b.logits(rows, VOCAB, dtype),
            b.expanded,
            temperature,
            seeds,
            b.ints(rows, 0, 5000, torch.int64),
            scaled,
            drafting,
            use_fp64=double,
        )
    assert launches["_gumbel_sample_kernel"] == 1


@pytest.mark.parametrize("per_row", [False, True])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_gumbel_sample_fills_the_draft_cache_and_skips_padding(per_row, seed):
    from vllm.v1.worker.gpu.sample import gumbel

    b = batch(seed)
    temperature, seeds = sampling_state(b)
    rows = b.num_logits
    mapping = b.expanded.clone()
    mapping[b.rng.random(rows) < 0.3] = -1
    cache = torch.zeros(SLOTS, b.steps, VOCAB + 3, dtype=torch.bfloat16)
    column = b.ints(rows, 0, b.steps, torch.int64) if per_row else torch.tensor(1)
    with checked("vllm.v1.worker.gpu.sample.gumbel"):
        gumbel.gumbel_sample(
            b.logits(rows, VOCAB, torch.bfloat16),
            mapping,
            temperature,
            seeds,
            b.ints(rows, 0, 5000, torch.int64),
            True,
            True,
            logits_cache=cache,
            logits_cache_col=column,
        )


@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_temperature_and_min_p(seed):
    from vllm.v1.worker.gpu.sample import gumbel, min_p

    b = batch(seed)
    temperature, _ = sampling_state(b)
    shares = torch.from_numpy(b.rng.choice([0.0, 0.05, 0.5, 1.0], SLOTS)).float()
    logits = b.logits(b.num_logits, VOCAB)
    with checked("vllm.v1.worker.gpu.sample.gumbel"):
        gumbel.apply_temperature(logits, b.expanded, temperature)
    with checked("vllm.v1.worker.gpu.sample.min_p"):
        min_p.apply_min_p(logits, b.expanded, shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=SEEDS, vocab=st.sampled_from([31, 64, 2500]))
def test_grammar_bitmask(dtype, seed, vocab):
    """Positions past a request's admitted drafts must stay untouched (adaptive verification trims on device)."""
    from differential import check

    b = batch(seed)
    stride = b.steps + 1
    mapping = torch.tensor(
        [r * stride + p for r in range(b.size) for p in range(stride) if b.rng.random() < 0.7] or [0], dtype=torch.int32
    )
    words = (vocab + 31) // 32
    bits = torch.from_numpy(b.rng.integers(-(2**31), 2**31, (len(mapping), words))).to(torch.int32)
    bits[b.rng.random(len(mapping)) < 0.3] = 0
    bits[b.rng.random(len(mapping)) < 0.3] = -1
    logits = b.logits(b.num_logits, vocab, dtype)
    check(
        "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel",
        (len(mapping), -(-vocab // 8192)),
        logits,
        logits.stride(0),
        mapping,
        b.cu_logits,
        bits,
        bits.stride(0),
        vocab,
        MASK_STRIDE=stride,
        BLOCK_SIZE=8192,
    )


def test_all_masked_row_gives_the_first_token_of_each_block():
    from vllm.v1.worker.gpu.sample import gumbel

    logits = torch.full((2, VOCAB), -torch.inf)
    with checked("vllm.v1.worker.gpu.sample.gumbel"):
        tokens = gumbel.gumbel_sample(
            logits,
            torch.tensor([0, 1]),
            torch.tensor([0.0, 1.0]),
            torch.tensor([1, 2]),
            torch.tensor([5, 5]),
            False,
            False,
        )
    assert tokens.tolist() == [0, 0]


def test_noise_has_the_gumbel_distribution():
    """The pruned search must not bias the draw: frequencies follow the softmax."""
    from specgram_lab.builders.cpu.kernels.random import murmur_prefix
    from specgram_lab.builders.cpu.kernels.sampling import noised_argmax32

    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    draws = [
        noised_argmax32(logits, 0, 4, np.float32(1), murmur_prefix(11, position, 0))[1] for position in range(20000)
    ]
    assert np.allclose(np.bincount(draws, minlength=4) / 20000, [0.5, 0.25, 0.125, 0.125], atol=0.015)
