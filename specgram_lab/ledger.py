"""The tables of a run: their schemas, the invariants that every row obeys, reading and writing.

Four grains, one parquet file each: ``runs`` (one row a cell), ``requests``, ``steps`` (one row a request and
engine step in which the request was to produce tokens), ``fsm_events`` (the grammar refused a token).
Everything else, counters, rates, figures, is derived from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 1
"""Stored in every file. History: 1, the first layout."""
FEW = 1000
"""Rows up to which a table is written and read in a way that is quick for thousands of small files."""
READERS = 4
TOGETHER = 256
"""Files that are read before they become one table: thousands of small tables take more memory than what they hold."""


class LedgerError(ValueError):
    """A table that breaks an invariant or does not fit its schema; the message shows the row."""


def _schema(**columns: tuple[pa.DataType, str]) -> pa.Schema:
    fields = [pa.field(name, kind, metadata={"about": about}) for name, (kind, about) in columns.items()]
    return pa.schema(fields, metadata={"schema_version": str(SCHEMA_VERSION)})


_I, _L, _F, _B, _S = pa.int32(), pa.int64(), pa.float64(), pa.bool_(), pa.string()

RUNS = _schema(
    run_id=(_S, "the cell id"),
    outcome=(
        _S,
        "ok, unsupported, engine_failed, ledger_failed (a step breaks an invariant, or the engine reported other "
        "numbers), grammar_rejected, rejected_request, timeout, killed, no_data",
    ),
    reason=(_S, "one sentence for every outcome but ok"),
    warnings=(pa.list_(_S), "what the reader of the numbers should know"),
    partial=(_B, "the run ended before its last request did; an engine that was killed leaves no other tables"),
    engine=(_S, "local or scripted"),
    device=(_S, "cpu or cuda"),
    drafter=(_S, "method"),
    k=(_I, "num_speculative_tokens"),
    grammar=(_S, "name or kind"),
    grammar_kind=(_S, "kind"),
    whitespace=(_S, "any, compact or spaced: what the grammar allows between JSON tokens; empty where it has none"),
    workload=(_S, "prompts or scenario"),
    concurrency=(_I, "requests in the engine at once"),
    runner_requested=(_S, "v1 or v2"),
    runner_effective=(_S, "read back from the engine"),
    scheduling_requested=(_S, "sync or async"),
    scheduling_effective=(_S, "read back from the engine"),
    budget_requested=(_S, "AV policy asked for"),
    budget_effective=(_S, "off where the engine made no AV manager"),
    config_requested=(_S, "canonical JSON of the cell"),
    config_effective=(_S, "JSON of what the engine says it runs with"),
    engine_num_drafts=(_L, "vllm:spec_decode_num_drafts; empty where not reported"),
    engine_draft_tokens=(_L, "vllm:spec_decode_num_draft_tokens"),
    engine_accepted_tokens=(_L, "vllm:spec_decode_num_accepted_tokens"),
    engine_semantics=(_S, "pre-64156, or rfc where the patch rfc-counters is on"),
    prompts=(_L, "requests that were to run"),
    output_tokens=(_L, "tokens produced"),
    generate_s=(_F, "seconds from the first request to the last output"),
    start_s=(_F, "seconds from the process's start to the engine's readiness"),
    provenance=(_S, "JSON: builds, patches, machine, model hashes, seeds, environment"),
)

REQUESTS = _schema(
    run_id=(_S, "the cell id"),
    request_id=(_S, "numbered in the order of the prompts"),
    prompt_id=(_S, "from the prompt file"),
    repeat=(_I, "0 for the first pass over the prompts"),
    prompt_tokens=(_I, ""),
    output_tokens=(_I, ""),
    finish_reason=(_S, "stop, length, error, rejected"),
    output_class=(_S, "see grammars.OutputClass; empty without a grammar"),
    class_detail=(_S, "why"),
    class_position=(_I, "character at which it went wrong; empty where there is none"),
    text=(_S, "output; a lone surrogate, also one that the JSON text spells, is escaped"),
    token_ids=(pa.list_(_I), "output"),
    reported_spec_steps=(_I, "per_request_spec_decode_metrics; empty on builds without it"),
    reported_drafted=(_I, "the same"),
    reported_accepted=(_I, "the same"),
    reported_step_drafted=(pa.list_(_I), "the same, step by step"),
    reported_step_accepted=(pa.list_(_I), "the same, step by step"),
)

STEPS = _schema(
    run_id=(_S, "the cell id"),
    step=(_I, "engine step, from 0"),
    request_id=(_S, "as in requests"),
    request_step=(_I, "the request's own step, from 0 for its prefill's end"),
    in_reasoning=(_B, "the position before the draft lies inside reasoning"),
    judged=(_B, "a grammar judged this draft"),
    drafted=(_I, "tokens the drafter proposed"),
    grammar_valid=(_I, "longest prefix of the draft that the grammar accepts; drafted where not judged"),
    scheduled=(_I, "draft slots in the scheduler's output"),
    struck=(_I, "of these, taken back as invalid after scheduling (async)"),
    verified=(_I, "draft tokens that entered the target's forward pass"),
    padded=(_I, "draft slots in the forward pass that held no proposal"),
    av_skipped=(_I, "scheduled drafts that adaptive verification left out"),
    accepted=(_I, "draft tokens the target kept, as the engine counts them"),
    sampled=(_I, "tokens the step gave, the bonus token included"),
    committed=(_I, "of these, appended to the output; fewer where a stop lies among them"),
    draft_token_ids=(pa.list_(_I), "the draft as proposed"),
    sampled_token_ids=(pa.list_(_I), "what the step gave"),
)

FSM_EVENTS = _schema(
    run_id=(_S, "the cell id"),
    step=(_I, "engine step"),
    request_id=(_S, "as in requests"),
    phase=(_S, "draft-probe (harmless) or commit (the request dies)"),
    token_ids=(pa.list_(_I), "tokens handed to the grammar"),
    token_text=(_S, "the same, decoded and escaped"),
    in_reasoning=(_B, "the request was inside reasoning when the step began"),
    message=(_S, "the engine's own words, empty if it said nothing"),
)

TABLES: Mapping[str, pa.Schema] = {"runs": RUNS, "requests": REQUESTS, "steps": STEPS, "fsm_events": FSM_EVENTS}

COUNTS = ("drafted", "grammar_valid", "scheduled", "struck", "verified", "padded", "av_skipped", "accepted", "sampled")

INVARIANTS: Mapping[str, str] = {
    "drafted >= grammar_valid": "grammar_valid > drafted",
    "drafted >= verified": "verified > drafted",
    "verified >= accepted": "accepted > verified",
    "scheduled >= verified": "verified > scheduled",
    "scheduled = verified + padded + av_skipped": "scheduled != verified + padded + av_skipped",
    "scheduled >= struck": "struck > scheduled",
    "sampled >= committed": "committed > sampled",
    "sampled > accepted, where a draft was accepted": "accepted > 0 and sampled <= accepted",
    "drafted = number of draft_token_ids": "drafted != n_draft_ids",
    "no count is negative": " or ".join(f"{name} < 0" for name in COUNTS),
}
"""Name of each invariant of a step, and the rows that break it (a pandas query)."""


def frame(table: str, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A typed frame of ``table``; missing columns are empty, unknown ones refused."""
    schema = TABLES[table]
    unknown = {key for row in rows for key in row} - set(schema.names)
    if unknown:
        raise LedgerError(f"{table} has no column {', '.join(sorted(unknown))}")
    return to_pandas(pa.Table.from_pylist([dict(row) for row in rows], schema=schema))


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Pandas with nullable types, so that an empty count stays empty and never becomes a float."""
    kinds = {
        pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype(),
        pa.float64(): pd.Float64Dtype(), pa.string(): pd.StringDtype(),
    }  # fmt: skip
    frame: pd.DataFrame = table.to_pandas(types_mapper=kinds.get)
    return frame


def check_steps(steps: pd.DataFrame) -> None:
    """Raise `LedgerError` with the invariant's name and the first row that breaks it."""
    if steps.empty:
        return
    for name in (*COUNTS, "committed", "draft_token_ids"):
        if steps[name].isna().any():
            first = steps[steps[name].isna()].iloc[0]
            raise LedgerError(f"step {first['step']} of request {first['request_id']} has no {name}")
    checked = steps.assign(n_draft_ids=steps["draft_token_ids"].map(len).astype("Int32"))
    for name, breach in INVARIANTS.items():
        wrong = checked.query(breach)
        if not wrong.empty:
            row = {key: value for key, value in wrong.iloc[0].items() if key not in ("run_id", "n_draft_ids")}
            raise LedgerError(f"a step breaks '{name}': " + ", ".join(f"{k}={v}" for k, v in row.items()))
    doubled = steps.duplicated(["run_id", "step", "request_id"])
    if doubled.any():
        twice = steps[doubled].iloc[0]
        raise LedgerError(f"step {twice['step']} of request {twice['request_id']} is recorded twice")


def write_table(folder: Path, name: str, data: pd.DataFrame) -> Path:
    """Write one table (tmp, then rename); steps are checked first."""
    if name == "steps":
        check_steps(data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    table = pa.Table.from_pandas(data, schema=TABLES[name], preserve_index=False)
    pq.write_table(table, part, compression="zstd" if len(data) > FEW else "snappy")
    part.replace(path)
    return path


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """Read one table; an empty frame where the run has none.

    Raises:
        LedgerError: the file was written by a newer lab or is no ledger table.
    """
    return read_tables([folder], name)


def read_tables(folders: Sequence[Path], name: str) -> pd.DataFrame:
    """The rows of one table of many runs, in their order; as `read_table`."""
    paths = [folder / f"{name}.parquet" for folder in folders]
    found: list[pa.Table] = []
    with ThreadPoolExecutor(READERS) as readers:
        for start in range(0, len(paths), TOGETHER):
            chunk = paths[start : start + TOGETHER]
            parts = map(_read, chunk) if len(chunk) <= READERS else readers.map(_read, chunk)
            found += [part for part in parts if part is not None]
            found = [pa.concat_tables(found).combine_chunks()] if found else []
    return to_pandas(found[0].cast(TABLES[name]) if found else TABLES[name].empty_table())


def _read(path: Path) -> pa.Table | None:
    """A table as it was written; None where there is none, or no row in it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    file = pq.ParquetFile(pa.BufferReader(content))
    version = (file.metadata.metadata or {}).get(b"schema_version", b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise LedgerError(f"{path} has schema version {version}, this lab reads {SCHEMA_VERSION}")
    if not file.metadata.num_rows:
        return None
    return file.read(use_threads=file.metadata.num_rows > FEW)  # a pool is slower than a small file


def read_run(folder: Path) -> dict[str, pd.DataFrame]:
    """All four tables of one run or of a collected folder, by name."""
    return {name: read_table(folder, name) for name in TABLES}
