"""Sweeps on the scripted engine: cells, runners and workers that are killed, then resumed, give the same table."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time

import pandas as pd
import psutil
import pytest

from specgram_lab import lab, ledger
from specgram_lab.sweeps import cluster, definition, executors, runner

SWEEP = {
    "name": "scripted",
    "axes": {"workload.scenario": ["row-a", "row-c", "row-h"], "scheduling": ["sync", "async"]},
    "fixed": {"drafter": {"method": "scripted", "k": 4}, "engine": {"kind": "scripted"}},
    "resources": {"cpus": 1, "memory_mib": 512},
}
SYNC = {**SWEEP, "axes": {**SWEEP["axes"], "scheduling": ["sync"]}}
TIMES = ["start_s", "generate_s", "provenance"]
"""Columns that differ between two runs of the same: times, and processes, environment and order in the provenance."""
LONG_S = 300


def engines(folder):
    """The processes that run cells of a sweep."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        command = one.info["cmdline"] or []
        if "specgram_lab.cell" in command and any(part.startswith(str(folder)) for part in command):
            found.append(one)
    return found


def wait_for(what):
    """Poll until ``what`` gives something."""
    deadline = time.monotonic() + LONG_S
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def same(found, whole):
    wanted = {name: table[table["run_id"].isin(found.runs["run_id"])] for name, table in whole.tables.items()}
    for name in ledger.TABLES:
        pairs = [
            table.drop(columns=TIMES, errors="ignore").sort_values("run_id", kind="stable").reset_index(drop=True)
            for table in (found.tables[name], wanted[name])
        ]
        pd.testing.assert_frame_equal(*pairs)


def left_behind(folder):
    return [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".lock"))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target_folder):
    """A sweep that nobody disturbed."""
    results = lab.sweep(SWEEP, tmp_path_factory.mktemp("whole"), executors.Local())
    assert list(results.runs["outcome"]) == ["ok"] * 6
    return results


@pytest.mark.engine
def test_a_killed_cell_and_a_terminated_runner_leave_nothing_and_the_rest_gives_the_same_table(tmp_path, whole):
    folder = tmp_path / "mit {k} Ä"
    (tmp_path / "sweep.yaml").write_text(json.dumps(SYNC), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "specgram_lab.cli",
        "sweep",
        "run",
        str(tmp_path / "sweep.yaml"),
        "--out",
        str(folder),
    ]
    chance = random.Random(5)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        (first,) = wait_for(lambda: engines(folder))
        time.sleep(chance.uniform(0, 4))
        first.kill()
        (second,) = wait_for(lambda: [one for one in engines(folder) if one != first])
        time.sleep(chance.uniform(0, 2))
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not second.is_running()
    assert engines(folder) == []
    assert "1 killed" in runner.status(folder)
    resumed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    same(lab.read(folder), whole)
    assert left_behind(folder) == []
    assert engines(folder) == []


@pytest.mark.engine
def test_ray_gives_the_same_table_also_when_a_worker_is_killed(tmp_path, whole):
    sweep = definition.parse(SWEEP)
    folder = tmp_path / "ray"
    lost = []

    def kill() -> None:
        engine = wait_for(lambda: engines(folder))[0]
        lost.append(engine.parent())
        lost[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    results = runner.run(sweep, folder, executor=cluster.Ray(sweep.resources, "local"))
    killer.join()
    assert sorted(results.runs["outcome"]) == ["killed", *["ok"] * 5]
    assert "the Ray worker that ran it was lost" in results.failed["reason"].item()
    assert not lost[0].is_running()
    assert engines(folder) == []
    assert [one for one in psutil.Process().children(recursive=True) if "ray" in one.name()] == []
    same(runner.run(sweep, folder, executor=executors.Local(2, sweep.resources)), whole)
    assert left_behind(folder) == []


@pytest.mark.engine
def test_ray_refuses_what_no_node_has(tmp_path):
    content = {**SWEEP, "resources": {"cpus": 1000}}
    with pytest.raises(lab.SpecError, match="a cell asks for 1000 CPUs, 0 GPUs and 4096 MiB, no node"):
        lab.sweep(content, tmp_path, cluster.Ray(definition.parse(content).resources, "local"))


def test_without_ray_one_sentence_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(lab.SpecError, match=r"needs the package ray: pip install 'specgram-lab\[ray\]'"):
        lab.sweep(SYNC, tmp_path, cluster.Ray())
