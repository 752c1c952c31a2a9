"""The client and the check against a small server that answers well, wrongly, late or not at all."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from random import Random

import pytest
from fake_server import chat, cut, error, send, serve
from typer.testing import CliRunner

from specgram_lab import ledger, workloads
from specgram_lab.cli import app
from specgram_lab.grammars import OutputClass
from specgram_lab.servers import check as checking
from specgram_lab.servers import client, verdict
from specgram_lab.servers.address import parse_address
from specgram_lab.servers.answers import Outcome, read_error
from specgram_lab.servers.asking import ask
from specgram_lab.servers.client import Limits
from specgram_lab.servers.judging import judge
from specgram_lab.servers.log import LogError
from specgram_lab.spec import Grammar, SpecError, Workload
from specgram_lab.workloads import Prompt

FAST = Limits(concurrency=2, timeout_s=2.0, total_s=10.0, pause_s=0.01)
WORKLOAD = Workload(inline=("x",), max_tokens=16)
OBJECT = Prompt("p", text="Say {}.")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time", "strict": True,
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def asks(count: int = 1, **more):
    return [ask(number, OBJECT, WORKLOAD, **more) for number in range(count)]


def one(url: str, limits: Limits = FAST, environ=None, **more):
    return client.send(parse_address(url, environ or {}), "m", asks(**more), limits)[0]


def ok(handler, body):
    send(
        handler,
        200,
        chat("{}", metrics={"speculative_decoding": {"num_spec_steps": 2}}, system_fingerprint="vllm-0.32.0-ab"),
    )


def test_an_answer_and_what_stands_beside_it():
    with serve(ok) as fake:
        answer = one(fake.url)
    assert (answer.outcome, answer.text, answer.finish_reason) == (Outcome.OK, "{}", "stop")
    assert (answer.prompt_tokens, answer.output_tokens, answer.server_id) == (3, 5, "chatcmpl-1")
    assert answer.spec_metrics == {"num_spec_steps": 2}
    assert len(answer.attempts) == 1
    assert fake.asked[0]["response_format"] == {"type": "json_object"}
    assert judge(answer).verdict.kind is OutputClass.VALID


def test_what_is_sent_for_each_grammar_and_parameter():
    schema = {"type": "object"}
    workload = Workload(
        inline=("x",), temperature=0.7, min_p=0.1, top_p=0.9, seed=3, repetition_penalty=1.1, logit_bias={"5": 1.0},
        ignore_eos=True, min_tokens=2,
    )  # fmt: skip
    body = ask(4, OBJECT, workload, Grammar(kind="regex", value="a+")).body
    assert (body["seed"], body["top_p"], body["logit_bias"]) == (7, 0.9, {"5": 1.0})
    assert body["extra_body"] == {
        "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    own = ask(0, Prompt("p", text="x", schema=schema), WORKLOAD)
    assert own.body["response_format"]["json_schema"] == {"name": "answer", "schema": schema, "strict": True}
    assert own.schema == schema
    bare = ask(0, OBJECT, WORKLOAD, Grammar(kind="json_object"), endpoint="completions")
    assert bare.body["prompt"] == "Say {}."
    assert bare.body["extra_body"] == {"structured_outputs": {"json_object": True}}
    assert "extra_body" not in ask(0, OBJECT, WORKLOAD, Grammar()).body
    tools = ask(0, Prompt("p", text="x", tools=(TOOL,)), WORKLOAD).body
    assert (tools["tools"], tools["tool_choice"]) == ([TOOL], "auto")
    assert (
        ask(0, Prompt("p", text="x", tools=(TOOL,)), WORKLOAD, tool_choice="required").body["tool_choice"] == "required"
    )
    with pytest.raises(SpecError, match="the endpoint completions takes a text"):
        ask(0, Prompt("p", messages=(workloads.Message("user", "x"),)), WORKLOAD, endpoint="completions")
    with pytest.raises(SpecError, match="the endpoint completions takes none"):
        ask(0, Prompt("p", text="x", tools=(TOOL,)), WORKLOAD, endpoint="completions")


def pieces(*texts: str, finish: str | None = "stop", failing: str = "", whole: bool = True):
    def reply(handler, body):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()

        def event(content):
            handler.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
            handler.wfile.flush()

        base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        for number, text in enumerate(texts):
            end = finish if number == len(texts) - 1 else None
            event({**base, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": end}]})
        if failing:
            event({"error": {"message": failing, "type": "InternalServerError", "code": 500}})
        if whole:
            usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
            event({**base, "choices": [], "usage": usage, "metrics": {"speculative_decoding": {"num_spec_steps": 1}}})
            handler.wfile.write(b"data: [DONE]\n\n")
        handler.close_connection = True

    return reply


def test_a_stream_is_put_together():
    with serve(pieces("{", '"a": 1', "}")) as fake:
        answer = one(fake.url, stream=True)
    assert (answer.outcome, answer.text, answer.output_tokens) == (Outcome.OK, '{"a": 1}', 4)
    assert answer.first_token_s is not None
    assert answer.spec_metrics == {"num_spec_steps": 1}


def test_a_stream_that_ends_early_keeps_what_came():
    with serve(pieces('{"a', finish=None, whole=False)) as fake:
        answer = one(fake.url, stream=True)
    assert (answer.outcome, answer.text, answer.finish_reason) == (Outcome.CUT, '{"a', None)


def test_an_error_inside_a_stream_is_the_servers():
    with serve(pieces('{"a', finish=None, failing="Internal server error", whole=False)) as fake:
        answer = one(fake.url, stream=True)
    assert (answer.outcome, answer.text) == (Outcome.SERVER_ERROR, '{"a')
    assert "Internal server error" in answer.message


def closing(handler, body):
    handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"id":')
    handler.wfile.flush()
    cut(handler)


GARBAGE = {
    "page": lambda handler, body: send(handler, 200, b"<html>Sign in</html>", "text/html"),
    "broken json": lambda handler, body: send(handler, 200, b'{"id": "x", "choi'),
    "other json": lambda handler, body: send(handler, 200, {"hello": 1}),
    "a list": lambda handler, body: send(handler, 200, [1, 2]),
    "no choices": lambda handler, body: send(handler, 200, chat("{}") | {"choices": []}),
    "binary": lambda handler, body: send(handler, 200, b"\xff\xfe\x00\x01"),
}
ENDINGS = {
    "refused": (error(400, "The min_p and logit_bias sampling parameters are not yet supported"), Outcome.REFUSED, 400),
    "unprocessable": (error(422, "no"), Outcome.REFUSED, 422),
    "key": (error(401, "Unauthorized"), Outcome.UNAUTHORISED, 401),
    "model": (error(404, "The model `m` does not exist."), Outcome.NOT_FOUND, 404),
    "died": (error(500, "Internal server error"), Outcome.SERVER_ERROR, 500),
    "engine dead": (error(503, "EngineCore encountered an issue."), Outcome.SERVER_ERROR, 503),
    "cut": (lambda handler, body: cut(handler), Outcome.CUT, None),
    "cut inside": (closing, Outcome.CUT, None),
    "late": (lambda handler, body: threading.Event().wait(3), Outcome.TIMEOUT, None),
    **{name: (reply, Outcome.NOT_OPENAI, None) for name, reply in GARBAGE.items()},
}


@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_request_can_end_each_with_one_attempt(name):
    reply, outcome, status = ENDINGS[name]
    with serve(reply) as fake:
        answer = one(fake.url, Limits(timeout_s=0.5, total_s=5, pause_s=0.01))
    assert (answer.outcome, answer.attempts[0].status) == (outcome, status)
    assert len(answer.attempts) == len(fake.asked) == 1
    assert answer.message
    assert judge(answer).verdict is None


def test_not_http_at_all():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak():
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            connection.sendall(b"220 mail.example ESMTP\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
            connection.close()

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        answer = one(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(5)
    assert answer.outcome is Outcome.NOT_OPENAI


def test_an_overloaded_server_is_asked_again_and_each_attempt_is_kept():
    replies = iter([error(503, "full"), lambda h, b: send(h, 429, {}, headers={"Retry-After": "0.01"}), ok])
    with serve(lambda handler, body: next(replies)(handler, body)) as fake:
        answer = one(fake.url)
    assert [attempt.outcome for attempt in answer.attempts] == [Outcome.OVERLOADED, Outcome.OVERLOADED, Outcome.OK]
    assert [attempt.status for attempt in answer.attempts] == [503, 429, None]
    assert len(fake.asked) == 3


def test_an_overload_that_stays_ends_after_the_retries():
    with serve(error(503, "full")) as fake:
        answer = one(fake.url)
    assert answer.outcome is Outcome.OVERLOADED
    assert len(answer.attempts) == len(fake.asked) == 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_no_server_ends_all_requests_quickly():
    answers = client.send(parse_address(f"http://127.0.0.1:{free_port()}", {}), "m", asks(50), FAST)
    outcomes = {answer.outcome for answer in answers}
    assert outcomes <= {Outcome.UNREACHABLE, Outcome.NOT_SENT}
    assert answers[0].outcome is Outcome.UNREACHABLE
    assert answers[-1].outcome is Outcome.NOT_SENT
    assert "an earlier request ended with unreachable" in answers[-1].message


def test_https_to_a_server_that_speaks_http_is_a_tls_error():
    with serve(ok) as fake:
        answer = one(fake.url.replace("http://", "https://"))
        assert answer.outcome is Outcome.TLS
        assert len(answer.attempts) == 1


def test_a_certificate_that_is_not_trusted_is_a_tls_error():
    caught = RuntimeError("Connection error.")
    caught.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate")
    assert read_error(caught)[0] is Outcome.TLS


def test_no_more_requests_at_once_than_allowed():
    gate = threading.Event()

    def slow(handler, body):
        gate.wait(0.05)
        ok(handler, body)

    with serve(slow) as fake:
        client.send(parse_address(fake.url, {}), "m", asks(12), Limits(concurrency=3, timeout_s=5))
    assert fake.most_at_once == 3


def test_a_server_that_hangs_is_given_up_and_all_ends_within_the_total():
    with serve(lambda handler, body: threading.Event().wait(2)) as fake:
        answers = client.send(
            parse_address(fake.url, {}), "m", asks(30), Limits(concurrency=1, timeout_s=0.1, total_s=5)
        )
    assert [answer.outcome for answer in answers[:3]] == [Outcome.TIMEOUT] * 3
    assert {answer.outcome for answer in answers[3:]} == {Outcome.NOT_SENT}
    with serve(lambda handler, body: threading.Event().wait(2)) as fake:
        answers = client.send(
            parse_address(fake.url, {}), "m", asks(3), Limits(concurrency=1, timeout_s=9, total_s=0.2)
        )
    assert [answer.outcome for answer in answers] == [Outcome.TIMEOUT, Outcome.NOT_SENT, Outcome.NOT_SENT]
    assert "limit of 0.2 s for all requests" in answers[-1].message


SECRET = "sk-very-secret/1"


def test_a_key_and_a_password_are_sent_and_never_shown():
    def echo(handler, body):
        send(handler, 400, {"error": {"message": f"bad key {handler.headers['Authorization']} {SECRET}", "code": 400}})

    with serve(echo, metrics="x 1\n") as fake:
        host = fake.url.removeprefix("http://")
        for url, environ, sent in (
            (fake.url, {"OPENAI_API_KEY": SECRET}, f"Bearer {SECRET}"),
            (f"http://me:sk-very-secret%2F1@{host}/v1?key={SECRET}", {}, "Basic bWU6c2stdmVyeS1zZWNyZXQvMQ=="),
        ):
            address = parse_address(url, environ)
            seen = checking.check(address, asks(), limits=FAST)
            assert all(headers["authorization"] == sent for headers in fake.headers)
            shown = (
                json.dumps(verdict.to_dict(seen)) + verdict.to_text(verdict.to_dict(seen)) + repr(address) + repr(seen)
            )
            assert "very-secret" not in shown
            assert "me:" not in shown
            assert "bWU6" not in shown
            assert address.root == fake.url
            fake.headers.clear()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h/", "http://", "http://h:port/", "", "http://u:pw@/v1"])
def test_what_is_no_address_is_refused_without_its_credentials(url):
    with pytest.raises(SpecError, match="is no address of a server") as caught:
        parse_address(url, {})
    assert "pw" not in str(caught.value)


CALL = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Oslo"}'}}


@pytest.mark.parametrize(
    ("calls", "text", "finish", "kind"),
    [
        ([CALL], "", "tool_calls", OutputClass.VALID),
        ([CALL, CALL], "", "tool_calls", OutputClass.VALID),
        (
            [CALL | {"function": {"name": "get_time", "arguments": '{"town": 1}'}}],
            "",
            "tool_calls",
            OutputClass.INVALID,
        ),
        ([CALL | {"function": {"name": "get_time", "arguments": '{"city": "Os'}}], "", "length", OutputClass.TRUNCATED),
        ([CALL | {"function": {"name": "get_tim", "arguments": "{}"}}], "", "tool_calls", OutputClass.INVALID),
        ([], "<tool_call>{", "stop", OutputClass.INVALID),
        ([], "<tool_call>{", "length", OutputClass.TRUNCATED),
        ([], "It is noon.", "stop", OutputClass.NOT_JUDGED),
        ([], " ", "stop", OutputClass.EMPTY),
    ],
)
def test_calls_of_tools_are_judged_by_their_schemas(calls, text, finish, kind):
    with serve(lambda h, b: send(h, 200, chat(text, finish, message={"tool_calls": calls}))) as fake:
        request = ask(0, Prompt("p", text="x", tools=(TOOL,)), WORKLOAD)
        answer = client.send(parse_address(fake.url, {}), "m", [request], FAST)[0]
    assert judge(answer).verdict.kind is kind


COUNTERS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 20
vllm:generation_tokens_total{engine="0"} 50
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop"} 1
"""


def test_a_check_in_which_nothing_is_wrong():
    with serve(ok, metrics=COUNTERS, version='{"version": "0.32.0"}') as fake:

        def reply(handler, body):
            fake.gets["/metrics"] = (
                200,
                COUNTERS.replace(" 10\n", " 14\n").replace(" 40\n", " 52\n").replace(" 20\n", " 26\n"),
                "text/plain",
            )
            ok(handler, body)

        fake.reply = reply
        report = verdict.to_dict(checking.check(parse_address(fake.url, {}), asks(2), limits=FAST))
    assert report["problems"] == []
    assert (report["version"], report["model"], report["outputs"]) == ("0.32.0", "m", {"valid": 2})
    found = report["acceptance"]
    assert (found["drafts"], found["draft_tokens"], found["accepted_tokens"]) == (4, 12, 6)
    assert (found["acceptance_rate"], found["mean_acceptance_length"], found["counting"]) == (0.5, 2.5, "engine")
    contained = {row["name"]: row["contained"] for row in report["build"]}
    assert contained["stops-at-end"] is True
    assert contained["verified-counter"] is False
    assert verdict.to_text(report).endswith("nothing is wrong")


def test_invalid_outputs_and_what_the_log_got_meanwhile_are_wrong(tmp_path):
    log = tmp_path / "engine.log"
    old = (
        "ERROR 01-01 00:00:00 [x.py:1] Unexpected: grammar rejected tokens [1] for request old. Terminating request.\n"
    )
    log.write_text(old)

    def reply(handler, body):
        with log.open("a") as out:
            out.write(old.replace("old", f"r{len(fake.asked)}"))
            out.write(
                "ERROR 01-01 00:00:01 [x.py:1] Failed to advance FSM for request p for tokens 7. Please file it.\n"
            )
        send(handler, 200, chat('{"a": }'))

    with serve(reply, metrics=COUNTERS, version='{"version": "0.28.0"}') as fake:
        report = verdict.to_dict(checking.check(parse_address(fake.url, {}), asks(2), log_file=log, limits=FAST))
    assert report["log"]["fsm_events"]["commit"] == 2, "only what was written during the check"
    assert report["log"]["fsm_events"]["draft-probe"] in (1, 2)
    assert any("2 outputs are invalid" in sentence for sentence in report["problems"])
    assert any("2 requests that the engine ended" in sentence for sentence in report["problems"])
    (words,) = (sentence for sentence in report["advice"] if "cannot be seen from outside" in sentence)
    assert words.startswith("requests die of refused tokens: vLLM 0.28.0 lacks changes that 0.33.0 has")
    assert "(vllm#52805)" in words
    assert "(vllm#44297)" not in words, "0.28.0 has it"
    assert report["answers"][0]["position"] == 6


def test_a_rotated_log_is_said(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("x" * 100)

    def reply(handler, body):
        log.write_text("")
        ok(handler, body)

    with serve(reply, metrics=COUNTERS) as fake:
        report = verdict.to_dict(checking.check(parse_address(fake.url, {}), asks(), log_file=log, limits=FAST))
    assert report["log"] is None
    assert any("cut or rotated" in note for note in report["notes"])


def command(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ((404, '{"detail": "Not Found"}', "x"), "this is not the address of an OpenAI-compatible server"),
        ((200, "<html>", "x"), "does not list models: the answer begins with '<html>'"),
        ((200, '{"data": []}', "x"), "lists no model"),
        ((401, "{}", "x"), "answers with 401 Unauthorized: no key is set"),
        ((500, "{}", "x"), "answers with 500"),
    ],
)
def test_a_wrong_address_is_one_sentence_and_exit_code_1(models, sentence):
    with serve(ok) as fake:
        fake.gets["/v1/models"] = models
        code, text = command("server", "check", fake.url)
    assert code == 1
    assert sentence in text
    assert fake.asked == []


def test_the_command_with_a_model_that_is_not_there_and_with_bad_input(tmp_path):
    with serve(ok) as fake:
        code, text = command("server", "check", fake.url, "--model", "other", "--json")
    assert code == 1
    assert json.loads(text)["problems"] == ["the server has no model 'other', it has m"]
    with pytest.raises(SpecError, match="is no address of a server"):
        CliRunner().invoke(app, ["server", "check", "localhost:1"], catch_exceptions=False)


def test_a_repeated_request_has_an_id_and_a_seed_of_its_own():
    sampled = [ask(number, OBJECT, Workload(inline=("x",), temperature=1.0, seed=5)) for number in range(2)]
    assert [(a.request_id, a.repeat, a.body["seed"]) for a in checking.renumbered(sampled, 2)] == [
        ("0", 0, 5), ("1", 0, 6), ("2", 1, 7), ("3", 1, 8),
    ]  # fmt: skip
    assert "seed" not in checking.renumbered(asks(), 1)[0].body


def test_the_command_checks_a_bundled_set_and_repeats_it():
    with serve(ok, metrics=COUNTERS) as fake:
        code, text = command("server", "check", fake.url, "--prompts", "report-r0", "--repeat", "2", "--json")
    assert code == 0, text
    report = json.loads(text)
    assert report["requests"]["sent"] == 6
    assert [(a["request_id"], a["repeat"]) for a in report["answers"]] == [(str(i), i // 3) for i in range(6)]
    assert "us-east-1" in fake.asked[0]["messages"][0]["content"]


def test_the_command_says_how_many_answers_it_could_not_judge_and_can_force_calls():
    with serve(lambda h, b: send(h, 200, chat("It is noon.")), metrics=COUNTERS) as fake:
        code, text = command("server", "check", fake.url, "--prompts", "report-r1", "--force-tools")
    assert code == 0
    assert "50 outputs are not judged, the first: the model answered without calling a tool" in text
    assert {body["tool_choice"] for body in fake.asked} == {"required"}


def test_the_commands_of_the_readers(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text(
        "ERROR 01-01 00:00:00 [x.py:1] Failed to advance FSM for request p for tokens 7. Please file an issue.\n"
    )
    code, text = command("log", str(log))
    assert (code, "1 draft-probe (harmless)" in text) == (0, True)
    log.write_text(
        "ERROR 01-01 00:00:00 [x.py:1] Unexpected: grammar rejected tokens [1] for request a. Terminating request.\n"
    )
    code, text = command("log", str(log), "--json")
    assert (code, json.loads(text)["fsm_events"]["terminated_requests"]) == (1, 1)
    saved = tmp_path / "metrics.txt"
    saved.write_text(COUNTERS)
    code, text = command("metrics", str(saved))
    assert (code, "acceptance 50.0% of drafted, mean acceptance length 3.000" in text) == (0, True)
    with serve(ok, metrics=COUNTERS.replace("} 20", "} 50")) as fake:
        code, text = command("metrics", fake.url, "--json")
    assert code == 1
    assert json.loads(text)["breaches"] == ["engine 0: metrics reader: accepted 50 is more than drafted 40"]


def test_the_bundled_sets_of_the_reports():
    r0, r1 = (workloads.load(Workload(prompts=name)) for name in ("report-r0", "report-r1"))
    assert len(r0) == 3
    assert len({prompt.messages for prompt in r0}) == 1
    assert len(r1) == 50
    assert all(prompt.tools for prompt in r1)
    assert all(tool["function"]["strict"] for prompt in r1 for tool in prompt.tools)


def test_starting_the_command_imports_neither_the_client_nor_an_engine():
    import subprocess
    import sys

    heavy = ("openai", "vllm", "torch", "prometheus_client", "pandas")
    script = f"import sys, specgram_lab.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_redirection_to_another_server_is_not_followed_and_gets_no_key():
    with serve(ok, metrics=COUNTERS) as other, serve(ok) as fake:
        fake.gets["/metrics"] = (302, "", "text/plain")
        fake.more = {"Location": f"{other.url}/metrics"}
        seen = checking.check(parse_address(fake.url, {"OPENAI_API_KEY": SECRET}), asks(), limits=FAST)
    assert other.headers == []
    assert any("it redirects to" in sentence for sentence in seen.unseen)


def test_a_notebook_has_a_loop_of_its_own():
    async def cell():
        return one(fake.url)

    with serve(ok) as fake:
        assert asyncio.run(cell()).outcome is Outcome.OK


def test_a_log_that_is_not_there_is_refused_before_anything_is_sent(tmp_path):
    with serve(ok) as fake, pytest.raises(LogError, match=r"no\.log cannot be read: No such file"):
        checking.check(parse_address(fake.url, {}), asks(), log_file=tmp_path / "no.log", limits=FAST)
    assert fake.asked == []


ODD = [None, 1, -1, 1.5, "x", "\ud800", [], {}, [1], {"a": 1}, True, float("nan"), 10**40, ["a", None]]


def odd(random: Random) -> dict:
    """An answer with a few of its values replaced by something that does not belong there."""
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "get_time", "arguments": "{}"}}
    content = chat("{}", message={"tool_calls": [call]}, metrics={"speculative_decoding": {"num_spec_steps": 2}})
    for _ in range(random.randint(1, 3)):
        place = content
        while True:
            key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], dict | list) and place[key] and random.random() < 0.8:
                place = place[key]
            else:
                place[key] = random.choice(ODD)
                break
    return content


@pytest.mark.parametrize("seed", range(4))
def test_odd_answers_of_the_api_become_outcomes(seed, tmp_path):
    random = Random(seed)
    with serve(lambda handler, body: send(handler, 200, odd(random))) as fake:
        tools = [ask(n, Prompt("p", text="x", tools=(TOOL,)), WORKLOAD) for n in range(100)]
        seen = checking.check(parse_address(fake.url, {}), tools, limits=FAST)
    report = verdict.to_dict(seen)
    json.dumps(report, allow_nan=False, ensure_ascii=False).encode()
    assert verdict.to_text(report).encode()
    assert set(report["requests"]["outcomes"]) == {"ok", "not_openai"}
    server = pytest.importorskip("specgram_lab.builders.server")
    rows = [server._row("run", item) for item in seen.judged]
    ledger.write_table(tmp_path, "requests", ledger.frame("requests", rows))
