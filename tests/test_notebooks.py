"""Notebooks through papermill, whose word on success is never taken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from specgram_lab import lab, notebooks
from specgram_lab.spec import SpecError

FOLDER = Path(__file__).parent.parent / "notebooks"


def write(path: Path, *cells: str, tags: tuple[str, ...] = ("parameters",)) -> Path:
    made = new_notebook(cells=[new_code_cell(text) for text in cells])
    made.cells[0].metadata["tags"] = list(tags)
    nbformat.write(made, path)
    return path


CLOSE = "from specgram_lab import lab\nlab.close(out, dict(out=out, n=n), rows=1)"


def test_there_are_notebooks_and_they_are_clean():
    found = sorted(FOLDER.glob("*.ipynb"))
    assert found
    for path in found:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["metadata"]["kernelspec"]["name"] == "python3"
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in content["cells"]), path
        assert "out" in notebooks.defaults(path)


@pytest.mark.engine
def test_a_notebook_that_closes_is_ok_and_its_parameters_are_the_given_ones(tmp_path):
    path = write(
        tmp_path / "good.ipynb",
        "out = '.'\nn = 1\ngrammar = 'root ::= \"a\" | \"b\"'",
        "from specgram_lab import lab\nprint('hello')\nlab.close(out, dict(out=out, n=n, grammar=grammar), rows=n)",
    )
    done = notebooks.execute(path, tmp_path / "out", {"n": 7, "grammar": 'root ::= "c"'})
    assert (done.outcome, done.reason) == ("ok", "")
    assert done.parameters["n"] == 7
    assert done.parameters["grammar"] == 'root ::= "c"'
    assert (tmp_path / "out" / "good.log").read_text(encoding="utf-8").strip().endswith("hello")


@pytest.mark.engine
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_notebook_that_is_killed_leaves_nothing_once_it_has_run_again(tmp_path, how):
    path = write(tmp_path / "slow.ipynb", "out = '.'\nn = 1", "import time\ntime.sleep(60 * n)", CLOSE)
    command = [sys.executable, "-m", "specgram_lab.cli", "notebook", str(path), "--out", str(tmp_path / "out")]
    (tmp_path / "t").mkdir()
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / "t")}, start_new_session=True)
    connection = tmp_path / "out" / notebooks.CONNECTION.format(process.pid)
    while process.poll() is None and not connection.is_file():
        time.sleep(0.02)
    kernels = [child for child in psutil.Process(process.pid).children() if str(connection) in child.cmdline()]
    process.send_signal(how)
    assert process.wait() != 0
    assert connection.exists() == (how == signal.SIGKILL)
    psutil.wait_procs(kernels, timeout=20)
    assert not any(kernel.is_running() for kernel in kernels)
    done = notebooks.execute(path, tmp_path / "out", {"n": 0})
    assert (done.outcome, done.reason) == ("ok", "")
    assert not list((tmp_path / "out").glob(".*"))
    assert not list((tmp_path / "t").iterdir())


@pytest.mark.engine
def test_one_line_of_fifty_megabytes_is_in_the_log_and_its_ends_in_the_copy(tmp_path):
    path = write(
        tmp_path / "flood.ipynb", "out = '.'\nn = 1", "print('<' + 'x' * 50_000_000 + '>')\n'y' * 200_000", CLOSE
    )
    done = notebooks.execute(path, tmp_path / "out")
    assert (done.outcome, done.reason) == ("ok", "")
    assert done.notebook.stat().st_size < 100_000
    printed, value = nbformat.read(done.notebook, 4).cells[-2].outputs
    assert printed["text"].startswith("<x")
    assert printed["text"].endswith("x>\n")
    assert "characters left out here; what was printed is in flood.log" in printed["text"]
    assert "characters left out" in value["data"]["text/plain"]
    assert (tmp_path / "out" / "flood.log").stat().st_size >= 50_000_000


@pytest.mark.engine
@pytest.mark.parametrize(
    ("cells", "outcome", "reason"),
    [
        (["import os\nos.kill(os.getpid(), 9)", CLOSE], "kernel_died", "ended in the middle"),
        (["raise ValueError('no good')", CLOSE], "failed", "ValueError: no good"),
        (
            ["try:\n    raise ValueError('hidden')\nexcept ValueError as error:\n    print(error)"],
            "no_data",
            "lab.close",
        ),
        (["n = 5", CLOSE], "failed", "parameter n was 3, the notebook saw 5"),
        (["from specgram_lab import lab\nlab.close(out, dict(out=out, n=n), rows=0)"], "failed", "without one row"),
    ],
)
def test_nothing_papermill_says_is_believed(tmp_path, cells, outcome, reason):
    path = write(tmp_path / "bad.ipynb", "out = '.'\nn = 1", *cells)
    done = notebooks.execute(path, tmp_path / "out", {"n": 3})
    assert done.outcome == outcome
    assert reason in done.reason


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"m": 1}, "has no parameter m; it takes n, out"),
        ({"n": (1, 3)}, "parameter n is a tuple"),
        ({"n": np.int64(4)}, "parameter n is a int64"),
        ({"n": {1: 3}}, "parameter n has the key 1"),
        ({"n": Path("r")}, "parameter n is a PosixPath"),
        ({"n": float("inf")}, "parameter n is inf"),
        ({"n": [[1, None], {"a": (1,)}]}, "parameter n is a tuple"),
    ],
)
def test_parameters_that_would_change_on_the_way_are_refused(tmp_path, parameters, sentence):
    path = write(tmp_path / "one.ipynb", "out = '.'\nn = 1")
    with pytest.raises(SpecError) as caught:
        notebooks.execute(path, tmp_path / "out", parameters)
    assert sentence in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_notebook_without_one_parameters_cell_is_refused(tmp_path):
    with pytest.raises(SpecError, match="has 0 cells tagged parameters"):
        notebooks.execute(write(tmp_path / "none.ipynb", "n = 1", tags=()), tmp_path / "out")


def test_parameters_in_the_notebook_are_checked_by_type():
    types = {"ks": list[int], "name": str}
    assert lab.parameters({"ks": [1], "name": "x"}, types) == {"ks": [1], "name": "x"}
    with pytest.raises(SpecError, match="parameter ks"):
        lab.parameters({"ks": "[1, 2]", "name": "x"}, types)
    with pytest.raises(SpecError, match="unknown parameter kz; the notebook takes ks, name"):
        lab.parameters({"ks": [1], "name": "x", "kz": 1}, types)
    with pytest.raises(SpecError, match="parameter name is missing"):
        lab.parameters({"ks": [1]}, types)


@pytest.mark.engine
def test_the_quickstart_runs_on_a_real_engine_and_again_without_one(tmp_path, target_folder):
    small = {
        "drafters": [{"method": "ngram", "k": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}],
        "grammars": [{"kind": "json_object"}],
        "schedulings": ["sync", "async"],
        "limit": 3,
        "max_tokens": 16,
    }
    done = notebooks.execute(FOLDER / "01_quickstart.ipynb", tmp_path, small)
    assert done.outcome == "ok", done.reason
    results = lab.read(tmp_path)
    assert sorted(results.runs["outcome"]) == ["ok", "unsupported"]
    assert len(results.requests) == 3
    assert results.steps["drafted"].sum() > 0
    for name in ("mean_acceptance_length", "acceptance_rate", "fates", "positions", "fsm_events"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 5000
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").glob("*/done.json")}
    again = notebooks.execute(FOLDER / "01_quickstart.ipynb", tmp_path, small)
    assert again.outcome == "ok", again.reason
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cells").glob("*/done.json")} == stamps


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SMALL = {
    "03_drafters": {"names": [], "ks": [2], "limit": 2, "max_tokens": 16},
    "04_av_budgets": {
        "trained": [], "limit": 2, "max_tokens": 16, "concurrencies": [2], "curves": ["gpu-nemotronh-30b-a3b"],
        "estimator_limit": 8,
    },
    "06_sweep": {"drafters": [NGRAM], "ks": [2], "schedulings": ["sync"], "limit": 2, "max_tokens": 16},
}  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("name", SMALL)
def test_the_other_notebooks_run_on_real_engines(name, tmp_path, target_folder):
    """In small: without trained drafters, whose runs have tests of their own."""
    done = notebooks.execute(FOLDER / f"{name}.ipynb", tmp_path, SMALL[name])
    assert done.outcome == "ok", done.reason
    results = lab.read(tmp_path)
    assert set(results.runs["outcome"]) == {"ok"}
    assert results.steps["verified"].sum() > 0
    figures = {path.stem for path in tmp_path.glob("*.svg")}
    assert figures == {path.stem for path in tmp_path.glob("*.png")} != set()
