"""Kernels of the drafters against the interpreter; all memory equal."""

from types import SimpleNamespace

import numpy as np
import torch
from batches import MAX_LEN, SLOTS, batch
from differential import check, checked
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31 - 1)
FEW = settings(max_examples=8, deadline=None, derandomize=True)
DECODE = "vllm.v1.worker.gpu.spec_decode."


def outcome(b):
    """Sampled and rejected counts of a step; a request in prefill has neither."""
    sampled = torch.tensor([int(b.rng.integers(0, n + 1)) for n in b.cu_logits.diff()], dtype=torch.int32)
    rejected = torch.where(sampled > 0, b.cu_logits.diff() - sampled, 0).to(torch.int32)
    return sampled, rejected


def inputs(b):
    return SimpleNamespace(
        num_reqs=b.size,
        num_tokens=b.num_tokens,
        input_ids=b.ints(b.num_tokens),
        positions=b.positions,
        idx_mapping=b.requests,
        query_start_loc=b.query_start,
        query_start_loc_np=b.query_start.numpy(),
        seq_lens=b.seq_lens,
        num_scheduled_tokens=b.query_start.diff().numpy(),
    )


def buffers(size=200):
    return SimpleNamespace(
        input_ids=torch.full((size,), -7, dtype=torch.int32),
        positions=torch.full((size,), -7, dtype=torch.int64),
        query_start_loc=torch.full((SLOTS + 1,), -7, dtype=torch.int32),
        seq_lens=torch.full((SLOTS,), -7, dtype=torch.int32),
    )


@FEW
@given(seed=SEEDS)
def test_own_draft_model(seed):
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

    b = batch(seed)
    _, rejected = outcome(b)
    with checked(speculator.__name__) as launches:
        speculator.prepare_prefill_inputs(
            buffers(),
            inputs(b),
            b.ints((SLOTS, 1), dtype=torch.int64),
            rejected,
            torch.zeros(220, dtype=torch.int32),
            torch.zeros(220, dtype=torch.int64),
            torch.zeros(SLOTS, dtype=torch.int64),
            SLOTS,
            40,
        )
    assert len(launches) == 1


@FEW
@given(seed=SEEDS, advance=st.booleans(), step=st.integers(0, 2))
def test_target_dependent(seed, advance, step):
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator

    b = batch(seed)
    sampled, rejected = outcome(b)
    target, own = inputs(b), buffers()
    hidden = torch.from_numpy(b.rng.normal(size=(SLOTS, 48))).to(torch.bfloat16)
    current = torch.tensor(step)
    sources = b.ints(SLOTS, 0, 40, torch.int64)
    with checked(speculator.__name__) as launches:
        speculator.prepare_prefill_inputs(
            torch.zeros(SLOTS, dtype=torch.int64),
            torch.tensor(9),
            own,
            target,
            sampled,
            rejected,
            b.ints((SLOTS, 1), dtype=torch.int64),
            b.ints((1, SLOTS)),
            SLOTS,
        )
        speculator.prepare_decode_inputs(
            b.ints((b.size, b.steps), dtype=torch.int64), b.seq_lens, rejected, own, sources, 40, SLOTS, advance
        )
        speculator.update_draft_inputs(
            b.ints(b.size, dtype=torch.int64),
            current,
            hidden,
            torch.zeros(SLOTS, b.steps, dtype=torch.int64),
            torch.zeros_like(hidden),
            own,
            sources,
            b.size,
            40,
            b.steps,
            advance,
        )
    assert len(launches) == 3


@FEW
@given(seed=SEEDS, cached=st.booleans())
def test_multi_module_mtp(seed, cached):
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator

    b = batch(seed, steps=4)
    sampled, rejected = outcome(b)
    target, own = inputs(b), buffers()
    own.query_start_loc[: b.size + 1] = b.query_start
    last = torch.zeros(SLOTS, dtype=torch.int64)
    size, steps = 40, b.steps

    def floats(*shape):
        return torch.from_numpy(b.rng.normal(size=shape)).to(torch.bfloat16)

    hidden, embeds, kept_ids = floats(200, size), floats(200, size) if cached else None, b.ints((SLOTS, steps - 1))
    kept, kept_embeds = floats(SLOTS, steps - 1, size), floats(SLOTS, steps - 1, size) if cached else None
    with checked(speculator.__name__) as launches:
        speculator.prepare_input_buffers(
            b.size,
            target,
            kept_ids,
            sampled,
            rejected,
            b.ints((SLOTS, 1), dtype=torch.int64),
            b.ints((steps, SLOTS)),
            torch.zeros(SLOTS, steps - 1, dtype=torch.int64),
            own,
            last,
            SLOTS,
            steps,
        )
        speculator.prepare_input_hidden_states_and_embeddings(
            b.size,
            int(b.query_start.diff().max()),
            hidden,
            floats(b.num_tokens, size),
            kept,
            embeds,
            kept_embeds,
            target,
            own,
            rejected,
            steps,
        )
        speculator.pad_trailing_draft_slots(b.ints((2, 220), dtype=torch.int64), own.query_start_loc, last, b.size)
        speculator.cache_inputs(
            own, embeds, hidden, kept_ids, kept_embeds, kept, last, b.requests, b.size, steps, cached
        )
        speculator.update_draft_inputs(
            b.ints(b.size, dtype=torch.int64),
            floats(b.size, size) if cached else None,
            own,
            embeds,
            last,
            b.requests,
            b.size,
        )
    assert len(launches) == (6 if cached else 5)


@FEW
@given(seed=SEEDS, anchor=st.booleans())
def test_block_drafter_inputs(seed, anchor):
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    b = batch(seed)
    sampled, rejected = outcome(b)
    steps = b.steps
    queries = steps if anchor else steps + 1
    longs = [torch.full((size,), -7, dtype=torch.int64) for size in (220, 220, 220, SLOTS * steps, SLOTS * steps)]
    with checked(speculator.__name__) as launches:
        speculator.prepare_dflash_inputs(
            buffers(),
            *longs,
            torch.full((SLOTS * steps,), -7, dtype=torch.int32),
            torch.zeros(SLOTS),
            torch.zeros(SLOTS, dtype=torch.int64),
            inputs(b),
            sampled,
            rejected,
            b.ints((SLOTS, 1), dtype=torch.int64),
            b.ints((1, SLOTS)),
            torch.rand(SLOTS),
            b.ints(SLOTS, dtype=torch.int64),
            b.ints((SLOTS, 9), 0, 4),
            8,
            0,
            1,
            1,
            5,
            queries,
            steps,
            SLOTS,
            220,
            40,
            anchor,
        )
    assert len(launches) == 1


@FEW
@given(seed=SEEDS, probabilistic=st.booleans(), double=st.booleans())
def test_candidate_walk(seed, probabilistic, double):
    from vllm.v1.worker.gpu.spec_decode.dflash2 import speculator

    b = batch(seed)
    top_k, size = 5, b.size
    sampler = speculator.CandidateSampler(SLOTS, b.steps, top_k, torch.device("cpu"))
    sampler.scores.fill_(-7)
    candidates = torch.from_numpy(np.stack([b.rng.permutation(b.vocab)[:top_k] for _ in range(size * b.steps)]))
    mapping = torch.repeat_interleave(b.requests, b.steps)
    mapping[torch.from_numpy(np.repeat(b.rng.random(size) < 0.2, b.steps))] = -1
    with checked(speculator.__name__) as launches:
        sampler.sample(
            candidates.view(size, b.steps, top_k),
            b.logits((size, b.steps, top_k), top_k),
            size,
            b.ints(size * b.steps, 1, 40, torch.int64),
            mapping,
            torch.from_numpy(b.rng.choice([0.0, 0.8], SLOTS)).float(),
            b.ints(SLOTS, dtype=torch.int64),
            torch.zeros(SLOTS, b.steps, dtype=torch.int64),
            torch.full((SLOTS, b.steps, b.vocab), -torch.inf) if probabilistic else None,
            double,
        )
    assert len(launches) == 1 + probabilistic


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=SEEDS, shortest=st.integers(1, 2), longest=st.integers(2, 4), letters=st.sampled_from([2, 4, 50]))
def test_ngram(seed, shortest, longest, letters):
    b = batch(seed)
    tokens = b.ints((SLOTS, MAX_LEN), 0, letters)
    lengths = b.ints(SLOTS, 1, MAX_LEN)
    sampled = b.ints(b.size, 0, 3)
    blocks = MAX_LEN // 32
    scratch = torch.full((SLOTS, blocks), -7, dtype=torch.int64)
    check(
        DECODE + "ngram.speculator._ngram_scan_kernel",
        (b.size, blocks),
        tokens,
        MAX_LEN,
        b.requests,
        lengths,
        sampled,
        scratch,
        blocks,
        MAX_LEN,
        shortest,
        longest,
        4,
        32,
    )
    check(
        DECODE + "ngram.speculator._ngram_finalize_kernel",
        (b.size,),
        tokens,
        MAX_LEN,
        b.requests,
        lengths,
        sampled,
        b.ints(SLOTS, dtype=torch.int64),
        scratch,
        blocks,
        torch.zeros(SLOTS, 4, dtype=torch.int64),
        MAX_LEN,
        blocks,
        4,
        4,
        4,
    )


@FEW
@given(seed=SEEDS, per_row=st.booleans())
def test_acceptance_estimator(seed, per_row):
    from vllm.v1.worker.gpu.spec_decode import acceptance_estimator

    b = batch(seed, decoding=True)
    sampled, rejected = outcome(b)
    estimator = acceptance_estimator.OnlineAcceptanceEstimator(SLOTS, b.steps, torch.device("cpu"))
    estimator.REFIT_INTERVAL = 2
    rows = b.size * b.steps if per_row else b.size
    mapping = torch.repeat_interleave(b.requests, b.steps) if per_row else b.requests.clone()
    mapping[b.rng.random(rows) < 0.15] = -1
    step = torch.arange(b.steps).repeat(b.size) if per_row else torch.tensor(1)
    temperature = torch.from_numpy(b.rng.choice([0.0, 0.7, 1.0], SLOTS)).float()
    with checked(acceptance_estimator.__name__) as launches:
        for _ in range(2):
            estimator.predict(
                b.logits(rows, 5000, torch.bfloat16), mapping, step, torch.zeros(SLOTS, b.steps), temperature
            )
            estimator.step(b.requests, sampled, rejected)
    assert len(launches) == 4
