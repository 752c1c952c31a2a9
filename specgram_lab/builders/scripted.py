"""The model-free engine: vLLM's real scheduler, grammar, metrics and detokenizer over a scripted target and drafter.

The executor stands where the workers would be. It answers as a worker does: it verifies the drafts it proposed
itself (in asynchronous scheduling the scheduler's output only holds placeholders), as many as the scheduler
gave slots for and the scenario's AV admits, and accepts those that are what the target says; a target that obeys the
grammar looks at the rows of the mask that the scheduler sent for these slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from specgram_lab.scenarios import KV_BLOCK_TOKENS, Scenario, ScriptedRequest, load_scenario
from specgram_lab.spec import Cell, SpecError


def one_token(tokenizer: Any, text: str) -> int:
    """The one token that ``text`` is; ``<eos>`` is the end of sequence.

    Raises:
        SpecError: it is several.
    """
    if text == "<eos>":
        return int(tokenizer.eos_token_id)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise SpecError(f"the draft text {text!r} is {len(ids)} tokens, one is wanted")
    return int(ids[0])


class Script:
    """One request's tokens: what the target says, and the draft of every step.

    ``answer`` is what a real target says, and takes the place of the scenario's ``says``.
    """

    def __init__(self, request: ScriptedRequest, tokenizer: Any, answer: Sequence[int] | None = None) -> None:
        says = tokenizer(request.says, add_special_tokens=False).input_ids
        self.answer: list[int] = list(answer) if answer is not None else says
        self.answer += [tokenizer.eos_token_id] * (64 if request.ends and answer is None else 0)
        self.end = tokenizer.eos_token_id
        self.drafts = [[self._token(tokenizer, text) for text in draft] for draft in request.drafts]
        self.admits = request.admits
        self.lost = frozenset(request.lost)
        self.obeys = request.obeys
        self.liked: tuple[int, range] | None = None
        if request.preference is not None:
            at, times = request.preference.at, request.preference.times
            self.liked = (one_token(tokenizer, request.preference.token), range(at, at + times))
        self.aside = 0  # liked tokens said so far, which are none of its words
        self.position = 0
        self.step = 0  # decode steps so far; the prefill's end is not one

    @staticmethod
    def _token(tokenizer: Any, text: str) -> int | None:
        return None if text == "=" else one_token(tokenizer, text)

    def token_at(self, position: int) -> int:
        """What the target says there; the end of sequence past its last word."""
        word = position - self.aside
        return self.answer[word] if word < len(self.answer) else self.end

    def choice(self, position: int, row: Any) -> int:
        """What the target says at ``position`` under ``row`` of a mask, or without one; to be asked once a position."""
        if row is None or not self.obeys:
            return self.token_at(position)
        if self.liked is not None and position in self.liked[1] and allows(row, self.liked[0]):
            self.aside += 1
            return self.liked[0]
        wanted = self.token_at(position)
        return wanted if allows(row, wanted) else lowest(row)

    def draft(self) -> list[int]:
        """The proposal for the next decode step, made after the target said all up to `position`."""
        texts = self.drafts[self.step] if self.step < len(self.drafts) else []
        return [self.token_at(self.position + i) if token is None else token for i, token in enumerate(texts)]

    def advance(self, sampled: int) -> list[int]:
        """Take note that a step gave ``sampled`` tokens, and return the proposal for the next one."""
        self.step += self.position > 0
        self.position += sampled
        return self.draft()

    def hands_over(self) -> bool:
        """Whether the scheduler gets to see the draft for the coming decode step."""
        return self.step not in self.lost

    def admitted(self, slots: int) -> int:
        """How many of ``slots`` AV lets into the forward pass of the coming decode step."""
        return min(slots, self.admits[self.step]) if self.step < len(self.admits) else slots


class Stage:
    """What the executor, or the patched drafter, of this process plays: one scenario at a time."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.budgets: Sequence[int] = ()
        self._steps = 0

    def set(self, scenario: Scenario, tokenizer: Any, answers: Sequence[Sequence[int]] | None = None) -> None:
        """Take up ``scenario`` from its beginning; ``answers`` are what a real target says to its requests."""
        said: Sequence[Sequence[int] | None] = answers or [None] * len(scenario.requests)
        self.scripts = [Script(r, tokenizer, answer) for r, answer in zip(scenario.requests, said, strict=True)]
        self.budgets = scenario.requests[0].admits
        self._steps = 0

    def clear(self) -> None:
        """Play nothing: a real drafter's own proposals stand."""
        self.scripts, self.budgets = [], ()

    def next_step(self) -> int:
        """Number of the step with drafts that AV is about to budget, from 0."""
        self._steps += 1
        return self._steps - 1

    def script_of(self, request_id: str) -> Script | None:
        """The script of a request; ids are numbers in the order of the scenario, with vLLM's suffix behind a dash."""
        number = request_id.partition("-")[0]
        return self.scripts[int(number)] if number.isdecimal() and int(number) < len(self.scripts) else None


STAGE = Stage()


def allows(row: Any, token: int) -> bool:
    """Whether a row of a mask, 32 tokens a word, has the token's bit."""
    return bool(int(row[token // 32]) >> (token % 32) & 1)


def lowest(row: Any) -> int:
    """The lowest token id that a row of a mask allows."""
    word = next(i for i, bits in enumerate(row) if bits)
    bits = int(row[word])
    return 32 * word + (bits & -bits).bit_length() - 1


def mask_rows(scheduler_output: Any, grammar_output: Any) -> dict[str, Any]:
    """Each request's rows of the grammar's mask, by what lies in the scheduler's output and in the mask's own size.

    Up to 0.32 the rows are packed, one a scheduled draft and one for the bonus token; 0.33 gives every request k + 1.
    """
    if grammar_output is None:
        return {}
    ids, mask = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
    widths = [len(scheduler_output.scheduled_spec_decode_tokens.get(request) or ()) + 1 for request in ids]
    if sum(widths) != len(mask):
        widths = [len(mask) // len(ids)] * len(ids)
    ends = [sum(widths[: i + 1]) for i in range(len(ids))]
    return {request: mask[end - width : end] for request, width, end in zip(ids, widths, ends, strict=True)}


def acceptable(grammar_output: Any) -> dict[str, int]:
    """How many drafts of each request runner V2 may accept: none that the grammar has not seen (vllm#54442)."""
    limits = getattr(grammar_output, "num_acceptable_drafts", None)  # 0.32 and later
    return dict(zip(grammar_output.structured_output_request_ids, limits, strict=True)) if limits is not None else {}


def executor(listeners: Sequence[Any], attach: Callable[[Any], None]) -> type:
    """A subclass of vLLM's `Executor` that plays what is on `STAGE`; vLLM wants a class, not an instance.

    ``listeners`` hear what a model runner's hooks would say (`specgram_lab.samplers.hooks.Listener`); ``attach`` is
    called with the output of each step.
    """
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

    class ScriptedExecutor(Executor):
        supports_pp = True

        @classmethod
        def supports_async_scheduling(cls) -> bool:
            return True

        def _init_executor(self) -> None:
            self.by_request: dict[str, Script] = {}
            self.proposals: dict[str, list[int]] = {}
            self.prompts: dict[str, int] = {}
            self.left: dict[str, int] = {}  # tokens to compute before the request says something
            self.pending: list[tuple[Any, dict[str, list[int]], set[str]]] = []
            self.drafted: dict[str, list[int]] = {}
            self.drafts = self.vllm_config.speculative_config is not None

        def check_health(self) -> None:
            """Always well."""

        def collective_rpc(
            self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False
        ) -> Any:
            spec = FullAttentionSpec(block_size=KV_BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
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
                script = STAGE.script_of(new.req_id)
                assert script is not None
                self.by_request[new.req_id] = script
                self.prompts[new.req_id] = len(new.prompt_token_ids)
                self.left[new.req_id] = len(new.prompt_token_ids) - new.num_computed_tokens
            cached = scheduler_output.scheduled_cached_reqs
            for request, computed, said in zip(
                cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
            ):
                if request in cached.resumed_req_ids:
                    self.left[request] = self.prompts[request] + said - computed
            entered, slots, unfinished = {}, {}, set()
            for request, tokens in scheduler_output.num_scheduled_tokens.items():
                self.left[request] -= tokens
                if self.left[request] > 0:
                    unfinished.add(request)
                count = len(scheduler_output.scheduled_spec_decode_tokens.get(request) or ())
                slots[request] = self.by_request[request].admitted(count) if count else 0
                entered[request] = self.proposals.get(request, [])[: slots[request]]
            for listener in listeners:
                listener.executed(scheduler_output, slots, unfinished)
            self.pending.append((scheduler_output, entered, unfinished))
            return done(None, non_block)

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            scheduler_output, entered, unfinished = self.pending.pop(0)
            ids = list(scheduler_output.num_scheduled_tokens)
            rows = mask_rows(scheduler_output, grammar_output)
            limits = acceptable(grammar_output) if self.vllm_config.use_v2_model_runner else {}
            sampled: list[list[int]] = []
            drafts = {}
            for request in ids:
                if request in unfinished:  # a part of what it has so far: there is nothing to say yet
                    sampled.append([])
                    continue
                script, mask = self.by_request[request], rows.get(request)
                said: list[int] = []
                for token in [*entered[request][: limits.get(request)], None]:
                    said.append(script.choice(script.position + len(said), None if mask is None else mask[len(said)]))
                    if said[-1] != token:
                        break
                sampled.append(said)
                draft = script.advance(len(said))
                drafts[request] = draft if self.drafts else []
            self.proposals |= drafts
            self.drafted = drafts
            for listener in listeners:
                listener.proposed(drafts.items())
            index = {request: i for i, request in enumerate(ids)}
            output = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)
            attach(output)
            return done(output, non_block)

        def take_draft_token_ids(self) -> Any:
            seen = {request: d for request, d in self.drafted.items() if self.by_request[request].hands_over()}
            return DraftTokenIds(list(seen), [list(d) for d in seen.values()])

    return ScriptedExecutor


def engine_arguments(cell: Cell) -> dict[str, Any]:
    """What differs from the local engine's arguments."""
    from specgram_lab.patches.rfc_counters import COUNTS
    from specgram_lab.samplers.hooks import RECORDER

    assert cell.workload.scenario is not None
    setting = load_scenario(cell.workload.scenario).setting
    counting = "rfc-counters" in cell.engine.patches
    listeners = [RECORDER] * cell.engine.record + [COUNTS] * counting
    arguments: dict[str, Any] = {
        "distributed_executor_backend": executor(listeners, COUNTS.attach if counting else lambda output: None),
        "load_format": "dummy",
    }
    if setting.kv_blocks is not None:
        arguments["num_gpu_blocks_override"] = setting.kv_blocks
    return arguments
