"""Batch layout kernels against the interpreter; all memory equal."""

import numpy as np
import pytest
import torch
from batches import MAX_LEN, SLOTS, batch
from differential import check, checked
from hypothesis import given, settings
from hypothesis import strategies as st

from specgram_lab.builders.cpu import kernels

SEEDS = st.integers(0, 2**31 - 1)
FEW = settings(max_examples=10, deadline=None, derandomize=True)
BATCH = "vllm.v1.worker.gpu.input_batch"
TABLE = "vllm.v1.worker.gpu.block_table"


def filled(*shape, dtype=torch.int32):
    """Memory that a kernel must overwrite, or leave alone, exactly where the oracle does."""
    return torch.full(shape, -77, dtype=dtype)


@FEW
@given(seed=SEEDS, lookahead=st.integers(1, 4))
def test_input_batch_functions(seed, lookahead):
    from vllm.v1.worker.gpu import input_batch

    b = batch(seed)
    ids, positions = filled(200), filled(200, dtype=torch.int64)
    seq_lens = filled(SLOTS)
    with checked(BATCH) as launches:
        input_batch.prepare_prefill_inputs(
            ids, filled(lookahead, SLOTS), b.requests, b.query_start, b.tokens, b.prefill_len, b.computed
        )
        input_batch.prepare_pos_seq_lens(b.requests, b.query_start, b.computed, positions, seq_lens)
        for new in (0, 1):
            input_batch.combine_sampled_and_draft_tokens(
                ids,
                b.requests,
                b.ints((SLOTS, 1)),
                b.query_start,
                seq_lens,
                b.prefill_len,
                b.ints((SLOTS, b.steps + 1), dtype=torch.int64),
                b.cu_logits,
                b.num_logits,
                new,
            )
        input_batch.expand_idx_mapping(b.requests, b.num_logits, b.cu_logits, b.steps + 1)
        sampled = torch.tensor([int(b.rng.integers(1, n + 1)) for n in b.cu_logits.diff()], dtype=torch.int32)
        _, rejected = input_batch.get_num_sampled_and_rejected(
            sampled, b.seq_lens, b.cu_logits, b.requests, b.prefill_len
        )
        mapping = b.requests.clone()
        mapping[b.rng.random(b.size) < 0.2] = -1
        for counts, start in ((None, b.query_start), (torch.zeros(SLOTS, b.vocab, dtype=torch.int32), None)):
            input_batch.post_update(
                mapping,
                b.computed,
                b.ints(SLOTS, dtype=torch.int64),
                counts,
                b.ints((b.size, b.steps + 1), dtype=torch.int64),
                sampled,
                rejected,
                start,
                b.tokens,
                b.total_len,
            )
        input_batch.post_update_num_computed_tokens(b.requests, b.computed, b.query_start)
    assert len(launches) == 7


def run_on_tables(seed, native, groups, padded):
    """One pass over pointer tables, which differential copies cannot follow; returns what was written."""
    b = batch(seed)
    strides = torch.from_numpy(b.rng.integers(20, 30, groups)).to(torch.int32)
    sources = [b.ints((SLOTS, int(s)), 1, 50) for s in strides]
    targets = [filled(SLOTS, int(s)) for s in strides]
    pointers = [torch.tensor([t.data_ptr() for t in ts], dtype=torch.uint64) for ts in (sources, targets)]
    blocks = b.ints((groups, SLOTS), 0, 20)
    sizes = torch.from_numpy(b.rng.choice([4, 8], groups)).to(torch.int32)
    enabled = torch.from_numpy(b.rng.random(groups) < 0.8)
    slots = filled(groups, 220, dtype=torch.int64)
    mapping = b.requests.clone()
    mapping[b.rng.random(b.size) < 0.2] = -1
    writes = b.ints(5, 0, SLOTS), b.ints(5, 0, 4), torch.tensor([3, 3, 7, 12, 14], dtype=torch.int32)
    contents, chosen = b.ints(14), b.ints(5, 0, groups)

    def launch(name, grid, *args, **kwargs):
        kernel = kernels.find(name)
        if native:
            kernels.NATIVE[name](grid, *args, **kwargs)
        else:
            kernel[grid](*args, **kwargs)

    launch(
        TABLE + "._gather_block_tables_kernel",
        (groups, b.size + padded),
        b.requests,
        *pointers,
        strides,
        blocks,
        blocks.stride(0),
        b.size,
        BLOCK_SIZE=1024,
    )
    launch(
        TABLE + "._compute_slot_mappings_kernel",
        (groups, b.size + 1),
        220,
        mapping,
        b.query_start,
        b.positions,
        pointers[0],
        strides,
        sizes,
        enabled,
        enabled,
        slots,
        slots.stride(0),
        0,
        CP_SIZE=1,
        CP_INTERLEAVE=1,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=1024,
    )
    launch(
        "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel",
        (5,),
        pointers[1],
        strides,
        writes[0],
        writes[1],
        contents,
        writes[2],
        chosen,
        BLOCK_SIZE=1024,
        MULTI_GROUP=True,
    )
    cache = [filled(SLOTS, 16) for _ in range(groups)]
    launch(
        "vllm.v1.worker.utils._zero_kv_blocks_kernel",
        (3, groups, 2),
        torch.tensor([t.data_ptr() for t in cache], dtype=torch.int64),
        torch.full((groups,), 16, dtype=torch.int64),
        torch.full((groups,), 12, dtype=torch.int64),
        torch.tensor([0, 2, 5]),
        BLOCK_SIZE=8,
    )
    return [*targets, slots, *cache]


@FEW
@given(seed=SEEDS, groups=st.integers(1, 3), padded=st.integers(0, 1))
def test_block_tables(seed, groups, padded):
    for oracle, native in zip(
        run_on_tables(seed, False, groups, padded), run_on_tables(seed, True, groups, padded), strict=True
    ):
        assert torch.equal(oracle, native)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_staged_writes(dtype):
    rng = np.random.default_rng(3)
    rows, starts = (torch.from_numpy(rng.integers(0, 5, 4)).to(torch.int32) for _ in range(2))
    check(
        "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel",
        (4,),
        torch.zeros(6, MAX_LEN, dtype=dtype),
        MAX_LEN,
        rows,
        starts,
        torch.arange(12).to(dtype),
        torch.tensor([2, 2, 9, 12], dtype=torch.int32),
        None,
        BLOCK_SIZE=4,
        MULTI_GROUP=False,
    )
