"""What a build contains, from its version and from what was seen; and counters that an earlier run left behind."""

from __future__ import annotations

import pytest

from specgram_lab.builders import options
from specgram_lab.servers import verdict
from specgram_lab.servers.address import parse_address
from specgram_lab.servers.builds import CHANGES, contains, release, survey
from specgram_lab.servers.check import Seen
from specgram_lab.servers.exposition import parse_exposition
from specgram_lab.servers.log import read_log
from specgram_lab.servers.metrics import difference, engines
from specgram_lab.spec import parse_cell

BY_NAME = {change.name: change for change in CHANGES}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.32.0", (0, 32)), ("v0.28.0", (0, 28)), ("0.32.0+cpu", (0, 32)), ("0.30.1.post1", (0, 30)),
        ("0.31.0+cu130", (0, 31)), ("0.28.1rc0", None), ("0.1.dev20051+g487ecf187", None),
        ("0.26.1rc1.dev1045+g3406ec1da", None), ("", None), (None, None),
    ],
)  # fmt: skip
def test_only_a_released_version_says_what_is_in_it(text, found):
    assert release(text) == found


@pytest.mark.parametrize(
    ("name", "version", "contained"),
    [
        ("stops-at-end", "0.28.0", False), ("stops-at-end", "0.27.0", False), ("stops-at-end", "0.30.0", True),
        ("compact-separators", "0.31.0", False), ("compact-separators", "0.33.0", True),
        ("verified-counter", "0.33.0", False), ("verified-counter", "0.34.0", None),
        ("per-request-metrics", "0.29.0", True), ("stops-at-end", "0.29.1", True),
        ("stops-at-end", "0.28.1rc0", None), ("stops-at-end", None, None),
    ],
)  # fmt: skip
def test_of_what_was_not_read_nothing_is_claimed(name, version, contained):
    assert contains(BY_NAME[name], version) is contained


def test_what_was_seen_is_better_evidence_than_a_version():
    rows = {row["name"]: row for row in survey("0.33.0", {"verified-counter": True})}
    assert (rows["verified-counter"]["contained"], rows["verified-counter"]["known_by"]) == (True, "seen")
    assert rows["stops-at-end"]["known_by"] == "version 0.33.0"
    unknown = {row["name"]: row for row in survey(None, {})}
    assert {row["contained"] for row in unknown.values()} == {None}


PROBE = "ERROR 11-29 15:57:55 [x.py:1] Failed to advance FSM for request r for tokens 271. Please file it.\n"
NAMED = "ERROR 11-29 15:57:55 [x.py:1] Unexpected: grammar terminated or rejected draft token 271 for request r"
NAMED += " during bitmask fill.\n"
DEAD = "ERROR 11-29 15:57:55 [x.py:1] Unexpected: grammar rejected tokens [271] for request r. Terminating request.\n"


@pytest.mark.parametrize(
    ("version", "log", "words"),
    [
        ("0.28.0", PROBE, "harmless; 0.29.0 and later no longer log those behind a reasoning end (vllm#53046)"),
        ("0.29.0", PROBE, "harmless; this build asks the grammar beforehand, so there should be none: report it"),
        ("0.28.1rc0", PROBE, "harmless; its version does not say what is in it; specgram doctor --wheel tells it"),
        (None, PROBE + NAMED, "harmless; this build asks the grammar beforehand"),
        ("0.30.0", PROBE + DEAD, "vLLM 0.30.0 lacks changes that 0.33.0 has, and which of them is wanted here cannot"),
        ("0.33.0", PROBE + DEAD, "0.33.0 lacks no change known to help: report it to vLLM"),
        ("0.34.0", PROBE + DEAD, "requests die of refused tokens: its version does not say what is in it"),
    ],
)
def test_advice_claims_no_more_than_version_and_log_show(tmp_path, version, log, words):
    (tmp_path / "server.log").write_text(log, encoding="utf-8")
    report = read_log(tmp_path / "server.log")
    seen = Seen(address=parse_address("http://h:1", {}), version=version, log=report)
    found = verdict.advice(seen)
    assert any(words in sentence for sentence in found), found
    dead = bool(report.terminated)
    assert ("until then no drafter for structured requests" in " ".join(found)) == dead


def test_counts_that_an_earlier_run_left_in_a_directory_are_not_this_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    cell = parse_cell({"workload": {"inline": ["x"]}})
    assert options.environment(cell, "cpu", tmp_path)["PROMETHEUS_MULTIPROC_DIR"] == ""
    text = 'vllm:spec_decode_num_drafts_total{{engine="0"}} {}\n'
    text += 'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {}\n'
    before, after = (engines(parse_exposition(text.format(*counts))) for counts in ((100, 70), (104, 73)))
    assert difference(before, after).total.drafts == 4
    assert difference(before, after).total.accepted_tokens == 3
