"""How a cell can end: by a signal at any moment, by its limits, refused, and with a folder that cannot be used."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from ledgers import simulate

from specgram_lab import handover, ledger, scenarios
from specgram_lab import run as runs
from specgram_lab.handover import BEGUN, write_json
from specgram_lab.run import reconciled
from specgram_lab.spec import Limits, parse_cell

BARE = parse_cell({"workload": {"prompts": "records"}})
ASYNC = {"engine": {"scheduling": "async"}}


def processes_of(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.engine
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_cell_killed_at_a_random_moment_leaves_a_row_and_no_process(tmp_path, target_folder, seed):
    delay = random.Random(seed).uniform(0.2, 6.0)
    killed = []

    def kill() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = processes_of(tmp_path)
            if found:
                time.sleep(delay)
                found[0].send_signal(signal.SIGKILL)
                killed.append(found[0].pid)
                return
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    row = runs.run_cell(scenarios.cell("row-a", "sync"), tmp_path)
    killer.join()
    assert killed
    assert row["outcome"] == "killed"
    assert "SIGKILL" in row["reason"]
    assert row["partial"]
    assert processes_of(tmp_path) == []
    assert (tmp_path / runs.DONE).is_file()


@pytest.mark.engine
def test_limits_end_the_cell(tmp_path, target_folder):
    cell = scenarios.cell("row-a", "sync")
    late = runs.run_cell(cell.model_copy(update={"limits": Limits(timeout_s=0.5)}), tmp_path / "late")
    assert late["outcome"] == "timeout"
    assert "0.5 s" in late["reason"]
    large = runs.run_cell(cell.model_copy(update={"limits": Limits(memory_mib=256)}), tmp_path / "large")
    assert large["outcome"] == "killed"
    assert "256 MiB" in large["reason"]
    assert processes_of(tmp_path) == []


@pytest.mark.engine
def test_the_engine_dies_with_the_process_that_started_it(tmp_path, target_folder):
    (tmp_path / "cell.yaml").write_text(
        "drafter: {method: scripted, k: 4}\nworkload: {scenario: row-a}\nengine: {kind: scripted}\n", encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "specgram_lab.cli",
        "run",
        str(tmp_path / "cell.yaml"),
        "--out",
        str(tmp_path / "out"),
    ]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not (child := [p for p in processes_of(tmp_path / "out") if "specgram_lab.cell" in p.cmdline()]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(child, timeout=10)
    assert not alive
    assert not (tmp_path / "out" / runs.DONE).is_file()


@pytest.mark.engine
def test_a_lone_surrogate_is_kept_escaped(tmp_path, target_folder):
    row = runs.run_cell(parse_cell(SURROGATE), tmp_path)
    assert row["outcome"] == "ok", row["reason"]
    from specgram_lab import ledger

    request = ledger.read_table(tmp_path, "requests").iloc[0]
    assert request["text"] == '{"s":"\\ud83d"}'
    assert request["output_class"] == "valid"
    assert len(request["token_ids"]) > 3


@pytest.mark.engine
def test_characters_of_several_tokens_are_counted_as_tokens_and_stored_as_text(tmp_path, target_folder):
    scenario = str(Path(__file__).with_name("multibyte.yaml"))
    row = runs.run_cell(parse_cell({**SURROGATE, "workload": {"scenario": scenario}}), tmp_path)
    assert row["outcome"] == "ok", row["reason"]
    from specgram_lab import ledger

    request, steps = ledger.read_table(tmp_path, "requests").iloc[0], ledger.read_table(tmp_path, "steps")
    assert (request["text"], request["output_class"]) == ('"在线"', "valid")
    assert request["output_tokens"] > len(request["text"]) + 1
    assert steps["drafted"].sum() == steps["accepted"].sum() == 3, "the first draft ends inside a character"
    assert steps["committed"].sum() == request["output_tokens"]


SURROGATE = {
    "drafter": {"method": "scripted", "k": 4},
    "workload": {"scenario": str(Path(__file__).with_name("surrogate.yaml"))},
    "engine": {"kind": "scripted"},
}


def test_a_finished_cell_is_not_run_again_and_another_is_refused(tmp_path):
    refused = parse_cell(
        {"workload": {"inline": ["x"]}, "drafter": {"method": "ngram", "k": 1}, "engine": {"scheduling": "async"}}
    )
    first = runs.run_cell(refused, tmp_path)
    assert first["outcome"] == "unsupported"
    stamp = (tmp_path / runs.DONE).stat().st_mtime_ns
    again = runs.run_cell(refused, tmp_path)
    assert again["reason"] == first["reason"]
    assert (tmp_path / runs.DONE).stat().st_mtime_ns == stamp
    other = parse_cell(
        {"workload": {"inline": ["y"]}, "drafter": {"method": "ngram", "k": 1}, "engine": {"scheduling": "async"}}
    )
    with pytest.raises(runs.OutputFolderError, match="holds the finished cell"):
        runs.run_cell(other, tmp_path)


def test_a_metrics_folder_of_the_user_is_not_handed_on_and_this_is_said():
    (said,) = runs.unset({"PROMETHEUS_MULTIPROC_DIR": "/tmp/old"})
    assert "/tmp/old is not handed on" in said
    assert runs.unset({}) == []
    handed = runs.options.environment(scenarios.cell("row-a", "sync"), "cpu", Path("reports"))
    assert handed["PROMETHEUS_MULTIPROC_DIR"] == ""


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    cell = scenarios.cell("row-a", "sync")
    begin = time.monotonic()
    with pytest.raises(runs.OutputFolderError, match="file"):
        runs.run_cell(cell, tmp_path / "file" / "out")
    assert time.monotonic() - begin < 1.0


def test_a_read_only_folder_is_refused(tmp_path):
    """In a child that is not root: root may write anywhere."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    said = tmp_path / "said"
    said.touch()
    said.chmod(0o666)
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            runs.prepare(closed / "out")
        except runs.OutputFolderError as error:
            said.write_text(str(error), encoding="utf-8")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert said.read_text(encoding="utf-8") == f"results cannot be written to {closed / 'out'}: Permission denied"


def written(folder, **run):
    """A folder with the tables of a simulated run, and its row."""
    made = simulate("run", **run)
    for name in ("requests", "steps"):
        ledger.write_table(folder, name, made[name])
    return made["runs"].iloc[0].to_dict()


def test_a_run_whose_engine_reported_what_its_steps_give_stays_ok(tmp_path):
    assert reconciled(tmp_path, written(tmp_path)) == {}


@pytest.mark.parametrize("outcome", ["ok", "killed"])
def test_a_difference_to_the_engines_own_numbers_makes_the_run_fail_and_shows_both(tmp_path, outcome):
    row = written(tmp_path, engine_num_drafts=1, outcome=outcome)
    reason = "the engine reported other numbers than its steps: run run: engine_num_drafts is 1, its steps give 136"
    assert reconciled(tmp_path, row) == ({"outcome": "ledger_failed", "reason": reason} if outcome == "ok" else {})


def test_many_differences_are_cut_and_counted(tmp_path):
    row = written(tmp_path)
    requests = ledger.read_table(tmp_path, "requests")
    ledger.write_table(tmp_path, "requests", requests.assign(reported_drafted=1))
    reason = reconciled(tmp_path, row)["reason"]
    assert "request 0 of run run: reported_drafted is 1, its steps give" in reason
    assert reason.endswith("; and 5 more")


def test_an_engine_that_counted_where_nothing_was_recorded_makes_the_run_fail(tmp_path):
    row = written(tmp_path, engine_draft_tokens=40, config_requested=BARE.canonical())
    ledger.write_table(tmp_path, "steps", ledger.frame("steps", []))
    found = reconciled(tmp_path, row)
    assert found["outcome"] == "ledger_failed"
    assert found["reason"].endswith("engine_draft_tokens is 40, no step was recorded")


def test_a_finished_cell_with_other_prompts_is_refused(tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"id": "one", "text": "Hello."}', encoding="utf-8")
    cell = parse_cell({"workload": {"prompts": str(prompts)}, "drafter": {"method": "ngram", "k": 2}, **ASYNC})
    assert runs.run_cell(cell, tmp_path / "out")["outcome"] == "unsupported"
    runs.run_cell(cell, tmp_path / "out")
    prompts.write_text('{"id": "one", "text": "Goodbye."}', encoding="utf-8")
    with pytest.raises(runs.OutputFolderError, match=r"holds the finished cell .* with other prompts"):
        runs.run_cell(cell, tmp_path / "out")


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"target": {"model": "nothing-here"}}, "target 'nothing-here' is neither a folder with a config.json nor"),
        ({"workload": {"prompts": "nothing-here"}}, "no prompt 'nothing-here'"),
    ],
)
def test_a_cell_whose_model_or_prompts_cannot_be_had_is_a_row_and_the_others_run(tmp_path, part, reason):
    bad = parse_cell({"workload": {"inline": ["x"]}, **part})
    other = parse_cell({"workload": {"inline": ["x"]}, "drafter": {"method": "ngram", "k": 2}, **ASYNC})
    rows = runs.run_cells([(bad, tmp_path / "bad"), (other, tmp_path / "other")])
    assert [row["outcome"] for row in rows] == ["unsupported", "unsupported"]
    assert reason in rows[0]["reason"]
    assert "async scheduling with ngram" in rows[1]["reason"]


def test_a_killed_cell_keeps_what_its_engine_said_of_itself(tmp_path):
    said = {"effective": {"runner": "v2", "scheduling": "async"}, "budget_effective": "off", "provenance": {"x": 1}}
    (tmp_path / BEGUN).write_text(json.dumps(said), encoding="utf-8")
    row = runs.outcome(tmp_path, runs.Ending(-signal.SIGKILL))
    assert (row["outcome"], row["runner_effective"], row["scheduling_effective"]) == ("killed", "v2", "async")
    assert json.loads(row["provenance"]) == {"x": 1}


def test_a_cell_finished_before_inputs_were_noted_is_still_finished(tmp_path):
    write_json(tmp_path / runs.DONE, {"run_id": BARE.cell_id, "outcome": "ok"})
    assert runs.is_done(BARE, tmp_path)


def test_a_module_is_asked_in_a_process_of_its_own():
    assert handover.ask_module("json.tool", {"a": [1, 2]}) == {"a": [1, 2]}
    with pytest.raises(handover.ChildError, match=r"No module named specgram_lab\.nothing"):
        handover.ask_module("specgram_lab.nothing", {})
