"""The model-free engine: vLLM's real scheduler, grammar, metrics and detokenizer over a scripted target and drafter.

The executor stands where the workers would be. It answers as a worker does: it verifies the drafts it proposed
itself (in asynchronous scheduling the scheduler's output only holds placeholders), as many as the scheduler
gave slots for and the scenario's AV admits, and accepts those that are what the target says.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from specgram_lab.scenarios import Scenario, load_scenario
from specgram_lab.spec import Cell, SpecError


class Script:
    """One request's tokens: what the target says, and the draft of every step."""

    def __init__(self, scenario: Scenario, number: int, tokenizer: Any) -> None:
        request = scenario.requests[number]
        says = tokenizer(request.says, add_special_tokens=False).input_ids
        self.answer: list[int] = says + [tokenizer.eos_token_id] * (64 if request.ends else 0)
        self.end = tokenizer.eos_token_id
        self.drafts = [[self._token(tokenizer, text) for text in draft] for draft in request.drafts]
        self.admits = request.admits
        self.position = 0
        self.step = 0  # decode steps so far; the prefill's end is not one

    @staticmethod
    def _token(tokenizer: Any, text: str) -> int | None:
        if text == "=":
            return None
        if text == "<eos>":
            return int(tokenizer.eos_token_id)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise SpecError(f"the draft text {text!r} is {len(ids)} tokens, one is wanted")
        return int(ids[0])

    def token_at(self, position: int) -> int:
        """What the target says there; the end of sequence past its last word."""
        return self.answer[position] if position < len(self.answer) else self.end

    def draft(self) -> list[int]:
        """The proposal for the next decode step, made after the target said all up to `position`."""
        texts = self.drafts[self.step] if self.step < len(self.drafts) else []
        return [self.token_at(self.position + i) if token is None else token for i, token in enumerate(texts)]

    def admitted(self, slots: int) -> int:
        """How many of ``slots`` AV lets into the forward pass of the coming decode step."""
        return min(slots, self.admits[self.step]) if self.step < len(self.admits) else slots


class Stage:
    """What the executor of this process plays: one scenario at a time."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []

    def set(self, scenario: Scenario, tokenizer: Any) -> None:
        """Take up ``scenario`` from its beginning."""
        self.scripts = [Script(scenario, i, tokenizer) for i in range(len(scenario.requests))]


STAGE = Stage()


def executor(recorder: Any) -> type:
    """A subclass of vLLM's `Executor` that plays what is on `STAGE`; vLLM wants a class, not an instance."""
    import torch
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

    def done(value: Any, non_block: bool) -> Any:
        if not non_block:
            return value
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    class ScriptedExecutor(Executor):  # type: ignore[misc]
        supports_pp = True

        @classmethod
        def supports_async_scheduling(cls) -> bool:
            return True

        def _init_executor(self) -> None:
            self.by_request: dict[str, Script] = {}
            self.proposals: dict[str, list[int]] = {}
            self.pending: list[tuple[Any, dict[str, list[int]]]] = []

        def check_health(self) -> None:
            """Always well."""

        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False
        ) -> Any:
            spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
            replies = {
                "get_kv_cache_spec": {"layer": spec},
                "get_supported_kv_cache_layouts": ["LBHNC"],
                "determine_available_memory": 1 << 26,
                "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
                "get_supported_tasks": ("generate",),
            }
            return done([replies.get(method)], non_block)

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            if scheduler_output.total_num_scheduled_tokens == 0:
                return done(EMPTY_MODEL_RUNNER_OUTPUT, non_block)
            for new in scheduler_output.scheduled_new_reqs:
                # request ids are numbers in the order of the scenario, with vLLM's suffix behind a dash
                self.by_request[new.req_id] = STAGE.scripts[int(new.req_id.partition("-")[0])]
            entered, slots = {}, {}
            for request in scheduler_output.num_scheduled_tokens:
                count = len(scheduler_output.scheduled_spec_decode_tokens.get(request) or ())
                slots[request] = self.by_request[request].admitted(count) if count else 0
                entered[request] = self.proposals.get(request, [])[: slots[request]]
            if recorder is not None:
                recorder.executed(scheduler_output, slots)
            self.pending.append((scheduler_output, entered))
            return done(None, non_block)

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            scheduler_output, entered = self.pending.pop(0)
            ids = list(scheduler_output.num_scheduled_tokens)
            sampled = []
            drafts = {}
            for request in ids:
                script = self.by_request[request]
                accepted = 0
                for token in entered[request]:
                    if token != script.token_at(script.position + accepted):
                        break
                    accepted += 1
                decoding = script.position > 0
                sampled.append([script.token_at(script.position + i) for i in range(accepted + 1)])
                script.position += accepted + 1
                script.step += decoding
                drafts[request] = script.draft()
            self.proposals |= drafts
            self.drafted = drafts
            if recorder is not None:
                recorder.proposed(drafts.items())
            index = {request: i for i, request in enumerate(ids)}
            return done(ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled), non_block)

        def take_draft_token_ids(self) -> Any:
            return DraftTokenIds(list(self.drafted), [list(d) for d in self.drafted.values()])

    return ScriptedExecutor


def engine_arguments(cell: Cell) -> dict[str, Any]:
    """What differs from the local engine's arguments."""
    from specgram_lab.samplers.hooks import RECORDER

    assert cell.workload.scenario is not None
    scenario = load_scenario(cell.workload.scenario)
    return {
        "distributed_executor_backend": executor(RECORDER if cell.engine.record else None),
        "max_model_len": scenario.max_model_len,
        "load_format": "dummy",
    }
