"""The patch ``av-budget``: adaptive verification with a budget of one's choice instead of vLLM's argmax.

vLLM picks one draft budget a step (`AdaptiveVerificationManager.get_num_tokens`) and then shares it out among
the requests (`reallocate_drafts`). Only the first is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements

_MANAGER = "vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager"


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


def set_budget(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Options: ``policy`` and ``value`` as in `specgram_lab.spec.Budget`."""
    from specgram_lab.builders.scripted import STAGE
    from specgram_lab.samplers import hooks

    hooks.prepare_v2()
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    policy, value = options["policy"], options.get("value")
    of_scenario = policy == "schedule" and value is None
    steps = 0

    def get_num_tokens(self: Any, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        nonlocal steps
        original(self, num_tokens_per_req, draft_tokens)
        drafts, others, native = self._batch_budget
        if of_scenario:
            budget = choose_budget(policy, STAGE.budgets, list(drafts.values()), native, STAGE.next_step())
        else:
            budget = choose_budget(policy, value, list(drafts.values()), native, steps)
        steps += 1
        self._batch_budget = (drafts, others, budget)
        tokens: int = sum(others.values()) + budget
        return tokens

    original = changes.set(AdaptiveVerificationManager, "get_num_tokens", get_num_tokens)


PATCHES = {
    "av-budget": Patch(
        "av-budget",
        "the draft budget of adaptive verification as a variable",
        (f"{_MANAGER}.get_num_tokens", f"{_MANAGER}.compact_batch", f"{_MANAGER}.reallocate_drafts"),
        set_budget,
    )
}
