"""A sweep in a folder: run what is missing, say how it stands, collect the table.

The folder is the record. It holds ``cells.parquet`` (every cell of the sweep with its labels), ``cells/`` with a folder
for each, and the collected tables. One runner works in it at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from specgram_lab import lab, ledger
from specgram_lab.run import DONE, OVER_MEMORY, Ended, OutputFolderError, Progress, requested, writing
from specgram_lab.spec import Cell, SpecError, parse_cell
from specgram_lab.sweeps import cluster, executors
from specgram_lab.sweeps.definition import Sweep
from specgram_lab.sweeps.plan import Plan, plan
from specgram_lab.sweeps.showing import filling

CELLS = "cells.parquet"
LOCK = "sweep.lock"
FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
"""What the system says of a full disk, a file that is too large, a quota; such a cell runs again, too."""
NOT_RUN = "the cell has not run yet"
Changed = Literal["refuse", "drop"]


def run(
    sweep: Sweep,
    folder: Path,
    *,
    executor: lab.Executor | None = None,
    again: Collection[str] = (),
    changed: Changed = "refuse",
) -> lab.Results:
    """Run what is missing of ``sweep`` in ``folder`` and collect all of it.

    Args:
        sweep: what to run.
        folder: a new one, or that of the same sweep or of one that this one extends.
        executor: `executors.Local` or `cluster.Ray`; by itself as many workers as the machine has room for.
        again: outcomes whose cells run again, beside those that somebody killed and those that met a full disk. A cell
            that broke its own limit of memory would break it again.
        changed: what happens when finished cells are no longer in the sweep, or not as they were: ``refuse``, or
            ``drop`` them from the tables (their folders stay).

    Raises:
        SpecError: the sweep cannot be, or changed.
        OutputFolderError: the folder cannot be written, or has a runner.
    """
    made = plan(sweep)
    if executor is None:
        executor = executors.Local(executors.room(sweep.resources), sweep.resources)
    with writing(folder), locked(folder), terminable():
        clean(folder)
        if changed == "refuse":
            check_unchanged(made, folder)
        write_cells(made, folder)
        forget(made, folder, again)
        known = {one.cell.cell_id: outcome(folder, one.cell.cell_id) for one in made.cells}
        with filling(made, known) as filled:
            return lab.run([one.cell for one in made.cells], folder, in_passes(made, executor), filled)


def in_passes(made: Plan, executor: lab.Executor) -> lab.Executor:
    """``executor``, called once a pass of the plan."""

    def run_passes(work: Collection[tuple[Cell, Path]], progress: Progress, ended: Ended) -> None:
        waiting = {cell.cell_id: (cell, path) for cell, path in work}
        for one_pass in made.passes:
            part = [waiting[one.cell.cell_id] for one in one_pass if one.cell.cell_id in waiting]
            if part:
                executor(part, progress, ended)

    return run_passes


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` against other runners; the system lets go of it when this process ends, however it does.

    Raises:
        OutputFolderError: it has a runner.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    while True:
        stream = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            holder = stream.read() or "another process"
            stream.close()
            raise OutputFolderError(f"{folder} has a runner already: {holder}") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                break
        stream.close()  # the runner before removed the file between opening and locking it
    with stream:
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}")
        stream.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Leave as after an error on SIGTERM and SIGHUP, so that no engine stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    for one in before:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def clean(folder: Path) -> None:
    """Remove what a runner that was killed had not finished writing, and what Ray kept for it."""
    for path in folder.glob(".*.tmp"):
        path.unlink()
    cluster.clean_up_after_the_killed()


def write_cells(made: Plan, folder: Path) -> None:
    """Write ``cells.parquet``."""
    part = folder / f".{CELLS}.tmp"
    made.table().to_parquet(part, index=False)
    part.replace(folder / CELLS)


def read_cells(folder: Path) -> pd.DataFrame:
    """The cells of the sweep in ``folder``: see `Plan.table`.

    Raises:
        SpecError: there is none.
    """
    if not (folder / CELLS).is_file():
        raise SpecError(f"{folder} holds no sweep")
    return pd.read_parquet(folder / CELLS)


def axes_of(cells: pd.DataFrame) -> list[str]:
    """The columns of ``cells`` that are axes."""
    return [name for name in cells.columns if name not in ("run_id", "repeat", "unsupported", "cell")]


def outcome(folder: Path, run_id: str) -> str | None:
    """The outcome of a finished cell, None of another one."""
    try:
        return str(json.loads((folder / "cells" / run_id / DONE).read_text(encoding="utf-8"))["outcome"])
    except FileNotFoundError:
        return None


def forget(made: Plan, folder: Path, again: Collection[str]) -> None:
    """Take the completion files of those cells away that are to run again."""
    for one in made.cells:
        path = folder / "cells" / one.cell.cell_id
        found = outcome(folder, one.cell.cell_id)
        if found in (None, "ok", "unsupported") and found not in again:
            continue
        reason = str(ledger.read_table(path, "runs")["reason"].iloc[0])
        from_outside = found == "killed" and not reason.startswith(OVER_MEMORY)
        if found in again or from_outside or any(text in reason for text in FULL):
            (path / DONE).unlink()


def check_unchanged(made: Plan, folder: Path) -> None:
    """Hold the finished cells of ``folder`` against the plan.

    Raises:
        SpecError: one of them is not in it as it was; shows what differs.
    """
    if not (folder / CELLS).is_file():
        return
    known = read_cells(folder)
    kept = {one.cell.cell_id for one in made.cells}
    gone = known[~known["run_id"].isin(kept)]
    gone = gone[[outcome(folder, run_id) not in (None, "unsupported") for run_id in gone["run_id"]]]
    if gone.empty:
        return
    first = gone.iloc[0]
    shown = ", ".join(f"{axis} {first[axis]}" for axis in axes_of(known))
    here = {**{axis: first[axis] for axis in axes_of(known)}, "repeat": first["repeat"]}
    now = next((o.cell for o in made.cells if {**o.where, "repeat": o.repeat} == here), None)
    what = "is no longer asked for"
    if now is not None:
        was = _flat(json.loads(parse_cell(json.loads(first["cell"])).canonical()))
        new = _flat(json.loads(now.canonical()))
        what = ", ".join(
            f"{key} was {was.get(key)!r} and is {new.get(key)!r}"
            for key in sorted(was.keys() | new.keys())
            if was.get(key) != new.get(key)
        )
    more = f" ({len(gone)} such cells)" if len(gone) > 1 else ""
    raise SpecError(
        f"the finished cell {first['run_id']} ({shown}) {what}{more};"
        f" take another folder, or let the change drop what is finished from the tables"
    )


def _flat(content: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(content, dict) or not content:
        return {at: content}
    return {key: v for name, one in content.items() for key, v in _flat(one, f"{at}.{name}" if at else name).items()}


def collect(folder: Path) -> lab.Results:
    """The tables of a sweep from all its cells, written to ``folder``; a cell that has not run has its row, too."""
    cells = read_cells(folder)
    paths = [folder / "cells" / run_id for run_id in cells["run_id"]]
    with writing(folder):
        results = lab.collect([path for path in paths if (path / DONE).is_file()], folder)
        missing = cells[~cells["run_id"].isin(results.runs["run_id"])]
        rows = [
            requested(parse_cell(json.loads(text))) | {"outcome": "no_data", "reason": NOT_RUN}
            for text in missing["cell"]
        ]
        if not rows:
            return results
        runs = pd.concat([results.runs, ledger.frame("runs", rows)], ignore_index=True)
        runs = runs.set_index("run_id").loc[list(cells["run_id"])].reset_index()
        ledger.write_table(folder, "runs", runs)
    return lab.Results(folder, runs, results.requests, results.steps, results.fsm_events)


def status(folder: Path) -> str:
    """How a sweep stands, for a terminal: cells by outcome, the failed ones with their reasons, who runs it."""
    cells = read_cells(folder)
    found = {run_id: outcome(folder, run_id) for run_id in cells["run_id"]}
    counts = Counter(kind or "not run yet" for kind in found.values())
    lines = [f"{folder.name}: {len(cells)} cells", *(f"  {count} {kind}" for kind, count in counts.most_common())]
    failed = [run_id for run_id, kind in found.items() if kind not in (None, "ok", "unsupported")]
    runs = ledger.read_tables([folder / "cells" / run_id for run_id in failed], "runs")
    for kind, reason in zip(runs["outcome"], runs["reason"], strict=True):
        lines.append(f"  {kind}: {reason}")
    lines.append(f"running: {_holder(folder)}")
    return "\n".join(lines)


def _holder(folder: Path) -> str:
    try:
        with (folder / LOCK).open(encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return stream.read()
    except FileNotFoundError:
        pass
    return "no"
