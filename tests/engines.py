"""Cells that the engine tests look at, run once: one engine process per configuration, everything else shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from specgram_lab import ledger
from specgram_lab.run import run_cells
from specgram_lab.spec import Cell, parse_cell


@dataclass(frozen=True)
class Ran:
    """A cell, its row and its tables."""

    cell: Cell
    folder: Path
    run: pd.Series
    requests: pd.DataFrame
    steps: pd.DataFrame
    fsm_events: pd.DataFrame
    runs: pd.DataFrame


def run(cells: dict[str, Cell], folder: Path) -> dict[str, Ran]:
    """Run all cells and read their tables."""
    rows = run_cells([(cell, folder / name) for name, cell in cells.items()])
    result = {}
    for (name, cell), row in zip(cells.items(), rows, strict=True):
        tables = ledger.read_run(folder / name)
        result[name] = Ran(cell=cell, folder=folder / name, run=row, **tables)
    return result


def cell(drafter: dict[str, Any] | None = None, grammar: dict[str, Any] | None = None, **parts: Any) -> Cell:
    """A small cell: six prompts for records, 24 tokens, greedy."""
    workload = {"prompts": "records", "limit": 6, "max_tokens": 24, "concurrency": 4} | parts.pop("workload", {})
    return parse_cell({"drafter": drafter or {}, "grammar": grammar or {}, "workload": workload, **parts})


NGRAM = {"method": "ngram", "k": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SELF = {"method": "draft_model", "model": "target", "k": 3}
SCHEMA = {"kind": "json_schema", "per_prompt": True, "name": "schema"}
OBJECT = {"kind": "json_object"}
