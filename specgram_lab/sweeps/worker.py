"""Cells that share an engine, in a worker's process: ``python -m specgram_lab.sweeps.worker``, work on stdin.

A worker of this machine is such a process; Ray calls `work` in one of its own. Both are told plain JSON and say what
kept them from working, if anything did, in one sentence; what became of the cells stands in their folders.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from specgram_lab.builds import BuildError
from specgram_lab.handover import die_with_parent
from specgram_lab.models import ModelError
from specgram_lab.paths import DataNotFoundError
from specgram_lab.run import OutputFolderError, run_cells, writing
from specgram_lab.spec import Cell, SpecError, parse_cell


def told(group: Sequence[tuple[Cell, Path]], cores: Sequence[int] = ()) -> str:
    """The work of a worker as JSON; ``cores`` are those that it keeps to, all of the machine's without any."""
    cells = [[cell.model_dump(mode="json"), str(folder)] for cell, folder in group]
    return json.dumps({"cells": cells, "cores": list(cores)})


def work(text: str) -> str:
    """Run the cells that ``text`` (see `told`) holds; returns why it could not, empty where it could."""
    asked = json.loads(text)
    if asked["cores"]:
        os.sched_setaffinity(0, asked["cores"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto"  # among these: what was set is for an engine that is alone
    group = [(parse_cell(cell), Path(folder)) for cell, folder in asked["cells"]]
    try:
        with writing(group[0][1].parent):
            run_cells(group)
    except (OutputFolderError, ModelError, SpecError, DataNotFoundError, BuildError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    die_with_parent()
    sys.stdout.write(work(sys.stdin.read()))
