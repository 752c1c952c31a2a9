"""The log reader: every shape of line, refusals paired into events, four generations of acceptance lines."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import logging
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgram_lab.servers import log, records
from specgram_lab.servers.log import BLOCK, KEPT, LogError, read_log, scan, to_dict
from specgram_lab.servers.records import parse_record
from specgram_lab.servers.speclines import parse_spec_line

E = "\x1b"
COLOURED = (
    f"{E}[0;36m(Worker_TP5_EP5 pid=890){E}[0;0m {E}[31mERROR{E}[0m {E}[90m01-22 22:24:13{E}[0m"
    f" {E}[90m[backend_xgrammar.py:202]{E}[0m Failed to advance FSM for request r-7 for tokens 271."
    " Please file an issue."
)
FSM = "Failed to advance FSM for request r-7 for tokens 271. Please file an issue."
FILL = "Unexpected: grammar terminated or rejected draft token 271 for request r-7 during bitmask fill."
COMMIT = "Unexpected: grammar rejected tokens [271, 5] for request r-7. Terminating request."
OLD_COMMIT = "Unexpected: grammar rejected tokens [271, 5] for request r-7."
HEAD = "(EngineCore pid=12) ERROR 11-02 10:00:01 [x.py:1] "
V0 = (
    "INFO 10-16 19:05:47 metrics.py:367] Speculative metrics: Draft acceptance rate: 0.500, System efficiency: 0.400,"
    " Number of speculative tokens: 4, Number of accepted tokens: 20, Number of draft tokens: 40,"
    " Number of emitted tokens: 24."
)
FIRST_V1 = (
    "INFO 04-02 10:00:00 [metrics.py:62] SpecDecoding metrics: Draft acceptance rate: 50.0%, Accepted: 20 tokens,"
    " Drafted: 40 tokens"
)
SECOND_V1 = (
    "INFO 05-02 10:00:00 [metrics.py:76] SpecDecoding metrics: Draft acceptance rate: 75.0%, Mean acceptance length:"
    " 2.50, Accepted: 30 tokens, Drafted: 40 tokens, Per-position acceptance rate: 0.900, 0.600"
)
LATE_V1 = (
    "(APIServer pid=1) INFO 05-24 12:44:43 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.50,"
    " Accepted throughput: 3.00 tokens/s, Drafted throughput: 4.00 tokens/s, Accepted: 30 tokens, Drafted: 40 tokens,"
    " Per-position acceptance rate: 0.900, 0.600, Avg Draft acceptance rate: 75.0%"
)
NOTHING_V1 = (
    "(APIServer pid=1) INFO 05-24 12:44:53 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 1.00,"
    " Accepted throughput: 0.00 tokens/s, Drafted throughput: 0.00 tokens/s, Accepted: 0 tokens, Drafted: 0 tokens,"
    " Per-position acceptance rate: 0.000, 0.000, Avg Draft acceptance rate: nan%"
)


def read(*lines: str):
    return scan(io.BytesIO("".join(line + "\n" for line in lines).encode()))


def message(line: str) -> str:
    record = parse_record(line)
    assert record is not None
    return record.message


def test_a_coloured_line_of_an_old_worker():
    record = parse_record(COLOURED)
    assert (record.process, record.pid, record.level) == ("Worker_TP5_EP5", 890, "ERROR")
    assert (record.time, record.source, record.message) == ("01-22 22:24:13", "backend_xgrammar.py:202", FSM)
    event = read(COLOURED).events[0]
    assert (event.request_id, event.token_ids, event.kind.phase) == ("r-7", (271,), "draft-probe")
    assert event.record == record


@pytest.mark.parametrize("line", ["(EngineCore_0 pid=11) (VllmWorker TP0 pid=12) ", "", "\r", f"{E}[0m", "  "])
def test_a_line_without_a_body_is_skipped(line):
    assert parse_record(line) is None


BAR = "Processed prompts:  50%|█████     | 1/2 [00:01<00:01,  1.00s/it]"
PYTHON_JSON = {
    "asctime": "2026-01-22 22:24:13,001", "levelname": "ERROR", "name": "vllm.v1.structured_output.backend_xgrammar",
    "processName": "EngineCore", "process": 890, "message": FSM,
}  # fmt: skip
SHAPES = {
    "old wrapper": f"(EngineCore_0 pid=890) ERROR 01-22 22:24:13 [backend_xgrammar.py:168] {FSM}",
    "formatter": f"(EngineCore pid=890) ERROR 01-22 22:24:13 [backend_xgrammar.py:202] {FSM}",
    "relative path": f"(EngineCore pid=890) ERROR 01-22 22:24:13 [v1/structured_output/backend_xgrammar.py:202] {FSM}",
    "own prefix": f"prod-7 (EngineCore pid=890) ERROR 01-22 22:24:13 [backend_xgrammar.py:202] {FSM}",
    "own prefix, wrapper": f"(EngineCore pid=890) prod-7 ERROR 01-22 22:24:13 [backend_xgrammar.py:202] {FSM}",
    "json": json.dumps(PYTHON_JSON),
    "json, wrapper": f"(EngineCore pid=890) {json.dumps(PYTHON_JSON)}",
    "bar": f"\r{BAR}\r(EngineCore pid=890) ERROR 01-22 22:24:13 [backend_xgrammar.py:202] {FSM}",
    "bar, wrapper": f"(EngineCore_0 pid=890) \r{BAR}\rERROR 01-22 22:24:13 [backend_xgrammar.py:168] {FSM}",
    "bar without end": f"(EngineCore_0 pid=890) \r{BAR}ERROR 01-22 22:24:13 [backend_xgrammar.py:168] {FSM}",
    "windows": f"(EngineCore pid=890) ERROR 01-22 22:24:13 [backend_xgrammar.py:202] {FSM}\r",
    "ray": f"(EngineCore pid=890, ip=10.0.0.5) ERROR 01-22 22:24:13 [backend_xgrammar.py:202] {FSM}",
    "docker -t": f"2026-01-22T22:24:13.123456789Z (EngineCore pid=890) ERROR 01-22 22:24:13 [b.py:202] {FSM}",
    "compose": f"vllm-1  | (EngineCore pid=890) ERROR 01-22 22:24:13 [backend_xgrammar.py:202] {FSM}",
    "kubernetes": f"2026-01-22T22:24:13.123Z stderr F (EngineCore pid=890) ERROR 01-22 22:24:13 [b.py:202] {FSM}",
    "docker json-file": json.dumps(
        {"log": f"(EngineCore pid=890) ERROR 01-22 22:24:13 [b.py:202] {FSM}\n", "stream": "stderr", "time": "x"}
    ),
    "journal": f"Jan 22 22:24:13 box vllm[7]: (EngineCore pid=890) ERROR 01-22 22:24:13 [b.py:202] {FSM}",
    "journal iso": f"2026-01-22T22:24:13+0000 box vllm[7]: (EngineCore pid=890) ERROR 01-22 22:24:13 [b.py:202] {FSM}",
    "coloured": f"{E}[0;36m(EngineCore pid=890){E}[0;0m {E}[31mERROR{E}[0m {E}[90m01-22 22:24:13{E}[0m"
    f" {E}[90m[b.py:202]{E}[0m {FSM}",
}


@pytest.mark.parametrize("line", SHAPES.values(), ids=SHAPES)
def test_every_shape_of_a_line_gives_the_same_event(line):
    report = read("INFO something before", line, "INFO something after")
    assert len(report.events) == 1
    event = report.events[0]
    assert (event.request_id, event.token_ids, event.record.pid, event.record.level) == ("r-7", (271,), 890, "ERROR")
    assert event.record.message == FSM
    record = parse_record(line)
    assert (record.process, record.message) == (event.record.process, FSM)


@pytest.mark.parametrize(
    "line",
    [
        f"ERROR 01-22 22:24:13 [backend_xgrammar.py:158] {FSM}",
        FSM,
        f"2026-01-22 22:24:13,001 - vllm.backend_xgrammar - ERROR - {FSM}",
        f"[ERROR] vllm: {FSM}",
    ],
)
def test_a_line_without_a_process_gives_an_event_without_one(line):
    event = read(line).events[0]
    assert (event.record.process, event.record.pid, event.token_ids) == (None, None, (271,))


@pytest.mark.parametrize(
    "line",
    [
        f"(APIServer pid=1) INFO 01-22 22:24:13 [logger.py:39] Received request x: prompt: '{FSM}'",
        f'(APIServer pid=1) INFO 01-22 22:24:13 [logger.py:39] Received request x: prompt: "ERROR: {FSM}"',
        f"user wrote: {FSM}",
        '{"message": "he said ' + FSM + '", "levelname": "INFO"}',
        FSM.replace("Please", "please"),
        FSM.replace("271", "27x"),
        HEAD + COMMIT.replace("271", "9" * 30),
        "(EngineCore pid=12) ERROR 11-02 10:00:01 [x.py:1] Unexpected: grammar of this schema is odd.",
    ],
)
def test_text_that_only_quotes_a_refusal_is_none(line):
    report = read(line)
    assert report.events == []
    assert not report.phases


def phases(*lines: str) -> list[tuple[str, bool, bool]]:
    return [(event.kind.phase, event.kind.confirmed, event.kind.terminated) for event in read(*lines).events]


def test_a_refusal_alone_is_a_draft_probe_that_nobody_confirmed():
    assert phases(HEAD + FSM) == [("draft-probe", False, False)]


def test_a_refusal_in_the_mask_fill_is_one_confirmed_draft_probe():
    assert phases(HEAD + FSM, HEAD + FILL) == [("draft-probe", True, False)]


def test_a_refused_committed_token_ends_the_request_and_is_one_event():
    assert phases(HEAD + FSM, HEAD + COMMIT) == [("commit", True, True)]
    assert read(HEAD + FSM, HEAD + COMMIT).events[0].token_ids == (271,)


def test_an_older_build_lets_the_request_go_on():
    assert phases(HEAD + FSM, HEAD + OLD_COMMIT) == [("commit", True, False)]


def test_a_probe_before_a_commit_is_an_event_of_its_own():
    assert phases(HEAD + FSM, HEAD + FSM, HEAD + COMMIT) == [("draft-probe", False, False), ("commit", True, True)]


def test_other_requests_and_processes_in_between_do_not_part_a_pair():
    other = HEAD.replace("pid=12", "pid=13") + FSM.replace("r-7", "r-8").replace("271", "9")
    report = read(HEAD + FSM, other, LATE_V1, HEAD + COMMIT, other)
    assert report.phases == {"commit": 1, "draft-probe": 2}
    assert report.requests == {b"r-7", b"r-8"}
    assert report.terminated == 1


def test_a_commit_of_other_tokens_does_not_take_a_probe_with_it():
    assert read(HEAD + FSM.replace("271", "99"), HEAD + COMMIT).phases == {"draft-probe": 1, "commit": 1}


GUIDANCE = (
    "(EngineCore pid=12) WARNING 11-02 10:00:01 [backend_guidance.py:231] LLMatcher error: Parser Error:"
    " token \"⟨ null⟩\" doesn't satisfy the grammar; forced bytes: got ' '; applying '\"'"
)


def test_guidance_has_its_own_words():
    event = read(GUIDANCE).events[0]
    assert (event.kind.backend, event.kind.phase) == ("guidance", "draft-probe")
    assert (event.request_id, event.token_ids) == (None, ())
    report = read(GUIDANCE, HEAD + COMMIT)
    assert [(e.kind.backend, e.kind.phase, e.request_id) for e in report.events] == [("guidance", "commit", "r-7")]
    assert report.guidance == 1


def test_a_file_with_the_line_ends_of_windows_keeps_equal_lines_apart():
    assert read(*[HEAD + FSM + "\r"] * 3).phases == {"draft-probe": 3}


def test_lines_of_one_record_are_one_event():
    prefix = GUIDANCE[: GUIDANCE.index("LLMatcher")]
    assert read(GUIDANCE + "\r", prefix + "doesn't satisfy the grammar; state:\r", prefix + "end").phases == {
        "draft-probe": 1
    }


@pytest.mark.parametrize("shift", [0, 1, 2, 40])
def test_lines_of_one_record_are_one_event_across_the_end_of_a_block(shift):
    record = f"{HEAD}{FSM}\r\n{HEAD}{FSM}\n".encode()
    first = record.index(b"\n") + 1
    data = b"x" * (BLOCK - first - shift - 1) + b"\n" + record
    assert scan(io.BytesIO(data)).phases == {"draft-probe": 1}


def test_each_generation_of_the_acceptance_line_is_read():
    v0, first, second, late = (parse_spec_line(message(line)) for line in (V0, FIRST_V1, SECOND_V1, LATE_V1))
    assert (v0.definition, v0.accepted, v0.drafted, v0.emitted, v0.system_efficiency) == ("v0", 20, 40, 24, 0.4)
    assert (first.definition, first.accepted, first.drafted, first.acceptance_rate) == ("v1", 20, 40, 0.5)
    assert v0.acceptance_rate == first.acceptance_rate
    for line in (second, late):
        assert (line.accepted, line.drafted, line.acceptance_rate) == (30, 40, 0.75)
        assert (line.mean_acceptance_length, line.per_position) == (2.5, (0.9, 0.6))
        assert line.fault() is None


def test_nan_is_no_number():
    line = parse_spec_line(message(NOTHING_V1))
    assert (line.accepted, line.drafted, line.acceptance_rate) == (0, 0, None)
    content = to_dict(read(NOTHING_V1))
    assert content["acceptance"] == {"v1": {"lines": 1, "accepted": 0, "drafted": 0, "acceptance_rate": None}}
    assert "NaN" not in json.dumps(content, allow_nan=False)


def test_intervals_are_added_and_of_cumulative_lines_the_last_counts():
    later = V0.replace("accepted tokens: 20", "accepted tokens: 60").replace("draft tokens: 40", "draft tokens: 80")
    assert to_dict(read(FIRST_V1, LATE_V1, NOTHING_V1))["acceptance"]["v1"] == {
        "lines": 3, "accepted": 50, "drafted": 80, "acceptance_rate": 0.625,
    }  # fmt: skip
    assert to_dict(read(V0, later))["acceptance"] == {
        "v0": {"engines": 1, "accepted": 60, "drafted": 80, "emitted": 24, "acceptance_rate": 0.75}
    }
    assert to_dict(read(later, V0))["acceptance"]["v0"]["drafted"] == 120, "a count that went down is a new engine"


def test_without_a_line_there_is_no_acceptance():
    assert to_dict(read("INFO nothing"))["acceptance"] is None


@pytest.mark.parametrize(
    ("old", "new"),
    [("Accepted: 30", "Accepted: 3"), ("0.900, 0.600", "0.900"), ("75.0%", "nan%"), ("Drafted: 40", "Drafted: 4")],
)
def test_a_line_that_contradicts_itself_is_in_no_sum(old, new):
    report = read(LATE_V1.replace(old, new))
    assert to_dict(report)["acceptance"] is None
    assert "log reader" in report.notes[0]


def test_records_that_a_journal_left_out_are_reported():
    assert "journalctl --all" in read("Jan 22 22:24:13 box vllm[7]: [188B blob data]").notes[0]


def test_what_the_engine_says_of_itself():
    report = read(
        "(EngineCore pid=2) INFO 11-29 12:47:18 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: m,"
        " speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=4), tokenizer='m'",
        "(APIServer pid=1) INFO 11-29 12:47:05 [vllm.py:1605] Asynchronous scheduling is enabled.",
    )
    assert report.facts == {"version": "0.32.0", "engine": "1", "method": "ngram", "k": "4", "async": "enabled"}


def test_an_engine_that_failed_is_seen():
    report = read(f"{HEAD}EngineCore encountered a fatal error.", "vllm.v1.engine.exceptions.EngineDeadError: dead")
    assert report.failure_lines == 2
    assert report.failures[0].message == "EngineCore encountered a fatal error."


def test_gzip_utf16_and_a_beginning_in_the_middle(tmp_path):
    text = f"{HEAD}{FSM}\n{LATE_V1}\n"
    plain, packed, wide = (tmp_path / name for name in ("a.log", "a.gz", "wide.log"))
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    wide.write_bytes(text.replace("\n", "\r\n").encode("utf-16"))
    for path in (plain, packed, wide):
        assert read_log(path).phases == {"draft-probe": 1}
        assert read_log(path).acceptance.accepted == 30
    assert not read_log(plain, start=text.index("\n") + 1).phases
    with pytest.raises(LogError, match="was cut or rotated"):
        read_log(plain, start=10_000)
    with pytest.raises(LogError, match=r"missing\.log cannot be read: No such file"):
        read_log(tmp_path / "missing.log")


def test_a_line_across_the_end_of_a_block_and_a_long_bar_without_an_end():
    line = (HEAD + FSM + "\n").encode()
    for shift in range(0, len(line), 7):
        data = b"x" * (BLOCK - shift - 1) + b"\n" + line
        assert scan(io.BytesIO(data)).phases == {"draft-probe": 1}
    bars = f"\r{BAR}".encode() * (5 * BLOCK // len(BAR))
    assert scan(io.BytesIO(bars + b"\r" + line)).phases == {"draft-probe": 1}


def test_what_stands_before_a_message_is_remembered_only_where_it_is_a_heads_length():
    known = records._remembered.cache_info().misses
    report = read(json.dumps({"extra": "x" * 5000, "message": FSM, "levelname": "ERROR"}))
    assert report.phases == {"draft-probe": 1}
    assert records._remembered.cache_info().misses == known


def test_requests_and_tokens_are_told_apart_up_to_a_bound_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(log, "DISTINCT", 3)
    lines = [HEAD + FSM.replace("r-7", f"r-{n % 5}").replace("271", str(n % 5)) for n in range(20)]
    report = read(*lines)
    assert (report.phases["draft-probe"], len(report.requests)) == (20, 3)
    assert report.tokens == {0: 4, 1: 4, 2: 4}
    assert "more than 3 requests had a refusal" in report.notes[0]
    assert not read(*lines[:3]).notes


def test_a_storm_is_counted_and_a_bounded_part_kept():
    line = (HEAD + FSM + "\n").encode()
    report = scan(io.BytesIO(line * (3 * KEPT)))
    assert report.phases == {"draft-probe": 3 * KEPT}
    assert len(report.events) == KEPT


SEEDS = [COLOURED, V0, FIRST_V1, SECOND_V1, LATE_V1, NOTHING_V1, GUIDANCE, HEAD + FILL, HEAD + COMMIT, *SHAPES.values()]
PIECES = [E, "\r", "\n", "(", "pid=", "{", '"', "nan", "%", "9" * 30, "-1", "\x00", "�", "\ud800", ", ", "", "", ""]


def mutated(random: Random) -> str:
    """A seed with pieces cut out, doubled, overwritten or put in."""
    line = random.choice(SEEDS)
    for _ in range(random.randint(1, 3)):
        begin = random.randint(0, len(line))
        end = min(len(line), begin + random.randint(0, 40))
        middle = random.choice(
            [*PIECES, line[begin:end] * 2, chr(random.randint(1, 0x2FFF)), str(random.randint(0, 99))]
        )
        line = line[:begin] + middle + line[end:]
    return line


def numbers(text: str) -> set[int]:
    return {int(part) for part in re.findall(r"\d+", text)}


def check_invents_nothing(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    report = scan(io.BytesIO(data + b"\n"))
    content = to_dict(report)
    json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
    # what a JSON record spells with escapes stands for itself
    known = numbers(data.decode("utf-8", "replace")) | numbers(re.sub(r"\\u[0-9a-fA-F]{4}|\\.", " ", text))
    for event in report.events:
        assert {abs(token) for token in event.token_ids} <= known
        assert event.record.pid is None or event.record.pid in known
    assert sum(report.phases.values()) <= text.count("FSM") + text.count("grammar") + text.count("LLM")
    for found in (content["acceptance"] or {}).values():
        assert found["accepted"] <= found["drafted"]
    if report.acceptance.intervals == 1:
        assert {report.acceptance.accepted, report.acceptance.drafted} <= known
    parse_record(text)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32))
def test_ten_thousand_damaged_lines_give_no_exception_and_no_number_that_is_not_in_them(seed):
    random = Random(seed)
    for _ in range(20):
        check_invents_nothing(mutated(random))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read(text):
    check_invents_nothing(text)


def formatters(prefix: str = "") -> dict[str, logging.Formatter]:
    """The formatters of the installed vLLM, loaded without the package itself."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    spec = importlib.util.spec_from_file_location("vllm_formatter", root / "logging_utils" / "formatter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    form = (
        prefix
        + "(%(vllm_process_name)s pid=%(process)d) %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s"
    )
    return {
        f"{kind.__name__} {level}": kind(form, "%m-%d %H:%M:%S", log_level=level)
        for kind in (module.NewLineFormatter, module.ColoredFormatter)
        for level in ("INFO", "DEBUG")
    }


@pytest.mark.parametrize("prefix", ["", "prod-7 ", "[a]"])
def test_what_the_installed_vllms_formatters_write_is_read_back(prefix):
    words = [
        FSM,
        COMMIT,
        message(LATE_V1),
        message(GUIDANCE) + "\nstate: 'x'\n" + FSM[10:],
        f"user said:\n{LATE_V1}\n{FSM}",
    ]
    for name, formatter in formatters(prefix).items():
        lines = []
        for text in words:
            record = logging.LogRecord("vllm.x", logging.ERROR, "/a/b/backend_xgrammar.py", 202, text, (), None)
            record.vllm_process_name, record.process = "EngineCore_DP0", 890
            lines.append(formatter.format(record))
        report = read(*lines)
        assert sum(line.count("SpecDecoding metrics") for line in lines) == 2
        assert [(e.kind.phase, e.kind.backend, e.record.process, e.record.pid) for e in report.events] == [
            ("commit", "xgrammar", "EngineCore_DP0", 890), ("draft-probe", "guidance", "EngineCore_DP0", 890),
        ], name  # fmt: skip
        assert (report.acceptance.intervals, report.acceptance.accepted) == (1, 30), name
