"""The recorder: takes what the hooks see in scheduler and worker, and makes the rows of the ledger.

A step is numbered when a worker executes it. The worker says which draft it held for each request and how many
of its slots entered the target's forward pass; the scheduler says how much of the draft the grammar accepts,
what was scheduled and what came out. Both speak about the same `SchedulerOutput` object, so the worker's
part travels on it, and asynchronous steps cannot be mixed up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["draft-probe", "commit"]
_MARK = "_specgram_step"


@dataclass
class WorkerStep:
    """What the worker knows of one step: per request the draft it held and its slots in the forward pass."""

    number: int
    drafts: dict[str, list[int]]
    slots: dict[str, int]


@dataclass
class Judgement:
    """What the grammar said of the draft that a request's next step verifies."""

    valid: int
    judged: bool


@dataclass
class Recorder:
    """Rows of ``steps`` and ``fsm_events`` as plain dicts, in the order in which things happened."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    fsm_events: list[dict[str, Any]] = field(default_factory=list)
    proposals: dict[str, list[int]] = field(default_factory=dict)
    judgements: dict[str, Judgement] = field(default_factory=dict)
    reasoning: dict[str, bool] = field(default_factory=dict)
    phase: Phase = "commit"
    current_step: int = -1
    _next: int = 0
    _said: str = ""
    _own_steps: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all rows and requests; the next cell on this engine begins at step 0."""
        self.__init__()  # type: ignore[misc]

    # what the worker says

    def proposed(self, drafts: Iterable[tuple[str, Sequence[int]]]) -> None:
        """The drafter proposed these tokens for the next step of these requests; -1 means no proposal from there on."""
        for request, tokens in drafts:
            tokens = list(tokens)
            self.proposals[request] = tokens[: tokens.index(-1)] if -1 in tokens else tokens

    def executed(self, scheduler_output: Any, slots: Mapping[str, int], unfinished: Collection[str] = ()) -> WorkerStep:
        """A forward pass ran; ``slots`` counts each request's draft slots in it. Takes the proposals it used.

        Where only a part of a request's tokens was computed (``unfinished``), a draft that preemption left waits on.
        """
        ended = [r for r in scheduler_output.num_scheduled_tokens if r not in unfinished]
        drafts = {r: self.proposals.pop(r, []) for r in ended}
        step = WorkerStep(self._next, drafts, dict(slots))
        self._next += 1
        setattr(scheduler_output, _MARK, step)
        return step

    # what the scheduler says

    def judged(self, request: str, judgement: Judgement) -> None:
        """The grammar looked at the draft that the request's next recorded step carries."""
        self.judgements[request] = judgement

    def step_of(self, scheduler_output: Any) -> int:
        """The number of a step; of one that has not run yet, the number it will get."""
        step = getattr(scheduler_output, _MARK, None)
        return step.number if step is not None else self._next

    def refused(self, request: str, tokens: Sequence[int]) -> None:
        """The grammar refused a token in the phase that is under way, in the words that it just said."""
        self.fsm_events.append(
            {
                "step": self.current_step,
                "request_id": request,
                "phase": self.phase,
                "token_ids": [int(t) for t in tokens],
                "in_reasoning": self.reasoning.get(request, False),
                "message": self._said,
            }
        )
        self._said = ""

    def said(self, message: str) -> None:
        """The grammar's backend logged this while it looks at the tokens that it may refuse next."""
        self._said = message

    def added(self, message: str) -> None:
        """The engine logged this about the refusal that was recorded last."""
        if self.fsm_events:
            before = self.fsm_events[-1]["message"]
            self.fsm_events[-1]["message"] = f"{before}\n{message}" if before else message

    def finished(self, scheduler_output: Any, request: str, sampled: Sequence[int], committed: int) -> None:
        """A request's step is over: ``sampled`` is what the engine gave for it, ``committed`` how much was kept."""
        worker: WorkerStep | None = getattr(scheduler_output, _MARK, None)
        if worker is None:
            raise RuntimeError("a step was processed that no recorded worker executed")
        scheduled = len(scheduler_output.scheduled_spec_decode_tokens.get(request) or ())
        struck = (scheduler_output.num_invalid_spec_tokens or {}).get(request, 0)
        draft = worker.drafts.get(request, [])
        slots = worker.slots.get(request, 0)
        verified = min(slots, len(draft))
        judgement = self.judgements.pop(request, None)
        number = self._own_steps.get(request, 0)
        self._own_steps[request] = number + 1
        self.steps.append(
            {
                "step": worker.number,
                "request_id": request,
                "request_step": number,
                "in_reasoning": self.reasoning.get(request, False),
                "judged": judgement is not None and judgement.judged and bool(draft),
                "drafted": len(draft),
                "grammar_valid": min(judgement.valid, len(draft)) if judgement is not None else len(draft),
                "scheduled": scheduled,
                "struck": struck,
                "verified": verified,
                "padded": slots - verified,
                "av_skipped": scheduled - slots,
                "accepted": max(len(sampled) - 1, 0) if scheduled else 0,
                "sampled": len(sampled),
                "committed": committed,
                "draft_token_ids": list(draft),
                "sampled_token_ids": [int(t) for t in sampled],
            }
        )
