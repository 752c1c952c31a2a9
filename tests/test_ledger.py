"""The tables: schemas, invariants, reading and writing."""

from __future__ import annotations

import pandas as pd
import pyarrow.parquet as pq
import pytest

from specgram_lab import ledger

ROW = {
    "run_id": "r", "step": 3, "request_id": "0", "request_step": 1, "in_reasoning": False, "judged": True, "drafted": 4,
    "grammar_valid": 2, "scheduled": 4, "struck": 2, "verified": 3, "padded": 0, "av_skipped": 1, "accepted": 1,
    "sampled": 2, "committed": 2, "draft_token_ids": [5, 6, 7, 8], "sampled_token_ids": [5, 9],
}  # fmt: skip


def test_rows_come_back_as_they_were_written(tmp_path):
    ledger.write_table(tmp_path, "steps", ledger.frame("steps", [ROW]))
    back = ledger.read_table(tmp_path, "steps")
    assert back.drop(columns=["draft_token_ids", "sampled_token_ids"]).iloc[0].to_dict().items() <= ROW.items()
    assert list(back["draft_token_ids"].iloc[0]) == ROW["draft_token_ids"]
    assert [p.name for p in tmp_path.iterdir()] == ["steps.parquet"]


def test_what_is_not_known_stays_empty(tmp_path):
    ledger.write_table(tmp_path, "runs", ledger.frame("runs", [{"run_id": "r", "outcome": "killed"}]))
    run = ledger.read_table(tmp_path, "runs").iloc[0]
    assert pd.isna(run["engine_num_drafts"])
    assert pd.isna(run["generate_s"])


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"drafted": 2, "draft_token_ids": [5, 6], "verified": 3}, "drafted >= verified"),
        ({"verified": 3, "accepted": 4}, "verified >= accepted"),
        ({"grammar_valid": 5}, "drafted >= grammar_valid"),
        ({"av_skipped": 0}, "scheduled = verified + padded + av_skipped"),
        ({"struck": 5}, "scheduled >= struck"),
        ({"committed": 3}, "sampled >= committed"),
        ({"draft_token_ids": [5]}, "drafted = number of draft_token_ids"),
        ({"padded": -1, "av_skipped": 2}, "no count is negative"),
    ],
)
def test_a_violated_invariant_is_named_with_its_row(tmp_path, change, invariant):
    wrong = ledger.frame("steps", [ROW | {"step": 1}, ROW | change])
    with pytest.raises(ledger.LedgerError) as caught:
        ledger.write_table(tmp_path, "steps", wrong)
    assert f"'{invariant}'" in str(caught.value)
    assert "step=3, request_id=0" in str(caught.value)
    assert not (tmp_path / "steps.parquet").exists()


def test_a_step_recorded_twice_is_refused():
    with pytest.raises(ledger.LedgerError, match="step 3 of request 0 is recorded twice"):
        ledger.check_steps(ledger.frame("steps", [ROW, ROW]))


def test_unknown_columns_and_newer_files_are_refused(tmp_path):
    with pytest.raises(ledger.LedgerError, match="steps has no column verifed"):
        ledger.frame("steps", [{"verifed": 1}])
    path = ledger.write_table(tmp_path, "steps", ledger.frame("steps", [ROW]))
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"schema_version": "2"}), path)
    with pytest.raises(ledger.LedgerError, match=f"schema version 2, this lab reads {ledger.SCHEMA_VERSION}"):
        ledger.read_table(tmp_path, "steps")


def test_every_column_says_what_it_is():
    bare = [
        (name, field.name)
        for name, schema in ledger.TABLES.items()
        for field in schema
        if not (field.metadata or {}).get(b"about") and not field.name.endswith("_tokens")
    ]
    assert bare == []
