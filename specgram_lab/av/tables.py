"""Two tables beside the ledger for runs with adaptive verification: what its budgets were chosen by.

``av_steps`` has one row an engine step, ``av_proposals`` one row a request and step: the confidences of the draft that
was proposed after that step, and is verified in the request's next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specgram_lab.ledger import to_pandas

SCHEMA_VERSION = 1
"""Stored in every file. History: 1, the first layout."""

_INT, _TEXT, _REAL = pa.int32(), pa.string(), pa.float64()
_REALS = pa.list_(pa.float32())

TABLES: Mapping[str, Mapping[str, tuple[pa.DataType, str]]] = {
    "av_steps": {
        "run_id": (_TEXT, "the cell id"),
        "step": (_INT, "engine step, as in steps"),
        "requests": (_INT, "requests in the step"),
        "tokens": (_INT, "tokens in the target's forward pass"),
        "non_draft_tokens": (_INT, "of these, no drafts; empty in a step without drafts, as are the next three"),
        "scheduled": (_INT, "scheduled drafts"),
        "native": (_INT, "vLLM's own budget: the argmax over the cost curve"),
        "budget": (_INT, "the policy's"),
        "slope": (_REAL, "of the acceptance estimator after the step; empty for a drafter with a confidence head"),
        "intercepts": (_REALS, "the same, one a draft position"),
        "refits": (_INT, "the same, how often it was fitted"),
    },
    "av_proposals": {
        "run_id": (_TEXT, "the cell id"),
        "step": (_INT, "engine step after which the draft was proposed"),
        "request_id": (_TEXT, "as in requests"),
        "confidences": (_REALS, "of the draft's tokens, each given that those before it are accepted"),
        "features": (_REALS, "what the estimator saw: log-odds of the drafter's best token"),
    },
}


def _schema(name: str) -> pa.Schema:
    fields = [pa.field(key, kind, metadata={"about": about}) for key, (kind, about) in TABLES[name].items()]
    return pa.schema(fields, metadata={"schema_version": str(SCHEMA_VERSION)})


def write(
    folder: Path, run_id: str, steps: Sequence[Mapping[str, Any]], proposals: Sequence[Mapping[str, Any]]
) -> None:
    """Write both tables; vLLM's suffix behind a request's number is taken off."""
    numbered = [{**row, "request_id": row["request_id"].partition("-")[0]} for row in proposals]
    for name, rows in (("av_steps", steps), ("av_proposals", numbered)):
        table = pa.Table.from_pylist([{**row, "run_id": run_id} for row in rows], schema=_schema(name))
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")


def read(folders: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """Both tables of the cells in ``folders``, by name; a cell without adaptive verification has no rows."""
    found = {}
    for name in TABLES:
        paths = [path for folder in folders if (path := folder / f"{name}.parquet").is_file()]
        parts = [pq.read_table(path).cast(_schema(name)) for path in paths]
        found[name] = to_pandas(pa.concat_tables(parts) if parts else _schema(name).empty_table())
    return found
