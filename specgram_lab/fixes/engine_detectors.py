"""Detectors for worker, configuration and metrics: masks in the runner, adaptive verification, refusals, counters."""

from __future__ import annotations

from collections.abc import Callable

from specgram_lab.fixes.finding import Finding
from specgram_lab.fixes.grammar_detectors import FILL, OUTPUT, found, look
from specgram_lab.fixes.shapes import branches, called, fields, names, says
from specgram_lab.fixes.source import MANAGER, Source

WORKER = "v1/worker/gpu/structured_outputs.py"
REJECTION = "v1/worker/gpu/spec_decode/rejection_sampler.py"
SPECULATOR = "v1/worker/gpu/spec_decode/speculator.py"
ESTIMATOR = "v1/worker/gpu/spec_decode/acceptance_estimator.py"
DFLASH2 = "v1/worker/gpu/spec_decode/dflash2/speculator.py"
DFLASH2_MODEL = "model_executor/models/qwen3_dflash2.py"
V1_MASKS = "v1/structured_output/utils.py"
CONFIG = "config/vllm.py"
SPECULATIVE_CONFIG = "config/speculative.py"
OBSERVABILITY = "config/observability.py"
PARALLEL = "config/parallel.py"
ARGUMENTS = "engine/arg_utils.py"
SAMPLING = "sampling_params.py"
SPEC_METRICS = "v1/spec_decode/metrics.py"
REQUEST_METRICS = "v1/metrics/stats.py"
ADAPTIVE = "enable_adaptive_verification"
MAPPING = "_build_grammar_mapping"
APPLY = "StructuredOutputsWorker.apply_grammar_bitmask"


def dflash2(source: Source) -> Finding:
    """#52816: the DFlash2 drafter."""
    parts = {path: source.module(path) is not None for path in (DFLASH2, DFLASH2_MODEL)}
    if all(parts.values()):
        return found("contained", DFLASH2, "")
    there = [path for path, is_there in parts.items() if is_there]
    return found("partial", there[0], "", "drafter or model alone") if there else found("missing", DFLASH2, "")


def unseen_drafts(source: Source) -> Finding:
    """#54442: drafts that met a free row because the grammar never saw them are not accepted (runner V2)."""
    sampler = source.module(REJECTION)
    parts = {
        "sent": "num_acceptable_drafts" in fields(look(source, OUTPUT, "GrammarOutput")),
        "marked": look(source, WORKER, "grammar_invalid_drafts") is not None,
        "not accepted": sampler is not None and "invalid_drafts" in names(sampler.tree),
    }
    if all(parts.values()):
        return found("contained", WORKER, "grammar_invalid_drafts")
    there = [name for name, is_there in parts.items() if is_there]
    if there:
        return found("partial", OUTPUT, "GrammarOutput", "only " + ", ".join(there))
    return found("missing", OUTPUT, "GrammarOutput")


def stride_mapping(source: Source) -> bool:
    """Whether worker V2 counts on as many mask rows for each request, whatever was drafted."""
    apply = look(source, WORKER, APPLY)
    return "mask_stride" in names(apply) and look(source, WORKER, MAPPING) is None and MAPPING not in names(apply)


def fixed_stride(source: Source) -> Finding:
    """The design of #52477: k+1 mask rows for each request, from the manager to both runners."""
    parts = {
        "manager": "mask_stride" in names(look(source, MANAGER, FILL)),
        "runner V1": "mask_stride" in names(look(source, V1_MASKS, "apply_grammar_bitmask")),
        "runner V2": stride_mapping(source),
    }
    if all(parts.values()):
        return found("contained", MANAGER, FILL)
    there = [name for name, is_there in parts.items() if is_there]
    return found("partial", MANAGER, FILL, "only " + ", ".join(there)) if there else found("missing", MANAGER, FILL)


def zero_budget(source: Source) -> Finding:
    """#52436: mask rows follow the scheduled drafts when adaptive verification admits none of them."""
    mapping = look(source, WORKER, MAPPING)
    if mapping is None:
        if stride_mapping(source):
            return found("removed", WORKER, APPLY, "mask rows no longer depend on how many drafts are admitted")
        if not adaptive(source):
            return found("no-feature", WORKER, APPLY, "no adaptive verification")
        by_admitted = "cu_num_logits_np" in names(look(source, WORKER, APPLY))
        return found("missing" if by_admitted else "unknown", WORKER, APPLY)
    by_scheduled = "num_draft_tokens_per_req" in names(mapping)
    if not by_scheduled and not adaptive(source):
        return found("no-feature", WORKER, MAPPING, "no adaptive verification")
    return found("contained" if by_scheduled else "missing", WORKER, MAPPING)


def adaptive(source: Source) -> bool:
    """Whether the build has adaptive verification."""
    return ADAPTIVE in fields(look(source, SPECULATIVE_CONFIG, "SpeculativeConfig"))


def pipeline_async(source: Source) -> Finding:
    """#56250: pipeline parallelism with async scheduling is refused on runner V1."""
    symbol = "VllmConfig._get_v1_model_runner_unsupported_features"
    unsupported = look(source, CONFIG, symbol)
    refused = [
        branch
        for branch in branches(unsupported, "pipeline_parallel_size", "async_scheduling")
        if says(branch, "pipeline parallelism")
    ]
    if refused:
        return found("contained", CONFIG, symbol)
    return found("missing", CONFIG, symbol if unsupported else "VllmConfig")


def request_metrics(source: Source) -> Finding:
    """#48915: speculative metrics per request."""
    symbol = "ObservabilityConfig"
    offered = "per_request_spec_decode_metrics" in fields(look(source, OBSERVABILITY, symbol))
    kept = look(source, REQUEST_METRICS, "RequestSpecDecodeMetrics") is not None
    if offered and kept:
        return found("contained", OBSERVABILITY, symbol)
    return found("unknown" if offered or kept else "missing", OBSERVABILITY, symbol)


def estimator(source: Source) -> Finding:
    """#52228: adaptive verification for drafters without a confidence head."""
    if not adaptive(source):
        return found("no-feature", SPECULATIVE_CONFIG, "SpeculativeConfig", "no adaptive verification")
    speculator = source.module(SPECULATOR)
    there = look(source, ESTIMATOR, "OnlineAcceptanceEstimator") is not None
    used = speculator is not None and "OnlineAcceptanceEstimator" in called(speculator.tree)
    if there and used:
        return found("contained", ESTIMATOR, "OnlineAcceptanceEstimator")
    if says(look(source, SPECULATIVE_CONFIG, "SpeculativeConfig"), "only supported with DSpark"):
        return found("missing", SPECULATIVE_CONFIG, "SpeculativeConfig", "refused unless the method is dspark")
    return found("unknown", SPECULATOR, "", "no estimator, and no refusal")


def adaptive_logprobs(source: Source) -> Finding:
    """Logprobs of outputs together with adaptive verification."""
    symbol = "SamplingParams._validate_spec_decode"
    check = look(source, SAMPLING, symbol)
    if not adaptive(source):
        return found("no-feature", SAMPLING, symbol, "no adaptive verification")
    if branches(check, ADAPTIVE, "num_logprobs"):
        return found("missing", SAMPLING, symbol, "refused for each request that asks for them")
    return found("contained" if check else "unknown", SAMPLING, symbol)


def adaptive_sharded(source: Source) -> Finding:
    """Adaptive verification together with batch-sharded sampling."""
    symbol = "VllmConfig._validate_batch_sharded_sampling"
    if "enable_batch_sharded_sampling" not in fields(look(source, PARALLEL, "ParallelConfig")):
        return found("no-feature", PARALLEL, "ParallelConfig", "no batch-sharded sampling")
    check = look(source, CONFIG, symbol)
    if branches(check, ADAPTIVE):
        return found("missing", CONFIG, symbol, "refused at start")
    return found("contained" if check else "unknown", CONFIG, symbol)


def adaptive_with(*conditions: str) -> Callable[[Source], Finding]:
    """A detector: adaptive verification together with what these identifiers of a condition stand for."""

    def detector(source: Source) -> Finding:
        if not adaptive(source):
            return found("no-feature", SPECULATIVE_CONFIG, "SpeculativeConfig", "no adaptive verification")
        check = "VllmConfig._validate_adaptive_verification"
        if branches(look(source, CONFIG, check), *conditions):
            return found("missing", CONFIG, check, "refused at start")
        for path, symbol in ((CONFIG, "VllmConfig"), (SPECULATIVE_CONFIG, "SpeculativeConfig")):
            if branches(look(source, path, symbol), ADAPTIVE, *conditions):
                return found("missing", path, symbol, "refused at start")
        there = look(source, CONFIG, "VllmConfig") is not None
        return found("contained" if there else "unknown", CONFIG, "VllmConfig")

    return detector


def adaptive_v1(source: Source) -> Finding:
    """Adaptive verification on runner V1."""
    symbol = "VllmConfig._get_v1_model_runner_unsupported_features"
    if not adaptive(source):
        return found("no-feature", SPECULATIVE_CONFIG, "SpeculativeConfig", "no adaptive verification")
    unsupported = look(source, CONFIG, symbol)
    if branches(unsupported, ADAPTIVE):
        return found("missing", CONFIG, symbol, "refused at start")
    return found("contained" if unsupported else "unknown", CONFIG, symbol)


def verified_counter(source: Source) -> Finding:
    """#64156: drafted as proposed, and a counter of what was verified."""
    symbol = "SpecDecodingStats"
    stats = look(source, SPEC_METRICS, symbol)
    if stats is None:
        return found("unknown", SPEC_METRICS, symbol, "no such class")
    counted = any("verified" in name for name in fields(stats))
    return found("contained" if counted else "missing", SPEC_METRICS, symbol)


def histogram_by_length(source: Source) -> Finding:
    """#56278: per request, the acceptance histogram by how much was drafted."""
    symbol = "RequestSpecDecodeMetrics"
    metrics = look(source, REQUEST_METRICS, symbol)
    if metrics is None:
        return found("no-feature", REQUEST_METRICS, symbol, "no metrics per request")
    there = "acceptance_histogram_by_draft_length" in names(metrics) or says(metrics, "by_draft_length")
    return found("contained" if there else "missing", REQUEST_METRICS, symbol)


def takes_v2(source: Source) -> bool:
    """Whether the build takes runner V2 by itself for every architecture, not for a list of them only."""
    choice = look(source, CONFIG, "VllmConfig.use_v2_model_runner")
    return choice is not None and "_is_default_v2_model_runner_model" not in names(choice)


def async_by_runner(source: Source) -> bool:
    """Whether a drafter switches async scheduling off on runner V1 only."""
    return "v1_async_sched_incompat" in names(look(source, CONFIG, "VllmConfig.__post_init__"))
