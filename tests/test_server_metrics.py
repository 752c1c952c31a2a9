"""The metrics reader: several engines, restarts, renamed families, other servers, damaged expositions."""

from __future__ import annotations

import json
import math
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest

from specgram_lab.semantics import SemanticsError
from specgram_lab.servers import metrics
from specgram_lab.servers.exposition import MetricsError, metrics_url, parse_exposition, read_metrics
from specgram_lab.servers.metrics import SpecCounters, breaches, difference, engines, to_dict


def exposition(
    per_engine: dict[str, dict], *, created: float | None = 1.79e9, total: str = "_total", model: str = "m"
) -> str:
    """Text as vLLM V1 writes it; per engine: drafts, draft_tokens, accepted and positions."""
    lines = []
    names = {"drafts": "num_drafts", "draft_tokens": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    for key, name in names.items():
        lines.append(f"# TYPE vllm:spec_decode_{name}{total} counter")
        for engine, values in per_engine.items():
            labels = f'{{engine="{engine}",model_name="{model}"}}'
            lines.append(f"vllm:spec_decode_{name}{total}{labels} {values[key]}")
        if created is not None:
            lines.append(f"# TYPE vllm:spec_decode_{name}_created gauge")
            lines += [
                f'vllm:spec_decode_{name}_created{{engine="{engine}",model_name="{model}"}} {created}'
                for engine in per_engine
            ]
    lines.append(f"# TYPE vllm:spec_decode_num_accepted_tokens_per_pos{total} counter")
    for engine, values in per_engine.items():
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos{total}{{engine="{engine}",model_name="{model}",'
            f'position="{p}"}} {n}'
            for p, n in values.get("positions", {}).items()
        ]
    return "\n".join(lines) + "\n"


def read(text: str):
    return engines(parse_exposition(text))


TWO = {
    "0": {"drafts": 10, "draft_tokens": 20, "accepted": 12, "positions": {0: 8, 1: 4}},
    "1": {"drafts": 20, "draft_tokens": 40, "accepted": 27, "positions": {0: 18, 1: 9}},
}


def test_positions_of_several_engines_are_added():
    total = read(exposition(TWO)).total
    assert (total.drafts, total.draft_tokens, total.accepted_tokens) == (30, 60, 39)
    assert total.per_position == (26, 13)
    assert total.per_position_rates[0] == pytest.approx(26 / 30)
    assert total.mean_acceptance_length == pytest.approx(1 + sum(total.per_position_rates))


def test_a_vector_that_was_overwritten_breaks_the_identity_and_names_the_reader():
    total = read(exposition(TWO)).total
    wrong = SpecCounters(drafts=30, draft_tokens=60, accepted_tokens=39, per_position=(18, 9))
    total.check()
    with pytest.raises(SemanticsError, match=r"metrics reader: mean acceptance length 2\.3 is not 1 \+ the sum"):
        wrong.check()


def test_exponents_and_created_gauges():
    text = (
        "# TYPE vllm:spec_decode_num_drafts_total counter\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 2.5e+03\n'
        "# TYPE vllm:spec_decode_num_drafts_created gauge\n"
        'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.79e+09\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1e+04\n'
        'vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="m"} 1.79e+09\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 5e+03\n'
        'vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="m"} 1.79e+09\n'
    )
    total = read(text).total
    assert (total.drafts, total.draft_tokens, total.accepted_tokens, total.acceptance_rate) == (2500, 10_000, 5000, 0.5)


def test_positions_are_ordered_as_numbers():
    positions = {p: 100 - p for p in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)}
    one = {"0": {"drafts": 100, "draft_tokens": 1200, "accepted": sum(positions.values()), "positions": positions}}
    assert read(exposition(one)).total.per_position == tuple(100 - p for p in range(12))


@pytest.mark.parametrize("labels", ["", "x", "-1", "1.0", "²"])
def test_a_position_that_is_no_number_is_named(labels):
    one = {"0": {"drafts": 1, "draft_tokens": 1, "accepted": 1, "positions": {labels: 1}}}
    found = read(exposition(one))
    assert found.total.per_position == ()
    assert "a whole number from 0 is wanted" in found.notes[0]


def test_a_missing_position_leaves_no_vector():
    one = {"0": {"drafts": 10, "draft_tokens": 30, "accepted": 6, "positions": {0: 5, 2: 1}}}
    found = read(exposition(one))
    assert found.total.per_position == ()
    assert "of 3 positions only 2 are there" in found.notes[0]


def later(**changes: int) -> dict:
    return {
        "0": {"drafts": 15, "draft_tokens": 30, "accepted": 20, "positions": {0: 12, 1: 8}} | changes,
        "1": TWO["1"],
    }


def test_the_difference_between_two_moments():
    found = difference(read(exposition(TWO)), read(exposition(later())))
    total = found.total
    assert (total.drafts, total.draft_tokens, total.accepted_tokens, total.per_position) == (5, 10, 8, (4, 4))
    assert found.notes == ()
    assert breaches(found) == []


def test_a_restart_is_seen_by_its_creation_time_and_by_a_lower_count():
    after = {"0": {"drafts": 11, "draft_tokens": 22, "accepted": 13, "positions": {0: 9, 1: 4}}}
    before = {"0": TWO["0"]}
    new = difference(read(exposition(before)), read(exposition(after, created=1.8e9)))
    assert new.total.drafts == 11
    assert "was restarted in between" in new.notes[0]
    lower = difference(read(exposition(after, created=None)), read(exposition(before, created=None)))
    assert lower.total.drafts == 10
    assert "was restarted in between" in lower.notes[0]


def test_an_engine_that_is_new_or_gone():
    one = {"0": TWO["0"]}
    new = difference(read(exposition(one)), read(exposition(TWO)))
    assert new.total.drafts == 20
    assert "engine 1 is new" in new.notes[0]
    gone = difference(read(exposition(TWO)), read(exposition(one)))
    assert gone.total.drafts == 0
    assert "engine 1 is gone" in gone.notes[0]


V0 = (
    '# TYPE vllm:spec_decode_draft_acceptance_rate gauge\nvllm:spec_decode_draft_acceptance_rate{model_name="m"} 0.5\n'
    '# TYPE vllm:spec_decode_efficiency gauge\nvllm:spec_decode_efficiency{model_name="m"} 0.4\n'
)
SGLANG = (
    "# TYPE sglang:spec_accept_rate gauge\n"
    'sglang:spec_accept_rate{tp_rank="0"} 0.5\nsglang:spec_accept_rate{tp_rank="1"} 0.7\n'
    '# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{tp_rank="0"} 2.5\n'
)


def test_v0_has_gauges_only_and_they_are_kept_as_they_are():
    content = to_dict(parse_exposition(V0))
    assert (content["definition"], content["total"], content["engines"]) == ("v0", None, [])
    assert [(g["name"], g["value"], g["definition"]) for g in content["gauges"]] == [
        ("vllm:spec_decode_draft_acceptance_rate", 0.5, "v0"),
        ("vllm:spec_decode_efficiency", 0.4, "v0"),
    ]
    assert any(note.startswith("no per-step counters in this version") for note in content["notes"])
    assert content["promql"] is None


def test_gauges_of_another_server_are_neither_added_nor_subtracted():
    found = read(SGLANG)
    assert found.total is None
    assert difference(found, read(SGLANG.replace("0.5", "0.9"))).total is None
    content = to_dict(parse_exposition(SGLANG))
    assert [gauge["value"] for gauge in content["gauges"]] == [0.5, 0.7, 2.5]
    assert content["definition"] is None


def test_an_old_name_of_a_gauge_is_given_its_new_one():
    content = to_dict(
        parse_exposition('# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc{engine="0"} 0.25\n')
    )
    assert content["gauges"] == [
        {
            "name": "vllm:gpu_cache_usage_perc", "labels": {"engine": "0"}, "value": 0.25,
            "now_called": "vllm:kv_cache_usage_perc",
        }
    ]  # fmt: skip
    assert content["total"] is None
    assert any("runs without a drafter" in note for note in content["notes"])


def test_a_gauge_with_a_counters_name_is_no_counter():
    text = exposition(TWO).replace("drafts_total counter", "drafts_total gauge")
    found = read(text)
    assert found.total.drafts is None
    assert "is declared as a gauge" in found.notes[0]
    assert found.total.mean_acceptance_length is None


def test_queries_for_users_carry_the_suffix():
    content = to_dict(parse_exposition(exposition(TWO)))
    assert content["definition"] == "v1"
    for query in content["promql"].values():
        names = re.findall(r"vllm:\w+", query)
        assert names
        assert all(name.endswith("_total") for name in names)


def test_counters_without_the_suffix_and_a_counter_of_verified_tokens():
    text = exposition(TWO, total="", created=None) + (
        'vllm:spec_decode_num_verified_tokens_total{engine="0",model_name="m"} 15\n'
        'vllm:spec_decode_num_verified_tokens_total{engine="1",model_name="m"} 30\n'
    )
    total = read(text).total
    assert (total.drafts, total.verified_tokens) == (30, 45)


def test_what_prometheus_client_writes_is_read_back_whatever_is_in_the_labels():
    registry = CollectorRegistry()
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    labels = ['a"b\\c\nd', '模型 {x="y"} 1 # EOF', "engine=0,"]
    for name in names:
        counter = Counter(name, "text", ["engine", "model_name"], registry=registry)
        for number, label in enumerate(labels):
            counter.labels(str(number), label).inc(number + 1)
    found = read(generate_latest(registry).decode())
    assert found.total.drafts == 6
    assert [dict(key)["model_name"] for key in found.engines] == labels
    assert all(item.created is not None for item in found.engines.values())


def test_a_sample_that_stands_there_twice_is_not_used():
    text = exposition(TWO)
    line = next(line for line in text.splitlines() if line.startswith("vllm:spec_decode_num_drafts_total"))
    parsed = parse_exposition(text + line + "\n")
    assert "stands there twice" in parsed.faults[0]
    assert engines(parsed).total.drafts is None


def test_sources_that_hold_no_metrics(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>Sign in</title>")
    with pytest.raises(MetricsError, match="holds no Prometheus metrics: it begins with '<!doctype html>"):
        read_metrics(str(page))
    page.write_text("")
    with pytest.raises(MetricsError, match="it is empty"):
        read_metrics(str(page))
    with pytest.raises(MetricsError, match="cannot be read: No such file"):
        read_metrics(str(tmp_path / "missing"))


def test_addresses():
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/metrics"):
        assert metrics_url(url) == "http://h:1/metrics"
    assert metrics_url("https://h/proxy/v1/") == "https://h/proxy/metrics"


SEEDS = [exposition({"0": TWO["0"]}), exposition({"1": TWO["1"]}, total="", created=None), V0, SGLANG]
PIECES = [
    "nan",
    "+Inf",
    "-1",
    "1e400",
    "{",
    "}",
    '"',
    "\n",
    "# TYPE",
    " ",
    "\\",
    "",
    "",
    "=",
    ",",
    "\x00",
    "é",
    "# EOF\n",
]


def mutated(random: Random) -> str:
    text = random.choice(SEEDS)
    for _ in range(random.randint(1, 4)):
        begin = random.randint(0, len(text))
        end = min(len(text), begin + random.randint(0, 60))
        middle = random.choice(
            [*PIECES, text[begin:end] * 2, str(random.randint(0, 10**6)), chr(random.randint(1, 0x2FFF))]
        )
        text = text[:begin] + middle + text[end:]
    return text


def check_invents_nothing(text: str) -> None:
    """Every count is a number of the text, and every rate one of two counts."""
    parsed = parse_exposition(text)
    content = to_dict(parsed)
    json.dumps(content, allow_nan=False)
    known = set()
    for word in re.findall(r"[^\s}]+", text):
        try:
            known.add(float(word))
        except ValueError:
            continue
    for engine in content["engines"]:
        counts = {name: engine[name] for name in metrics.COUNTERS if name in engine}
        assert set(counts.values()) <= known
        assert set(engine.get("per_position", [])) <= known
        if engine["acceptance_rate"] is not None:
            assert engine["acceptance_rate"] == counts["accepted_tokens"] / counts["draft_tokens"]
        if engine["mean_acceptance_length"] is not None:
            assert engine["mean_acceptance_length"] == 1 + counts["accepted_tokens"] / counts["drafts"]
    for gauge in content["gauges"]:
        assert math.isfinite(gauge["value"])
    found = engines(parsed)
    same = difference(found, found).total
    assert same is None or all(getattr(same, name) in (None, 0) for name in metrics.COUNTERS)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**32))
def test_ten_thousand_damaged_expositions_give_no_exception_and_no_number_that_is_not_in_them(seed):
    random = Random(seed)
    for _ in range(20):
        check_invents_nothing(mutated(random))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read(text):
    check_invents_nothing(text)
