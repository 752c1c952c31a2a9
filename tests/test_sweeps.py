"""Sweeps without an engine: definition, plan, the folder as record, comparison. Cells are made up or refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import made_cells
import pandas as pd
import pytest
import yaml
from made_cells import SWEEP
from typer.testing import CliRunner

from specgram_lab import cli, lab, ledger, run
from specgram_lab.spec import SpecError
from specgram_lab.stats import Estimate
from specgram_lab.sweeps import cluster, compare, definition, executors, plan, runner, showing
from specgram_lab.sweeps import results as sweep_results


def sweep(**changes):
    return definition.parse({**SWEEP, **changes})


def swept(folder, **changes):
    return runner.run(sweep(**changes), folder, executor=made_cells.executor)


def stamps(folder):
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("cells/*/done.json")}


@pytest.fixture
def folder(tmp_path):
    """Blanks, braces, letters beyond ASCII, a percent sign."""
    return tmp_path / "Läufe {k} 100% ä" / "out"


# definition


def test_axes_are_paths_or_words_and_their_values_have_labels():
    made = sweep(
        axes={
            "drafter": [{"method": "ngram", "k": 2}, {"method": "ngram", "k": 4}, {"method": "none"}],
            "scheduling": {"s": "sync"},
            "workload.temperature": [0.0, 0.5],
        }
    )
    assert list(made.axes["drafter"]) == ["ngram k=2", "ngram k=4", "none"]
    found = made.combinations()
    assert len(found) == 6
    where, cell = found[1]
    assert where == {"drafter": "ngram k=2", "scheduling": "s", "workload.temperature": "0.5"}
    assert (cell.drafter.k, cell.workload.temperature, cell.engine.scheduling) == (2, 0.5, "sync")


def test_a_sweep_written_as_a_file_is_the_same_sweep(tmp_path):
    made = sweep(exclude=[{"drafter.method": "ngram", "scheduling": "async"}], repeats=2)
    (tmp_path / "sweep.yaml").write_text(definition.dump(made), encoding="utf-8")
    assert definition.load(tmp_path / "sweep.yaml") == made


def test_k_leaves_a_cell_without_a_drafter_alone_and_it_appears_once():
    found = sweep().combinations()
    assert len(found) == 2 * (1 + 2 + 2)
    assert [where["k"] for where, cell in found if cell.drafter.method == "none"] == ["0", "0"]


def test_a_deeper_axis_is_laid_over_a_part_whatever_the_order():
    made = sweep(axes={"k": [3], "drafter": [{"method": "ngram"}]}).combinations()
    assert [(where, cell.drafter.k) for where, cell in made] == [({"k": "3", "drafter": "ngram"}, 3)]


def test_exclusions_take_combinations_out():
    rules = [{"drafter.method": "ngram", "k": [2, 3]}, {"drafter": {"method": "draft_model"}, "scheduling": "async"}]
    cells = [cell for _, cell in sweep(exclude=rules).combinations()]
    kept = {(c.drafter.method, c.drafter.k, c.engine.scheduling) for c in cells}
    assert kept == {
        ("none", 0, "sync"), ("none", 0, "async"), ("ngram", 4, "sync"), ("ngram", 4, "async"),
        ("draft_model", 2, "sync"), ("draft_model", 4, "sync"),
    }  # fmt: skip


def test_a_kernels_package_alone_makes_no_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    assert not lab.in_notebook()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "a sweep is a mapping, got list"),
        ({"axes": {}}, "at least one axis"),
        ({"axes": {"k": []}}, "at least one value"),
        ({"axes": {"k": 3}}, "axis k holds a list or a mapping"),
        ({"axes": {"k": [1, 1]}}, "axis k has the value 1 twice"),
        ({"axes": {"k": [1]}, "cores": 3}, "cores is not a known key"),
        ({"axes": {"k": [1]}, "repeats": 0}, "repeats: "),
        ({**SWEEP, "axes": {"drafters": [{"method": "none"}]}}, "drafters none: drafters is not a known key"),
        ({**SWEEP, "exclude": [{"engine.speed": 1}]}, "engine.speed is no path in a cell"),
        ({**SWEEP, "axes": {"drafter": [{"method": "eagle3", "k": 2}]}}, "drafter eagle3"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_one_sentence(content, sentence):
    with pytest.raises(SpecError) as caught:
        plan.plan(definition.parse(content))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_lie_beside_the_sweeps_own(tmp_path):
    (tmp_path / "s.json").write_text('{"type": "object"}', encoding="utf-8")
    (tmp_path / "p.jsonl").write_text('{"id": "one", "text": "x"}\n', encoding="utf-8")
    content = {
        "axes": {"grammar": [{"kind": "json_schema", "file": "s.json"}], "workload.prompts": ["p.jsonl", "records"]},
        "fixed": {"workload": {"max_tokens": 8}},
    }
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    found = definition.load(tmp_path / "s.yaml").combinations()
    assert [cell.workload.prompts for _, cell in found] == [str(tmp_path / "p.jsonl"), "records"]
    assert found[0][1].grammar.value == {"type": "object"}
    (tmp_path / "bad.yaml").write_text("axes: [", encoding="utf-8")
    with pytest.raises(SpecError, match=r"bad\.yaml is not YAML"):
        definition.load(tmp_path / "bad.yaml")


# plan


def test_a_plan_says_what_cannot_run_and_why():
    made = plan.plan(sweep())
    bad = [one for one in made.cells if one.reason]
    assert {(one.where["drafter"], one.where["scheduling"]) for one in bad} == {("ngram", "async")}
    text = plan.to_text(made, plan.estimate(made))
    assert "10 cells" in text
    assert "unsupported here: 2" in text
    assert "2 x async scheduling with ngram" in text


def test_cells_share_an_engine_unless_repeats_alternate():
    grammars = {"drafter": [{"method": "ngram", "k": 2}], "grammar": [{"kind": "none"}, {"kind": "json_object"}]}
    together = plan.plan(sweep(axes=grammars, repeats=3))
    assert plan.estimate(together).engines == 1
    apart = plan.plan(sweep(axes=grammars, repeats=3, alternating=True))
    assert plan.estimate(apart).engines == 3
    orders = [[one.where["grammar"] for one in part] for part in apart.passes]
    assert orders == [["none", "json_object"], ["json_object", "none"], ["none", "json_object"]]
    assert [one.cell.workload.seed for one in apart.cells] == [0, 0, 1, 1, 2, 2]


def test_repeats_need_a_seed():
    workload = {"workload": {"inline": ["a"], "seed": None}}
    with pytest.raises(SpecError, match="repeats count the workload's seed on"):
        plan.plan(sweep(fixed=workload, repeats=2))


def test_finished_cells_give_the_times_and_are_not_counted():
    made = plan.plan(sweep())
    runs = ledger.frame(
        "runs", [{"run_id": made.cells[0].cell.cell_id, "outcome": "ok", "start_s": 9.0, "generate_s": 2.0}]
    )
    guess = plan.estimate(made, runs)
    assert guess.engines == 7  # of eight that the eight cells which can run would need
    assert guess.seconds == 7 * 9.0 + 7 * 2.0


def test_thousands_of_scripted_cells_are_planned_at_once():
    axes = {"workload.seed": list(range(1000)), "scheduling": ["sync", "async"]}
    fixed = {
        "drafter": {"method": "scripted", "k": 4},
        "engine": {"kind": "scripted"},
        "workload": {"scenario": "row-a"},
    }
    made = definition.parse({"axes": axes, "fixed": fixed})
    begin = time.process_time()
    found = plan.plan(made)
    assert len({one.cell.cell_id for one in found.cells}) == 2000
    assert plan.estimate(found).engines == 2
    assert time.process_time() - begin < 5


# the folder


def test_a_sweep_ends_with_a_row_for_every_cell_and_leaves_no_temporary_file(folder):
    results = swept(folder)
    assert len(results.runs) == 10
    assert results.runs["outcome"].value_counts().to_dict() == {"ok": 8, "unsupported": 2}
    assert set(results.steps["run_id"]) == set(results.runs.loc[results.runs["outcome"] == "ok", "run_id"])
    top = {path.name for path in folder.iterdir()}
    assert top == {"cells", runner.CELLS, *(f"{name}.parquet" for name in ledger.TABLES)}
    assert list(folder.rglob("*.tmp")) == []
    cells = runner.read_cells(folder)
    assert runner.axes_of(cells) == ["drafter", "k", "scheduling"]
    assert list(cells["run_id"]) == list(results.runs["run_id"])


def test_only_what_is_missing_runs_also_when_the_sweep_is_extended_and_the_clock_jumps(folder):
    swept(folder)
    before = stamps(folder)
    for number, path in enumerate(folder.glob("cells/*/done.json")):
        os.utime(path, (0, 0) if number % 2 else (4e9, 4e9))
    moved = stamps(folder)
    swept(folder)
    assert stamps(folder) == moved
    results = swept(folder, axes={**SWEEP["axes"], "k": [2, 4, 6]})
    assert len(results.runs) == 14
    after = stamps(folder)
    assert {name: after[name] for name in moved} == moved
    assert len(after) == len(before) + 4


def test_a_finished_cell_whose_definition_changed_is_refused_with_both_versions(folder):
    swept(folder)
    before = stamps(folder)
    other = {"workload": {**SWEEP["fixed"]["workload"], "max_tokens": 16}, "grammar": {"kind": "json_object"}}
    with pytest.raises(SpecError) as caught:
        swept(folder, fixed=other)
    assert "workload.max_tokens was 8 and is 16 (8 such cells)" in str(caught.value)
    assert "drafter none, k 0, scheduling sync" in str(caught.value)
    with pytest.raises(SpecError, match="is no longer asked for"):
        swept(folder, axes={**SWEEP["axes"], "scheduling": ["async"]})
    assert stamps(folder) == before
    results = runner.run(sweep(fixed=other), folder, executor=made_cells.executor, changed="drop")
    assert len(results.runs) == 10
    assert set(before) < set(stamps(folder))


def test_unsupported_cells_may_be_excluded_later(folder):
    swept(folder)
    assert len(swept(folder, exclude=[{"drafter.method": "ngram", "scheduling": "async"}]).runs) == 8


def test_killed_cells_and_those_that_met_a_full_disk_run_again_and_others_if_asked(folder):
    whole = swept(folder)
    made = plan.plan(sweep())
    good = [one.cell for one in made.cells if one.reason is None]
    endings = [
        ("killed", "the engine's process was ended by SIGKILL"),
        ("engine_failed", "OSError: [Errno 28] No space left on device"),
        ("engine_failed", "AssertionError"),
        ("killed", "more than 1 MiB of memory in use"),
    ]
    for cell, (kind, reason) in zip(good, endings, strict=False):
        run.finish(cell, folder / "cells" / cell.cell_id, run.requested(cell) | {"outcome": kind, "reason": reason})
    results = swept(folder)
    assert "AssertionError" in list(results.failed["reason"])
    assert sorted(results.failed["outcome"]) == ["engine_failed", "killed", "unsupported", "unsupported"]
    again = runner.run(sweep(), folder, executor=made_cells.executor, again={"engine_failed", "killed"})
    pd.testing.assert_frame_equal(again.runs, whole.runs)
    pd.testing.assert_frame_equal(again.steps, whole.steps)


def test_what_an_engine_wrote_before_it_was_killed_is_not_collected(folder):
    whole = swept(folder)
    cell = next(one.cell for one in plan.plan(sweep()).cells if one.reason is None)
    (folder / "cells" / cell.cell_id / "done.json").unlink()
    found = runner.collect(folder)
    assert found.runs.set_index("run_id")["reason"][cell.cell_id] == runner.NOT_RUN
    assert cell.cell_id not in set(found.steps["run_id"])
    assert set(found.steps["run_id"]) == set(whole.steps["run_id"]) - {cell.cell_id}


def test_a_full_disk_is_told_for_an_engine_that_could_not(tmp_path, monkeypatch):
    (tmp_path / run.LOG).write_text("loading\n", encoding="utf-8")
    ending = run.Ending(1)
    assert run.ended_early(tmp_path, ending)["reason"] == "the engine's process ended with code 1: loading"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 4096))
    reason = run.ended_early(tmp_path, ending)["reason"]
    assert any(text in reason for text in runner.FULL), reason


def test_a_second_runner_is_refused(folder):
    with runner.locked(folder):
        assert f"process {os.getpid()} on" in runner._holder(folder)
        with pytest.raises(run.OutputFolderError, match=f"has a runner already: process {os.getpid()} on"):
            swept(folder)
    assert len(swept(folder).runs) == 10
    assert not (folder / runner.LOCK).exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_runner_that_is_killed_again_and_again_gives_the_table_of_one_that_was_not(folder, tmp_path, how):
    whole = swept(tmp_path / "whole")
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP), encoding="utf-8")
    command = [sys.executable, made_cells.__file__, str(tmp_path / "sweep.json"), str(folder)]
    chance = random.Random(int(how))
    for number in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wanted = min(number * 3 + chance.randint(1, 3), 9)
        while len(stamps(folder)) < wanted and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(how)
        assert process.wait() in (-how, 128 + how)
    assert len(stamps(folder)) < 10
    partly = runner.collect(folder)
    assert len(partly.runs) == 10
    assert partly.failed["reason"].eq(runner.NOT_RUN).any()
    assert list(partly.runs["run_id"]) == list(whole.runs["run_id"])
    assert "not run yet" in runner.status(folder)
    assert runner.status(folder).endswith("running: no")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count(": ok") + done.stdout.count(": unsupported") == 10 - len(partly.runs) + len(
        partly.runs[partly.runs["reason"].eq(runner.NOT_RUN).fillna(False)]
    )
    found = lab.read(folder)
    for name in ledger.TABLES:
        pd.testing.assert_frame_equal(found.tables[name], whole.tables[name])
    assert [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".lock"))] == []


def test_a_disk_that_takes_no_more_is_said_and_what_is_finished_is_kept(folder, tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP), encoding="utf-8")
    command = [sys.executable, made_cells.__file__, str(tmp_path / "sweep.json"), str(folder)]
    full = subprocess.run([*command, "20000"], capture_output=True, text=True, check=False)
    assert full.returncode == 2, full.stderr
    assert f"results cannot be written to {folder}: File too large; what is finished there is kept" in full.stdout
    subprocess.run(command, capture_output=True, check=True)
    assert len(lab.read(folder).runs) == 10


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(run.OutputFolderError, match=r"cannot be written to .*file/out: Not a directory"):
        swept(tmp_path / "file" / "out")


def test_a_read_only_folder_is_refused(tmp_path):
    """In a child that is not root: root may write anywhere."""
    closed, said = tmp_path / "closed", tmp_path / "said"
    closed.mkdir(mode=0o555)
    said.touch()
    said.chmod(0o666)
    for one in (tmp_path, *list(tmp_path.parents)[:-2]):
        one.chmod(0o755)
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            swept(closed / "out")
        except run.OutputFolderError as error:
            said.write_text(str(error), encoding="utf-8")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert said.read_text(encoding="utf-8").startswith(f"results cannot be written to {closed / 'out'}: Permission")


def test_a_lost_worker_costs_the_cell_that_ran(tmp_path):
    made = plan.plan(sweep())
    (group, *_) = executors.grouped([(one.cell, tmp_path / one.cell.cell_id) for one in made.cells if not one.reason])
    _, path = group[0]
    path.mkdir()
    (path / run.LOG).touch()
    assert executors.left_of(group, "the worker that ran it was ended by SIGKILL") == group[1:]
    row = ledger.read_table(path, "runs").iloc[0]
    assert (row["outcome"], row["reason"]) == ("killed", "the worker that ran it was ended by SIGKILL")
    assert executors.left_of(group, None) == group[1:]


def test_a_log_has_one_plain_line_a_finished_cell(tmp_path, capsys):
    results = swept(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{row.run_id}: {row.outcome}" for row in results.runs.itertuples()]
    swept(tmp_path)
    assert capsys.readouterr().out == ""


def test_the_table_of_a_notebook_fills():
    made = plan.plan(sweep())
    ids = [one.cell.cell_id for one in made.cells]
    shown = showing.Filling(made, {ids[0]: "ok"})
    shown.through(ids[2], "killed")
    table = shown.table()
    assert list(table.index) == ["none", "ngram", "draft_model"]
    assert table.loc["none"].to_dict() == {"killed": 0, "ok": 1, "to run": 1}
    assert table.loc["ngram", "killed"] == 1


def test_the_python_object_is_run_by_the_lab_with_its_plain_data(tmp_path):
    results = lab.sweep(SWEEP, tmp_path, made_cells.executor)
    pd.testing.assert_frame_equal(results.runs, lab.sweep(sweep(), tmp_path, made_cells.executor).runs)


# comparison

DRAFTERS = {"drafter": [{"method": "ngram"}, {"method": "draft_model", "model": "target"}], "k": [2, 4]}


def test_two_sides_are_compared_prompt_by_prompt(folder):
    swept(folder, axes=DRAFTERS)
    runner.collect(folder)
    sides = [compare.side(f"drafter={name}", folder) for name in ("ngram", "draft_model")]
    table = compare.compare(*sides, resamples=200)
    assert list(table.columns[:3]) == ["k", "pairs", "left_out"]
    assert list(dict.fromkeys(table["k"])) == ["2", "4", compare.ALL]
    row = table[(table["k"] == "4") & (table["name"] == "acceptance_rate")].iloc[0]
    steps, runs = lab.read(folder).steps, lab.read(folder).runs
    for side, method in (("first", "ngram"), ("second", "draft_model")):
        run_id = runs.loc[(runs["drafter"] == method) & (runs["k"] == 4), "run_id"].item()
        own = steps[steps["run_id"] == run_id]
        assert row[side] == pytest.approx(own["accepted"].sum() / own["drafted"].sum())
    assert row["value"] == pytest.approx(row["second"] - row["first"])
    assert row["n"] == 4
    assert row["n_of"] == "prompts"
    text = compare.to_text(table, "ngram", "draft_model")
    assert "all together: acceptance_rate" in text
    again = compare.compare(*sides, resamples=200)
    pd.testing.assert_frame_equal(table, again)


def test_a_side_against_itself_shows_no_difference(folder):
    swept(folder, axes=DRAFTERS)
    one = compare.side(str(folder))
    table = compare.compare(one, one)
    acceptance = table[table["name"] == "acceptance_rate"]
    assert (acceptance["value"] == 0).all()
    assert acceptance["words"].str.startswith("no difference: all 4 prompts agree exactly").all()


@pytest.mark.parametrize(
    ("value", "low", "high", "reason", "said"),
    [
        (0.1, -0.1, 0.3, "", "no difference shown: +0.1 lies within what chance gives (-0.1 to +0.3 over 9 prompts)"),
        (-0.25, -0.5, -0.1, "", "the second is lower by 0.25 (-0.5 to -0.1 over 9 prompts)"),
        (None, None, None, "the denominator is 0", "cannot be compared: the denominator is 0"),
        (0.5, None, None, "it is one", "the second is higher by 0.5, but how sure that is cannot be said: it is one"),
        (0.0, None, None, "all agree", "no difference: all agree"),
    ],
)
def test_words_say_what_the_interval_says(value, low, high, reason, said):
    assert compare.words(Estimate("acceptance_rate", value, low, high, 9, "prompts", "", reason=reason)) == said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("speed=1", "neither a folder nor AXIS=LABEL with an axis of drafter, k, scheduling"),
        ("k=9", "axis k has no value '9', only 0, 2, 4"),
        ("k=2,drafter=none", "has no cell with k=2,drafter=none"),
    ],
)
def test_a_side_that_is_not_there_is_said(folder, text, sentence):
    swept(folder)
    with pytest.raises(SpecError, match=sentence):
        compare.side(text, folder)


def test_cells_that_cannot_be_told_apart_are_not_paired(folder, tmp_path):
    swept(folder)
    swept(tmp_path / "other", axes=DRAFTERS)
    sides = compare.side(str(folder)), compare.side(str(tmp_path / "other"))
    with pytest.raises(SpecError, match="has several cells with drafter none, k 0, repeat 0"):
        compare.compare(*sides)


# the notebook's tables and figure

GRID = {
    "drafter": [
        {"method": "ngram"},
        {"method": "draft_model", "model": "target"},
        {"method": "ngram", "prompt_lookup_min": 2},
    ],
    "k": [2, 4],
    "grammar": [{"kind": "none"}, {"kind": "json_object"}],
    "scheduling": ["sync", "async"],
}


def test_a_sweep_is_shown_with_intervals_by_every_axis(folder):
    results = swept(folder, axes=GRID, fixed={"workload": SWEEP["fixed"]["workload"]})
    acceptance = sweep_results.acceptance(results)
    assert len(acceptance) == (2 * 2 * 2 + 2 * 2 * 2) * 3
    assert set(acceptance["drafter"]) == {"ngram", "draft_model", "ngram prompt_lookup_min=2"}
    assert set(acceptance["n_of"]) == {"prompts"}
    verified = sweep_results.verified(results).set_index(list(sweep_results.BY))
    row = acceptance.set_index([*sweep_results.BY, "name"]).loc[
        "draft_model", 4, "json_object", "async", "acceptance_rate"
    ]
    sums = verified.loc["draft_model", 4, "json_object", "async"]
    assert row["value"] == pytest.approx(sums["accepted"] / sums["drafted"])
    assert row["low"] < row["value"] < row["high"]
    assert (verified.xs("none", level="grammar")["grammar_invalid"] == 0).all()
    failures = sweep_results.failures(results)
    assert set(failures["phase"]) == {"draft-probe", "commit"}
    figure = sweep_results.figure(results, acceptance)
    lines = [len(axes.get_legend_handles_labels()[1]) for axes in figure.axes]
    assert lines == [4, 4, 4, 4]
    assert [axes.get_title() for axes in figure.axes[:2]] == ["no grammar", "json_object"]
    made = {path.name for path in folder.iterdir()}
    assert {"acceptance.csv", "verified.csv", "fsm_rates.csv", "sweep.svg", "sweep.png"} <= made


# the command

CLI = CliRunner()


def test_the_command_plans_shows_collects_and_compares(folder, tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({**SWEEP, "axes": {**SWEEP["axes"], **DRAFTERS}}), encoding="utf-8")
    asked = CLI.invoke(cli.app, ["sweep", "plan", str(file)])
    assert "made: 8 cells" in asked.output
    runner.run(definition.load(file), folder, executor=made_cells.executor)
    asked = CLI.invoke(cli.app, ["sweep", "plan", str(file), "--out", str(folder)])
    assert "engine starts: 0; about 0 s (from 6 finished cells" in asked.output
    shutil.rmtree(next(folder.glob("cells/*draft-model*")))
    asked = CLI.invoke(cli.app, ["sweep", "status", str(folder)])
    assert "5 ok" in asked.output
    assert "1 not run yet" in asked.output
    asked = CLI.invoke(cli.app, ["sweep", "collect", str(folder)])
    assert asked.exit_code == 1
    assert "1 of 8 cells failed" in asked.output
    runner.run(definition.load(file), folder, executor=made_cells.executor)
    sides = ["scheduling=sync,drafter=draft_model", "scheduling=async,drafter=draft_model"]
    asked = CLI.invoke(cli.app, ["sweep", "compare", *sides, "--in", str(folder), "--csv", str(tmp_path / "c.csv")])
    assert asked.exit_code == 0, asked.output
    assert "all together: mean_acceptance_length" in asked.output
    assert len(pd.read_csv(tmp_path / "c.csv")) == 3 * 4
    assert CLI.invoke(cli.app, ["sweep", "run", str(file), "--out", str(folder)]).exit_code == 0


# workers of this machine, with cells that need no engine

REFUSED = {"drafter": [{"method": "ngram"}, {"method": "suffix"}], "k": [2, 4], "scheduling": ["async"]}


def test_workers_give_the_rows_that_this_process_gives(folder, tmp_path):
    tables = [
        runner.run(sweep(axes=REFUSED), path, executor=executors.Local(number))
        for number, path in ((1, tmp_path / "one"), (2, folder))
    ]
    assert list(tables[0].runs["outcome"]) == ["unsupported"] * 4
    pd.testing.assert_frame_equal(tables[0].runs, tables[1].runs)


def test_a_worker_that_cannot_write_says_so(tmp_path):
    first = plan.plan(sweep(axes=REFUSED)).cells[0].cell.cell_id
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / first).symlink_to(tmp_path / "nowhere" / "else")
    with pytest.raises(run.OutputFolderError, match=f"results cannot be written to .*{first}: "):
        runner.run(sweep(axes=REFUSED), tmp_path, executor=executors.Local(2))


def test_what_ray_kept_for_a_runner_that_was_killed_goes_with_the_next_sweep(folder, tmp_path, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, theirs = (tmp_path / f"{cluster.SCRATCH}{pid}-abc" for pid in (os.getpid(), gone.pid))
    mine.mkdir(), theirs.mkdir()
    swept(folder)
    assert mine.is_dir()
    assert not theirs.exists()
