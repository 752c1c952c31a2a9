"""Small sources that have, or lack, the structure of a change of vLLM; and folders and wheels made of them."""

from __future__ import annotations

import zipfile

from specgram_lab.fixes.source import MANAGER

XGRAMMAR = "v1/structured_output/backend_xgrammar.py"
SCHEDULER = "v1/core/sched/scheduler.py"
OUTPUT = "v1/core/sched/output.py"
WORKER = "v1/worker/gpu/structured_outputs.py"
CONFIG = "config/vllm.py"
SPECULATIVE = "config/speculative.py"
METRICS = "v1/metrics/stats.py"

OLD_MANAGER = """
class StructuredOutputManager:
    def grammar_bitmask(self, requests, ids, drafts):
        for i, token in enumerate(drafts):
            if reasoner.is_reasoning_end_streaming(tokens, [token]):
                apply = True
            accepted = {feed}
            if not accepted:
                {refused}

    def should_advance(self, request, new_token_ids):
        if request.reasoning_ended:
            return True
        if reasoner.is_reasoning_end_streaming(tokens, new_token_ids):
            request.reasoning_end_token_index = 3
            return True
        return False

    def should_fill_bitmask(self, request):
        return request.reasoning_ended

    def trim_reasoning_for_advance(self, request, new_token_ids):
        return new_token_ids[1:]
"""
OLD_FEED, GUARDED_FEED = (
    "grammar.accept_tokens(r, [token])",
    ("bool(grammar.validate_tokens([token])) and grammar.accept_tokens(r, [token])"),
)
NEW_MANAGER = """
class StructuredOutputManager:
    def grammar_bitmask(self, requests, ids, drafts):
        {bounds} = self.bounds(request)
        {stride}
        for i, token in enumerate(drafts):
            if not grammar.accept_tokens(r, [token]):
                logger.error("Unexpected: grammar terminated or rejected "
                             "draft token %s", token)
            {later}

    def validate_tokens(self, request, drafts):
        return grammar.validate_tokens(drafts)

    def accept_tokens(self, request, new_token_ids):
        request.reasoning_ended = True
        return grammar.accept_tokens(request.id, new_token_ids)
{more}
"""
NEW_SCHEDULER = """
class Scheduler:
    def update_draft_token_ids(self, drafts):
        self.manager.validate_tokens(request, drafts)

    def update_draft_token_ids_in_output(self, drafts, output):
        self.manager.validate_tokens(request, drafts)

    def update_from_output(self, output):
        self.manager.accept_tokens(request, tokens)
"""
PLAIN = {"bounds": "constraint_start", "stride": "", "later": "", "more": ""}
AV = "class SpeculativeConfig:\n    enable_adaptive_verification: bool = False\n"


def old(feed=OLD_FEED, refused="raise AssertionError((token, r))"):
    return {MANAGER: OLD_MANAGER.format(feed=feed, refused=refused)}


def new(**parts):
    return {MANAGER: NEW_MANAGER.format(**{**PLAIN, **parts}), SCHEDULER: NEW_SCHEDULER}


def backend(accept="pass", validate="pass", reset="pass", compile_arguments="any_whitespace=True"):
    return {
        XGRAMMAR: f"""
class XgrammarBackend:
    def compile_grammar(self, kind, text):
        return self.compiler.compile_json_schema(text, {compile_arguments})

class XgrammarGrammar:
    def accept_tokens(self, r, tokens):
        {accept}
        return all(self.matcher.accept_token(t) for t in tokens)

    def validate_tokens(self, tokens):
        {validate}
        return tokens

    def reset(self):
        {reset}
"""
    }


STOPS = {
    "accept": "if self._is_terminated: return True",
    "validate": "if self._is_terminated: return []",
    "reset": "self._is_terminated = False",
}
BLIND_MAPPING = "def _build_grammar_mapping(ids, cu_num_logits_np): return cu_num_logits_np"
SEEING_MAPPING = "def _build_grammar_mapping(ids, num_draft_tokens_per_req): return num_draft_tokens_per_req"
STRIDE_WORKER = """
class StructuredOutputsWorker:
    def apply_grammar_bitmask(self, ids):
        return [i * self.mask_stride for i in ids]
"""
STRIDES = {
    WORKER: STRIDE_WORKER,
    "v1/structured_output/utils.py": "def apply_grammar_bitmask(mask, ids):\n    mask_stride = len(mask) // len(ids)\n",
    **new(stride="mask_stride = k + 1"),
}
LIMITS = {
    OUTPUT: "class GrammarOutput:\n    num_acceptable_drafts: list | None = None\n",
    WORKER: "def grammar_invalid_drafts(batch): ...\n",
    "v1/worker/gpu/spec_decode/rejection_sampler.py": "def sample(logits, invalid_drafts=None): ...\n",
}
REFUSES_PIPELINE = """
class VllmConfig:
    def _get_v1_model_runner_unsupported_features(self):
        unsupported = []
        if self.parallel_config.pipeline_parallel_size > 1 and self.scheduler_config.async_scheduling:
            unsupported.append("pipeline parallelism with async scheduling")
        return unsupported
"""
REQUEST_METRICS = {
    "config/observability.py": "class ObservabilityConfig:\n    per_request_spec_decode_metrics: str = 'none'\n",
    METRICS: "class RequestSpecDecodeMetrics:\n    num_spec_steps: int = 0\n",
}
ESTIMATOR = {
    SPECULATIVE: AV,
    "v1/worker/gpu/spec_decode/acceptance_estimator.py": "class OnlineAcceptanceEstimator: ...\n",
    "v1/worker/gpu/spec_decode/speculator.py": "estimator = OnlineAcceptanceEstimator(3)\n",
}
DSPARK_ONLY = (
    AV + "\n    def check(self):\n        raise ValueError('Adaptive verification only supported with DSpark')\n"
)
SHARDS = {"config/parallel.py": "class ParallelConfig:\n    enable_batch_sharded_sampling: bool = False\n"}
SHARD_CHECK = """
class VllmConfig:
    def _validate_batch_sharded_sampling(self):
        if {test}:
            raise ValueError
"""
ADAPTIVE_CHECK = """
class VllmConfig:
    def _validate_adaptive_verification(self):
        if not self.speculative_config.enable_adaptive_verification:
            return
        if {test}:
            raise ValueError
"""
ADAPTIVE_UNSUPPORTED = """
class VllmConfig:
    def _get_v{runner}_model_runner_unsupported_features(self):
        if self.speculative_config.enable_adaptive_verification{test}:
            unsupported.append("adaptive draft verification")
"""
LOCAL_ARGMAX_CHECK = (
    AV
    + """
    def check(self):
        if self.method != "dspark" and self.enable_adaptive_verification and self.use_local_argmax_reduction:
            raise ValueError
"""
)
LOGPROBS_CHECK = """
class SamplingParams:
    def _validate_spec_decode(self, config):
        if {test}:
            raise ValueError
"""
DRAFTER = {
    "v1/worker/gpu/spec_decode/dflash2/speculator.py": "",
    "model_executor/models/qwen3_dflash2.py": "",
}
MASKS_ENDS = {
    "later": "self.fill(self._masked_reasoning_ends(request))",
    "more": "    def _masked_reasoning_ends(self, r):\n        return [t for t in all if grammar.validate_tokens([t])]",
}


def write(folder, files):
    """A package folder with these files; the manager's is there in every build."""
    for name, text in {MANAGER: "", **files}.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def wheel(path, files, version="0.99.0", name="vllm"):
    """A wheel with these files, and a module at its top that must not be run."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
        archive.writestr("vllm/__init__.py", "raise SystemExit('run')")
        for member, text in {MANAGER: "", **files}.items():
            archive.writestr(f"vllm/{member}", text)
    return path
