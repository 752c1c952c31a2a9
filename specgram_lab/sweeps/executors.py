"""What runs a sweep's cells: workers on this machine, or a Ray cluster, behind one interface.

An executor is called with cells and their folders, as `specgram_lab.run.run_cells` is, and returns when each has its
``done.json``. Cells that can share an engine go to one worker; a worker that is lost costs the cell that it ran.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from specgram_lab.handover import PARENT, PROGRESS
from specgram_lab.run import DONE, LOG, Ended, OutputFolderError, Progress, Watch, finish, requested, run_cells, tell
from specgram_lab.spec import Cell
from specgram_lab.sweeps import worker
from specgram_lab.sweeps.definition import Resources
from specgram_lab.sweeps.plan import engine_keys

Group = list[tuple[Cell, Path]]
POLL_S = 0.1


def grouped(work: Sequence[tuple[Cell, Path]]) -> list[Group]:
    """Cells that can share an engine, together, in their order."""
    found: dict[str, Group] = {}
    for key, (cell, folder) in zip(engine_keys([cell for cell, _ in work]), work, strict=True):
        found.setdefault(key, []).append((cell, folder.absolute()))
    return list(found.values())


class Following:
    """What the parent knows of cells that run elsewhere: it looks into their folders."""

    def __init__(self, progress: Progress, ended: Ended) -> None:
        self.progress = progress
        self.ended = ended
        self._shown: dict[Path, str] = {}
        self._through: set[Path] = set()

    def look(self, groups: Sequence[Group]) -> None:
        """Tell of every cell that has ended or has got further since the last look."""
        for group in groups:
            for _, folder in group:
                if folder in self._through:
                    continue
                if (folder / DONE).is_file():
                    self._through.add(folder)
                    tell(self.ended, folder)
                    continue
                with contextlib.suppress(OSError, ValueError):
                    text = (folder / PROGRESS).read_text(encoding="utf-8")
                    finished, total = map(int, text.split("/"))
                    if self._shown.get(folder) != text:
                        self._shown[folder] = text
                        self.progress(folder, finished, total)


def left_of(group: Group, reason: str | None) -> Group:
    """What a worker that has ended left undone; where it was lost, the cell that it ran gets a row with ``reason``."""
    left = [(cell, folder) for cell, folder in group if not (folder / DONE).is_file()]
    if reason is not None and left:
        begun = [(cell, folder) for cell, folder in left if os.path.lexists(folder / LOG)]
        cell, folder = (begun or left[:1])[-1]
        folder.mkdir(parents=True, exist_ok=True)
        finish(cell, folder, requested(cell) | {"outcome": "killed", "reason": reason, "partial": True})
        left.remove((cell, folder))
    return left


@dataclass(frozen=True)
class Local:
    """Workers on this machine, ``workers`` at once; one runs in this process."""

    workers: int = 1
    resources: Resources = field(default_factory=Resources)

    def __call__(self, work: Sequence[tuple[Cell, Path]], progress: Progress, ended: Ended) -> None:
        """Run the cells; see the module."""
        if self.workers == 1:
            run_cells(work, progress, ended)
            return
        waiting = grouped(work)
        running: dict[int, tuple[Group, _Worker]] = {}
        following = Following(progress, ended)
        try:
            while waiting or running:
                for slot in range(self.workers):
                    if slot not in running and waiting:
                        group = waiting.pop(0)
                        running[slot] = (group, _Worker(group, slot, self.resources))
                time.sleep(POLL_S)
                following.look([group for group, _ in running.values()])
                for slot, (group, one) in list(running.items()):
                    if one.ended():
                        left = left_of(group, one.loss())
                        del running[slot]
                        following.look([group])
                        waiting += [left] if left else []
        finally:
            for _, one in running.values():
                one.end()


class _Worker:
    """A process of its own group that runs ``group``; what descends from it goes with it."""

    def __init__(self, group: Group, slot: int, resources: Resources) -> None:
        environment = {**os.environ, PARENT: str(os.getpid())}
        if resources.gpus:
            own = _devices()[slot * resources.gpus :][: resources.gpus]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        cores = sorted(os.sched_getaffinity(0))[slot * resources.cpus :][: resources.cpus]
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  closed in end
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specgram_lab.sweeps.worker"],
            stdin=subprocess.PIPE, stdout=self.said, stderr=self.log, env=environment, start_new_session=True,
        )  # fmt: skip
        self.watched = Watch(self.process.pid)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(worker.told(group, cores).encode())
            self.process.stdin.close()

    def ended(self) -> bool:
        """Whether it has; takes note of what descends from it."""
        self.watched.look()
        return self.process.poll() is not None

    def loss(self) -> str | None:
        """How the worker, which has ended, was lost, if it was.

        Raises:
            OutputFolderError: it could not work, for a reason that holds for every other one.
        """
        self.watched.end()
        said, log = self._text(self.said), self._text(self.log)
        code = self.process.returncode
        if code < 0:
            return f"the worker that ran it was ended by {signal.Signals(-code).name}"
        if code:
            return f"the worker that ran it ended with code {code}: {log.splitlines()[-1] if log else 'no log'}"
        if said:
            raise OutputFolderError(said)
        return None

    @staticmethod
    def _text(stream: IO[bytes]) -> str:
        with stream:
            stream.seek(0)
            return stream.read().decode("utf-8", "replace").strip()

    def end(self) -> None:
        """End it."""
        self.watched.end()
        self.process.wait()
        self.said.close()
        self.log.close()


def _devices() -> list[str]:
    """GPUs that this process may use."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return [name for name in shown.split(",") if name]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def room(resources: Resources) -> int:
    """How many engines this machine runs at once: by its cores, its memory that is free now, and its GPUs."""
    fits = [len(os.sched_getaffinity(0)) // resources.cpus]
    fits.append(psutil.virtual_memory().available // (resources.memory_mib << 20))
    fits += [len(_devices()) // resources.gpus] if resources.gpus else []
    return max(1, min(fits))
