"""Patches that let the full system run on a CPU: asynchronous scheduling, Model Runner V2, adaptive verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specgram_lab.av.costs import linear
from specgram_lab.patches.registry import Patch, Replacements

_AV = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"


def keep_async(changes: Replacements, options: Mapping[str, Any]) -> None:
    """`CpuPlatform.check_and_update_config` sets ``async_scheduling = False`` without a word: put the wish back."""
    from vllm.platforms.cpu import CpuPlatform

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    original = changes.set(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))


def run_v2(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Mend Triton's interpreter and put the native kernels in; V2 itself needs no change.

    Option ``native``: false leaves every kernel to the interpreter.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401  stream and event placeholders, must come before V2's modules

    from specgram_lab.builders.cpu import interpreter, kernels

    interpreter.install()
    if options.get("native", True):
        kernels.register(changes)


def verify_adaptively(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Take away what AV asks of CUDA graphs; give it a made-up cost curve, as there are no replays to profile.

    Host and device memory are the same on a CPU, so query lengths on both sides cannot differ. The patch ``av-budget``
    puts the cell's own curve in.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.config.vllm import VllmConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as av

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        self.cost_tables = linear(1.0, 0.3).tables(self.req_states.max_num_reqs, self.req_states.max_num_batched_tokens)

    original_init = changes.set(av.AdaptiveVerificationManager, "__init__", init)
    changes.set(VllmConfig, "_validate_adaptive_verification", lambda self: None)
    changes.set(CPUAttentionBackend, "supports_device_cpu_query_lens_mismatch", classmethod(lambda cls: True))
    changes.set(av, "get_varlen_cudagraph_unsupported_backend", lambda *args, **kwargs: None)
    changes.set(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **kwargs: mode)
    changes.set(av, "_assign_draft_token_budget_compiled", av._assign_draft_token_budget)


PATCHES = {
    "async-on-cpu": Patch(
        "async-on-cpu",
        "asynchronous scheduling on a CPU, which the platform switches off silently",
        ("vllm.platforms.cpu:CpuPlatform.check_and_update_config",),
        keep_async,
    ),
    "v2-on-cpu": Patch(
        "v2-on-cpu",
        "Model Runner V2 on a CPU through Triton's interpreter and native kernels",
        ("vllm.v1.worker.cpu_worker:CPUWorker.init_device",),
        run_v2,
        releases=("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
        elsewhere="there is no CPU wheel",
    ),
    "av-on-cpu": Patch(
        "av-on-cpu",
        "adaptive verification without CUDA graphs",
        (
            "vllm.config.vllm:VllmConfig._validate_adaptive_verification",
            f"{_AV}:AdaptiveVerificationManager.__init__",
            f"{_AV}:_assign_draft_token_budget",
            f"{_AV}:resolve_adaptive_cudagraph_mode",
            "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
        ),
        verify_adaptively,
        releases=("0.32.0",),
        elsewhere="what it replaces was studied in 0.32.0 only",
    ),
}
