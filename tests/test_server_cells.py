"""A server as the engine of a cell, against a small server of the tests' own; and prompts that bring tools."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from fake_server import chat, cut, error, send, serve

from specgram_lab import ledger, tables
from specgram_lab.run import run_cell
from specgram_lab.spec import SpecError, parse_cell
from specgram_lab.workloads import read_prompts

COUNTERS = (
    "# TYPE vllm:spec_decode_num_drafts_total counter\n"
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {0}\n'
    'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {1}\n'
    'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {2}\n'
)
METRICS = {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 3, "num_spec_tokens": 3}


def cell(url: str, **engine):
    return parse_cell(
        {
            "target": {"model": "m"},
            "drafter": {"method": "ngram", "k": 4},
            "grammar": {"kind": "json_object"},
            "workload": {"inline": ["a", "b"], "max_tokens": 16, "concurrency": 1},
            "engine": {"kind": "server", "url": url, **engine},
            "limits": {"timeout_s": 30.0},
        }
    )


def ok(handler, body):
    metrics = {"speculative_decoding": METRICS}
    send(handler, 200, chat("{}", id="chatcmpl-77", system_fingerprint="vllm-0.32.0-ab", metrics=metrics))


def test_answers_become_requests_and_counters_columns(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("")
    with serve(ok, metrics=COUNTERS.format(1, 3, 1)) as fake:

        def reply(handler, body):
            fake.gets["/metrics"] = (200, COUNTERS.format(5, 15, 7), "text/plain")
            with log.open("a") as out:
                out.write("ERROR 01-01 00:00:00 [x.py:1] Failed to advance FSM for request chatcmpl-77-0 for tokens 9.")
                out.write(" Please file an issue.\n")
            ok(handler, body)

        fake.reply = reply
        row = run_cell(cell(fake.url, log=str(log)), tmp_path / "out")
    found = ledger.read_run(tmp_path / "out")
    assert (row["outcome"], row["engine"], row["prompts"], row["output_tokens"]) == ("ok", "server", 2, 10)
    assert (row["engine_num_drafts"], row["engine_draft_tokens"], row["engine_accepted_tokens"]) == (4, 12, 6)
    assert row["engine_semantics"] == "pre-64156"
    assert json.loads(row["config_effective"]) == {"k": 3, "model": "m", "vllm": "0.32.0"}
    assert "asked for k=4, the server's answers say 3" in list(row["warnings"])
    assert list(found["requests"]["output_class"]) == ["valid", "valid"]
    assert list(found["requests"]["reported_drafted"]) == [6, 6]
    assert found["steps"].empty
    assert list(found["fsm_events"]["phase"]) == ["draft-probe", "draft-probe"]
    assert set(found["fsm_events"]["request_id"]) <= {"0", "1"}
    for column in ("device", "runner_effective", "scheduling_effective", "whitespace"):
        assert pd.isna(row[column]), column
    shown = tables.summary(found).iloc[0]
    assert pd.isna(shown["drafted"])
    assert any("4 spec steps, 12 drafted, 6 accepted" in note for note in shown["notes"])
    assert shown["valid_outputs"] == "2/2"


def test_without_metrics_there_are_no_counters(tmp_path):
    with serve(ok) as fake:
        row = run_cell(cell(fake.url), tmp_path)
    assert row["outcome"] == "ok"
    for column in ("engine_num_drafts", "engine_draft_tokens", "engine_accepted_tokens", "engine_semantics"):
        assert pd.isna(row[column]), column


@pytest.mark.parametrize(
    ("reply", "outcome", "reason"),
    [
        (error(400, "min_p is refused"), "rejected_request", "min_p is refused"),
        (lambda handler, body: cut(handler), "engine_failed", "2 of 2 requests had no answer, the first: cut"),
        (lambda handler, body: send(handler, 200, b"<html>", "text/html"), "engine_failed", "the first: not_openai"),
        (error(500, "Internal server error"), "no_data", "the server gave no token"),
    ],
)
def test_failures_are_rows(tmp_path, reply, outcome, reason):
    with serve(reply) as fake:
        row = run_cell(cell(fake.url), tmp_path)
    assert row["outcome"] == outcome
    assert reason in row["reason"]
    assert len(ledger.read_table(tmp_path, "requests")) == 2


def test_a_model_that_is_not_there_and_a_server_that_is_not_there(tmp_path):
    with serve(ok) as fake:
        other = cell(fake.url).model_copy(update={"target": cell(fake.url).target.model_copy(update={"model": "x"})})
        row = run_cell(other, tmp_path / "model")
        assert (row["outcome"], row["reason"]) == ("unsupported", "the server has no model 'x', it has m")
        gone = fake.url
    row = run_cell(cell(gone), tmp_path / "gone")
    assert row["outcome"] == "engine_failed"
    assert "cannot be reached" in row["reason"]


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"kind": "server"}, "engine server and url go together"),
        ({"kind": "local", "url": "http://h:1"}, "engine server and url go together"),
        ({"kind": "local", "log": "x"}, "log belongs to engine server"),
        ({"kind": "server", "url": "h:1"}, "'h:1' is no address of a server"),
        ({"kind": "server", "url": "http://h:1/?key=secret"}, "'http://h:1/' is no address of a server"),
        ({"kind": "server", "url": "http://me:secret@h:1"}, "url holds a user or a password"),
        ({"kind": "server", "url": "http://h:1", "patches": ["rfc-counters"]}, "takes no patches, budget or python"),
    ],
)
def test_what_a_server_cell_cannot_be(engine, sentence):
    with pytest.raises(SpecError) as caught:
        parse_cell({"workload": {"inline": ["x"]}, "engine": engine})
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_id_of_a_cell_names_the_server_and_no_path():
    one, two = cell("http://h:1"), cell("http://h:1/", log="/somewhere")
    assert one.cell_id == two.cell_id != cell("http://h:2").cell_id
    other = parse_cell({"workload": {"inline": ["x"]}})
    assert not {"url", "log"} & set(json.loads(other.canonical())["engine"])
    with pytest.raises(SpecError, match="a scenario cannot run on engine server"):
        parse_cell(
            {
                "drafter": {"method": "scripted", "k": 4},
                "workload": {"scenario": "row-a"},
                "engine": {"kind": "server", "url": "http://h:1"},
            }
        )


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [("{}", "has tools that are no list"), ("[1]", "has a tool that is not an object with a function that has a name")],
)
def test_tools_of_a_prompt_that_are_none(tmp_path, tools, sentence):
    path = tmp_path / "set.jsonl"
    path.write_text(f'{{"id": "a", "text": "x", "tools": {tools}}}\n')
    with pytest.raises(SpecError, match=sentence):
        read_prompts(path)
