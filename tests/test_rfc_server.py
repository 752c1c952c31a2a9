"""A real server on the CPU, its engine in a process of its own, with the patch ``rfc-counters``.

That a server without it counts as before is seen in test_server_engine.py; here it is held against a local engine.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request

import pytest
import vllm_server
from engines import NGRAM, SCHEMA, cell, run

from specgram_lab.servers.exposition import parse_exposition
from specgram_lab.spec import Workload
from specgram_lab.workloads import load

pytestmark = pytest.mark.engine

OPTIONS = {
    "--max-num-seqs": "4",
    "--speculative-config": json.dumps(
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    ),
    "--per-request-spec-decode-metrics": "detailed",
    "--no-enable-prefix-caching": None,
}
LOGGED = re.compile(r"SpecDecoding metrics: .*")
WAIT_S = 30


def ask(url: str, prompt) -> dict:
    """The metrics of one request under its schema, and its text."""
    body = {
        "model": vllm_server.MODEL, "messages": prompt.chat(), "max_tokens": 32, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": prompt.schema}},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        content = json.load(answer)
    return {"text": content["choices"][0]["message"]["content"], **content["metrics"]["speculative_decoding"]}


def counters(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        exposition = parse_exposition(answer.read().decode())
    names = ("drafts", "draft_tokens", "verified_tokens", "accepted_tokens")
    found = {name: exposition.samples.get(f"vllm:spec_decode_num_{name}_total", ()) for name in names}
    return {name: int(sum(sample.value for sample in samples)) for name, samples in found.items() if samples}


def logged(server) -> dict[str, int]:
    """Drafted, verified and accepted tokens, summed over the periodic lines, once they hold all."""
    deadline, found = time.monotonic() + WAIT_S, {}
    wanted = counters(server.url)["accepted_tokens"]
    while time.monotonic() < deadline:
        lines = LOGGED.findall(server.log.read_text(encoding="utf-8", errors="replace"))
        for name in ("Drafted", "Verified", "Accepted"):
            values = [re.search(rf"{name}: (\d+) tokens", line) for line in lines]
            found[name] = sum(int(value.group(1)) for value in values if value) if any(values) else None
        if found.get("Accepted") == wanted:
            return found
        time.sleep(0.2)
    raise AssertionError(f"the log has {found}, the counters say accepted {wanted}")


def served(folder, target, environment):
    """Everything that a server reports of the same five requests."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"VLLM_LOG_STATS_INTERVAL": "1", **environment}.items():
            patched.setenv(name, value)
        server = vllm_server.start(target, folder, OPTIONS)
    try:
        prompts = load(Workload(prompts="records", limit=5))
        requests = [ask(server.url, prompt) for prompt in prompts]
        return {"requests": requests, "metrics": counters(server.url), "log": logged(server)}
    finally:
        server.kill()


@pytest.fixture(scope="module")
def old(tmp_path_factory, target_folder):
    """The same requests, one after another, on an engine without the patch."""
    asked = cell(
        NGRAM, SCHEMA, target={"max_model_len": 512}, workload={"limit": 5, "max_tokens": 32, "concurrency": 1}
    )
    ran = run({"old": asked}, tmp_path_factory.mktemp("old"))["old"]
    assert ran.run["outcome"] == "ok", ran.run["reason"]
    return ran


@pytest.fixture(scope="module")
def new(tmp_path_factory, target_folder):
    environment = {
        "SPECGRAM_PATCHES": "rfc-counters",
        "SPECGRAM_PATCH_OPTIONS": json.dumps({"rfc-counters": {"runner": "v1"}}),
    }
    return served(tmp_path_factory.mktemp("new"), target_folder, environment)


def total(report, name):
    return sum(request[name] for request in report["requests"])


def test_with_it_all_three_places_say_the_same_of_verified(new):
    verified = new["metrics"]["verified_tokens"]
    assert new["metrics"]["draft_tokens"] > verified > new["metrics"]["accepted_tokens"] > 0
    assert new["log"]["Verified"] == verified
    assert total(new, "num_verified_draft_tokens") == verified
    assert sum(sum(request["per_step_verified"]) for request in new["requests"]) == verified


def test_with_it_all_three_places_say_the_same_of_drafted_and_steps(new):
    assert new["log"]["Drafted"] == new["metrics"]["draft_tokens"] == total(new, "num_draft_tokens")
    assert new["metrics"]["drafts"] == total(new, "num_spec_steps")


def test_without_it_the_old_counting_stands(old, new):
    assert list(old.requests["text"]) == [request["text"] for request in new["requests"]]
    # this engine is synchronous: what it called drafted is what was left after the grammar had cut the drafts
    assert old.run["engine_draft_tokens"] == new["metrics"]["verified_tokens"] < new["metrics"]["draft_tokens"]
    assert old.run["engine_num_drafts"] <= new["metrics"]["drafts"]
    assert old.run["engine_accepted_tokens"] == new["metrics"]["accepted_tokens"]
