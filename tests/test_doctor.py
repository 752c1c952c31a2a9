"""The doctor on a server's configuration: how it is read, what follows per release, what is said, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner
from vllm_sources import AV, BLIND_MAPPING, SPECULATIVE, STRIDE_WORKER, WORKER, backend, new, old, wheel, write

from specgram_lab import doctor
from specgram_lab.cli import app
from specgram_lab.fixes import table
from specgram_lab.fixes.catalog import FIXES, examine
from specgram_lab.fixes.command import of_command, of_options
from specgram_lab.fixes.configuration import Configuration, ConfigurationError
from specgram_lab.fixes.consequences import following, possible
from specgram_lab.fixes.finding import Finding
from specgram_lab.fixes.report import WIDTH, of_build, to_text
from specgram_lab.fixes.rules import KINDS, RULES
from specgram_lab.fixes.setting import Setting
from specgram_lab.fixes.source import Source, SourceError, open_source

MTP = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
R0 = (
    "vllm serve Qwen/Qwen3.8-27B-FP8 --speculative-config "
    """'{"method":"dflash","model":"z-lab/draft","num_speculative_tokens":7}' --kv-cache-dtype fp8 """
    "--enable-prefix-caching --async-scheduling --reasoning-parser qwen3 -tp 2"
)
R1 = (
    f"vllm serve Qwen/Qwen3.5-35B-A3B {MTP} --enable-auto-tool-choice --tool-call-parser qwen3_coder"
    " --reasoning-parser qwen3"
)
R2 = "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve Qwen/Qwen3.5-35B-A3B --pipeline-parallel-size 3"
R4 = """vllm serve m --speculative-config '{"method":"dspark","model":"d","enable_adaptive_verification":true}'"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (R0, {"drafter": "dflash", "k": 7, "reasoning_parser": "qwen3", "async_scheduling": True}),
        (R1, {"drafter": "mtp", "k": 3, "reasoning_parser": "qwen3", "tool_parser": "qwen3_coder"}),
        (R2, {"runner": "v1", "pipeline_parallel": 3}),
        (R4, {"drafter": "dspark", "adaptive": True}),
        ("vllm serve m --pipeline_parallel_size=2 --no-async-scheduling",
         {"pipeline_parallel": 2, "async_scheduling": False}),
        ("vllm serve m -pp 2 -O3 -cc.mode 3 --seed=-1", {"pipeline_parallel": 2}),
        ("vllm serve m -sc '{\"method\": \"ngram\"}'", {"drafter": "ngram"}),
        ("vllm serve m --speculative-config.method qwen3_next_mtp --speculative-config.num_speculative_tokens 2",
         {"drafter": "mtp", "k": 2}),
        ("vllm serve m --spec-method eagle3 --spec-model e --spec-tokens 4", {"drafter": "eagle3", "k": 4}),
        ("vllm serve m --structured-outputs '{\"backend\":\"xgrammar\",\"disable_any_whitespace\":true}'",
         {"backend": "xgrammar", "compact": True}),
        ("vllm serve m --structured-outputs-config.reasoning_parser qwen3", {"reasoning_parser": "qwen3"}),
        ("vllm serve m --per-request-spec-decode-metrics summary", {"per_request_metrics": True}),
        ("vllm serve m --per-request-spec-decode-metrics none", {}),
        ("vllm serve m --enable-batch-sharded-sampling", {"batch_sharded": True}),
        ("vllm serve m --enable-lora --enforce-eager", {"lora": True, "graphs": "none"}),
        ("vllm serve m -cc.cudagraph_mode piecewise", {"graphs": "piecewise"}),
        ("vllm serve m --compilation-config '{\"cudagraph_mode\": \"FULL_DECODE_ONLY\"}'", {"graphs": "full"}),
        ("vllm serve m --compilation-config 3 --no-enable-lora", {}),
        ("vllm serve m -cc $CC -O2", {}),
        ("vllm serve m -O0", {"graphs": "none"}),
        ("vllm serve m -O 1 --reasoning-parser r", {"graphs": "piecewise", "reasoning_parser": "r"}),
        ("vllm serve m --optimization-level=0 -cc.cudagraph_mode FULL", {"graphs": "full"}),
        ("python -m vllm.entrypoints.openai.api_server --model m --reasoning-parser r", {"reasoning_parser": "r"}),
        ("docker run --gpus all -e VLLM_USE_V2_MODEL_RUNNER=1 vllm/vllm-openai:v0.30.0 --model m -pp 2",
         {"runner": "v2", "pipeline_parallel": 2}),
        ("docker run -e VLLM_USE_V2_MODEL_RUNNER=0 image bash -c 'vllm serve m -pp 2 > log'",
         {"runner": "v1", "pipeline_parallel": 2}),
        ("#!/bin/sh\nexport VLLM_USE_V2_MODEL_RUNNER=0  # V1\nvllm serve m \\\n -pp 4 \\\r\n --reasoning-parser r\n",
         {"runner": "v1", "pipeline_parallel": 4, "reasoning_parser": "r"}),
        ("vllm serve m --reasoning-parser r 2>&1 | tee --pipeline-parallel-size 9", {"reasoning_parser": "r"}),
        ("\x1b[32m$ vllm serve m\x1b[0m \x1b[1m--reasoning-parser\x1b[0m r", {"reasoning_parser": "r"}),
        ("--reasoning-parser r", {"reasoning_parser": "r"}),
        ("vllm serve m", {}),
    ],
)  # fmt: skip
def test_a_command_is_read(text, expected):
    found = of_command(text)
    assert found == Configuration(**expected, notes=found.notes)


@pytest.mark.parametrize(
    ("flags", "fix", "releases"),
    [
        ("--enforce-eager", "adaptive-eager", "0.28.0 0.29.0 0.30.0 0.33.0"),
        ("-cc.cudagraph_mode PIECEWISE", "adaptive-piecewise", "0.30.0 0.33.0"),
        ("-cc.cudagraph_mode FULL_DECODE_ONLY", "", ""),
        ("-pp 2", "adaptive-pipeline", "0.28.0 0.29.0 0.30.0 0.33.0"),
        ("--enable-lora", "adaptive-lora", "0.28.0 0.29.0 0.30.0 0.33.0"),
        ("-sc.method eagle3 -sc.use_local_argmax_reduction true", "adaptive-local-argmax", "0.30.0 0.33.0"),
        ("-sc.use_local_argmax_reduction true", "", ""),
    ],
)
def test_where_adaptive_verification_cannot_run_is_said_before_the_server_starts(flags, fix, releases):
    for release in ("0.28.0", "0.29.0", "0.30.0", "0.33.0"):
        found = following(setting(release, f"{R4} {flags}", "cuda"))
        refused = {item.fix for item in found if item.kind == "does not start" and item.fix != "acceptance-estimator"}
        assert refused == ({fix} if release in releases.split() else set())


def test_adaptive_verification_does_not_start_on_a_cpu_or_on_runner_v1():
    on_cpu = {item.fix for item in following(setting("0.32.0", R4, "cpu")) if item.kind == "does not start"}
    on_v1 = following(setting("0.32.0", f"VLLM_USE_V2_MODEL_RUNNER=0 {R4}", "cuda"))
    assert on_cpu == {"adaptive-eager"}
    by_method = following(setting("0.32.0", R4.replace("dspark", "suffix"), "cuda"))
    for found in (on_v1, by_method):
        assert {item.fix for item in found if item.kind == "does not start"} == {"adaptive-runner-v1"}


def test_flags_that_decide_nothing_are_named():
    assert of_command(R0).notes == (
        "not read, as they decide nothing here: --kv-cache-dtype, --enable-prefix-caching, -tp",
    )
    assert of_command(R2).notes == ()


def test_a_method_that_is_not_given_is_said_to_be_assumed():
    found = of_command("""vllm serve m --speculative-config '{"model": "d", "num_speculative_tokens": 2}'""")
    assert found.drafter == "draft_model"
    assert "draft_model is assumed" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve m --speculative-config \"{'method': 'ngram', 'enable': True}\"",
         "--speculative-config is no JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
         "); inside it are double quotes, true and false"),
        ("vllm serve m --speculative-config '[3]'", "takes a JSON object, got [3]"),
        ("vllm serve m --speculative-config", "--speculative-config is no JSON"),
        ("vllm serve m --speculative-config '{\"method\": \"ngram\", \"ngram_prompt_lookup_max\": 4}'",
         "ngram_prompt_lookup_max is vLLM's old spelling, write prompt_lookup_max"),
        ("vllm serve m --speculative-config '{\"num_speculative_tokens\": 4}'", "neither a method nor a model"),
        ("vllm serve m --speculative-config '{\"method\": 3}'", "is a name such as mtp or ngram, got 3"),
        ("vllm serve m --spec-method mtp --spec-tokens none", "num_speculative_tokens is a whole number from 1 on"),
        ("vllm serve m -pp $PP", "--pipeline-parallel-size is a whole number from 1 on, got '$PP'"),
        ("vllm serve m --reasoning-parser", "--reasoning-parser has no value"),
        ("vllm serve m --spec-method 'mtp", "cannot be split into words: No closing quotation"),
        ("vllm serve a -pp 2\nvllm serve b", "holds 2 server commands; give one"),
        ("my-server.sh", "no flag of vLLM in 'my-server.sh'"),
        ("vllm serve m --config none.yaml", "--config none.yaml cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_sentence(text, words):
    with pytest.raises(ConfigurationError) as caught:
        of_command(text)
    assert words in str(caught.value)


def test_a_configuration_file_counts_less_than_the_command(tmp_path):
    (tmp_path / "server.yaml").write_text(
        "pipeline-parallel-size: 2\nreasoning_parser: a\nasync-scheduling: false\n"
        "speculative-config: {method: mtp, num_speculative_tokens: 2}\n"
    )
    (tmp_path / "start.sh").write_text("vllm serve m --config server.yaml --reasoning-parser b\n")
    found = of_options(str(tmp_path / "start.sh"), None)
    assert found == Configuration(drafter="mtp", k=2, pipeline_parallel=2, reasoning_parser="b", async_scheduling=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "the server command is no command and no file: {}: No such file or directory"),
        (b"\x7fELF\x00\x01", "{} is no text"),
        (b"echo hello\n", "{}: there is no flag of vLLM in 'echo hello'"),
        (b"vllm serve m --speculative-config '[1]'\n", "{}: --speculative-config takes a JSON object, got [1]"),
    ],
)
def test_a_file_without_a_server_command_is_one_sentence_with_its_name(tmp_path, content, words):
    path = tmp_path / "start.sh"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        of_options(str(path), None)
    assert str(caught.value) == words.format(path)


def test_single_options_count_more_than_the_command():
    found = of_options(R2, '{"method": "mtp"}', runner="v2", pipeline_parallel=None, async_scheduling=False)
    assert found == Configuration(drafter="mtp", runner="v2", pipeline_parallel=3, async_scheduling=False)
    assert of_options(None, None, runner=None) is None
    with pytest.raises(ConfigurationError, match="--runner is one of v1, v2, got 'v3'"):
        of_options(None, None, runner="v3")


def setting(release, command, device="cuda"):
    """A configuration on a release of the table; of its sources only how it chooses runner and scheduling."""
    by_architecture = "self._is_default_v2_model_runner_model()" if release == "0.28.0" else "True"
    by_runner = "v1_async_sched_incompat = None" if release == "0.33.0" else "pass"
    text = (
        f"class VllmConfig:\n    def use_v2_model_runner(self):\n        return {by_architecture}\n"
        f"    def __post_init__(self):\n        {by_runner}\n"
    )
    source = Source("x", "vllm", release, lambda path: text.encode() if path == "config/vllm.py" else None)
    findings = {name: Finding(**found) for name, found in table.known()[release]["fixes"].items()}
    return Setting(of_options(command, None, device=device), source, findings)


def kinds(release, command, device="cuda"):
    return {(item.report, item.kind) for item in following(setting(release, command, device))}


ENDLESS, COUNTS = ("R1", "endless outputs"), ("R3", "other numbers")
LOGGED, DIES, REFUSED, SYNC = ("R0", "harmless"), ("R2", "requests end"), ("R2", "does not start"), ("R2", "slower")


@pytest.mark.parametrize(
    ("release", "command", "there", "absent"),
    [
        ("0.24.0", R1, {("R1", "requests end"), ("R1", "wrong outputs")}, {LOGGED}),
        ("0.26.0", R1, {LOGGED, ("R1", "wrong outputs")}, {("R1", "requests end")}),
        ("0.28.0", R0 + " --structured-outputs-config.backend guidance", {COUNTS}, {LOGGED, ENDLESS}),
        ("0.28.0", R0, {LOGGED, COUNTS, ENDLESS}, {DIES}),
        ("0.29.0", R0, {COUNTS, ENDLESS}, {LOGGED}),
        ("0.30.0", R0, {COUNTS, ENDLESS}, {LOGGED}),
        ("0.33.0", R0, {COUNTS, ENDLESS}, {LOGGED, ("R1", "unlikely")}),
        ("0.28.0", R0.replace("--reasoning-parser qwen3", ""), {COUNTS}, {LOGGED}),
        ("0.31.0", R1, {("R1", "wrong outputs")}, {LOGGED}),
        ("0.32.0", R1, {("R1", "unlikely")}, {("R1", "wrong outputs")}),
        ("0.28.0", R2, {DIES}, {REFUSED, SYNC, COUNTS}),
        ("0.30.0", R2, {DIES}, {REFUSED, SYNC}),
        ("0.31.0", R2, {SYNC}, {DIES, REFUSED}),
        ("0.33.0", R2, {SYNC}, {DIES, REFUSED}),
        ("0.32.0", R2 + " --async-scheduling", {REFUSED}, {DIES, SYNC}),
        ("0.30.0", R2 + " --async-scheduling", {DIES}, {REFUSED}),
        ("0.30.0", R2 + " --no-async-scheduling", {ENDLESS}, {DIES, REFUSED, SYNC}),
        ("0.32.0", R2 + " --no-async-scheduling", {ENDLESS}, {DIES, REFUSED, SYNC}),
        ("0.30.0", R2.replace("=0", "=1"), {ENDLESS}, {DIES}),
        ("0.28.0", R2.replace("VLLM_USE_V2_MODEL_RUNNER=0", ""), {DIES}, set()),
        ("0.30.0", R2.replace("VLLM_USE_V2_MODEL_RUNNER=0", ""), {ENDLESS}, {DIES}),
        ("0.31.0", f"vllm serve m -pp 2 {MTP}", {("R1", "wrong outputs")}, {DIES}),
        ("0.31.0", f"vllm serve m -pp 2 {MTP} --no-async-scheduling", {COUNTS}, {("R1", "wrong outputs")}),
        ("0.31.0", "vllm serve m -pp 2 --spec-method ngram", {COUNTS}, {("R1", "wrong outputs")}),
        ("0.32.0", f"vllm serve m -pp 2 {MTP}", {COUNTS}, {("R1", "wrong outputs")}),
        ("0.28.0", R4, {("", "other numbers")}, {("R4", "engine ends"), ("", "does not start")}),
        ("0.29.0", R4.replace("dspark", "mtp"), {("", "does not start")}, {("", "other numbers")}),
        ("0.30.0", R4.replace("dspark", "mtp") + " --enable-batch-sharded-sampling", {("", "does not start")}, set()),
        ("0.33.0", R4.replace("dspark", "mtp") + " --enable-batch-sharded-sampling", set(), {("", "does not start")}),
        ("0.28.0", f"{MTP} --per-request-spec-decode-metrics summary", {("R3", "does not start")}, set()),
        ("0.29.0", f"{MTP} --per-request-spec-decode-metrics summary", {COUNTS}, {("R3", "does not start")}),
        ("0.31.0", "--structured-outputs-config.disable_any_whitespace true", {("R1", "slower")}, {ENDLESS}),
        ("0.32.0", "--structured-outputs-config.disable_any_whitespace true", set(), {("R1", "slower"), ENDLESS}),
    ],
)  # fmt: skip
def test_what_follows(release, command, there, absent):
    found = kinds(release, command)
    assert there <= found
    assert not absent & found


def test_a_cpu_schedules_synchronously():
    """`CpuPlatform.check_and_update_config` switches async scheduling off, whatever was asked."""
    assert not {DIES, REFUSED} & kinds("0.30.0", R2 + " --async-scheduling", "cpu")
    assert setting("0.30.0", R2, "cpu").taken() == "runner V1, sync scheduling, CPU"
    assert (
        setting("0.28.0", "vllm serve m").taken()
        == "runner V1 or V2, by the model's architecture, async scheduling, GPU"
    )
    assert setting("0.30.0", R4, "cuda").taken() == "runner V2, async scheduling, GPU"
    assert setting("0.33.0", "--spec-method ngram").taken() == "runner V2, async scheduling, GPU"
    assert setting("0.32.0", "--spec-method ngram").taken() == "runner V2, sync scheduling, GPU"
    assert setting("0.33.0", "--spec-method suffix").taken() == "runner V1, sync scheduling, GPU"


def test_r4_on_a_build_without_its_fix(tmp_path):
    source = open_source(write(tmp_path, {WORKER: BLIND_MAPPING, SPECULATIVE: AV}))
    report = of_build(source, of_command(R4))
    first = report["consequences"][0]
    assert (first["report"], first["kind"]) == ("R4", "engine ends")
    assert "assert num_masks == len(mapping)" in first["see"]
    assert first["do"].startswith("take vLLM 0.28.0 or later; until then: enable_adaptive_verification: false")
    assert of_build(source, of_command(R0))["reports"]["R4"]["through"] == []


def test_the_worst_comes_first_and_every_kind_is_known():
    for release in table.known():
        for found in (following(setting(release, R0)), possible(setting(release, R0))):
            order = [KINDS.index(item.kind) for item in found]
            assert order == sorted(order)
    assert {rule.kind for rule in RULES} == set(KINDS) - {"unknown"}


def test_the_release_to_take_is_one_for_the_device():
    on_cpu = {item.fix: item for item in following(setting("0.32.0", R1, "cpu"))}
    on_gpu = {item.fix: item for item in following(setting("0.32.0", R1))}
    assert on_cpu["masked-reasoning-ends"].do.endswith("; mended in 0.33.0, which is for CUDA only")
    assert on_gpu["masked-reasoning-ends"].do.startswith("take vLLM 0.33.0 or later; until then: ")
    assert on_gpu["verified-counter"].do.endswith("; no release up to 0.33.0 mends it")


def test_a_shape_that_was_never_read_is_not_called_a_fault(tmp_path):
    source = open_source(write(tmp_path, {WORKER: "", SPECULATIVE: AV}))
    found = {item["fix"]: item for item in of_build(source, of_command(R4))["consequences"]}
    assert found["zero-budget-mapping"]["kind"] == "unknown"
    assert "another shape than those read so far" in found["zero-budget-mapping"]["says"]


def test_a_fix_that_is_there_in_part_is_said_to_be(tmp_path):
    source = open_source(write(tmp_path, backend(accept="if self._is_terminated: return True")))
    found = {item["fix"]: item for item in of_build(source, of_command(R0))["consequences"]}
    assert found["stops-at-end"]["says"].endswith("(the fix is there in part: only in accept_tokens)")


@pytest.mark.parametrize(
    ("release", "met"),
    [
        ("0.24.0", {"R1", "R2", "R3"}), ("0.28.0", {"R0", "R1", "R2", "R3"}), ("0.29.0", {"R1", "R2", "R3"}),
        ("0.31.0", {"R1", "R3"}), ("0.33.0", {"R1", "R3"}),
    ],
)  # fmt: skip
def test_which_reports_can_be_met_on_a_release(release, met):
    assert {item.report for item in possible(setting(release, "vllm serve m"))} - {""} == met


def test_without_a_server_the_reports_come_first(tmp_path):
    source = open_source(wheel(tmp_path / "x.whl", old(), "9.9.9"))
    first = to_text(of_build(source)).splitlines()[0]
    assert first == "vllm 9.9.9: of the five reports R0, R1, R2, R3 can be met on this build; R4 cannot"


def test_every_fix_that_a_rule_names_exists():
    names = {fix.name for fix in FIXES}
    assert {rule.fix for rule in RULES} <= names
    assert {rule.requires for rule in RULES} - {None} <= names


@pytest.mark.parametrize("files", [old(), new()])
@pytest.mark.parametrize("command", [None, R0, R2, "vllm serve m"])
def test_the_text_says_the_verdict_first_and_is_narrow(tmp_path, files, command):
    source = open_source(wheel(tmp_path / "x.whl", files, "9.9.9"))
    text = to_text(of_build(source, of_command(command) if command else None))
    assert text.startswith("vllm 9.9.9: ")
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert ("you see: " in text) == (command is not None)
    assert ("--server-command" in text) == (command is None)


def test_when_nothing_follows_the_doctor_says_so(tmp_path):
    files = {WORKER: STRIDE_WORKER}
    source = open_source(wheel(tmp_path / "x.whl", files, "9.9.9"))
    findings = {name: Finding("contained", "f", "s") for name in examine(source)}
    assert following(Setting(of_command(R0), source, findings)) == []
    report = of_build(source, of_command(R0)) | {"consequences": []}
    assert to_text(report).splitlines()[0] == "vllm 9.9.9: nothing follows for this server"


def test_the_command_reads_a_wheel_and_runs_nothing_of_it(tmp_path):
    """In a process where vLLM cannot be imported; the wheel's own module would end it."""
    path = wheel(tmp_path / "vllm-0.99.0.whl", old(), "0.99.0")
    code = "import sys; sys.modules['vllm'] = None; from specgram_lab.cli import main; main()"
    arguments = ["doctor", "--wheel", str(path), "--json", "--server-command", R0]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["fixes"]
    assert report["build"]["label"] == "vllm 0.99.0"
    assert report["configuration"]["drafter"] == "dflash"
    states = {fix["name"]: fix["state"] for fix in report["fixes"]}
    assert states["probe-guard"] == "missing"
    assert "R0" in {item["report"] for item in report["consequences"]}


def test_the_command_on_what_is_installed():
    done = CliRunner().invoke(app, ["doctor", "--runner", "v1", "--pipeline-parallel-size", "2"])
    assert done.exit_code == 0, done.output
    assert "SLOWER: vLLM switches async scheduling off by itself" in done.stdout
    assert "R2, vllm#56250" in done.stdout


def test_the_plain_command_says_the_fixes_first_and_then_what_can_run(monkeypatch):
    monkeypatch.setattr(doctor, "kernels", dict)  # asked of vLLM in a process of its own, which takes long
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "of the five reports" in text.splitlines()[0]
    assert text.index("fixes, told from the code:") < text.index("adaptive verification:")
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert report["fixes"]["configuration"] is None
    assert report["runners"]


def test_without_a_vllm_only_a_question_about_a_server_is_refused(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda: None)
    assert doctor.of_build(None, None) is None
    with pytest.raises(SourceError, match="no vLLM is installed here; --wheel reads one"):
        doctor.of_build(None, Configuration())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--wheel", "none.whl"], "specgram: none.whl is not there\n"),
        (["--runner", "v3"], "specgram: --runner is one of v1, v2, got 'v3'\n"),
        (["--speculative-config", "{x}"], "specgram: --speculative-config is no JSON"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_exit_code_2(tmp_path, arguments, words):
    command = [sys.executable, "-m", "specgram_lab.cli", "doctor", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1
