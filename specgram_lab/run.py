"""Run one cell in a process of its own, and leave a row whatever becomes of it.

The process gets its own group and files for its output. When it ends, by itself, by a limit or by a signal from
anywhere, everything it started is ended by id, ``runs.parquet`` is written, and last of all ``done.json``: a cell
without it has not run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from specgram_lab import builds, capabilities, grammars, ledger, models, semantics, workloads
from specgram_lab.builders import options
from specgram_lab.drafters import registry
from specgram_lab.handover import BEGUN, CELL, CHILD, PARENT, PROGRESS, write_json
from specgram_lab.paths import DataNotFoundError, data_file
from specgram_lab.spec import Cell, SpecError

DONE = "done.json"
LOG = "engine.log"
POLL_S = 0.05
LOOK_S = 0.25
"""Between two looks at what an engine has started; each goes through all processes of the machine."""
CANNOT_WRITE = frozenset(
    {
        errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ENOSPC,
        errno.ENOTDIR, errno.EPERM, errno.EROFS, errno.ESTALE,
    }
)  # fmt: skip
PER_PROCESS = 200
"""Cells that one engine's process takes up at most: they stand in its command line."""
OVER_MEMORY = "more than"
"""How the reason of a cell begins that broke its limit of memory."""
NEARLY_FULL = 1 << 20
"""Bytes: a disk with less was full for a process that had its tables to write."""
SHOWN = 3
"""Differences between the engine's numbers and the ledger that a reason spells out."""

Progress = Callable[[Path, int, int], None]
"""Called with a cell's folder, its finished requests and all of them."""
Ended = Callable[[Path, str], None]
"""Called with the folder and the outcome of a cell that is through."""


class OutputFolderError(ValueError):
    """A results folder that cannot be used, said in one sentence."""


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the system says of a full disk or a closed folder into one sentence.

    Raises:
        OutputFolderError: in place of an `OSError` whose number is one of `CANNOT_WRITE`.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno not in CANNOT_WRITE:
            raise
        raise OutputFolderError(
            f"results cannot be written to {folder}: {os.strerror(error.errno)}; what is finished there is kept"
        ) from error


@dataclass(frozen=True)
class Ending:
    """How the child process ended."""

    returncode: int
    limit: str = ""


def run_cell(cell: Cell, folder: Path, progress: Progress | None = None) -> pd.Series:
    """Run ``cell`` in ``folder`` and return its row of the table ``runs``; see `run_cells`."""
    return run_cells([(cell, folder)], progress)[0]


def run_cells(
    work: Sequence[tuple[Cell, Path]], progress: Progress | None = None, ended: Ended | None = None
) -> list[pd.Series]:
    """Run cells in their folders; those that can share an engine do. Rows of ``runs`` in the same order.

    A finished cell is not run again: its row is read. ``progress`` is called with the folder, finished and all
    requests; ``ended`` with the folder and the outcome of every cell that is through. A cell that takes the engine
    down with it costs only itself: the others go on in a new process.

    Raises:
        OutputFolderError: before anything is started, if a folder cannot be written or belongs to another cell.
    """
    work = [(cell, folder.absolute()) for cell, folder in work]
    waiting: dict[str, list[tuple[Cell, Path]]] = {}
    with contextlib.closing(Grammars()) as checked:
        for cell, folder in work:
            if not is_done(cell, folder):
                prepare(folder)
                if not refused(cell, folder, checked):
                    waiting.setdefault(options.engine_key(cell), []).append((cell, folder))
                    continue
            tell(ended, folder)
    for group in waiting.values():
        left = group
        while left:
            execute(left[:PER_PROCESS], progress, ended)
            left = [(cell, folder) for cell, folder in left if not (folder / DONE).is_file()]
    return [ledger.read_table(folder, "runs").iloc[0] for _, folder in work]


def tell(ended: Ended | None, folder: Path) -> None:
    """Say that the cell in ``folder`` is through."""
    if ended is not None:
        ended(folder, json.loads((folder / DONE).read_text(encoding="utf-8"))["outcome"])


def is_done(cell: Cell, folder: Path) -> bool:
    """Whether ``folder`` holds the finished ``cell``.

    Raises:
        OutputFolderError: it holds another one, or the same with other prompts or from another interpreter.
    """
    if not (folder / DONE).is_file():
        return False
    known = json.loads((folder / DONE).read_text(encoding="utf-8"))
    if known["run_id"] != cell.cell_id:
        raise OutputFolderError(f"{folder} holds the finished cell {known['run_id']}, asked for is {cell.cell_id}")
    now = inputs(cell)
    changed = [name for name, value in known.get("inputs", {}).items() if now.get(name) != value]
    if changed:
        name = changed[0]
        raise OutputFolderError(
            f"{folder} holds the finished cell {cell.cell_id} with other {name} ({known['inputs'][name]}, now"
            f" {now.get(name)}); give another folder, or delete that one to run it again"
        )
    return True


def inputs(cell: Cell) -> dict[str, str]:
    """What a cell's id does not name: the content of its prompts or scenario and the weights of a trained drafter
    (SHA-256), and the interpreter."""
    found = {"python": cell.engine.python} if cell.engine.python else {}
    for kind, name in (("target", cell.target.model), ("drafter", cell.drafter.model)):
        if name is not None and registry.is_trained(name):
            found[kind] = models.sha256(registry.folder(name) / registry.WEIGHTS)[:16]
    for kind, name in (("prompts", cell.workload.prompts), ("scenarios", cell.workload.scenario)):
        if name is not None:
            with contextlib.suppress(DataNotFoundError):
                found[kind] = hashlib.sha256(data_file(kind, name).read_bytes()).hexdigest()[:16]
    return found


def refused(cell: Cell, folder: Path, checked: Grammars) -> bool:
    """Write the row of a cell that cannot run or whose grammar does not compile; say whether it was one."""
    reason = capabilities.refusal(cell)
    if reason is not None:
        finish(cell, folder, requested(cell) | {"outcome": "unsupported", "reason": reason})
        return True
    if cell.engine.kind == "server":
        row = requested(cell)  # it compiles the grammar itself, with a tokenizer that is not known here
    else:
        try:
            models.ensure_all(cell.target.model, cell.drafter.model)
            if cell.workload.scenario is None:
                workloads.load(cell.workload)
        except (models.ModelError, DataNotFoundError, SpecError) as error:
            finish(cell, folder, requested(cell) | {"outcome": "unsupported", "reason": str(error)})
            return True
        row = requested(cell) | checked.columns(cell)
    row["warnings"] = [*row["warnings"], *capabilities.notes(cell)]
    row["warnings"] += unset(os.environ) if cell.engine.kind != "server" else []
    if "outcome" in row:
        finish(cell, folder, row)
        return True
    write_json(folder / "row.json", row)
    write_json(folder / CELL, cell.model_dump(mode="json"))
    return False


def unset(inherited: Mapping[str, str]) -> list[str]:
    """A word on what the user's environment holds and the engine does not get."""
    folder = inherited.get("PROMETHEUS_MULTIPROC_DIR")
    if not folder:
        return []
    return [f"PROMETHEUS_MULTIPROC_DIR={folder} is not handed on: counters of other processes there would be added"]


def prepare(folder: Path) -> None:
    """Make the folder, empty of an earlier attempt.

    Raises:
        OutputFolderError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / "reports").mkdir()
    except OSError as error:
        raise OutputFolderError(f"results cannot be written to {folder}: {error.strerror}") from None


def requested(cell: Cell) -> dict[str, Any]:
    """The columns of the run's row that the spec alone gives."""
    workload, engine = cell.workload, cell.engine
    return {
        "run_id": cell.cell_id,
        "warnings": [],
        "partial": False,
        "engine": engine.kind,
        "device": capabilities.device(cell) if engine.kind != "server" else None,
        "drafter": cell.drafter.method,
        "k": cell.drafter.k,
        "grammar": "scenario" if workload.scenario else cell.grammar.label,
        "grammar_kind": "scenario" if workload.scenario else cell.grammar.kind,
        "workload": workload.scenario or workload.prompts or "inline",
        "concurrency": workload.concurrency,
        "runner_requested": engine.runner,
        "scheduling_requested": engine.scheduling,
        "budget_requested": engine.budget.label,
        "config_requested": cell.canonical(),
        "engine_semantics": "rfc" if "rfc-counters" in engine.patches else "pre-64156",
    }


def execute(work: Sequence[tuple[Cell, Path]], progress: Progress | None, ended: Ended | None) -> None:
    """Start the process of these cells, finish each as it ends, end all that the process started.

    At least the first cell is finished when this returns.
    """
    cell, first = work[0]
    environment = {**os.environ, **options.environment(cell, capabilities.device(cell), first / "reports")}
    environment = {key: value for key, value in environment.items() if value != ""} | {PARENT: str(os.getpid())}
    folders = [folder for _, folder in work]
    # -P: the process has the user's working folder, whose files are no modules of it
    command = [builds.python_of(cell.engine), "-P", "-m", "specgram_lab.cell", *map(str, folders)]
    with (first / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    watched = Watch(process.pid)
    try:
        for cell, folder in work:
            if folder != first:
                (folder / LOG).symlink_to(os.path.relpath(first / LOG, folder))
            ending = wait(process, watched, cell, folder, progress)
            row = json.loads((folder / "row.json").read_text(encoding="utf-8"))
            found = outcome(folder, ending)
            row |= found | {"warnings": [*row["warnings"], *found.get("warnings", [])]}
            finish(cell, folder, row | reconciled(folder, row))
            tell(ended, folder)
            if ending is not None or row["outcome"] == "engine_failed":
                break  # the engine is gone; what is left gets another
    finally:
        watched.end()
        process.wait()


def wait(
    process: subprocess.Popen[bytes], watched: Watch, cell: Cell, folder: Path, progress: Progress | None
) -> Ending | None:
    """Poll until the cell is through (None), or its process has ended or broken a limit."""
    deadline, next_look = time.monotonic() + cell.limits.timeout_s, 0.0
    shown = ""
    while not (folder / CHILD).is_file():
        if time.monotonic() >= next_look:
            watched.look()
            next_look = time.monotonic() + LOOK_S
        if process.poll() is not None:
            return None if (folder / CHILD).is_file() else Ending(process.returncode)
        if time.monotonic() > deadline:
            return Ending(-signal.SIGKILL, f"timeout: not finished within {cell.limits.timeout_s:g} s")
        if cell.limits.memory_mib is not None and watched.memory_mib() > cell.limits.memory_mib:
            return Ending(-signal.SIGKILL, f"killed: {OVER_MEMORY} {cell.limits.memory_mib} MiB of memory in use")
        if progress is not None:
            shown = report_progress(folder, shown, progress)
        time.sleep(POLL_S)
    return None


def report_progress(folder: Path, shown: str, progress: Progress) -> str:
    """Hand on what the child wrote, if it changed."""
    try:
        text = (folder / PROGRESS).read_text(encoding="utf-8")
    except OSError:
        return shown
    if text != shown and "/" in text:
        finished, _, total = text.partition("/")
        progress(folder, int(finished), int(total))
    return text


class Watch:
    """A process and all that descends from it, by id; a descendant that left the group is known all the same."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.seen: dict[int, psutil.Process] = {}
        self.look()

    def look(self) -> None:
        """Take note of descendants that are new."""
        try:
            root = self.seen.setdefault(self.pid, psutil.Process(self.pid))
            for child in root.children(recursive=True):
                self.seen.setdefault(child.pid, child)
        except psutil.Error:
            return

    def memory_mib(self) -> float:
        """Resident memory of all of them."""
        total = 0
        for process in self.seen.values():
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total / (1 << 20)

    def end(self) -> None:
        """End the group and every known descendant that still is the process it was."""
        self.look()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in self.seen.values():
            try:
                if process.is_running():
                    process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(list(self.seen.values()), timeout=5)


def outcome(folder: Path, ending: Ending | None) -> dict[str, Any]:
    """The columns that the run gave, from the child's report or, without one, from how it ended."""
    if ending is not None:
        begun = folder / BEGUN
        known = json.loads(begun.read_text(encoding="utf-8")) if begun.is_file() else {}
        return ended_early(folder, ending) | configured(known)
    report = json.loads((folder / CHILD).read_text(encoding="utf-8"))
    row = {
        key: report.get(key)
        for key in ("outcome", "reason", "partial", "prompts", "output_tokens", "generate_s", "start_s")
    }
    row |= configured(report) | {"warnings": report.get("warnings", [])}
    counters = report.get("counters", {})
    for column, name in (
        ("engine_num_drafts", "vllm:spec_decode_num_drafts"),
        ("engine_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
        ("engine_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
    ):
        row[column] = counters.get(name)
    row |= report.get("columns", {})
    return row


def ended_early(folder: Path, ending: Ending) -> dict[str, Any]:
    """Outcome and reason of a cell whose process ended before it did."""
    if ending.limit:
        kind, _, reason = ending.limit.partition(": ")
    elif ending.returncode < 0:
        name = signal.Signals(-ending.returncode).name
        hint = " (from outside; the system does so when memory runs out)" if name == "SIGKILL" else ""
        kind, reason = "killed", f"the engine's process was ended by {name}{hint}"
    else:
        kind = "engine_failed"
        reason = f"the engine's process ended with code {ending.returncode}: {last_line(folder / LOG)}"
        if shutil.disk_usage(folder).free < NEARLY_FULL:  # it may not have been able to say so
            reason += f"; {os.strerror(errno.ENOSPC)}"
    return {"outcome": kind, "reason": reason, "partial": True}


def configured(report: Mapping[str, Any]) -> dict[str, Any]:
    """The columns about what the engine says it is, as far as it came to say it."""
    row: dict[str, Any] = {"budget_effective": report.get("budget_effective")}
    effective = report.get("effective")
    if effective is not None:
        row |= {
            "runner_effective": effective["runner"],
            "scheduling_effective": effective["scheduling"],
            "config_effective": json.dumps(effective, sort_keys=True),
        }
    if "provenance" in report:
        row["provenance"] = json.dumps(report["provenance"], sort_keys=True)
    return row


def reconciled(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Outcome and reason of a run that ended well and whose engine reported other numbers than its steps give."""
    if row["outcome"] != "ok":
        return {}
    steps, requests = (ledger.read_table(folder, name) for name in ("steps", "requests"))
    found = semantics.reconcile(steps, requests, ledger.frame("runs", [row]))
    asked = json.loads(row["config_requested"] or "{}").get("engine", {})
    if steps.empty and asked.get("record") and asked["kind"] != "server" and row["engine_draft_tokens"]:
        found = [f"engine_draft_tokens is {row['engine_draft_tokens']}, no step was recorded"]
    if not found:
        return {}
    shown = "; ".join(found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return {"outcome": "ledger_failed", "reason": f"the engine reported other numbers than its steps: {shown}{more}"}


def last_line(log: Path) -> str:
    """The last line of a log that is not blank, shortened."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 4096))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return "no log"
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "empty log")


class Grammars:
    """Preflight of the cells' grammars, each compiled once, in a process per target and build."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str, str], grammars.CompilerSession] = {}
        self._known: dict[str, dict[str, Any]] = {}

    def columns(self, cell: Cell) -> dict[str, Any]:
        """The columns that the grammar gives to the run's row; with ``outcome`` where it cannot be used."""
        if cell.workload.scenario or cell.grammar.kind == "none":
            return {"warnings": []}
        schemas = [p.schema for p in workloads.load(cell.workload)] if cell.grammar.per_prompt else []
        where = cell.target.model, builds.python_of(cell.engine)
        asked = [*where, cell.grammar.model_dump(mode="json"), schemas, cell.workload.min_tokens]
        key = json.dumps(asked, sort_keys=True)
        if key not in self._known:
            if where not in self._sessions:
                self._sessions[where] = grammars.CompilerSession(models.model_dir(where[0]), python=where[1])
            session = self._sessions[where]
            found = grammars.preflight(cell.grammar, session, schemas=schemas, min_tokens=cell.workload.min_tokens)
            row: dict[str, Any] = {"warnings": list(found.warnings), "whitespace": found.whitespace}
            row["warnings"] += [f"not enforced by the grammar's backend: {item}" for item in found.not_enforced]
            if not found.ok:
                kind = "unsupported" if found.reason_kind == "unsupported" else "grammar_rejected"
                row |= {"outcome": kind, "reason": found.reason}
            self._known[key] = row
        return self._known[key]

    def close(self) -> None:
        """End the processes."""
        for session in self._sessions.values():
            session.close()


def finish(cell: Cell, folder: Path, row: dict[str, Any]) -> pd.Series:
    """Write the row, then the file that says that the cell is done; what a process did not finish writing goes."""
    for part in folder.glob(".*.tmp"):
        part.unlink()
    runs = ledger.frame("runs", [row])
    ledger.write_table(folder, "runs", runs)
    write_json(folder / DONE, {"run_id": cell.cell_id, "outcome": row["outcome"], "inputs": inputs(cell)})
    return runs.iloc[0]
