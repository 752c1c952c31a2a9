"""The patches ``av-budget`` and ``av-ngram``: adaptive verification (AV) with a budget of one's choice, and its record.

vLLM picks one draft budget a step (`AdaptiveVerificationManager.get_num_tokens`) and then shares it out among
the requests (`reallocate_drafts`). Only the first is replaced. What AV knew is kept for
`specgram_lab.av.tables`: confidences of every proposal, the budget, vLLM's own choice, the estimator's state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements

_AV = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_MANAGER = f"{_AV}:AdaptiveVerificationManager"
_NGRAM = "vllm.v1.worker.gpu.spec_decode.ngram.speculator:NgramGPUSpeculator"


def choose_budget(policy: str, value: Any, scheduled: list[int], native: int, step: int) -> int:
    """Draft tokens to verify in one step, of ``scheduled`` per request; ``native`` is vLLM's own choice.

    ``schedule`` reads ``value`` as a list, one budget a step with drafts; past its end all are verified. Without a list
    it is the scenario's.
    """
    total = sum(scheduled)
    if policy == "native":
        return native
    if policy == "all":
        return total
    if policy == "none":
        return 0
    if policy == "schedule":
        wanted = value[step] if step < len(value) else total
    elif policy == "fixed":
        wanted = value
    elif policy == "per_request":
        wanted = sum(min(n, int(value or 0)) for n in scheduled)
    else:
        wanted = math.floor((value or 0.0) * total)
    return max(0, min(int(wanted or 0), total))


class BudgetLog:
    """Rows of `specgram_lab.av.tables` of the cell that runs, and the state that it must not inherit."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.proposals: list[dict[str, Any]] = []
        self.speculator: Any = None
        self.recording = False
        self.budgeted = 0
        self._chosen: dict[str, Any] = {}

    def begin(self, llm: Any) -> None:
        """A cell begins: no rows, the schedule at its start, vLLM's acceptance estimator as on a fresh engine.

        Cells may share an engine; a fit to the last one's text would be a budget that depends on the order of cells.
        """
        self.steps, self.proposals, self._chosen = [], [], {}
        self.budgeted = 0
        self.recording = True
        self.speculator = llm.llm_engine.model_executor.driver_worker.worker.model_runner.speculator
        estimator = self.estimator
        if estimator is not None:
            from vllm.v1.worker.gpu.spec_decode import acceptance_estimator as vllm_estimator

            estimator.slope.fill_(vllm_estimator._INIT_SLOPE)
            estimator.intercepts.fill_(vllm_estimator._INIT_BIAS)
            for sums in (estimator.info, estimator.grad, estimator.counts):
                sums.zero_()
            estimator._steps_since_refit = estimator._refits = 0

    @property
    def estimator(self) -> Any:
        """vLLM's online acceptance estimator; None where the drafter has a confidence head, or none was made."""
        return getattr(self.speculator, "acceptance_estimator", None)

    def chose(self, drafts: Mapping[str, int], others: Mapping[str, int], native: int, budget: int) -> None:
        """The budget of the step that is about to run."""
        self.budgeted += 1
        self._chosen = {
            "non_draft_tokens": sum(others.values()),
            "scheduled": sum(drafts.values()),
            "native": native,
            "budget": budget,
        }

    def proposed(self, step: int, confidences: Any, batch: Any) -> None:
        """The drafter proposed for the requests of ``step``; ``confidences`` has a row for each."""
        if not self.recording:
            return
        estimator = self.estimator
        row: dict[str, Any] = {"step": step, "requests": batch.num_reqs, "tokens": batch.num_tokens, **self._chosen}
        self._chosen = {}
        features = None
        if estimator is not None:
            row |= {"slope": float(estimator.slope[0]), "intercepts": estimator.intercepts.tolist()}
            row |= {"refits": estimator._refits}
            features = estimator.features[batch.idx_mapping].tolist()
        self.steps.append(row)
        reached = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
        rows = confidences[: batch.num_reqs].tolist()
        for at, request_id in enumerate(batch.req_ids):
            if reached[at]:
                known = {"confidences": rows[at], "features": features[at] if features is not None else None}
                self.proposals.append({"step": step, "request_id": request_id, **known})


LOG = BudgetLog()


def set_budget(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Options: ``policy`` and ``value`` as in `specgram_lab.spec.Budget`; ``costs``: a `CostCurve` as plain data."""
    from specgram_lab.av.costs import CostCurve
    from specgram_lab.builders.scripted import STAGE
    from specgram_lab.samplers import hooks

    hooks.prepare_v2()
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as av

    policy, value = options["policy"], options.get("value")
    curve = CostCurve.model_validate(options["costs"]) if options.get("costs") else None
    of_scenario = policy == "schedule" and value is None
    priced: dict[int, Any] = {}

    def get_num_tokens(self: Any, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        if curve is not None:
            if id(self) not in priced:
                changes.at_end(partial(setattr, self, "cost_tables", self.cost_tables))  # vLLM's own, profiled
                sizes = self.req_states.max_num_reqs, self.req_states.max_num_batched_tokens
                priced[id(self)] = av.build_cost_tables_from_curves(
                    curve.points("draft"), curve.points("verify"), *sizes, cudagraph_limit=curve.graph_limit
                )
            self.cost_tables = priced[id(self)]
        original(self, num_tokens_per_req, draft_tokens)
        drafts, others, native = self._batch_budget
        schedule, step = (STAGE.budgets, STAGE.next_step()) if of_scenario else (value, LOG.budgeted)
        budget = choose_budget(policy, schedule, list(drafts.values()), native, step)
        LOG.chose(drafts, others, native, budget)
        self._batch_budget = (drafts, others, budget)
        tokens: int = sum(others.values()) + budget
        return tokens

    def record_confidences(self: Any, confidence_probs: Any, input_batch: Any) -> None:
        original_record(self, confidence_probs, input_batch)
        LOG.proposed(hooks.RECORDER.step_of(None) - 1, confidence_probs, input_batch)

    original = changes.set(av.AdaptiveVerificationManager, "get_num_tokens", get_num_tokens)
    original_record = changes.set(av.AdaptiveVerificationManager, "record_confidences", record_confidences)


def rank_ngrams(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Give V2's n-gram drafter what AV asks of a drafter: the switch, and confidences to rank its drafts by.

    vLLM drops the wish silently (`NgramGPUSpeculator` has neither). An n-gram knows no probability: a token counts for
    less the deeper it lies, and `specgram_lab.av.lookup.confidence` tells requests apart.
    """
    from specgram_lab.av.lookup import confidence
    from specgram_lab.samplers import hooks

    hooks.prepare_v2()
    import numpy as np
    import torch
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self.enable_adaptive_verification = self.speculative_config.enable_adaptive_verification
        self.draft_token_confidence_probs = torch.zeros(self.drafts.shape, dtype=torch.float32, device=self.device)

    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original_propose(self, input_batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            slots = input_batch.idx_mapping.tolist()
            lengths = self.req_states.total_len.gpu[input_batch.idx_mapping].to(torch.int64)
            texts = self.req_states.all_token_ids.gpu
            totals = [int(texts[slot, :length].sum()) for slot, length in zip(slots, lengths.tolist(), strict=True)]
            found = torch.from_numpy(confidence(np.array(totals, dtype=np.int64), lengths.cpu().numpy()))
            self.draft_token_confidence_probs[: input_batch.num_reqs] = found[:, None].to(self.device)
        return drafts

    original_init = changes.set(NgramGPUSpeculator, "__init__", init)
    original_propose = changes.set(NgramGPUSpeculator, "propose", propose)


PATCHES = {
    "av-budget": Patch(
        "av-budget",
        "the draft budget of adaptive verification as a variable, and a record of what it was chosen by",
        (
            f"{_MANAGER}.get_num_tokens",
            f"{_MANAGER}.compact_batch",
            f"{_MANAGER}.reallocate_drafts",
            f"{_MANAGER}.record_confidences",
            f"{_AV}:build_cost_tables_from_curves",
        ),
        set_budget,
        optional=("vllm.v1.worker.gpu.spec_decode.acceptance_estimator:OnlineAcceptanceEstimator",),
    ),
    "av-ngram": Patch(
        "av-ngram",
        "adaptive verification for V2's n-gram drafter, ranked by depth",
        (f"{_NGRAM}.__init__", f"{_NGRAM}.propose"),
        rank_ngrams,
    ),
}
