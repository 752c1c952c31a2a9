"""A real engine with real weights, on a CPU or on CUDA, in this process.

The process must have been started with the environment that `specgram_lab.builders.options` gives.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specgram_lab.builders import options
from specgram_lab.spec import Cell

NEWER = frozenset({"per_request_spec_decode_metrics"})
"""Arguments that only measure, and that builds before 0.29 do not have."""


def build(cell: Cell) -> Any:
    """A vLLM `LLM` for ``cell`` in this process, whose environment `specgram_lab.builders.options` gave.

    vLLM loads the patches through its plugin entry point while it reads the arguments.
    """
    from vllm import LLM

    arguments = options.engine_arguments(cell)
    if cell.engine.kind == "scripted":
        from specgram_lab.builders import scripted

        arguments |= scripted.engine_arguments(cell)
    return LLM(**without_newer(arguments))


@contextmanager
def quick_start() -> Iterator[None]:
    """Half the time of `build`, in a process that is there for an engine alone: elsewhere Ray may be wanted."""
    gc.disable()  # nearly all that is made until the engine stands stays
    sys.modules.setdefault("ray", None)  # type: ignore[arg-type]  # not importable: no engine here is spread by it
    try:
        import vllm.entrypoints.llm  # noqa: F401

        gc.freeze()  # vLLM collects several times while it loads; modules need not be looked at
        yield
    finally:
        gc.enable()


def without_newer(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` less those of `NEWER` that this build does not know."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    return {name: value for name, value in arguments.items() if name in known or name not in NEWER}


def effective_config(llm: Any) -> dict[str, Any]:
    """What the engine says it runs with, after all that vLLM changed silently. Plain data."""
    config = llm.llm_engine.vllm_config
    speculative = config.speculative_config
    effective: dict[str, Any] = {
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "scheduling": "async" if config.scheduler_config.async_scheduling else "sync",
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "cudagraph_mode": getattr(config.compilation_config.cudagraph_mode, "name", None),
        "compilation_mode": getattr(config.compilation_config.mode, "name", None),
        "structured_outputs_backend": config.structured_outputs_config.backend,
        "disable_any_whitespace": bool(config.structured_outputs_config.disable_any_whitespace),
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel": config.parallel_config.pipeline_parallel_size,
    }
    if speculative is not None:
        effective |= {
            "drafter": speculative.method,
            "k": speculative.num_speculative_tokens,
            "prompt_lookup_min": getattr(speculative, "prompt_lookup_min", None),
            "prompt_lookup_max": getattr(speculative, "prompt_lookup_max", None),
            "rejection_sample_method": getattr(speculative, "rejection_sample_method", None),
            "adaptive_verification": bool(getattr(speculative, "enable_adaptive_verification", False)),
        }
    return effective


def verifies_adaptively(llm: Any) -> bool:
    """Whether the engine made an AV manager; a drafter without confidences makes vLLM drop the wish silently."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    runner = getattr(getattr(getattr(executor, "driver_worker", None), "worker", None), "model_runner", None)
    return getattr(runner, "adaptive_verification", None) is not None
