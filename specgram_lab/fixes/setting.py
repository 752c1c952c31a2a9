"""A server's configuration on one build: what vLLM makes of what was not given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from specgram_lab.fixes.configuration import RUNNERS, Configuration, Runner
from specgram_lab.fixes.engine_detectors import async_by_runner, takes_v2
from specgram_lab.fixes.finding import Finding
from specgram_lab.fixes.source import Source

SYNCHRONOUS: Final = frozenset({"ngram", "suffix", "medusa", "mlp_speculator", "custom_class"})
"""Methods for which vLLM switches async scheduling off by itself, since 0.33 on runner V1 only (`VllmConfig`)."""
V1_METHODS: Final = frozenset({"suffix", "medusa", "mlp_speculator", "custom_class"})
"""Methods that runner V2 does not support (`VllmConfig._get_v2_model_runner_unsupported_features`)."""


@dataclass(frozen=True)
class Setting:
    """A configuration on a build: what vLLM makes of what was not given."""

    given: Configuration
    source: Source
    findings: Mapping[str, Finding]

    @property
    def for_cpu(self) -> bool:
        """Whether the server runs on a CPU: as given, else as the build says."""
        return self.source.for_cpu if self.given.device is None else self.given.device == "cpu"

    def runner_may_be(self, runner: Runner) -> bool:
        """Whether requests may run on this model runner; of two possible ones neither is ruled out."""
        if self.given.runner is not None:
            return self.given.runner == runner
        if self.for_cpu or self.given.drafter in V1_METHODS:
            return runner == "v1"
        if self.given.drafter == "dspark" or takes_v2(self.source):
            return runner == "v2"
        return True

    @property
    def asynchronous(self) -> bool:
        """Whether scheduling is asynchronous: on a CPU never, else as given, else vLLM's default."""
        if self.for_cpu:
            return False
        if self.given.async_scheduling is not None:
            return self.given.async_scheduling
        if self.pipeline_on_v1:
            return not self.findings["pipeline-async-refused"].good
        if async_by_runner(self.source) and not self.runner_may_be("v1"):
            return True
        return self.given.drafter not in SYNCHRONOUS

    @property
    def pipeline_on_v1(self) -> bool:
        """Whether there is pipeline parallelism, for certain on runner V1."""
        return self.given.pipeline_parallel > 1 and not self.runner_may_be("v2")

    @property
    def xgrammar(self) -> bool:
        """Whether xgrammar makes the grammars, which ``auto`` takes wherever it can; of the others less is known."""
        return self.given.backend in (None, "auto", "xgrammar")

    def taken(self) -> str:
        """What vLLM makes of what was not given, in words."""
        runners = [runner.upper() for runner in RUNNERS if self.runner_may_be(runner)]
        runner = f"runner {runners[0]}" if len(runners) == 1 else "runner V1 or V2, by the model's architecture"
        other = "" if self.xgrammar else f"; what is known of xgrammar is left out for {self.given.backend}"
        scheduling = "async scheduling" if self.asynchronous else "sync scheduling"
        return f"{runner}, {scheduling}, {'CPU' if self.for_cpu else 'GPU'}{other}"
