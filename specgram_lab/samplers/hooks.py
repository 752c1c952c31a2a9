"""The patch ``recorder``: hooks in vLLM's scheduler, grammar backends and both model runners.

Nothing is changed in what the engine computes. One recorder a process, `RECORDER`; it belongs to engines whose
scheduler and worker share a process, which the lab's builders see to.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from specgram_lab.patches.registry import Patch, Replacements
from specgram_lab.samplers.recorder import Judgement, Recorder


class Listener(Protocol):
    """What the hooks in the model runners speak to, in this order: `executed`, then `proposed` for the next step."""

    def executed(self, scheduler_output: Any, slots: Mapping[str, int], unfinished: Collection[str] = ()) -> Any:
        """A forward pass ran; ``slots`` counts each request's draft slots in it, after adaptive verification.

        ``unfinished`` are the requests of which it computed only a part, and which say nothing yet.
        """

    def proposed(self, drafts: Iterable[tuple[str, Sequence[int]]]) -> None:
        """The drafter proposed these tokens for the next step of these requests; -1 means none from there on."""


RECORDER = Recorder()
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.structured_output:StructuredOutputManager"


def _reasoning(request: Any) -> bool:
    """Whether the request, as far as the structured-output manager knows, is still reasoning."""
    return getattr(request.structured_output_request, "reasoning_ended", None) is False


def _by_request(drafts: Any) -> dict[str, list[int]]:
    """A `DraftTokenIds` as real tokens per request, copied: vLLM changes the lists, and pads with -1."""
    pairs = zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
    return {request: [t for t in tokens if t != -1] for request, tokens in pairs}


def _valid_prefix(manager: Any, request: Any, tokens: list[int]) -> list[int]:
    """What the grammar accepts of a draft; before 0.30 the scheduler asked the grammar itself, outside reasoning."""
    if hasattr(manager, "validate_tokens"):
        return list(manager.validate_tokens(request, tokens))
    if not manager.should_advance(request):
        return tokens
    return list(request.structured_output_request.grammar.validate_tokens(tokens))


class _Words(logging.Handler):
    """Hands the engine's own words about a refusal to the recorder."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "advance FSM" in message or "doesn't satisfy the grammar" in message:
            RECORDER.said(message)
        elif message.startswith("Unexpected: grammar "):
            RECORDER.added(message)


def hook_scheduler(changes: Replacements) -> None:
    """Drafts as judged by the grammar, and what each step gave."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        proposed = _by_request(draft_token_ids)
        original_sync(self, draft_token_ids)
        for request_id, tokens in proposed.items():
            request = self.requests.get(request_id)
            if request is None or request.is_prefill_chunk or not request.use_structured_output:
                continue
            valid = len(request.spec_token_ids)
            RECORDER.judged(request_id, Judgement(valid, not _reasoning(request) or valid < len(tokens)))

    def update_draft_token_ids_in_output(self: Any, draft_token_ids: Any, scheduler_output: Any) -> None:
        proposed = _by_request(draft_token_ids)
        original_async(self, draft_token_ids, scheduler_output)
        struck = scheduler_output.num_invalid_spec_tokens or {}
        for request_id, tokens in proposed.items():
            request = self.requests.get(request_id)
            scheduled = scheduler_output.scheduled_spec_decode_tokens.get(request_id)
            if request is None or not scheduled or not request.use_structured_output:
                continue
            valid = len(scheduled) - struck.get(request_id, 0)
            if len(tokens) > len(scheduled):  # cut to the scheduled length before it was judged: judge the whole
                valid = len(_valid_prefix(self.structured_output_manager, request, tokens))
            RECORDER.judged(request_id, Judgement(valid, not _reasoning(request) or valid < len(tokens)))

    def get_grammar_bitmask(self: Any, scheduler_output: Any) -> Any:
        RECORDER.current_step, RECORDER.phase = RECORDER.step_of(scheduler_output), "draft-probe"
        try:
            return original_mask(self, scheduler_output)
        finally:
            RECORDER.phase = "commit"

    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        RECORDER.current_step = RECORDER.step_of(scheduler_output)
        before: dict[str, tuple[Any, int, list[int]]] = {}
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                stale = getattr(request, "num_stale_output_tokens", 0) > 0 and request.drop_stale_output
                if not stale:
                    index = output.req_id_to_index.get(request_id)
                    sampled = output.sampled_token_ids[index] if output.sampled_token_ids and index is not None else ()
                    # copied: vLLM cuts the list itself where the request stops
                    before[request_id] = (request, request.num_output_tokens, list(sampled))
                    RECORDER.reasoning[request_id] = _reasoning(request)
        result = original_update(self, scheduler_output, output)
        for request_id, (request, count, sampled) in before.items():
            if sampled:
                committed = request.num_output_tokens - count
                RECORDER.finished(scheduler_output, request_id, sampled, committed)
        return result

    original_sync = changes.set(Scheduler, "update_draft_token_ids", update_draft_token_ids)
    original_async = changes.set(Scheduler, "update_draft_token_ids_in_output", update_draft_token_ids_in_output)
    original_mask = changes.set(Scheduler, "get_grammar_bitmask", get_grammar_bitmask)
    original_update = changes.set(Scheduler, "update_from_output", update_from_output)


def hook_grammars(changes: Replacements) -> None:
    """Refusals, told apart by where they happen."""
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    def watch(owner: Any) -> None:
        def accept_tokens(self: Any, request_id: str, tokens: list[int]) -> bool:
            RECORDER.said("")
            accepted = original(self, request_id, tokens)
            if not accepted:
                RECORDER.refused(request_id, tokens)
            return bool(accepted)

        original = changes.set(owner, "accept_tokens", accept_tokens)

    watch(XgrammarGrammar)
    watch(GuidanceGrammar)
    words = _Words(level=logging.WARNING)
    for name in ("vllm.v1.structured_output", "vllm.v1.core.sched.scheduler"):
        logger = logging.getLogger(name)
        logger.addHandler(words)
        changes.at_end(partial(logger.removeHandler, words))


def hook_v1(changes: Replacements, listener: Listener = RECORDER) -> None:
    """Runner V1: the draft it holds, and the draft slots of the forward pass."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    fits = True

    def input_fits_in_drafter(self: Any, metadata: Any) -> bool:
        nonlocal fits
        fits = original_fits(self, metadata)
        return fits

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original_execute(self, scheduler_output, *args, **kwargs)
        state = self.execute_model_state
        if state is not None and scheduler_output.total_num_scheduled_tokens > 0:
            metadata = state.spec_decode_metadata
            slots = (
                {} if metadata is None else dict(zip(self.input_batch.req_ids, metadata.num_draft_tokens, strict=True))
            )
            listener.executed(scheduler_output, slots, unfinished(self))
        return result

    def unfinished(self: Any) -> set[str]:
        ids = self.input_batch.req_ids
        discarded = self.discard_request_mask.np[: len(ids)].tolist()
        return {request for request, gone in zip(ids, discarded, strict=True) if gone}

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        nonlocal fits
        fits = True
        ids, gone = list(self.input_batch.req_ids), unfinished(self)
        result = original_sample(self, grammar_output)
        drafts = self._draft_token_ids
        if drafts is not None:
            rows = drafts if isinstance(drafts, list) else drafts.tolist()
            if not fits:  # vLLM fills in zeros where the drafter was skipped
                rows = [[] for _ in ids]
            listener.proposed([(r, row) for r, row in zip(ids, rows, strict=True) if r not in gone])
        return result

    original_fits = changes.set(GPUModelRunner, "_input_fits_in_drafter", input_fits_in_drafter)
    original_execute = changes.set(GPUModelRunner, "execute_model", execute_model)
    original_sample = changes.set(GPUModelRunner, "sample_tokens", sample_tokens)


def prepare_v2() -> None:
    """On a CPU, put in the placeholders for streams and events, which must be there before V2's modules are loaded."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu.shm  # noqa: F401


def hook_v2(changes: Replacements, listener: Listener = RECORDER) -> None:
    """Runner V2: the same; the slots are read off the logits that AV left, after its reallocation."""
    prepare_v2()
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = original_execute(self, scheduler_output, *args, **kwargs)
        state = self.execute_model_state
        if state is not None and scheduler_output.total_num_scheduled_tokens > 0 and not kwargs.get("dummy_run"):
            batch = state.input_batch
            bonus = self.model_state.num_new_sampled_tokens_per_step
            slots: dict[str, int] = {}
            if batch.num_draft_tokens_per_req is not None:
                offsets = batch.cu_num_logits.tolist()
                slots = {r: offsets[i + 1] - offsets[i] - bonus for i, r in enumerate(batch.req_ids)}
            listener.executed(scheduler_output, slots, unfinished(batch))
        return result

    def unfinished(batch: Any) -> set[str]:
        reached = (batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np).tolist()
        return {request for request, whole in zip(batch.req_ids, reached, strict=True) if not whole}

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        result = original_sample(self, grammar_output)
        if state is not None and self.speculator is not None:
            batch = state.input_batch
            gone = unfinished(batch)
            k = getattr(state, "num_spec_tokens_to_schedule", self.num_speculative_steps)  # 0.32: k may change by step
            rows = self.req_states.draft_tokens[batch.idx_mapping, :k].tolist()
            listener.proposed((r, row) for r, row in zip(batch.req_ids, rows, strict=True) if r not in gone)
        return result

    original_execute = changes.set(GPUModelRunner, "execute_model", execute_model)
    original_sample = changes.set(GPUModelRunner, "sample_tokens", sample_tokens)


def record(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Hook all of it. Option ``runner``: v1, v2, or scripted (the scripted executor speaks to `RECORDER` itself)."""
    hook_scheduler(changes)
    hook_grammars(changes)
    runner = options.get("runner", "v1")
    if runner == "v1":
        hook_v1(changes)
    elif runner == "v2":
        hook_v2(changes)


PATCHES = {
    "recorder": Patch(
        "recorder",
        "records every step for the ledger and changes nothing",
        (
            f"{_SCHEDULER}.update_draft_token_ids",
            f"{_SCHEDULER}.update_draft_token_ids_in_output",
            f"{_SCHEDULER}.get_grammar_bitmask",
            f"{_SCHEDULER}.update_from_output",
            f"{_MANAGER}.grammar_bitmask",
            "vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar.accept_tokens",
            "vllm.v1.structured_output.backend_guidance:GuidanceGrammar.accept_tokens",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        ),
        record,
        optional=(
            f"{_MANAGER}.accept_tokens",
            f"{_MANAGER}.validate_tokens",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        ),
    )
}
