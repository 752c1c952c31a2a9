"""Drives the compiling process: jobs in, answers out, and an end by force where a limit is reached."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

_SCRIPT = Path(__file__).with_name("compile_child.py")
_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class ChildLimits:
    """``seconds`` and ``memory_mib`` hold for one job each; memory is what the process grows beyond its start.

    ``start_seconds`` is for the interpreter, its imports and the tokenizer, which no grammar is blamed for.
    """

    seconds: float = 10.0
    memory_mib: int = 2048
    start_seconds: float = 120.0


@dataclass(frozen=True)
class ChildReport:
    """The first line of the child (``xgrammar``, ``vllm``, ``vocab_size``, or ``fault``) and one answer a job.

    An answer is the child's own (see `compile_child.Compiler.answer`; ``error`` is the compiler's text) or
    ``{"killed": "time" | "memory" | "died", "after_s", "signal"}``.
    """

    installed: Mapping[str, Any]
    answers: Sequence[Mapping[str, Any]]


class _Child:
    def __init__(self, folder: Path, python: str) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 closed in close
        self.process = subprocess.Popen(
            [python, str(_SCRIPT), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self.lines: queue.Queue[bytes] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.base = 0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(b"")

    def send(self, job: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        # ASCII with escapes, so that a lone surrogate in a text goes through as it is. A child that is gone is seen
        # by its missing answer.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job).encode("ascii") + b"\n")
            self.process.stdin.flush()

    def wait(self, seconds: float, memory_bytes: int | None) -> dict[str, Any]:
        started = time.monotonic()
        while True:
            passed = time.monotonic() - started
            try:
                line = self.lines.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if passed > seconds:
                    return {"killed": "time", "after_s": passed}
                if memory_bytes is not None and resident_bytes(self.process.pid) - self.base > memory_bytes:
                    return {"killed": "memory", "after_s": passed}
                continue
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
            code = self.process.wait()
            return {"killed": "died", "after_s": passed, "signal": -code if code < 0 else None, "code": code}

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode("utf-8", "replace").strip()

    def close(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        # The whole group: the child may have started helpers. Nothing in it has anything left to say.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(timeout=5)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process from ``/proc``; 0 where there is none, so that only the time limit holds."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class CompilerSession:
    """A compiling process that stays for several calls; starting one takes seconds, a grammar milliseconds.

    A context manager. The functions that ask the compiler take a session wherever they take a tokenizer's folder.
    A new process is started behind one that was ended by force.
    """

    def __init__(self, tokenizer_folder: Path, *, python: str = sys.executable) -> None:
        self.tokenizer_folder = tokenizer_folder
        self.python = python
        self._child: _Child | None = None
        self._installed: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if one runs."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def run(self, jobs: Sequence[Mapping[str, Any]], limits: ChildLimits | None = None) -> ChildReport:
        """Run ``jobs`` in order; a job that reaches a limit ends the process, and the next job a new one begins.

        Fields of a job: ``kind`` (``json_schema``, ``regex``, ``ebnf``, ``lark``, ``structural_tag``), ``text`` and
        ``backend`` (``guidance``, else xgrammar); for JSON ``any_whitespace``, ``separators``, ``max_whitespace``;
        then what is asked: ``search`` (a finite text), ``texts`` (to match), ``count`` (texts to count tokens of),
        ``prefix`` with ``drafts`` (texts or ids), ``walk`` (an output's ids) with ``drafts`` (ids, one after each) and
        ``stops`` (ids that end a text).
        """
        known = limits or ChildLimits()
        answers: list[Mapping[str, Any]] = []
        for job in jobs:
            child = self._ready(known)
            if child is None:
                break
            child.send(job)
            answer = child.wait(known.seconds, known.memory_mib * 2**20)
            if "killed" in answer:
                self.close()
            answers.append(answer)
        return ChildReport(dict(self._installed), answers)

    def _ready(self, limits: ChildLimits) -> _Child | None:
        if self._child is None:
            self._child = _Child(self.tokenizer_folder, self.python)
            first = self._child.wait(limits.start_seconds, None)
            if "killed" in first:
                how = self._child.said().splitlines()
                first = {"fault": f"the compiling process did not start ({first['killed']}): {how[-1] if how else ''}"}
            self._installed = first
            self._child.base = resident_bytes(self._child.process.pid)
            if "fault" in first:
                self.close()
        return self._child


@contextlib.contextmanager
def session(source: Path | CompilerSession, python: str) -> Iterator[CompilerSession]:
    """``source`` itself if it is a session, which stays open; else one for this call."""
    if isinstance(source, CompilerSession):
        yield source
    else:
        with CompilerSession(source, python=python) as made:
            yield made


def run_jobs(
    jobs: Sequence[Mapping[str, Any]],
    source: Path | CompilerSession,
    *,
    python: str = sys.executable,
    limits: ChildLimits | None = None,
) -> ChildReport:
    """`CompilerSession.run`, in a process of its own where ``source`` is the folder of a tokenizer."""
    with session(source, python) as open_session:
        return open_session.run(jobs, limits)
