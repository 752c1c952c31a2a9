"""The entry point ``vllm.general_plugins``: vLLM calls `register` in every engine and worker process.

Does nothing unless ``SPECGRAM_PATCHES`` is set, and the lab sets it only in the environment of
the engines that it starts. With it, the named patches are switched on and the process leaves a report, which
the cell compares with its spec: a run whose reports do not match is no result.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from specgram_lab.builders.options import OPTIONS, PATCHES, REPORTS


def register() -> None:
    """Called by vLLM, once or more in a process."""
    wanted = [name for name in os.environ.get(PATCHES, "").split(",") if name]
    if not wanted:
        return
    from specgram_lab import patches

    patches.activate(wanted, json.loads(os.environ.get(OPTIONS, "{}")))
    folder = os.environ.get(REPORTS)
    if folder:
        report = {"pid": os.getpid(), "program": Path(sys.argv[0]).name, "patches": patches.active()}
        path = Path(folder) / f"{os.getpid()}.json"
        part = path.with_suffix(".tmp")
        part.write_text(json.dumps(report), encoding="utf-8")
        part.replace(path)
