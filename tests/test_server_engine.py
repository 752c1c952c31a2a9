"""The check against a real vLLM server on the CPU: right, refused, overloaded, misaddressed, and killed meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request

import pandas as pd
import pytest
import vllm_server
from typer.testing import CliRunner

from specgram_lab import lab, ledger, semantics, tables
from specgram_lab.cli import app
from specgram_lab.servers import check as checking
from specgram_lab.servers import client, verdict
from specgram_lab.servers.address import parse_address
from specgram_lab.servers.answers import Outcome
from specgram_lab.servers.asking import ask
from specgram_lab.servers.client import Limits
from specgram_lab.spec import Grammar, Workload
from specgram_lab.workloads import Prompt, load

pytestmark = pytest.mark.engine

NGRAM = {"method": "ngram", "k": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
OPTIONS = {
    "--max-num-seqs": "4",
    "--speculative-config": json.dumps(
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    ),
    "--per-request-spec-decode-metrics": "detailed",
    "--enable-auto-tool-choice": None,
    "--tool-call-parser": "hermes",
    "--max-num-queued-reqs": "6",
    "--no-enable-prefix-caching": None,
}
# One request at a time: which others share a batch changes the last bits of bfloat16 sums, and so a token now and then.
SAME = {
    "target": {"model": vllm_server.MODEL, "max_model_len": 512},
    "drafter": NGRAM,
    "grammar": {"kind": "json_schema", "per_prompt": True, "name": "schema"},
    "workload": {"prompts": "records", "limit": 5, "max_tokens": 32, "concurrency": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, target_folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_LOG_STATS_INTERVAL", "1")
        running = vllm_server.start(target_folder, tmp_path_factory.mktemp("server"), OPTIONS)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def both(server, tmp_path_factory):
    """A sweep of one cell over an engine of the lab's own and the server."""
    engines = {"own": {"kind": "local"}, "server": {"kind": "server", "url": server.url, "log": str(server.log)}}
    return lab.sweep({"name": "both", "axes": {"engine": engines}, "fixed": SAME}, tmp_path_factory.mktemp("both"))


def tables_of(results, kind):
    run = results.runs.set_index("engine").loc[kind]
    assert run["outcome"] == "ok", run["reason"]
    return ledger.read_run(results.folder / "cells" / run["run_id"])


@pytest.fixture(scope="module")
def local(both):
    return tables_of(both, "local")


@pytest.fixture(scope="module")
def outside(both):
    return tables_of(both, "server")


def invoke(*arguments: str) -> tuple[int, dict]:
    result = CliRunner().invoke(app, ["server", "check", *arguments, "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.output)


def test_from_outside_the_same_texts_and_the_same_acceptance_as_in_the_ledger(local, outside):
    assert list(outside["requests"]["text"]) == list(local["requests"]["text"])
    run = outside["runs"].iloc[0]
    counted = semantics.totals(local["steps"], countings=["engine"], runs=local["runs"]).iloc[0]
    assert counted["spec_steps"] > 10
    assert (run["engine_num_drafts"], run["engine_draft_tokens"], run["engine_accepted_tokens"]) == (
        counted["spec_steps"], counted["drafted"], counted["accepted"],
    )  # fmt: skip
    for column in ("reported_spec_steps", "reported_drafted", "reported_accepted", "output_tokens", "finish_reason"):
        assert list(outside["requests"][column]) == list(local["requests"][column]), column
    steps = outside["requests"]["reported_step_drafted"]
    assert [list(values) for values in steps] == [list(values) for values in local["requests"]["reported_step_drafted"]]


def test_the_difference_to_what_was_proposed_is_the_grammar_invalid_tokens(local, outside):
    proposed = semantics.totals(local["steps"], countings=["rfc"], runs=local["runs"]).iloc[0]
    engine = outside["runs"].iloc[0]
    struck = local["steps"]["drafted"] - local["steps"]["grammar_valid"]
    shortened = local["steps"]["grammar_valid"] - local["steps"]["scheduled"]
    assert proposed["accepted"] == engine["engine_accepted_tokens"]
    assert proposed["drafted"] - engine["engine_draft_tokens"] == struck.sum() + shortened.sum()


def test_without_a_patch_the_old_counting_stands_in_the_metrics_and_in_the_log(server, outside):
    """In all three places where drafted and accepted are reported; the third, each request's block, is held above."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        content = answer.read().decode()
    assert "vllm:spec_decode_num_draft_tokens_total" in content
    assert "verified" not in content
    lines = [line for line in server.log.read_text(encoding="utf-8").splitlines() if "SpecDecoding metrics: " in line]
    assert lines
    assert not any("Verified" in line for line in lines)


def test_what_cannot_be_seen_is_empty_not_zero(outside):
    run = outside["runs"].iloc[0]
    assert outside["steps"].empty
    for column in ("device", "runner_effective", "scheduling_effective", "budget_effective", "whitespace", "start_s"):
        assert pd.isna(run[column]), column
    assert (run["engine"], run["engine_semantics"]) == ("server", "pre-64156")
    assert json.loads(run["config_effective"]) == {"k": 4, "model": vllm_server.MODEL, "vllm": "0.32.0"}
    assert outside["requests"]["token_ids"].isna().all()
    assert "hashes" not in run["provenance"]
    assert json.loads(run["provenance"])["model"] == {}


def test_a_server_stands_in_a_sweep_beside_an_engine_of_the_labs_own(both):
    runs = both.runs.set_index("engine").loc[["local", "server"]]
    assert runs["engine_draft_tokens"].nunique() == 1
    shown = tables.summary(both.tables).set_index("run").loc[runs["run_id"]]
    assert shown["verified"].iloc[0] > 0
    assert pd.isna(shown["verified"].iloc[1]), "not seen is not zero"
    assert any("the engine's own counters" in note for note in shown["notes"].iloc[1])


def test_a_check_of_the_bundled_prompts(server):
    code, report = invoke(server.url, "--log", str(server.log), "--max-tokens", "64", "--timeout", "120")
    assert report["problems"] == [], report["problems"]
    assert code == 0
    assert (report["version"], report["model"]) == ("0.32.0", vllm_server.MODEL)
    assert report["requests"] == {"sent": 9, "outcomes": {"ok": 9}}
    assert set(report["outputs"]) <= {"valid", "truncated"}
    found = report["acceptance"]
    assert found["mean_acceptance_length"] == pytest.approx(1 + sum(found["per_position_rates"]))
    own = [answer["spec_metrics"] for answer in report["answers"]]
    assert not any("verified" in name for metrics in own for name in metrics), "without the patch there is none"
    assert found["drafts"] == sum(metrics["num_spec_steps"] for metrics in own)
    assert found["draft_tokens"] == sum(metrics["num_draft_tokens"] for metrics in own)
    assert found["accepted_tokens"] == sum(metrics["num_accepted_draft_tokens"] for metrics in own)
    contained = {row["name"]: (row["contained"], row["known_by"]) for row in report["build"]}
    assert contained["per-request-metrics"] == (True, "seen")
    assert contained["verified-counter"] == (False, "version 0.32.0")


@pytest.fixture(scope="module")
def sent(server):
    """Every kind of request once, streaming and not."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    chat, text = Prompt("chat", text="Answer with one small JSON object."), Prompt("text", text="1 2 3 1 2 3 1")
    tools = load(Workload(prompts="report-r1", limit=2))
    workload = Workload(inline=("x",), max_tokens=24)
    kinds = [
        (chat, Grammar(kind="json_object"), "chat"),
        (chat, Grammar(kind="json_schema", value=schema), "chat"),
        (chat, Grammar(kind="regex", value="[0-9 ]{1,30}"), "chat"),
        (chat, Grammar(kind="choice", value=["yes", "no"]), "chat"),
        (text, Grammar(kind="json_schema", value=schema), "completions"),
        (text, Grammar(kind="regex", value="[0-9 ]{1,30}"), "completions"),
        (text, Grammar(), "completions"),
        *((prompt, None, "chat") for prompt in tools),
    ]
    asks = [
        ask(2 * number + stream, prompt, workload, grammar, stream=bool(stream), endpoint=endpoint)
        for number, (prompt, grammar, endpoint) in enumerate(kinds)
        for stream in (0, 1)
    ]
    limits = Limits(concurrency=1, timeout_s=120)
    return client.send(parse_address(server.url, {}), vllm_server.MODEL, asks, limits)


def test_every_kind_of_request_is_answered(sent):
    assert [(a.ask.request_id, a.message) for a in sent if a.outcome is not Outcome.OK] == []
    for whole, streamed in zip(sent[::2], sent[1::2], strict=True):
        assert whole.text == streamed.text
        assert [call.arguments for call in whole.calls] == [call.arguments for call in streamed.calls]
        assert (whole.finish_reason, whole.output_tokens) == (streamed.finish_reason, streamed.output_tokens)
        assert whole.spec_metrics == streamed.spec_metrics
        assert whole.spec_metrics is not None
        assert streamed.first_token_s is not None or not streamed.text


def test_their_texts_obey_their_grammars(sent):
    classes = [checking.judge(answer).verdict.kind.value for answer in sent[:12]]
    assert set(classes) <= {"valid", "truncated"}
    assert classes[2:4] == classes[6:8] == ["valid", "valid"]


def test_tools_that_must_be_called_are_called_as_their_schemas_say(server):
    workload = Workload(inline=("x",), max_tokens=96)
    asks = [
        ask(n, prompt, workload, stream=bool(n % 2), tool_choice="required")
        for n, prompt in enumerate(load(Workload(prompts="report-r1", limit=4)))
    ]
    answers = client.send(parse_address(server.url, {}), vllm_server.MODEL, asks, Limits(concurrency=2, timeout_s=120))
    assert [answer.message for answer in answers if answer.outcome is not Outcome.OK] == []
    for answer in answers:
        assert answer.calls, answer.text
        assert answer.calls[0].name in ("get_weather", "get_time", "getCurrentTime")
        assert checking.judge(answer).verdict.kind.value in ("valid", "truncated")


def test_parameters_that_a_drafter_refuses(server):
    code, report = invoke(server.url, "--prompts", "report-r0", "--min-p", "0.1", "--temperature", "0.7")
    assert code == 1
    assert report["requests"]["outcomes"] == {"refused": 3}
    assert all(len(answer["attempts"]) == 1 for answer in report["answers"])
    assert report["answers"][0]["attempts"][0]["status"] == 400
    assert "min_p and logit_bias" in report["problems"][0]
    assert any("leave them out" in sentence for sentence in report["advice"])
    assert report["acceptance"]["acceptance_rate"] is None
    assert any(note.startswith("no drafts were proposed in 0 tokens") for note in report["notes"])


def test_a_wrong_model_a_wrong_path_and_https(server):
    code, report = invoke(server.url, "--model", "other")
    assert (code, report["problems"]) == (1, [f"the server has no model 'other', it has {vllm_server.MODEL}"])
    answer = client.send(
        parse_address(server.url, {}), "other", [ask(0, Prompt("p", text="x"), Workload(inline=("x",)))], Limits()
    )[0]
    assert (answer.outcome, answer.attempts[0].status) == (Outcome.NOT_FOUND, 404)
    code, report = invoke(f"{server.url}/somewhere")
    assert (code, "this is not the address" in report["problems"][0]) == (1, True)
    code, report = invoke(server.url.replace("http://", "https://"))
    assert (code, "SSL" in report["problems"][0]) == (1, True)
    assert any("plain http" in sentence for sentence in report["advice"])


def test_more_requests_than_the_server_takes(server):
    asks = [
        ask(n, Prompt("p", text="Count."), Workload(inline=("x",), max_tokens=48, ignore_eos=True), Grammar())
        for n in range(24)
    ]
    limits = Limits(concurrency=24, timeout_s=120, retries=1, pause_s=0.05)
    answers = client.send(parse_address(server.url, {}), vllm_server.MODEL, asks, limits)
    outcomes = {answer.outcome for answer in answers}
    assert outcomes == {Outcome.OK, Outcome.OVERLOADED}
    refused = [answer for answer in answers if answer.outcome is Outcome.OVERLOADED]
    assert {attempt.status for answer in refused for attempt in answer.attempts} == {503}
    assert all(len(answer.attempts) == 2 for answer in refused)


def test_an_answer_that_comes_too_late(server):
    asks = [ask(0, Prompt("p", text="Count."), Workload(inline=("x",), max_tokens=400, ignore_eos=True), Grammar())]
    answer = client.send(parse_address(server.url, {}), vllm_server.MODEL, asks, Limits(timeout_s=0.3))[0]
    assert (answer.outcome, len(answer.attempts)) == (Outcome.TIMEOUT, 1)


def test_a_server_that_is_killed_meanwhile(server):
    """Behind it nothing is left of this server."""
    asks = [
        ask(
            n,
            Prompt("p", text="Count."),
            Workload(inline=("x",), max_tokens=64, ignore_eos=True),
            Grammar(),
            stream=True,
        )
        for n in range(30)
    ]
    ended = threading.Event()

    def kill_after_the_second(answer):
        if answer.ask.request_id == "1":
            server.kill()
            ended.set()

    begin = time.monotonic()
    limits = Limits(concurrency=2, timeout_s=60, total_s=60, pause_s=0.05)
    seen = checking.check(
        parse_address(server.url, {}), asks, log_file=server.log, limits=limits, answered=kill_after_the_second
    )
    assert ended.is_set()
    assert time.monotonic() - begin < 60
    report = verdict.to_dict(seen)
    outcomes = report["requests"]["outcomes"]
    assert outcomes["ok"] >= 1
    assert outcomes["not_sent"] > 20
    assert set(outcomes) <= {"ok", "cut", "unreachable", "not_sent"}
    assert report["ok"] is False
    assert "the server went away during the check" in report["problems"]
    assert report["acceptance"] is None
    assert report["log"] is not None
    assert any("metrics after the requests" in note for note in report["notes"])


@pytest.fixture(scope="module")
def second(server, target_folder, tmp_path_factory):
    """Another server, started when the first is dead; its drafter is the target itself."""
    assert server.process.poll() is not None
    config = {"method": "draft_model", "model": str(target_folder), "num_speculative_tokens": 3}
    running = vllm_server.start(
        target_folder, tmp_path_factory.mktemp("second"), {"--speculative-config": json.dumps(config)}
    )
    yield running
    running.kill()


def test_a_server_with_a_draft_model(second):
    code, report = invoke(second.url, "--prompts", "report-r0", "--max-tokens", "32", "--timeout", "120")
    assert (code, report["problems"]) == (0, [])
    found = report["acceptance"]
    assert len(found["per_position"]) == 3
    assert found["mean_acceptance_length"] > 2, "a target that drafts for itself agrees with itself"
    assert all(answer["spec_metrics"] is None for answer in report["answers"]), "off unless asked for"
    contained = {row["name"]: (row["contained"], row["known_by"]) for row in report["build"]}
    assert contained["per-request-metrics"] == (True, "version 0.32.0")


def test_the_command_reports_what_was_seen_of_a_server_that_is_killed(second):
    """Behind it nothing is left of the second server either."""
    command = [sys.executable, "-m", "specgram_lab.cli", "server", "check", second.url, "--prompts", "report-r0"]
    command += ["--repeat", "20", "--concurrency", "1", "--timeout", "30", "--log", str(second.log), "--json"]
    answered = second.log.read_text(encoding="utf-8").count('POST /v1/chat/completions HTTP/1.1" 200')
    begin = time.monotonic()
    check = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while second.log.read_text(encoding="utf-8").count('POST /v1/chat/completions HTTP/1.1" 200') < answered + 2:
        assert check.poll() is None
        assert time.monotonic() - begin < 300
        time.sleep(0.05)
    killed = time.monotonic()
    second.kill()
    output, errors = check.communicate(timeout=120)
    assert time.monotonic() - killed < 40, "bounded by the time-out"
    assert check.returncode == 1, errors
    report = json.loads(output)
    assert report["requests"]["outcomes"]["ok"] >= 2
    assert report["requests"]["outcomes"]["not_sent"] > 40
    assert "the server went away during the check" in report["problems"]
    assert "Traceback" not in errors
