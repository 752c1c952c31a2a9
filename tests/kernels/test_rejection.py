"""The rejection sampler, kernel by kernel, through vLLM's own rejection_sample."""

import pytest
import torch
from batches import SLOTS, batch
from differential import check, checked
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31 - 1)
UTILS = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


def run(
    seed, *, draft, dtype=torch.float32, double=False, by_block=False, synthetic=False, temperatures=(0.0, 0.6, 1.3)
):
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    b = batch(seed, decoding=True)
    vocab = 9000
    target = b.logits(b.num_logits, vocab, dtype)
    drafts = None
    if draft:
        drafts = b.logits((SLOTS, b.steps), vocab, torch.bfloat16)
    tokens = b.ints(b.num_logits, 0, vocab, torch.int32)
    # Half of the drafts are the target's favourites, so that some are accepted; some are placeholders.
    favourites = torch.roll(target.float().argmax(-1), 1).to(torch.int32)
    tokens = torch.where(torch.from_numpy(b.rng.random(len(tokens)) < 0.6), favourites, tokens)
    tokens[b.rng.random(len(tokens)) < 0.1] = -1
    temperature = torch.from_numpy(b.rng.choice(temperatures, SLOTS)).float()
    rates = torch.tensor([0.9, 0.6, 0.3]) if synthetic else None
    with checked(UTILS) as launches:
        sampled, count = rejection_sampler_utils.rejection_sample(
            target,
            drafts,
            tokens,
            b.cu_logits,
            b.ints(b.num_logits, 0, 4000, torch.int64),
            b.requests,
            b.expanded,
            b.local,
            temperature,
            torch.from_numpy(b.rng.integers(0, 2**62, SLOTS)),
            b.steps,
            rates,
            double,
            by_block,
        )
    assert ((count >= 1) & (count <= b.cu_logits[1:] - b.cu_logits[:-1])).all()
    return launches, sampled


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_token_by_token(draft, dtype, seed):
    launches, _ = run(seed, draft=draft, dtype=dtype)
    assert {
        "_compute_local_logits_stats_kernel",
        "_rejection_kernel",
        "_resample_kernel",
        "_insert_resampled_kernel",
    } == set(launches)


@pytest.mark.parametrize("draft", [False, True])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_block_verification(draft, seed):
    launches, _ = run(seed, draft=draft, by_block=True)
    assert launches["_compute_cumulative_log_p_kernel"] == 1
    assert launches["_compute_local_residual_mass_kernel"] == int(draft)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(seed=SEEDS, draft=st.booleans())
def test_double_precision_noise(seed, draft):
    run(seed, draft=draft, double=True, temperatures=(0.9,))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_synthetic_acceptance(seed):
    run(seed, draft=False, synthetic=True)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_gather_and_flatten(seed):
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    b = batch(seed)
    indices = torch.cat(
        [
            torch.arange(end - n, end)
            for end, n in zip(b.query_start[1:].tolist(), (b.cu_logits[1:] - b.cu_logits[:-1]).tolist(), strict=True)
        ]
    )
    with checked(SAMPLER) as launches:
        rejection_sampler.gather_draft_sampled(
            b.ints(b.num_tokens), b.positions, indices, b.expanded, b.local, b.prefill_len
        )
    assert launches["_gather_draft_sampled_kernel"] == 1
    sampled = b.ints((b.size, b.steps + 1), dtype=torch.int64)
    counts = torch.tensor(
        [int(b.rng.integers(0, n + 1)) for n in (b.cu_logits[1:] - b.cu_logits[:-1]).tolist()], dtype=torch.int32
    )
    check(
        SAMPLER + "._flatten_sampled_kernel",
        (b.size,),
        torch.zeros(b.num_logits, dtype=torch.int64),
        sampled,
        sampled.stride(0),
        counts,
        b.cu_logits,
    )
