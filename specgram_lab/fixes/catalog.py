"""The changes of vLLM that matter for drafts under a grammar, one entry each, and how they are looked for."""

from __future__ import annotations

from typing import Final

from specgram_lab.fixes import engine_detectors as engine
from specgram_lab.fixes import grammar_detectors as grammar
from specgram_lab.fixes.finding import Finding, Fix
from specgram_lab.fixes.source import Source

REPORTS: Final = {
    "R0": "'Failed to advance FSM' for drafts behind a reasoning end",
    "R1": "strict tool calling: refused tokens end requests; blanks without end",
    "R2": "pipeline parallelism with async scheduling on Model Runner V1",
    "R3": "drafted, verified, accepted: what the counters say",
    "R4": "adaptive verification with a budget of zero ends the engine",
}
"""The five reports that the lab starts from."""

FIXES: Final[tuple[Fix, ...]] = (
    Fix("reasoning-end-in-window", "a reasoning end inside a draft window is found; what follows it is masked",
        "vllm#44297", ("R1",), grammar.reasoning_end),
    Fix("one-boundary", "the reasoning end is found in one way for JSON, regex, choice, EBNF and tools",
        "vllm#44993", ("R1",), grammar.one_boundary),
    Fix("stops-at-end", "xgrammar is not advanced beyond the end of the output",
        "vllm#52805", ("R1",), grammar.stops_at_end),
    Fix("probe-guard", "a draft behind a reasoning end is asked about before it is fed to the grammar",
        "vllm#53046", ("R0",), grammar.probe_guard),
    Fix("manager-validates", "one place validates drafts and feeds committed tokens",
        "vllm#48200", ("R0", "R1"), grammar.manager_validates),
    Fix("draft-probe-named", "a refused draft is named as such in the log",
        "vllm#48200", ("R0", "R1"), grammar.refusal_logged),
    Fix("masks-after-refusal", "what follows a refused draft stays under the grammar",
        "source of 0.31", ("R1",), grammar.rows_after_refusal),
    Fix("implicit-reasoning-end", "a tool call that ends the reasoning is fed to the grammar",
        "source of 0.32", ("R1",), grammar.implicit_end),
    Fix("unseen-drafts-invalid", "drafts that the grammar has not seen are not accepted (runner V2)",
        "vllm#54442", ("R1",), engine.unseen_drafts),
    Fix("masked-reasoning-ends", "a tool call cannot end the reasoning where the grammar wants something else",
        "source of 0.33", ("R1",), grammar.masked_ends),
    Fix("pipeline-async-refused", "pipeline parallelism with async scheduling is refused on runner V1",
        "vllm#56250", ("R2",), engine.pipeline_async),
    Fix("verified-counter", "drafted as proposed, verified counted",
        "vllm#64156", ("R3",), engine.verified_counter),
    Fix("per-request-metrics", "speculative metrics in each answer",
        "vllm#48915", ("R3",), engine.request_metrics),
    Fix("histogram-by-draft-length", "the acceptance histogram of a request by how much was drafted",
        "vllm#56278", ("R3",), engine.histogram_by_length),
    Fix("zero-budget-mapping", "a verification budget of zero keeps mask rows and mapping alike",
        "vllm#52436", ("R4",), engine.zero_budget),
    Fix("fixed-stride-masks", "as many mask rows for each request, whatever is verified",
        "vllm#52477", ("R4",), engine.fixed_stride),
    Fix("acceptance-estimator", "adaptive verification for drafters without a confidence head",
        "vllm#52228", (), engine.estimator),
    Fix("adaptive-logprobs", "logprobs together with adaptive verification",
        "source of 0.29", (), engine.adaptive_logprobs),
    Fix("adaptive-batch-sharded", "adaptive verification together with batch-sharded sampling",
        "source of 0.33", (), engine.adaptive_sharded),
    Fix("adaptive-runner-v1", "adaptive verification on runner V1",
        "source of 0.29", (), engine.adaptive_v1),
    Fix("adaptive-eager", "adaptive verification without CUDA graphs",
        "source of 0.28", (), engine.adaptive_with("cudagraph_mode")),
    Fix("adaptive-piecewise", "adaptive verification with piecewise CUDA graphs",
        "source of 0.30", (), engine.adaptive_with("has_full_cudagraphs")),
    Fix("adaptive-pipeline", "adaptive verification together with pipeline parallelism",
        "source of 0.28", (), engine.adaptive_with("pipeline_parallel_size")),
    Fix("adaptive-lora", "adaptive verification together with LoRA",
        "source of 0.28", (), engine.adaptive_with("lora_config")),
    Fix("adaptive-local-argmax", "adaptive verification from a drafter's local argmax",
        "source of 0.30", (), engine.adaptive_with("use_local_argmax_reduction")),
    Fix("dflash2", "the drafter DFlash2",
        "vllm#52816", (), engine.dflash2),
    Fix("compact-separators", "disable_any_whitespace gives compact JSON",
        "vllm#58067", ("R1",), grammar.compact_separators),
    Fix("bounded-whitespace", "blanks between JSON tokens are bounded",
        "vllm#44619", ("R1",), grammar.bounded_whitespace),
)  # fmt: skip
BY_NAME: Final = {fix.name: fix for fix in FIXES}


def examine(source: Source) -> dict[str, Finding]:
    """Every fix in one build, by name."""
    return {fix.name: fix.detect(source) for fix in FIXES}
