"""Logits processors and logprobs against the interpreter."""

import numpy as np
import pytest
import torch
from batches import MAX_LEN, SLOTS, batch
from differential import check, checked
from hypothesis import given, settings
from hypothesis import strategies as st

from specgram_lab.builders.cpu import kernels

SEEDS = st.integers(0, 2**31 - 1)
FEW = settings(max_examples=6, deadline=None, derandomize=True)
SAMPLE = "vllm.v1.worker.gpu.sample."


def distinct(b, rows, columns, vocab):
    return torch.from_numpy(np.stack([b.rng.permutation(vocab)[:columns] for _ in range(rows)])).to(torch.int32)


@FEW
@given(seed=SEEDS)
def test_penalties(seed):
    from vllm.v1.worker.gpu.sample import penalties

    b = batch(seed, decoding=True, vocab=1100)
    bits = torch.zeros(SLOTS, (b.vocab + 31) // 32, dtype=torch.int32)
    counts = torch.zeros(SLOTS, b.vocab, dtype=torch.int32)
    kinds = [torch.from_numpy(b.rng.choice(c, SLOTS)).float() for c in ([1.0, 1.3, 0.8], [0.0, 0.4], [0.0, -0.7])]
    with checked(SAMPLE + "penalties") as launches:
        penalties.bincount(b.requests, b.tokens, b.prompt_len, b.prefill_len, bits, counts, int(b.prefill_len.max()))
        penalties.apply_penalties(
            b.logits(b.num_logits, b.vocab), b.expanded, b.ints(b.num_logits), b.local, *kinds, bits, counts
        )
    assert len(launches) == 2


@FEW
@given(seed=SEEDS, restore=st.booleans())
def test_bias(seed, restore):
    from vllm.v1.worker.gpu.sample import logit_bias

    b = batch(seed)
    lists = [(b.ints(SLOTS, 0, n + 1) * (b.ints(SLOTS, 0, 2)), distinct(b, SLOTS, n, b.vocab)) for n in (6, 5, 4)]
    with checked(SAMPLE + "logit_bias"):
        logit_bias.apply_logit_bias(
            b.logits(b.num_logits, b.vocab),
            b.expanded,
            b.ints(b.num_logits, 0, 40, torch.int64),
            lists[0][0],
            lists[0][1],
            lists[1][0],
            lists[1][1],
            torch.from_numpy(b.rng.normal(size=(SLOTS, 5))).float(),
            b.ints(SLOTS, 0, 60),
            lists[2][0],
            b.ints(SLOTS, 0, 2, torch.int8).bool(),
            lists[2][1],
            restore,
        )


@FEW
@given(seed=SEEDS)
def test_bad_words(seed):
    from vllm.v1.worker.gpu.sample import bad_words

    b = batch(seed, decoding=True, vocab=3)
    offsets = torch.from_numpy(
        np.concatenate([np.zeros((SLOTS, 1), int), np.cumsum(b.rng.integers(1, 4, (SLOTS, 4)), 1)], 1)
    )
    with checked(SAMPLE + "bad_words"):
        bad_words.apply_bad_words(
            b.logits(b.num_logits, 3),
            b.expanded,
            b.ints((SLOTS, 16)),
            offsets.to(torch.int32),
            b.ints(SLOTS, 0, 5),
            b.tokens,
            b.prompt_len,
            b.total_len,
            b.ints(b.num_logits),
            b.local,
            4,
        )


@FEW
@given(seed=SEEDS)
def test_trace_replay(seed):
    from vllm.v1.worker.gpu.sample import trace_replay

    b = batch(seed)
    mapping = b.requests.clone()
    mapping[0] = -1
    with checked(SAMPLE + "trace_replay"):
        trace_replay.apply_trace_tokens(
            b.ints(b.size, dtype=torch.int64),
            mapping,
            b.ints((SLOTS, MAX_LEN)),
            b.ints(SLOTS, 0, 12),
            b.total_len,
            b.prompt_len,
        )


@FEW
@given(seed=SEEDS)
def test_logprobs(seed):
    """The interpreter compares bfloat16 by its bits, so for bfloat16 the oracle is the same launch in float32."""
    from vllm.v1.worker.gpu.sample import logprob

    b = batch(seed, vocab=1500)
    halves = b.logits(b.num_logits, b.vocab, torch.bfloat16)
    tokens = b.ints(b.num_logits, dtype=torch.int64)
    with checked(SAMPLE + "logprob") as launches:
        expected = logprob.compute_topk_scores(halves.float(), 3, tokens)
    assert len(launches) == 2
    ranks, scores = torch.zeros_like(tokens), torch.zeros_like(expected.logprobs)
    kernels.NATIVE[SAMPLE + "logprob._ranks_kernel"]((len(tokens),), ranks, halves, b.vocab, tokens, b.vocab, 8192)
    kernels.NATIVE[SAMPLE + "logprob._topk_log_softmax_kernel"](
        (len(tokens),), scores, halves, b.vocab, expected.logprob_token_ids, 4, 4, b.vocab, 1024, 4
    )
    assert torch.equal(ranks, expected.selected_token_ranks)
    torch.testing.assert_close(scores, expected.logprobs, equal_nan=True)
    for topk in (0, 2):
        valid = torch.zeros(b.num_logits, 5, dtype=torch.bool)
        check(
            SAMPLE + "logprob._fill_logprob_token_ids_kernel",
            (b.num_logits,),
            b.ints((b.num_logits, 5), dtype=torch.int64),
            5,
            valid,
            5,
            b.ints(b.num_logits, dtype=torch.int64),
            b.ints((b.num_logits, 4)),
            4,
            b.expanded,
            b.ints(SLOTS, 0, 5),
            b.ints((SLOTS, 8)),
            8,
            NUM_TOPK=topk,
            PADDED_COLS=4,
        )


@FEW
@given(seed=SEEDS)
def test_prompt_logprobs_nan_counts_and_sampling_masks(seed):
    from vllm.v1.worker.gpu.metrics import logits as metrics
    from vllm.v1.worker.gpu.sample import output, prompt_logprob

    b = batch(seed, vocab=300)
    with checked(SAMPLE + "prompt_logprob"):
        prompt_logprob.get_prompt_logprobs_token_ids(b.num_tokens, b.query_start, b.requests, b.computed, b.tokens)
    logits = b.logits(b.num_logits, b.vocab)
    with checked(SAMPLE + "output"):
        output.SamplingMaskTensors.from_logits(logits, b.cu_logits, b.cu_logits.diff(), 40, b.steps + 1)
    logits[b.rng.random(logits.shape) < 0.1] = torch.nan
    with checked("vllm.v1.worker.gpu.metrics.logits"):
        metrics.get_num_nans(logits)


@pytest.mark.parametrize(("with_k", "with_p"), [(True, False), (False, True), (True, True)])
@FEW
@given(seed=SEEDS)
def test_top_k_and_top_p(with_k, with_p, seed):
    """The kernel cannot run in the interpreter (its row index is no tensor there): torch's version is the oracle."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    b = batch(seed)
    rows, vocab = b.num_logits, 700
    logits = torch.from_numpy(b.rng.normal(size=(rows, vocab)) * b.rng.choice([0.5, 3, 8], (rows, 1))).float()
    logits[:, b.rng.random(vocab) < 0.3] = -torch.inf
    k = b.ints(rows, 1, 60) if with_k else None
    p = torch.from_numpy(b.rng.uniform(0.1, 0.99, rows)).float() if with_p else None
    native = truncate(logits.clone(), k, p)
    oracle = apply_top_k_top_p_pytorch(logits.clone(), k, p)
    differing = (oracle > -torch.inf) != (native > -torch.inf)
    # Rounding may move the border by one token whose probability vanishes in the sum.
    assert ((logits.softmax(-1) * differing).sum(-1) <= 1e-6).all()
    assert torch.equal(native[~differing], oracle[~differing])


def truncate(logits, k, p):
    kernels.NATIVE["vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel"](
        None,
        logits,
        logits.stride(0),
        None,
        None,
        None,
        k,
        p,
        *logits.shape,
        -torch.inf,
        256,
        128,
        k is not None,
        p is not None,
        False,
    )
    return logits


def test_of_equal_logits_at_the_border_the_first_stay():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, -torch.inf], [0.0, 0.0, 0.0, 0.0, 0.0], [-torch.inf] * 5])
    kept = truncate(logits.clone(), torch.tensor([2, 5, 1], dtype=torch.int32), None) > -torch.inf
    assert kept.tolist() == [[True, True, False, False, False], [True] * 5, [False] * 5]
    kept = truncate(logits.clone(), None, torch.tensor([1.0, 0.5, 0.5])) > -torch.inf
    assert kept.tolist() == [[True, True, True, True, False], [True, True, True, False, False], [False] * 5]
