"""One engine, many budgets: ``python av_engine.py JOB.json``, and what the tests call to run such a job.

All policies of a drafter share one engine, as they do in a sweep; here the process runs a probe beside, which writes
what the rejection sampler got at every step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specgram_lab import handover, ledger, models
from specgram_lab import run as runs
from specgram_lab.av import costs
from specgram_lab.builders import options
from specgram_lab.spec import Cell, Grammar, parse_cell

PROBE, MASKS, FACTS = "probe.jsonl", "masks.jsonl", "facts.json"


def run(cells: dict[str, Cell], folder: Path, mixed: tuple[str, ...] = ()) -> dict[str, Path]:
    """Run ``cells`` (alike but for budget and workload) on one engine; their folders by name.

    In the ``mixed`` ones every second request has no grammar.
    """
    folders = {name: folder / name for name in cells}
    for name, cell in cells.items():
        (folders[name] / "reports").mkdir(parents=True)
        handover.write_json(folders[name] / "cell.json", cell.model_dump(mode="json"))
    first = next(iter(cells.values()))
    models.ensure_all(first.target.model, first.drafter.model)
    job = folder / "job.json"
    content = {"folders": [str(f) for f in folders.values()], "mixed": list(mixed)}
    job.write_text(json.dumps(content), encoding="utf-8")
    environment = os.environ | options.environment(first, "cpu", folders[next(iter(cells))] / "reports")
    environment = {key: value for key, value in environment.items() if value != ""}
    with (folder / "engine.log").open("w") as log:
        command = [sys.executable, str(Path(__file__)), str(job)]
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    tail = (folder / "engine.log").read_text(encoding="utf-8", errors="replace")[-3000:]
    assert code == 0, tail
    for name, cell in cells.items():
        row = runs.requested(cell) | runs.outcome(folders[name], None)
        runs.finish(cell, folders[name], row | runs.reconciled(folders[name], row))
    return folders


def probe(folder: Path) -> dict[int, dict[str, Any]]:
    """What the rejection sampler got in each step: ``requests``, ``drafts`` of each, ``rows`` of logits."""
    lines = (folder / PROBE).read_text(encoding="utf-8").splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def masks(folder: Path) -> dict[int, dict[str, Any]]:
    """Rows of the grammar's mask and of their mapping onto logits, in each step with a grammar."""
    lines = (folder / MASKS).read_text(encoding="utf-8").splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


@contextmanager
def probing(folder: Path) -> Any:
    """Write the worker's own tensors, at the place where they are verified, to files in ``folder``."""
    from vllm.v1.worker.gpu import structured_outputs
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    from specgram_lab.samplers.hooks import RECORDER

    batch: Any = None
    mapped = 0
    call, verify = RejectionSampler.__call__, RejectionSampler._verify
    mask, mapping = StructuredOutputsWorker.apply_grammar_bitmask, structured_outputs._build_grammar_mapping

    def watched_call(self: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal batch
        batch = input_batch
        return call(self, logits, input_batch, *args, **kwargs)

    def watched_verify(self: Any, logits: Any, draft_logits: Any, draft: Any, pos: Any, cu: Any, *args: Any) -> Any:
        ends = cu.tolist()
        drafts = {r: draft[ends[i] + 1 : ends[i + 1]].tolist() for i, r in enumerate(batch.req_ids)}
        row = {"step": RECORDER.step_of(None) - 1, "drafts": {r.partition("-")[0]: d for r, d in drafts.items()}}
        row |= {"rows": logits.shape[0]}
        print(json.dumps(row), file=verified, flush=True)
        return verify(self, logits, draft_logits, draft, pos, cu, *args)

    def watched_mask(self: Any, logits: Any, input_batch: Any, grammar_req_ids: Any, grammar_bitmask: Any) -> None:
        nonlocal mapped
        mapped = 0
        mask(self, logits, input_batch, grammar_req_ids, grammar_bitmask)
        row = {"step": RECORDER.step_of(None) - 1, "rows": len(grammar_bitmask), "mapped": mapped}
        print(json.dumps(row), file=masked, flush=True)

    def watched_mapping(*args: Any) -> list[int]:
        nonlocal mapped
        found: list[int] = mapping(*args)
        mapped = len(found)
        return found

    with (folder / PROBE).open("w") as verified, (folder / MASKS).open("w") as masked:
        RejectionSampler.__call__, RejectionSampler._verify = watched_call, watched_verify
        StructuredOutputsWorker.apply_grammar_bitmask = watched_mask
        structured_outputs._build_grammar_mapping = watched_mapping
        try:
            yield
        finally:
            RejectionSampler.__call__, RejectionSampler._verify = call, verify
            StructuredOutputsWorker.apply_grammar_bitmask = mask
            structured_outputs._build_grammar_mapping = mapping


def facts() -> dict[str, Any]:
    """What only a process with vLLM can tell: the mapping of the upstream example, cost tables."""
    import numpy as np
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves
    from vllm.v1.worker.gpu.structured_outputs import _build_grammar_mapping

    requests = ["a", "b", "c"]
    compacted = np.arange(4, dtype=np.int32)  # what a budget of zero makes of the CPU's offsets
    mapping = _build_grammar_mapping(requests, requests, compacted, np.array([2, 2, 0], np.int32), 1, 3)
    curves = {name: costs.load(name) for name in costs.names()} | {"linear(1, 0.3)": costs.linear(1, 0.3)}
    curves["padded"] = curves["gpu-nemotronh-30b-a3b"].model_copy(update={"graph_limit": 5})
    tables = {
        name: [
            table.tolist()
            for table in build_cost_tables_from_curves(
                curve.points("draft"), curve.points("verify"), 12, 200, cudagraph_limit=curve.graph_limit
            )
        ]
        for name, curve in curves.items()
    }
    plain = {name: curve.model_dump(mode="json") for name, curve in curves.items()}
    return {"mapping": mapping, "curves": plain, "tables": tables}


def main(job: dict[str, Any]) -> None:
    """Run the cells of ``job`` one after another on the first one's engine."""
    from specgram_lab import cell as cells
    from specgram_lab.builders import session

    folders = [Path(text) for text in job["folders"]]
    specs = [parse_cell(json.loads((f / "cell.json").read_text(encoding="utf-8"))) for f in folders]
    llm = cells.build(specs[0])
    prompted = session.Session._prompted

    def some_free(self: Any) -> Any:
        requests = prompted(self)
        for sent in requests[1::2]:
            sent.grammar, sent.schema = Grammar(), None
        return requests

    for number, (spec, folder) in enumerate(zip(specs, folders, strict=True)):
        session.Session._prompted = some_free if folder.name in job["mixed"] else prompted
        report: dict[str, Any] = {"outcome": "engine_failed", "reason": "", "partial": True, "cells_before": number}
        with probing(folder):
            cells.run(spec, llm, folder, report)
        handover.write_json(folder / handover.CHILD, report)
    handover.write_json(folders[0].parent / FACTS, facts())
    sys.stdout.flush()
    os._exit(0)


def steps(folder: Path) -> Any:
    """The ledger's steps of a cell."""
    return ledger.read_table(folder, "steps")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
