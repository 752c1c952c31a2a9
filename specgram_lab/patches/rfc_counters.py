"""The patch ``rfc-counters``: vLLM reports drafted, verified and accepted tokens as vllm#64156 proposes.

Drafted is what the drafter proposed, verified what of it entered the target's forward pass, and a step is a spec step
where something was proposed. Both numbers are taken in the worker, verified after adaptive verification has shared out
its budget, and travel to the scheduler on the `ModelRunnerOutput`: as an attribute beside its fields, which pickle
carries, so that workers may be processes of their own. From the scheduler to the front end they take the fields that
vLLM has, and one more for ``verified``.

On CUDA the worker reads two small tensors back every step, which costs a synchronization; a build that means to keep
the counters would copy them with the sampled tokens.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements

COUNTER = "vllm:spec_decode_num_verified_tokens"
"""The new Prometheus counter (``_total`` is added in the exposition)."""
REQUEST_FIELD = "num_verified_draft_tokens"
"""Its name in the metrics of a request; ``per_step_verified`` holds it step by step."""
CARRIED = "specgram_counts"
"""Attribute of a `ModelRunnerOutput`: {request: (drafted, verified)}."""
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_METRICS = "vllm.v1.spec_decode.metrics"


class WorkerCounts:
    """What one worker knows: how long each request's waiting draft is, and the counts of steps not handed over yet."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._steps: deque[dict[str, tuple[int, int]]] = deque()

    def proposed(self, drafts: Iterable[tuple[str, Sequence[int]]]) -> None:
        """The drafter proposed these tokens for the next step of these requests; -1 means none from there on."""
        for request, tokens in drafts:
            tokens = list(tokens)
            self._waiting[request] = tokens.index(-1) if -1 in tokens else len(tokens)

    def executed(self, scheduler_output: Any, slots: Mapping[str, int], unfinished: Collection[str] = ()) -> None:
        """A forward pass ran; ``slots`` counts each request's draft slots in it. See `hooks.Listener`."""
        for request in scheduler_output.finished_req_ids:
            self._waiting.pop(request, None)
        counts = {}
        for request in scheduler_output.num_scheduled_tokens:
            drafted = 0 if request in unfinished else self._waiting.pop(request, 0)
            counts[request] = (drafted, min(slots.get(request, 0), drafted))
        self._steps.append(counts)

    def attach(self, output: Any) -> None:
        """Put the counts of the oldest step on its output; asynchronous outputs hold the one that will travel."""
        if not self._steps:
            return
        counts = self._steps.popleft()
        for holder in ("model_runner_output", "_model_runner_output"):
            output = getattr(output, holder, output)
        if output is not None:
            setattr(output, CARRIED, counts)


COUNTS = WorkerCounts()


def count_in_worker(changes: Replacements, runner: str) -> None:
    """Hook the model runner; the scripted executor speaks to `COUNTS` itself."""
    from specgram_lab.samplers import hooks

    if runner == "scripted":
        return
    if runner == "v2":
        hooks.hook_v2(changes, COUNTS)
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    else:
        hooks.hook_v1(changes, COUNTS)
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        COUNTS.attach(output)
        return output

    original = changes.set(GPUModelRunner, "sample_tokens", sample_tokens)


def count_in_scheduler(changes: Replacements) -> None:
    """The worker's counts take the place of the scheduler's own, for the step and for each request."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        counts = getattr(output, CARRIED, None)
        if counts is None and scheduler_output.scheduled_spec_decode_tokens:
            raise RuntimeError("a step with drafts came back without the worker's counts: rfc-counters is off there")
        self.specgram_stats = None
        for request_id, drafted, verified, accepted in _counted(self, scheduler_output, output, counts or {}):
            if self.specgram_stats is None:
                self.specgram_stats = SpecDecodingStats.new(self.num_spec_tokens)
            self.specgram_stats.observe_draft(num_draft_tokens=drafted, num_accepted_tokens=accepted)
            self.specgram_stats.num_verified_tokens += verified
            metrics = self.requests[request_id].spec_decode_metrics
            if metrics is not None:
                detailed = self.spec_decode_metrics_level == "detailed"
                original_observe(metrics, num_draft_tokens=drafted, num_accepted=accepted, detailed=detailed)
                metrics.num_verified_tokens += verified
                if detailed:
                    metrics.per_step_verified = metrics.per_step_verified or []
                    metrics.per_step_verified.append(verified)
        return original_update(self, scheduler_output, output)

    def make_stats(self: Any, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any) -> Any:
        own, self.specgram_stats = getattr(self, "specgram_stats", None), None
        return original_stats(self, own, *args, **kwargs)

    def observe(self: Any, *args: Any, **kwargs: Any) -> None:
        """The step was counted before the scheduler looked at it."""

    original_update = changes.set(Scheduler, "update_from_output", update_from_output)
    original_stats = changes.set(Scheduler, "make_stats", make_stats)
    original_observe = changes.set(RequestSpecDecodeMetrics, "observe", observe)


def _counted(
    scheduler: Any, scheduler_output: Any, output: Any, counts: Mapping[str, tuple[int, int]]
) -> Iterable[tuple[str, int, int, int]]:
    """Request, drafted, verified and accepted of every spec step that the scheduler is about to take in."""
    for request_id in scheduler_output.num_scheduled_tokens:
        drafted, verified = counts.get(request_id, (0, 0))
        request = scheduler.requests.get(request_id)
        if not drafted or request is None or request.is_finished():
            continue
        if getattr(request, "num_stale_output_tokens", 0) > 0 and request.drop_stale_output:
            continue
        sampled = output.sampled_token_ids[output.req_id_to_index[request_id]] if output.sampled_token_ids else ()
        if sampled:
            yield request_id, drafted, verified, min(len(sampled) - 1, verified)


def report(changes: Replacements) -> None:
    """``verified`` beside ``drafted`` and ``accepted``: Prometheus, the periodic log line, the request's metrics."""
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.metrics.utils import create_metric_per_engine
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

    add_field(changes, SpecDecodingStats, "num_verified_tokens", int, 0)
    add_field(changes, RequestSpecDecodeMetrics, "num_verified_tokens", int, 0)
    add_field(changes, RequestSpecDecodeMetrics, "per_step_verified", list[int], ())

    def to_dict(self: Any) -> dict[str, Any]:
        content: dict[str, Any] = original_dict(self) | {REQUEST_FIELD: self.num_verified_tokens}
        return content | ({"per_step_verified": list(self.per_step_verified)} if self.per_step_verified else {})

    def init(self: Any, speculative_config: Any, labelnames: list[str], labels: Any, *args: Any, **kw: Any) -> None:
        original_init(self, speculative_config, labelnames, labels, *args, **kw)
        self.specgram_verified = None
        if speculative_config is not None:
            about = "Number of draft tokens that entered the target's forward pass."
            counter = self._counter_cls(name=COUNTER, documentation=about, labelnames=labelnames)
            self.specgram_verified = create_metric_per_engine(counter, labels)

    def observe(self: Any, stats: Any, engine_idx: int = 0) -> None:
        original_observe(self, stats, engine_idx)
        if self.specgram_verified is not None:
            self.specgram_verified[engine_idx].inc(stats.num_verified_tokens)

    def observe_for_log(self: Any, stats: Any) -> None:
        original_log_observe(self, stats)
        self.specgram_verified += stats.num_verified_tokens

    def reset(self: Any) -> None:
        original_reset(self)
        self.specgram_verified = 0

    def log(self: Any, *args: Any, **kwargs: Any) -> None:
        say = args[0] if args else kwargs.get("log_fn", logger.info)
        verified = self.specgram_verified

        def with_verified(message: str, *values: Any) -> None:
            head, mark, tail = (message % values).partition(", Per-position")
            say("%s", f"{head}, Verified: {verified} tokens{mark}{tail}")

        original_log(self, log_fn=with_verified)

    from vllm.v1.spec_decode.metrics import logger

    original_dict = changes.set(RequestSpecDecodeMetrics, "to_dict", to_dict)
    original_init = changes.set(SpecDecodingProm, "__init__", init)
    original_observe = changes.set(SpecDecodingProm, "observe", observe)
    original_log_observe = changes.set(SpecDecodingLogging, "observe", observe_for_log)
    original_reset = changes.set(SpecDecodingLogging, "reset", reset)
    original_log = changes.set(SpecDecodingLogging, "log", log)


def add_field(changes: Replacements, owner: Any, name: str, kind: Any, default: Any) -> None:
    """One more field of a dataclass, as far as its codec goes: sent and read, and not asked for by ``__init__``."""
    made: Any = dataclasses.make_dataclass("_Extra", [(name, kind, dataclasses.field(default=default))])
    changes.set(owner, name, default)
    changes.set(owner, "__annotations__", {**owner.__annotations__, name: kind})
    changes.set(owner, "__dataclass_fields__", owner.__dataclass_fields__ | made.__dataclass_fields__)


def count_as_proposed(changes: Replacements, options: Mapping[str, Any]) -> None:
    """All of it. Option ``runner``: v1, v2 or scripted."""
    report(changes)
    count_in_scheduler(changes)
    count_in_worker(changes, options.get("runner", "v1"))


PATCHES = {
    "rfc-counters": Patch(
        "rfc-counters",
        "drafted as proposed and a counter of verified tokens, the same steps sync and async (vllm#64156)",
        (
            f"{_SCHEDULER}.update_from_output",
            f"{_SCHEDULER}.make_stats",
            f"{_METRICS}:SpecDecodingStats",
            f"{_METRICS}:SpecDecodingLogging",
            f"{_METRICS}:SpecDecodingProm",
            "vllm.v1.metrics.stats:RequestSpecDecodeMetrics",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        ),
        count_as_proposed,
        optional=(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        ),
    )
}
