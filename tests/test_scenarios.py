"""Scenario files and the command that runs them."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from specgram_lab import scenario_runs, scenarios
from specgram_lab.cli import app
from specgram_lab.paths import DATA
from specgram_lab.scenario_runs import Result
from specgram_lab.scenarios import Counts
from specgram_lab.spec import SpecError

ROWS = {f"row-{letter}" for letter in "abceghjk"}
OPEN = {
    "token-budget", "length-limit", "grammar-end", "eos-inside", "drafter-skipped", "preempted", "resumed-in-parts",
    "mixed-step", "reasoning-end",
}  # fmt: skip


def write(folder, name="row-g", **changes):
    """A copy of a scenario file with some of its keys changed."""
    content = yaml.safe_load((DATA / "scenarios" / f"{name}.yaml").read_text(encoding="utf-8")) | changes
    path = folder / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in content.items() if value is not None}), encoding="utf-8"
    )
    return path


def test_all_rows_and_all_open_questions_have_a_file():
    assert set(scenarios.scenario_names()) >= ROWS | OPEN
    assert set(scenario_runs.local_names()) == ROWS


@pytest.mark.parametrize("name", scenarios.scenario_names())
def test_each_file_says_what_is_expected_and_why(name):
    scenario = scenarios.load_scenario(name)
    assert set(scenario.expected) == {"sync", "async"}
    assert len(scenario.why) > 80
    for counts in scenario.expected.values():
        assert counts.drafted >= counts.verified >= counts.accepted
        assert counts.scheduled >= counts.verified
    assert (scenario.expected["sync"].spec_steps, scenario.expected["sync"].drafted) == (
        scenario.expected["async"].spec_steps, scenario.expected["async"].drafted,
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(OPEN - {"drafter-skipped", "mixed-step"} | {"row-h", "row-j", "row-k"}))
def test_where_the_proposal_leaves_it_open_the_file_says_so(name):
    assert len(scenarios.load_scenario(name).undecided) > 40


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requests": [{"says": "a", "drafts": [["="] * 5]}]}, "request 0 drafts 5 tokens in a step, k is 4"),
        ({"requests": [{"says": "a"}] * 2}, "a local scenario has one request, this one has 2"),
        ({"local": False, "requests": [{"says": "a"}] * 5}, "5 requests do not fit into concurrency 4"),
        ({"setting": {"kv_block": 3}}, "setting.kv_block is not a known key"),
        ({"expected": {"sink": {}}}, "sink"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_by_name(tmp_path, changes, words):
    path = write(tmp_path, **changes)
    with pytest.raises(SpecError, match=r"row-g\.yaml: ") as caught:
        scenarios.load_scenario(str(path))
    assert words in str(caught.value)


def test_a_file_that_is_not_yaml_is_refused_with_its_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("about: a: b\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"broken\.yaml is not YAML in line 1"):
        scenarios.load_scenario(str(path))


def test_a_scenario_for_the_scripted_engine_alone_is_not_started_on_a_real_one(tmp_path):
    with pytest.raises(SpecError, match="scenario preempted runs on the scripted engine only"):
        scenario_runs.run(["preempted"], ["sync"], "local", tmp_path)


def test_a_scheduling_without_an_expectation_is_not_started(tmp_path):
    path = write(tmp_path, expected={"sync": scenarios.load_scenario("row-g").expected["sync"].model_dump()})
    with pytest.raises(SpecError, match="expects nothing of async scheduling"):
        scenario_runs.run([str(path)], ["sync", "async"], "scripted", tmp_path)


def test_the_table_shows_what_differs_and_what_did_not_run():
    counts = Counts(**dict.fromkeys(Counts.model_fields, 1))
    rfc = {"spec_steps": 1, "drafted": 1, "verified": 1, "accepted": 1}
    good = Result("one", "sync", "ok", "", counts, rfc, (), ())
    wrong = Result("two", "async", "ok", "", counts, rfc, ("drafted >= verified",), ("verified is 1, expected 2",))
    dead = Result("three", "sync", "engine_failed", "it fell", None, None, (), ())
    assert [result.ok for result in (good, wrong, dead)] == [True, False, False]
    lines = scenario_runs.to_text([good, wrong, dead]).splitlines()
    assert "NOT AS EXPECTED" in lines[2]
    assert "drafted >= verified" in lines[2]
    assert lines[3] == "    verified is 1, expected 2"
    assert lines[5] == "    engine_failed: it fell"
    assert lines[-1] == "1 of 3 as expected"


@pytest.mark.engine
def test_one_number_changed_in_a_file_is_exit_code_1_and_the_row(tmp_path, target_folder):
    expected = {side: counts.model_dump() for side, counts in scenarios.load_scenario("row-g").expected.items()}
    expected["async"]["verified"] = 4
    path = write(tmp_path, expected=expected)
    arguments = ["scenarios", "run", str(path), "row-b", "--scheduling", "async", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 1, done.output
    row = next(line for line in done.output.splitlines() if line.startswith("row-g"))
    assert row.endswith("NOT AS EXPECTED")
    assert "verified is 3, expected 4" in done.output
    assert "1 of 2 as expected" in done.output

    again = CliRunner().invoke(app, [*arguments[:2], "row-b", *arguments[4:], "--json"], catch_exceptions=False)
    assert again.exit_code == 0, again.output
    (found,) = json.loads(again.output)
    assert (found["scenario"], found["ok"], found["rfc"]["verified"]) == ("row-b", True, 3)
