"""What a sweep costs beside the work in it, how large it may be, and that it survives: three sub-commands.

``overhead FOLDER --wall SECONDS``: of a collected sweep, the share of its wall time that was not spent generating.
``overhead --run SWEEP.yaml FOLDER`` runs it first and takes the time itself.
``size``: 10,000 scripted cells planned, then as many made-up finished ones collected; seconds and memory.
``kills``: the scripted sweep below, killed N times at random moments (a cell, the runner, a worker, one of Ray's, the
kernel of a notebook that runs it; SIGKILL or SIGTERM), then resumed, on a tmpfs that is full at first; the table must
equal that of a run that nobody disturbed, and no process or temporary file of any of the runners be left.

Prints JSON; exit code 1 where a bound is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from specgram_lab import lab, ledger, run
from specgram_lab.sweeps import definition, executors, plan, runner

MOST_OUTSIDE = 0.25
PLAN_S, COLLECT_S, MEMORY_MIB = 5.0, 30.0, 1024.0
CELLS = 10_000
SWEEP = {
    "axes": {"workload.scenario": ["row-a", "row-c", "row-g", "row-h", "row-k"], "scheduling": ["sync", "async"]},
    "fixed": {"drafter": {"method": "scripted", "k": 4}, "engine": {"kind": "scripted"}},
    "resources": {"cpus": 1, "memory_mib": 1024},
}
TIMES = ["start_s", "generate_s", "provenance"]
KINDS = {
    "cell": "specgram_lab.cell",
    "worker": "specgram_lab.sweeps.worker",
    "kernel": "ipykernel_launcher",
    "ray": "ray::work",
    "runner": "",
    "runner with ray": "",
}
"""What is killed, and a word of its command line; the runner is the process that was started."""
MARK = "SPECGRAM_KILLS"
"""Environment variable by which a process is known to descend from one of the runners."""


def overhead(folder: Path, wall_s: float) -> dict[str, float]:
    """The parts of the wall time: generating, starting engines, the rest."""
    runs = lab.read(folder).runs
    generating, starting = float(runs["generate_s"].sum()), float(runs["start_s"].sum())
    return {
        "cells": len(runs),
        "wall_s": wall_s,
        "generating_s": generating,
        "starting_s": starting,
        "rest_s": wall_s - generating - starting,
        "outside": 1 - generating / wall_s,
    }


def size(cells: int) -> dict[str, float]:
    """Seconds to plan and collect ``cells`` cells, and the largest resident memory of this process."""
    axes = {"workload.seed": list(range(cells // 2)), "scheduling": ["sync", "async"]}
    fixed = {**SWEEP["fixed"], "workload": {"scenario": "row-a"}}
    begin = time.perf_counter()
    made = plan.plan(definition.parse({"axes": axes, "fixed": fixed}))
    plan.estimate(made)
    planned = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runner.write_cells(made, folder)
        _made_up(made, folder)
        begin, busy = time.perf_counter(), time.process_time()
        results = runner.collect(folder)
        collected, busy = time.perf_counter() - begin, time.process_time() - busy
    assert len(results.runs) == cells
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cells": cells, "plan_s": planned, "collect_s": collected, "collect_cpu_s": busy, "memory_mib": memory}


def _made_up(made: plan.Plan, folder: Path) -> None:
    """Finished cells of four requests of ten steps each, all alike."""
    steps = [
        {
            "run_id": "x", "step": at, "request_id": str(number), "request_step": at, "in_reasoning": False,
            "judged": True, "drafted": 4, "grammar_valid": 3, "scheduled": 4, "struck": 1, "verified": 4, "padded": 0,
            "av_skipped": 0, "accepted": 2, "sampled": 3, "committed": 3, "draft_token_ids": [1, 2, 3, 4],
            "sampled_token_ids": [1, 2, 5],
        }
        for number in range(4)
        for at in range(10)
    ]  # fmt: skip
    requests = [
        {"run_id": "x", "request_id": str(n), "prompt_id": f"p{n}", "repeat": 0, "text": "x" * 80} for n in range(4)
    ]
    provenance = json.dumps({"packages": {f"p{number}": "1.2.3" for number in range(60)}})
    named = {"requests": ledger.frame("requests", requests), "steps": ledger.frame("steps", steps)}
    tables = {name: pa.Table.from_pandas(one, schema=ledger.TABLES[name]) for name, one in named.items()}
    ledger.write_table(folder / "one", "fsm_events", ledger.frame("fsm_events", []))
    ended = {"outcome": "ok", "prompts": 4, "output_tokens": 120, "generate_s": 1.0, "provenance": provenance}
    for one in made.cells:
        path = folder / "cells" / one.cell.cell_id
        shutil.copytree(folder / "one", path)
        for name, table in tables.items():
            own = pa.array([one.cell.cell_id] * table.num_rows)
            pq.write_table(table.set_column(0, table.schema.field("run_id"), own), path / f"{name}.parquet")
        run.finish(one.cell, path, run.requested(one.cell) | ended)


def kills(number: int, seed: int, scratch: Path) -> dict[str, object]:
    """Kill and resume until ``number`` kills were made, then finish; whether table, processes and files are right."""
    sweep = definition.parse(SWEEP)
    whole = runner.run(sweep, scratch / "whole", executor=executors.Local())
    disk = scratch / "disk {x} ä"
    disk.mkdir()
    (scratch / "t").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        said = _on_full_disk(disk, scratch)
        chance, done = random.Random(seed), []  # noqa: S311
        while len(done) < number:
            done += _killed_once(list(KINDS)[len(done) % len(KINDS)], disk / "out", scratch, chance)
            print(f"{len(done)} of {number} killed", file=sys.stderr, flush=True)
        last = _start(disk / "out", scratch)
        assert last.wait() == 0
        found = lab.read(disk / "out")
        same = all(_same(found.tables[name], whole.tables[name]) for name in ledger.TABLES)
        left = [path.name for path in (disk / "out").rglob("*") if path.name.endswith((".tmp", ".lock"))]
        left += [path.name for path in (scratch / "t").iterdir() if not path.name.startswith("torchinductor_")]
        alive = [" ".join(one.cmdline())[:200] for one in _processes(scratch)]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    return {"kills": done, "full_disk": said, "same": same, "files_left": left, "processes_left": alive}


def _on_full_disk(disk: Path, scratch: Path) -> str:
    (disk / "filling").write_bytes(b"0" * ((4 << 20) - 200_000))
    process = _start(disk / "out", scratch)
    assert process.wait() != 0
    (disk / "filling").unlink()
    return (scratch / "log").read_text(encoding="utf-8").strip().splitlines()[-1]


def _start(folder: Path, scratch: Path, kind: str = "") -> subprocess.Popen[bytes]:
    path = scratch / "sweep.yaml"
    path.write_text(json.dumps(SWEEP), encoding="utf-8")
    command = [sys.executable, "-m", "specgram_lab.cli"]
    environment = os.environ | {MARK: str(scratch), "TMPDIR": str(scratch / "t")}
    if kind == "kernel":
        command += ["notebook", str(_notebook(path, folder)), "--out", str(scratch / "notebook")]
    else:
        workers = ["--executor", "ray"] if "ray" in kind else ["--workers", "2"]
        command += ["sweep", "run", str(path), "--out", str(folder), *workers]
    with (scratch / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _notebook(sweep: Path, folder: Path) -> Path:
    """A notebook that runs the sweep."""
    cells = [
        nbformat.v4.new_code_cell('out = ""', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "from specgram_lab import lab\n"
            f"results = lab.sweep({str(sweep)!r}, {str(folder)!r})\n"
            'lab.close(out, {"out": out}, rows=len(results.steps))'
        ),
    ]
    path = sweep.with_suffix(".ipynb")
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def _processes(scratch: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) == str(scratch)]


def _killed_once(kind: str, folder: Path, scratch: Path, chance: random.Random) -> list[str]:
    """Run the sweep, kill what ``kind`` says somewhen after it is there, wait for the end; empty if it was too late."""
    finished = sorted(folder.glob("cells/*/done.json"))
    for path in [*chance.sample(finished, min(2, len(finished))), *(f for f in finished if chance.random() < 0.3)]:
        path.unlink(missing_ok=True)  # so that there is something to run
    how = chance.choice((signal.SIGKILL, signal.SIGTERM))
    process = _start(folder, scratch, kind)
    while process.poll() is None and _target(process, kind) is None:
        time.sleep(0.05)
    deadline = time.monotonic() + chance.uniform(0, 20 if KINDS[kind] else 30)
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    target = _target(process, kind)
    if target is None:
        assert process.wait() == 0, (scratch / "log").read_text(encoding="utf-8")[-2000:]
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        target.send_signal(how)
    if KINDS[kind] and chance.random() < 0.5:
        process.terminate()  # else the runner goes on with the other cells
    process.wait()
    return [f"{kind} {how.name}"]


def _target(process: subprocess.Popen[bytes], kind: str) -> psutil.Process | None:
    if process.poll() is not None:
        return None
    runner = psutil.Process(process.pid)
    if not KINDS[kind]:
        return runner
    for one in runner.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if KINDS[kind] in " ".join(one.cmdline()):
                return one
    return None


def _same(found: pd.DataFrame, whole: pd.DataFrame) -> bool:
    pairs = [
        one.drop(columns=TIMES, errors="ignore").sort_values("run_id", kind="stable").reset_index(drop=True)
        for one in (found, whole)
    ]
    return bool(pairs[0].equals(pairs[1]))


def main() -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    share = commands.add_parser("overhead")
    share.add_argument("folder", type=Path)
    share.add_argument("--wall", type=float, help="seconds that the sweep took")
    share.add_argument("--run", type=Path, help="a sweep to run first, into a folder that has nothing of it yet")
    commands.add_parser("size").add_argument("--cells", type=int, default=CELLS)
    killing = commands.add_parser("kills")
    killing.add_argument("--number", type=int, default=20)
    killing.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.command == "overhead":
        if (given.wall is None) == (given.run is None):
            parser.error("give one of --wall and --run")
        wall = given.wall
        if given.run is not None:
            begin = time.monotonic()
            lab.sweep(given.run, given.folder)
            wall = time.monotonic() - begin
        found: dict[str, object] = dict(overhead(given.folder, wall))
        good = found["outside"] <= MOST_OUTSIDE
    elif given.command == "size":
        found = dict(size(given.cells))
        bounds = {"plan_s": PLAN_S, "collect_s": COLLECT_S, "memory_mib": MEMORY_MIB}
        good = all(found[name] <= bound for name, bound in bounds.items())
    else:
        scratch = Path(tempfile.mkdtemp(prefix="k"))
        try:
            found = kills(given.number, given.seed, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        good = bool(found["same"]) and not found["files_left"] and not found["processes_left"]
    print(json.dumps(found | {"load": os.getloadavg()[0]}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
