"""An executor that makes cells up: finished folders as a real one leaves them, without an engine.

Also a script that runs a sweep so: ``python tests/made_cells.py SWEEP.json FOLDER [BYTES]``, where no file may be
larger than BYTES.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from ledgers import simulate

from specgram_lab import capabilities, ledger, run
from specgram_lab.sweeps import definition, runner

SWEEP = {
    "name": "made",
    "axes": {
        "drafter": [{"method": "none"}, {"method": "ngram"}, {"method": "draft_model", "model": "target"}],
        "k": [2, 4],
        "scheduling": ["sync", "async"],
    },
    "fixed": {"workload": {"inline": ["a", "b", "c", "d"], "max_tokens": 8}, "grammar": {"kind": "json_object"}},
}


def executor(work, progress, ended, *, pause=0.0, requests=4, steps=6):
    """Finish every cell with numbers that its id decides."""
    for cell, folder in work:
        run.prepare(folder)
        row = run.requested(cell)
        reason = capabilities.refusal(cell)
        if reason is not None:
            row |= {"outcome": "unsupported", "reason": reason}
        else:
            made = simulate(
                cell.cell_id,
                drafter=cell.drafter.method,
                k=cell.drafter.k or 4,
                grammar=cell.grammar.kind,
                scheduling=cell.engine.scheduling,
                requests=requests,
                steps=steps,
                seed=int(cell.cell_id[-6:], 16),
            )
            for name in ("requests", "steps", "fsm_events"):
                ledger.write_table(folder, name, made[name])
            row = made["runs"].iloc[0].dropna().to_dict() | row | {"outcome": "ok", "start_s": 1.0}
        progress(folder, 1, 1)
        time.sleep(pause)
        run.finish(cell, folder, row)
        run.tell(ended, folder)


if __name__ == "__main__":
    sweep = definition.parse(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if len(sys.argv) > 3:
        limit = int(sys.argv[3])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        runner.run(sweep, Path(sys.argv[2]), executor=lambda *told: executor(*told, pause=0.05))
    except run.OutputFolderError as error:
        print(error)
        sys.exit(2)
