"""The command line: exit codes, one sentence for a fault, and what ``run`` and ``show`` print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

UNSUPPORTED = """
workload: {inline: ["One sentence."]}
drafter: {method: ngram, k: 2}
engine: {scheduling: async}
"""


def specgram(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specgram_lab.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_cell_that_cannot_run_is_a_row_with_its_reason_and_exit_code_1(tmp_path):
    (tmp_path / "cell.yaml").write_text(UNSUPPORTED, encoding="utf-8")
    done = specgram("run", tmp_path / "cell.yaml", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("unsupported: async scheduling with ngram")
    shown = specgram("show", tmp_path / "out")
    assert shown.returncode == 0
    assert shown.stdout == done.stdout
    assert "unsupported" in shown.stdout.splitlines()[2]
    assert "async scheduling with ngram: vLLM supports it only with" in shown.stdout
    pasted = specgram("show", tmp_path / "out", "--markdown").stdout
    assert pasted.startswith("| run | outcome | drafter |")


def test_wrong_input_is_one_sentence_and_exit_code_2_before_anything_is_written(tmp_path):
    (tmp_path / "cell.yaml").write_text("workload: {prompts: records}\nengin: {}\n", encoding="utf-8")
    done = specgram("run", tmp_path / "cell.yaml", "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("cell.yaml: engin is not a known key")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_run_is_said_to_be_one(tmp_path):
    done = specgram("show", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == f"{tmp_path} holds no finished run"


def test_parameters_of_a_notebook_from_a_file_that_is_none(tmp_path):
    notebook = Path(__file__).parent.parent / "notebooks" / "01_quickstart.ipynb"
    missing = specgram("notebook", notebook, "--out", tmp_path / "out", "-f", tmp_path / "none.yaml")
    assert (missing.returncode, len(missing.stderr.splitlines())) == (2, 1)
    assert "none.yaml cannot be read: No such file or directory" in missing.stderr
    (tmp_path / "list.yaml").write_text("- limit", encoding="utf-8")
    wrong = specgram("notebook", notebook, "--out", tmp_path / "out", "-f", tmp_path / "list.yaml")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    assert "holds no mapping of parameters" in wrong.stderr
    assert not (tmp_path / "out").exists()
