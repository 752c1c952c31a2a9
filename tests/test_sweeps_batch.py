"""Notebooks x parameter sets: checked beforehand, resumed, shown on a page that says what failed and why."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
import yaml
from ledgers import run_row
from nbformat.v4 import new_code_cell, new_notebook

from specgram_lab import ledger
from specgram_lab.spec import SpecError
from specgram_lab.sweeps import batch, page

BODY = """
import os
from pathlib import Path
from specgram_lab import lab
if do == "die":
    os.kill(os.getpid(), 9)
if do == "flood":
    print("\\n".join(f"line {number}" for number in range(50_000)))
Path(out, "table.csv").write_text("a\\n1\\n")
Path(out, "figure ä.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
lab.close(out, dict(out=out, do=do, revision=revision), rows=1)
"""
SETS = {"good": {"revision": "7e10"}, "Ende <b>": {"do": "die"}, "flood": {"do": "flood", "revision": "007"}}


def write(folder: Path, sets, *, tags=("parameters",)) -> Path:
    made = new_notebook(cells=[new_code_cell("out = '.'\ndo = ''\nrevision = ''"), new_code_cell(BODY)])
    made.cells[0].metadata["tags"] = list(tags)
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, folder / "one.ipynb")
    path = folder / "batch.yaml"
    content = {"name": "Nacht & Tag", "blocks": [{"notebooks": ["one.ipynb"], "sets": sets}]}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


class Links(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("href", "src") and not value.startswith("#")]

    def handle_data(self, data):
        self.text += data


@pytest.mark.engine
def test_a_batch_goes_on_after_a_dead_kernel_and_runs_only_what_failed_again(tmp_path):
    name, entries = batch.load(write(tmp_path, SETS))
    out = tmp_path / "out {x} ü"
    made = batch.run(name, entries, out)
    assert [one.outcome for one in made] == ["ok", "kernel_died", "ok"]
    assert [one.seen.get("revision") for one in made] == ["7e10", None, "007"]
    flood = made[2].folder
    assert (flood / "one.ipynb").stat().st_size < 100_000
    text = "".join(nbformat.read(flood / "one.ipynb", 4).cells[-1].outputs[0]["text"])
    assert text.startswith("line 0\n")
    assert text.endswith("line 49999\n")
    assert "characters left out here; what was printed is in one.log" in text
    assert (flood / "one.log").read_text(encoding="utf-8").count("\n") >= 50_000
    shown = Links((out / page.PAGE).read_text(encoding="utf-8"))
    assert all((out / unquote(link)).is_file() for link in shown.found)
    assert {Path(unquote(link)).name for link in shown.found} >= {"one.ipynb", "one.log", "table.csv", "figure ä.svg"}
    assert "Nacht & Tag" in shown.text
    assert "one.ipynb, Ende <b>: kernel_died the kernel ended in the middle of the notebook" in shown.text
    stamps = {one.folder.name: (one.folder / batch.ENTRY).stat().st_mtime_ns for one in made}
    again = batch.run(name, entries, out)
    changed = [
        one.set_name for one in again if (one.folder / batch.ENTRY).stat().st_mtime_ns != stamps[one.folder.name]
    ]
    assert changed == ["Ende <b>"]
    assert [path for path in out.rglob("*") if path.name.endswith((".tmp", ".lock"))] == []


@pytest.mark.parametrize(
    ("sets", "tags", "sentence"),
    [
        ({"a": {}}, (), "has 0 cells tagged parameters"),
        ({"a": {"speed": 1}}, ("parameters",), "one.ipynb has no parameter speed; it takes do, out, revision"),
        ({"a": {"do": float("inf")}}, ("parameters",), "a.do.float: input should be a finite number, got inf"),
        ({}, ("parameters",), "blocks.0.sets"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(tmp_path, sets, tags, sentence):
    with pytest.raises(SpecError) as caught:
        batch.load(write(tmp_path, sets, tags=tags))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("blocks: []", "the batch has no entry"),
        ("blocks: [{notebooks: [none.ipynb], sets: {a: {}}}]", "none.ipynb cannot be read: No such file"),
        ("blocks: [", "is not YAML"),
        ("- 1", "batch"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(tmp_path, content, sentence):
    (tmp_path / "batch.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(SpecError, match=sentence):
        batch.load(tmp_path / "batch.yaml")


def test_an_entry_is_what_its_notebook_and_parameters_are(tmp_path):
    write(tmp_path, SETS)
    one = batch.Entry(tmp_path / "one.ipynb", "a", {"do": "x"})
    same, other = one.entry_id, batch.Entry(one.notebook, "a", {"do": "y"}).entry_id
    assert same.startswith("one-a-")
    assert same != other
    one.notebook.write_text(one.notebook.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert one.entry_id != same


def test_the_page_says_which_cells_of_a_notebook_failed(tmp_path):
    folder = tmp_path / "one"
    rows = [run_row(run_id=str(number), outcome=kind, reason="<no>") for number, kind in enumerate(("ok", "timeout"))]
    ledger.write_table(folder, "runs", ledger.frame("runs", rows))
    path = page.write(tmp_path, "x", [page.Made("one.ipynb", "a", {}, folder, "ok", "", 3.0, {})])
    assert "1 of 2 cells: timeout: &lt;no&gt;" in path.read_text(encoding="utf-8")
    assert json.dumps({}) not in path.read_text(encoding="utf-8")
