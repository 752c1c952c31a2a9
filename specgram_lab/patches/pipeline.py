"""Pipeline parallelism with asynchronous scheduling: the combination brought back, and V2's spacing taken away.

``v2-without-worker`` lets a scripted engine schedule as runner V2 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements

REFUSED = "pipeline parallelism with async scheduling"


def allow_on_v1(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Take the combination off the list of what runner V1 does not support."""
    from vllm.config.vllm import VllmConfig

    def unsupported(self: Any) -> list[str]:
        return [feature for feature in original(self) if feature != REFUSED]

    original = changes.set(VllmConfig, "_get_v1_model_runner_unsupported_features", unsupported)


def decode_without_spacing(changes: Replacements, options: Mapping[str, Any]) -> None:
    """A request may be scheduled again in the very next step, whatever is in flight."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    def update_after_schedule(self: Any, scheduler_output: Any) -> None:
        original(self, scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self.requests[request_id].next_decode_eligible_step = 0

    original = changes.set(AsyncScheduler, "_update_after_schedule", update_after_schedule)


def schedule_as_v2(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Take away the wish for Triton: no worker is there that would launch a kernel."""
    import vllm.config.vllm as config

    changes.set(config, "HAS_TRITON", True)


PATCHES = {
    "pre-56250-pp-async": Patch(
        "pre-56250-pp-async",
        "pipeline parallelism with async scheduling on runner V1, which vllm#56250 refuses, is allowed again",
        ("vllm.config.vllm:VllmConfig._get_v1_model_runner_unsupported_features",),
        allow_on_v1,
        releases=("0.31.0", "0.32.0"),
        elsewhere="earlier releases allow it, 0.33.0 refuses it in a second place, amid VllmConfig.__post_init__",
    ),
    "no-pp-spacing": Patch(
        "no-pp-spacing",
        "takes away what keeps runner V2 from having two decode steps of a request in flight",
        ("vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",),
        decode_without_spacing,
    ),
    "v2-without-worker": Patch(
        "v2-without-worker",
        "scheduling for Model Runner V2 on a scripted engine, which has no worker and needs no Triton",
        ("vllm.config.vllm:VllmConfig._validate_v2_model_runner",),
        schedule_as_v2,
    ),
}
