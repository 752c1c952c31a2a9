"""A counter that goes backwards ends the engine in the middle of a run: what was counted until then is kept."""

from __future__ import annotations

import textwrap

import pytest
from engines import NGRAM, OBJECT, cell

from specgram_lab import ledger, semantics
from specgram_lab.run import run_cells

pytestmark = pytest.mark.engine

# The error itself is prometheus_client's own; only the negative amount is brought about.
FAULT = """
    import prometheus_client
    calls = 0

    def inc(self, amount=1, *args, **kwargs):
        global calls
        if self._name == "vllm:spec_decode_num_accepted_tokens":
            calls += 1
            amount = -1 if calls > 30 else amount
        return original(self, amount, *args, **kwargs)

    original = prometheus_client.Counter.inc
    prometheus_client.Counter.inc = inc
"""


def test_the_row_keeps_the_partial_counters_and_the_next_cell_runs(tmp_path, target_folder, monkeypatch):
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(textwrap.dedent(FAULT), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fault"))
    cells = [cell(NGRAM, OBJECT, workload={"limit": 8, "concurrency": 2}), cell(workload={"limit": 2})]
    failed, after = run_cells([(one, tmp_path / str(number)) for number, one in enumerate(cells)])
    assert failed["outcome"] == "engine_failed"
    assert "Counters can only be incremented by non-negative amounts" in failed["reason"]
    assert failed["partial"]
    assert failed["prompts"] == 8
    assert failed["engine_num_drafts"] > 20
    assert failed["engine_draft_tokens"] > failed["engine_accepted_tokens"] > 0
    tables = ledger.read_run(tmp_path / "0")
    finished = tables["requests"]["finish_reason"].notna().sum()
    assert 0 < finished < 8
    total = semantics.totals(tables["steps"], countings=("rfc",), runs=tables["runs"]).iloc[0]
    assert total["partial"]
    assert total["spec_steps"] > 20
    assert after["outcome"] == "ok"
