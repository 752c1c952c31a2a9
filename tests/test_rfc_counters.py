"""The patch ``rfc-counters``: an engine that reports as the proposal says, everywhere, and nothing else changed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import engines
import pytest
from engines import NGRAM, SCHEMA, SELF, cell

from specgram_lab import scenarios, semantics
from specgram_lab.handover import CHILD

pytestmark = pytest.mark.engine

ON = {"patches": ["rfc-counters"]}
COUNTERS = ("drafts", "draft_tokens", "verified_tokens", "accepted_tokens")
# of those that need an engine of their own, the one with preemption
SETTINGS = (scenarios.Setting(), scenarios.load_scenario("resumed-in-parts").setting)
SCRIPTED = [name for name in scenarios.scenario_names() if scenarios.load_scenario(name).setting in SETTINGS]
REAL = {
    "v1-ngram": cell(NGRAM, SCHEMA, engine=ON, workload={"limit": 4}),
    "v1-self": cell(SELF, SCHEMA, engine=ON, workload={"limit": 4}),
    "v1-async-self": cell(SELF, SCHEMA, engine={**ON, "scheduling": "async"}, workload={"limit": 4}),
    "v2-self": cell(SELF, SCHEMA, engine={**ON, "runner": "v2"}, workload={"limit": 4}),
    "v2-async-self": cell(SELF, SCHEMA, engine={**ON, "runner": "v2", "scheduling": "async"}, workload={"limit": 4}),
    "v1-ngram-off": cell(NGRAM, SCHEMA, workload={"limit": 4}),
    "v1-ngram-unrecorded": cell(NGRAM, SCHEMA, engine={**ON, "record": False}, workload={"limit": 4}),
}


def counters(one):
    """What the engine's Prometheus counters say, by their names' last part."""
    found = json.loads((one.folder / CHILD).read_text(encoding="utf-8"))["counters"]
    return {name: found.get(f"vllm:spec_decode_num_{name}") for name in COUNTERS}


def recorded(one):
    total = semantics.totals(one.steps, (), ("rfc",), runs=one.runs).iloc[0]
    return dict(zip(COUNTERS, (int(total[n]) for n in ("spec_steps", "drafted", "verified", "accepted")), strict=True))


@pytest.fixture(scope="module")
def played(tmp_path_factory, target_folder):
    cells = {
        f"{name}-{side}": scenarios.cell(name, side, patches=("rfc-counters",))
        for name in SCRIPTED
        for side in ("sync", "async")
    }
    return engines.run(cells, tmp_path_factory.mktemp("scripted-rfc"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory, target_folder):
    return engines.run(REAL, tmp_path_factory.mktemp("rfc"))


@pytest.mark.parametrize("side", ["sync", "async"])
@pytest.mark.parametrize("name", SCRIPTED)
def test_the_scripted_engine_reports_what_the_file_expects(played, name, side):
    one = played[f"{name}-{side}"]
    assert one.run["outcome"] == "ok", one.run["reason"]
    expected = scenarios.load_scenario(name).expected[side]
    assert counters(one) == {
        "drafts": expected.spec_steps, "draft_tokens": expected.drafted,
        "verified_tokens": expected.verified, "accepted_tokens": expected.accepted,
    }  # fmt: skip
    assert one.run["engine_semantics"] == "rfc"
    assert semantics.reconcile(one.steps, one.requests, one.runs) == []


@pytest.mark.parametrize("name", SCRIPTED)
def test_sync_and_async_report_the_same_steps_and_drafts(played, name):
    sync, other = (counters(played[f"{name}-{side}"]) for side in ("sync", "async"))
    assert (sync["drafts"], sync["draft_tokens"]) == (other["drafts"], other["draft_tokens"])


@pytest.mark.parametrize("name", [name for name in REAL if name not in ("v1-ngram-off", "v1-ngram-unrecorded")])
def test_a_real_engine_reports_what_was_recorded(ran, name):
    one = ran[name]
    assert one.run["outcome"] == "ok", one.run["reason"]
    found = counters(one)
    assert found == recorded(one)
    assert found["draft_tokens"] >= found["verified_tokens"] >= found["accepted_tokens"] > 0
    assert min(semantics.reported(one.requests, one.runs).values()) > 0
    assert semantics.reconcile(one.steps, one.requests, one.runs) == []


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_real_engine_reports_the_same_steps_sync_and_async(ran, runner):
    sync, other = (ran[name] for name in (f"{runner}-self", f"{runner}-async-self"))
    assert list(sync.requests["text"]) == list(other.requests["text"])
    one, two = counters(sync), counters(other)
    assert (one["drafts"], one["draft_tokens"]) == (two["drafts"], two["draft_tokens"])
    assert one["verified_tokens"] < two["verified_tokens"]  # async verifies what the grammar then refuses


def test_switched_off_it_changes_nothing(ran):
    off, on = ran["v1-ngram-off"], ran["v1-ngram"]
    assert counters(off)["verified_tokens"] is None
    assert off.run["engine_semantics"] == "pre-64156"
    assert counters(off)["draft_tokens"] < counters(on)["draft_tokens"]
    assert list(off.requests["text"]) == list(on.requests["text"])


def test_it_needs_no_recorder(ran):
    assert ran["v1-ngram-unrecorded"].steps.empty
    assert counters(ran["v1-ngram-unrecorded"]) == counters(ran["v1-ngram"])


def in_process_of_its_own(script):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_counts_travel_with_the_output_and_their_absence_is_an_error(target_folder):
    """Workers in processes of their own send their output pickled; asynchronous ones wrap it."""
    in_process_of_its_own("""
        import pickle
        from types import SimpleNamespace
        from specgram_lab import patches
        from specgram_lab.patches.rfc_counters import CARRIED, WorkerCounts
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import ModelRunnerOutput
        counts = WorkerCounts()
        counts.proposed([("a", [5, 6, -1, -1]), ("b", [1, 2, 3, 4]), ("gone", [1])])
        step = SimpleNamespace(finished_req_ids={"gone"}, num_scheduled_tokens={"a": 5, "b": 3, "c": 1})
        counts.executed(step, {"a": 4, "b": 2})
        counts.executed(step, {"a": 4, "b": 2})
        wrapped = SimpleNamespace(_model_runner_output=ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}))
        counts.attach(wrapped)
        read = pickle.loads(pickle.dumps(wrapped._model_runner_output))
        assert getattr(read, CARRIED) == {"a": (2, 2), "b": (4, 2), "c": (0, 0)}
        again = ModelRunnerOutput(["a"], {"a": 0})
        counts.attach(again)
        assert getattr(again, CARRIED)["b"] == (0, 0), "a draft is counted once"
        patches.activate(["rfc-counters"])
        step = SimpleNamespace(scheduled_spec_decode_tokens={"a": [1]})
        try:
            Scheduler.update_from_output(SimpleNamespace(), step, ModelRunnerOutput(["a"], {"a": 0}))
        except RuntimeError as error:
            assert "without the worker's counts" in str(error)
        else:
            raise AssertionError("nothing was said")
    """)


def test_undone_it_leaves_everything_as_it_was(target_folder):
    """In a process of its own: every symbol, class attribute and dataclass field before and after."""
    in_process_of_its_own("""
        from specgram_lab import patches
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
        from vllm.v1.spec_decode import metrics
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        owners = (Scheduler, RequestSpecDecodeMetrics, metrics.SpecDecodingStats, metrics.SpecDecodingLogging,
                  metrics.SpecDecodingProm, GPUModelRunner)
        patches.activate(["recorder"], {"recorder": {"runner": "v1"}})  # it replaces some of the same symbols
        before = [dict(vars(owner)) for owner in owners]
        patches.activate(["rfc-counters"], {"rfc-counters": {"runner": "v1"}})
        changed = [owner.__name__ for owner, old in zip(owners, before) if dict(vars(owner)) != old]
        assert changed == [owner.__name__ for owner in owners], changed
        stats = metrics.SpecDecodingStats.new(4)
        stats.num_verified_tokens += 3
        import msgspec
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=metrics.SpecDecodingStats)
        assert read.num_verified_tokens == 3, read
        patches.deactivate("rfc-counters")
        left = [owner.__name__ for owner, old in zip(owners, before) if dict(vars(owner)) != old]
        # msgspec keeps what it knows of a class on the class
        assert [name for name in left if name != "SpecDecodingStats"] == [], left
    """)
