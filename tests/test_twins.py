"""Outputs held against those of the run without a drafter."""

from __future__ import annotations

import pandas as pd
import pytest

from specgram_lab import ledger, twins
from specgram_lab.spec import parse_cell

NGRAM = {"method": "ngram", "k": 4}


def tables(*runs):
    rows, requests = [], []
    for drafter, engine, workload, outputs in runs:
        cell = parse_cell({"drafter": drafter, "engine": engine, "workload": {"prompts": "x", **workload}})
        row = {"run_id": cell.cell_id, "outcome": "ok", "drafter": cell.drafter.method}
        rows.append(row | {"config_requested": cell.canonical()})
        requests += [{"run_id": cell.cell_id, "request_id": str(i), "token_ids": t} for i, t in enumerate(outputs)]
    return ledger.frame("runs", rows), ledger.frame("requests", requests)


@pytest.mark.parametrize(
    ("theirs", "token"), [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)]
)
def test_the_first_token_that_differs_is_named(theirs, token):
    found = twins.diverged(*tables(({}, {}, {}, [theirs]), (NGRAM, {}, {}, [[1, 2, 3]]))).iloc[0]
    assert bool(found["diverged"]) == (token is not None)
    assert (None if pd.isna(found["token"]) else found["token"]) == token


def test_an_async_run_and_one_that_was_recorded_otherwise_have_the_same_twin():
    other = {"method": "ngram_gpu", "k": 4}
    runs, requests = tables(({}, {"record": False}, {}, [[1]]), (other, {"scheduling": "async"}, {}, [[2]]))
    assert list(twins.diverged(runs, requests)["token"]) == [0]


@pytest.mark.parametrize(
    ("engine", "workload"), [({"runner": "v2"}, {}), ({}, {"max_tokens": 5}), ({}, {"temperature": 0.5})]
)
def test_without_a_twin_there_are_no_rows(engine, workload):
    assert twins.diverged(*tables(({}, {}, {}, [[1]]), (NGRAM, engine, workload, [[2]]))).empty
