"""What follows from a fix that a build lacks, for which servers: what will be seen, and a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from specgram_lab.fixes.setting import Setting

Kind = Literal[
    "engine ends", "does not start", "requests end", "wrong outputs", "endless outputs", "unlikely", "slower",
    "other numbers", "harmless", "unknown",
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""From the worst to the most harmless."""


@dataclass(frozen=True)
class Rule:
    """What follows when ``fix`` is not there (or, with ``present``, when it is) and the setting is ``concerned``.

    ``when`` names such settings in words, ``avoid`` a way out without another build; ``requires`` is a fix without
    which nothing follows.
    """

    fix: str
    report: str
    kind: Kind
    when: str
    concerned: Callable[[Setting], bool]
    says: str
    see: str
    avoid: str
    present: bool = False
    requires: str | None = None


def _drafts_and_reasons(setting: Setting) -> bool:
    return setting.given.drafter is not None and setting.given.reasoning_parser is not None


def _drafts(setting: Setting) -> bool:
    return setting.given.drafter is not None


RULES: Final[tuple[Rule, ...]] = (
    Rule("zero-budget-mapping", "R4", "engine ends", "adaptive verification",
         lambda s: s.given.adaptive and s.runner_may_be("v2"),
         "a verification budget of zero, an ordinary step under load, ends the engine",
         "'assert num_masks == len(mapping)' in the worker, then EngineDeadError; every request fails",
         "enable_adaptive_verification: false"),
    Rule("draft-probe-named", "R1", "unlikely", "a drafter", _drafts,
         "a draft that escaped the check before and that the grammar refuses while masks are made ends the engine",
         "AssertionError with token, request and drafts in it, then EngineDeadError",
         "no drafter for structured requests"),
    Rule("pipeline-async-refused", "R2", "requests end", "pipeline parallelism, async scheduling, runner V1",
         lambda s: s.given.pipeline_parallel > 1 and s.runner_may_be("v1") and s.asynchronous,
         "several steps of a request are in flight and masks come from an old state, with a drafter or without",
         "'Failed to advance FSM' and 'grammar rejected tokens [..] ... Terminating request', HTTP 500; worst in the"
         " first burst after start",
         "--no-async-scheduling, or VLLM_USE_V2_MODEL_RUNNER=1"),
    Rule("pipeline-async-refused", "R2", "does not start", "pipeline parallelism, --async-scheduling, runner V1",
         lambda s: s.given.async_scheduling is True and not s.for_cpu and s.pipeline_on_v1,
         "vLLM refuses this combination since it breaks structured outputs",
         "ValueError at start that names the V1 model runner and pipeline parallelism",
         "--no-async-scheduling, or VLLM_USE_V2_MODEL_RUNNER=1", present=True),
    Rule("pipeline-async-refused", "R2", "slower", "pipeline parallelism, runner V1",
         lambda s: s.given.async_scheduling is None and s.pipeline_on_v1,
         "vLLM switches async scheduling off by itself; outputs are right",
         "WARNING 'Async scheduling is disabled because the V1 model runner does not support it ...'",
         "VLLM_USE_V2_MODEL_RUNNER=1 to have both", present=True),
    Rule("acceptance-estimator", "", "does not start", "adaptive verification with another drafter than dspark",
         lambda s: s.given.adaptive and s.given.drafter != "dspark",
         "this build cannot do adaptive verification with this drafter",
         "an error at start; 0.28 and 0.29 say 'Adaptive verification only supported with DSpark'",
         "enable_adaptive_verification: false"),
    Rule("adaptive-batch-sharded", "", "does not start", "adaptive verification and --enable-batch-sharded-sampling",
         lambda s: s.given.adaptive and s.given.batch_sharded,
         "this build cannot do both",
         "an error at start about batch-sharded sampling",
         "leave one of the two out"),
    Rule("adaptive-runner-v1", "", "does not start", "adaptive verification, runner V1",
         lambda s: s.given.adaptive and not s.for_cpu and not s.runner_may_be("v2"),
         "vLLM has adaptive verification on runner V2 only",
         "an error at start that names the V1 model runner and adaptive draft verification",
         "runner V2 with a drafter that it has, or enable_adaptive_verification: false"),
    Rule("adaptive-eager", "", "does not start", "adaptive verification on a CPU",
         lambda s: s.given.adaptive and s.for_cpu,
         "adaptive verification runs on GPUs only: on runner V2, with costs that vLLM profiles on full CUDA graphs",
         "an error at start about runner V1, or about full CUDA graphs",
         "enable_adaptive_verification: false"),
    Rule("adaptive-eager", "", "does not start", "adaptive verification, no CUDA graphs",
         lambda s: s.given.adaptive and s.given.graphs == "none" and not s.for_cpu,
         "vLLM takes the budget from step costs that it profiles on full CUDA graphs",
         "an error at start: 'Adaptive verification requires full CUDA graphs', before 0.30 'not currently compatible"
         " with enforce_eager/cudagraph_mode=none'",
         "leave --enforce-eager (or -O0) out, or enable_adaptive_verification: false"),
    Rule("adaptive-piecewise", "", "does not start", "adaptive verification, piecewise CUDA graphs",
         lambda s: s.given.adaptive and s.given.graphs == "piecewise" and not s.for_cpu,
         "vLLM takes the budget from step costs that it profiles on full CUDA graphs",
         "an error at start: 'Adaptive verification requires full CUDA graphs'",
         "cudagraph_mode FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE"),
    Rule("adaptive-pipeline", "", "does not start", "adaptive verification, pipeline parallelism",
         lambda s: s.given.adaptive and s.given.pipeline_parallel > 1,
         "confidences and costs are known on the last rank only",
         "an error at start about adaptive verification and pipeline parallelism",
         "leave one of the two out"),
    Rule("adaptive-lora", "", "does not start", "adaptive verification and --enable-lora",
         lambda s: s.given.adaptive and s.given.lora,
         "this build cannot do both",
         "an error at start about adaptive verification and LoRA",
         "leave one of the two out"),
    Rule("adaptive-local-argmax", "", "does not start", "adaptive verification, use_local_argmax_reduction",
         lambda s: s.given.adaptive and s.given.local_argmax and s.given.drafter != "dspark",
         "without a confidence head acceptance is estimated from draft logits, which a local argmax never makes",
         "an error at start: 'Disable one of them.'",
         "leave use_local_argmax_reduction out"),
    Rule("per-request-metrics", "R3", "does not start", "--per-request-spec-decode-metrics",
         lambda s: s.given.per_request_metrics,
         "this build does not know the flag",
         "'unrecognized arguments: --per-request-spec-decode-metrics'",
         "leave the flag out"),
    Rule("stops-at-end", "R1", "unlikely", "ignore_eos in a request", lambda s: s.xgrammar,
         "tokens committed behind the end of the grammar, as with ignore_eos, end the request",
         "'grammar rejected tokens [..] ... Terminating request', finish_reason error or HTTP 500",
         "no ignore_eos in structured requests"),
    Rule("reasoning-end-in-window", "R1", "requests end", "a drafter and a reasoning parser", _drafts_and_reasons,
         "drafts behind a reasoning end are not masked, and the end marker is fed to the grammar",
         "'grammar rejected tokens [..] ... Terminating request', HTTP 500; or answers that begin with ```json",
         "structured requests without reasoning (enable_thinking: false)"),
    Rule("one-boundary", "R1", "wrong outputs", "a drafter and a reasoning parser", _drafts_and_reasons,
         "where reasoning ends within a draft, the output's first token can be doubled or lost",
         "answers that begin with '{{' or with part of a key; no line in the log",
         "structured requests without reasoning (enable_thinking: false)"),
    Rule("unseen-drafts-invalid", "R1", "wrong outputs", "a drafter, pipeline parallelism, async scheduling, runner V2",
         lambda s: _drafts(s) and s.given.pipeline_parallel > 1 and s.asynchronous and s.runner_may_be("v2"),
         "drafts can be lost on their way to the scheduler (vllm#54437), and the worker accepts them unmasked",
         "invalid outputs, or 'grammar rejected tokens [..] ... Terminating request' some tokens later",
         "--no-async-scheduling"),
    Rule("implicit-reasoning-end", "R1", "wrong outputs", "a reasoning and a tool parser",
         lambda s: s.given.reasoning_parser is not None and s.given.tool_parser is not None,
         "a tool call that ends the reasoning without its end marker begins for the grammar one token late",
         "tool calls with a doubled opening, or free text where a call was wanted",
         "prompts or templates that close the reasoning before the call"),
    Rule("masked-reasoning-ends", "R1", "unlikely", "a reasoning parser",
         lambda s: s.given.reasoning_parser is not None,
         "a tool call that begins during reasoning, where JSON is wanted, is fed to the grammar, which refuses it",
         "'grammar rejected tokens [..] ... Terminating request' at the end of the reasoning, HTTP 500",
         "no tools in requests that ask for JSON", requires="implicit-reasoning-end"),
    Rule("bounded-whitespace", "R1", "endless outputs", "JSON grammars",
         lambda s: s.xgrammar and not s.given.compact,
         "the grammar allows blanks without end; a model may print them up to max_tokens, with a drafter or without",
         "finish_reason length and a long run of blanks or newlines in the output; no line in the log",
         "set max_tokens and bound strings in schemas; disable_any_whitespace where it gives compact JSON"),
    Rule("compact-separators", "R1", "slower", "disable_any_whitespace",
         lambda s: s.xgrammar and s.given.compact,
         "the grammar demands a space behind ':' and ',', against what models were trained to write",
         "'{\"a\": 1, \"b\": 2}' and nothing else; fewer drafts are accepted, contents can degenerate",
         "leave disable_any_whitespace out"),
    Rule("verified-counter", "R3", "other numbers", "a drafter", _drafts,
         "drafted leaves grammar-invalid drafts out, so sync and async scheduling give other rates for the same text",
         "vllm:spec_decode_num_draft_tokens_total below what was proposed; drafts that adaptive verification skipped"
         " count as drafted",
         "compare within one scheduling only; specgram metrics names what a server counts"),
    Rule("adaptive-logprobs", "", "other numbers", "adaptive verification",
         lambda s: s.given.adaptive,
         "requests for logprobs are refused",
         "an error per request, 'Output logprobs are not supported ...'",
         "no logprobs"),
    Rule("probe-guard", "R0", "harmless", "a drafter and a reasoning parser",
         lambda s: s.xgrammar and _drafts_and_reasons(s),
         "drafts behind a reasoning end are fed to the grammar unchecked, and each that it refuses is logged",
         "ERROR 'Failed to advance FSM for request .. for tokens N', up to k lines in a row, without 'Terminating"
         " request'; HTTP 200, valid outputs, counters unchanged",
         "nothing need be done, and specgram log tells these lines from fatal ones",
         requires="reasoning-end-in-window"),
)  # fmt: skip
