"""Cells on one engine in one process: ``python -m specgram_lab.cell FOLDER...``; started by `specgram_lab.run`.

Reads ``cell.json`` in each folder, writes the tables of requests, steps and events there and, last, ``child.json``
with the outcome as this process saw it. What is not written when it dies, its parent writes.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from specgram_lab import ledger
from specgram_lab.av import tables as budget_tables
from specgram_lab.builders import options
from specgram_lab.handover import BEGUN, CELL, CELL_BEGINS, CHILD, PROGRESS, die_with_parent, write_json
from specgram_lab.spec import Cell, parse_cell

STARTED = time.monotonic()


def main(folders: list[Path]) -> None:
    """Build the engine that the cells share, run them one after another, and leave."""
    die_with_parent()
    cells = [parse_cell(json.loads((f / CELL).read_text(encoding="utf-8"))) for f in folders]
    llm: Any = None
    for number, (cell, folder) in enumerate(zip(cells, folders, strict=True)):
        report: dict[str, Any] = {"outcome": "engine_failed", "reason": "", "partial": True, "cells_before": number}
        try:
            if cell.engine.kind == "server":
                from specgram_lab.builders import server

                server.run(cell, folder, report, dict(os.environ))
            else:
                llm = llm or build(cell)
                print(f"{CELL_BEGINS}{cell.cell_id}", file=sys.stderr, flush=True)
                run(cell, llm, folder, report)
        except ledger.LedgerError as error:
            report["outcome"], report["reason"] = "ledger_failed", str(error)
        except Exception as error:  # noqa: BLE001  every failure becomes a row
            traceback.print_exc()
            report["outcome"] = "unsupported" if refused_by_config(error) else "engine_failed"
            report["reason"] = sentence(error)
        write_json(folder / CHILD, report)
        if report["outcome"] == "engine_failed":
            break  # an engine that failed serves nobody; the parent starts another for the rest
    sys.stdout.flush()
    sys.stderr.flush()
    # vLLM's threads may outlive the engine and hold the interpreter; nothing is left to do.
    os._exit(0)


def refused_by_config(error: BaseException) -> bool:
    """Whether vLLM refused the configuration, before it made anything."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError | NotImplementedError) and any(f.name == "create_engine_config" for f in frames)


def sentence(error: BaseException) -> str:
    """The error's own words on one line; an assertion without words is shown as its source line."""
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"
    cause = error.__cause__ or error.__context__
    if not text and cause is not None:
        return sentence(cause)
    return f"{type(error).__name__}: {text}"[:2000]


def build(cell: Cell) -> Any:
    """The engine, with the patches that were asked for and no others."""
    from specgram_lab.builders import local

    with local.quick_start():
        llm = local.build(cell)
    check_patches(Path(os.environ[options.REPORTS]), json.loads(os.environ[options.OPTIONS]))
    return llm


def run(cell: Cell, llm: Any, folder: Path, report: dict[str, Any]) -> None:
    """Send the requests, write what came out; ``report`` is filled as things become known."""
    from specgram_lab import capabilities, patches, provenance
    from specgram_lab.builders import local
    from specgram_lab.builders.cpu.interpreter import reset_launches
    from specgram_lab.builders.session import Session
    from specgram_lab.samplers.hooks import RECORDER

    cold = llm.reset_prefix_cache() or report["cells_before"] == 0 or not cell.engine.prefix_caching
    report["warnings"] = [] if cold else ["warm: vLLM did not empty the prefix cache of the cell before"]
    if "av-budget" in patches.active():
        patches.change("av-budget", options.patches_for(cell, capabilities.device(cell))["av-budget"])
    report["start_s"] = time.monotonic() - STARTED if report["cells_before"] == 0 else 0.0
    report["effective"] = local.effective_config(llm)
    report["budget_effective"] = cell.engine.budget.label if local.verifies_adaptively(llm) else "off"
    report["provenance"] = provenance.collect(cell) | {
        "patches": patches.active(),
        "cells_before": report["cells_before"],
    }
    write_json(folder / BEGUN, {key: report[key] for key in ("effective", "budget_effective", "provenance")})
    session = Session(cell, llm, progress=folder / PROGRESS)
    RECORDER.clear()
    reset_launches()
    if local.verifies_adaptively(llm):
        from specgram_lab.patches import budget

        budget.LOG.begin(llm)
    before = engine_counters(llm)
    try:
        session.run()
        report["partial"] = False
    finally:
        report["generate_s"] = session.seconds
        report["counters"] = {key: value - before.get(key, 0) for key, value in engine_counters(llm).items()}
        write_tables(cell, folder, session, report)
    report["outcome"], report["reason"] = session.outcome()


def check_patches(reports: Path, wanted: dict[str, Any]) -> None:
    """Compare what each process of the engine reported with what was asked for.

    Raises:
        RuntimeError: a process reported something else, or none did.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(reports.glob("*.json"))]
    if wanted and not found:
        raise RuntimeError("no process of the engine reported its patches: the plugin entry point was not loaded")
    for process in found:
        if sorted(process["patches"]) != sorted(wanted):
            found_here = sorted(process["patches"])
            raise RuntimeError(f"process {process['pid']} has patches {found_here}, asked for were {sorted(wanted)}")


def engine_counters(llm: Any) -> dict[str, int]:
    """vLLM's own speculative counters by name, summed over engines.

    Raises:
        RuntimeError: the engine was made without counters, as vLLM's `LLM` is by itself.
    """
    if not llm.llm_engine.log_stats:
        raise RuntimeError("this engine counts nothing: make it with disable_log_stats=False")
    counters: dict[str, int] = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name and hasattr(metric, "value"):
            counters[metric.name] = counters.get(metric.name, 0) + int(metric.value)
    return counters


def write_tables(cell: Cell, folder: Path, session: Any, report: dict[str, Any]) -> None:
    """Requests, steps and events as parquet; what else is known of the run into ``report``."""
    report["output_tokens"] = session.output_tokens
    report["prompts"] = len(session.requests)
    ledger.write_table(folder, "requests", ledger.frame("requests", session.request_rows(cell.cell_id)))
    if cell.engine.record:
        steps, events = session.recorded(cell.cell_id)
        ledger.write_table(folder, "fsm_events", ledger.frame("fsm_events", events))
        ledger.write_table(folder, "steps", ledger.frame("steps", steps))
        if report["budget_effective"] != "off":
            from specgram_lab.patches.budget import LOG

            budget_tables.write(folder, cell.cell_id, LOG.steps, LOG.proposals)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from specgram_lab.builders.cpu.interpreter import interpreted_launches

        report["provenance"]["interpreted_kernels"] = interpreted_launches()


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
