"""What the process of a cell and the one that started it agree on: file names, and writing them whole."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

CELL = "cell.json"
"""The cell, for the process that runs it."""
CHILD = "child.json"
"""That process's report; written last, so its presence says that the cell is through."""
BEGUN = "begun.json"
"""What that process knows before the first request: effective configuration and provenance, should it be killed."""
PROGRESS = "progress"
"""Finished and all requests, as ``3/12``."""
CELL_BEGINS = "specgram cell "
"""What the process writes into its log, with the cell's id behind it, where an engine takes up a cell."""
PARENT = "SPECGRAM_PARENT"
"""Environment variable: id of the process that started this one."""


def write_json(path: Path, content: Any) -> None:
    """Write and rename, so that the file is whole or absent."""
    part = path.with_name(f".{path.name}.tmp")
    part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    part.replace(path)


def die_with_parent() -> None:
    """On Linux: be killed when the process that started this one is; leave at once if it already was."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.environ.get(PARENT) not in (None, str(os.getppid())):
        os._exit(1)


class ChildError(RuntimeError):
    """A process that was asked something ended without an answer; the message is its last line."""


def ask_module(module: str, asked: Any, *arguments: str) -> Any:
    """What ``python -m module`` answers: JSON in on its standard input, JSON out; it is ended when this process is.

    Raises:
        ChildError: it failed.
    """
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, PARENT: str(os.getpid())}
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode < 0:
        raise ChildError(f"its process was ended by signal {-done.returncode}")
    if done.returncode != 0:
        raise ChildError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return json.loads(done.stdout)
