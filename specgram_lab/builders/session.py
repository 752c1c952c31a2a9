"""The requests of one cell: sent to an engine, driven to their end, judged, and turned into rows."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specgram_lab import grammars, models, workloads
from specgram_lab.builders.options import FENCE, FENCE_END
from specgram_lab.scenarios import load_scenario
from specgram_lab.spec import Cell, Grammar

PROGRESS_S = 0.5
GRAMMAR_POLL_S = 0.002


@dataclass
class Sent:
    """One request: what was asked, and what became of it. ``refused`` holds vLLM's words if it did not take it."""

    request_id: str
    prompt_id: str
    repeat: int
    prompt: Any
    grammar: Grammar
    schema: Any = None
    max_tokens: int = 16
    output: Any = None
    refused: str = ""
    rows: dict[str, Any] = field(default_factory=dict)


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it does not take; a class of its own in newer releases."""
    from vllm import exceptions

    own = getattr(exceptions, "VLLMClientError", None)
    return (ValueError, NotImplementedError, *([own] if own else []))


class Session:
    """Sends all requests at once; the engine takes as many at a time as its ``max_num_seqs`` allows."""

    def __init__(self, cell: Cell, llm: Any, progress: Path) -> None:
        self.cell = cell
        self.llm = llm
        self.progress = progress
        self.tokenizer = llm.get_tokenizer()
        scenario = cell.workload.scenario
        fenced = FENCE_END if cell.engine.reasoning_parser == FENCE else None
        self.reasoning_end = load_scenario(scenario).setting.reasoning_end if scenario else fenced
        self.requests = self._scripted() if cell.workload.scenario else self._prompted()
        self.seconds = 0.0
        self.output_tokens = 0

    def _prompted(self) -> list[Sent]:
        workload, grammar = self.cell.workload, self.cell.grammar
        requests = []
        for number, prompt in enumerate(workloads.load(workload)):
            ids = self.tokenizer.apply_chat_template(prompt.chat(), add_generation_prompt=True, return_dict=False)
            schema = prompt.schema if grammar.per_prompt else None
            requests.append(
                Sent(str(number), prompt.prompt_id, prompt.repeat, ids, grammar, schema, workload.max_tokens)
            )
        return requests

    def _scripted(self) -> list[Sent]:
        assert self.cell.workload.scenario is not None
        scenario = load_scenario(self.cell.workload.scenario)
        requests = [
            Sent(str(i), f"{scenario.name}/{i}", 0, self.tokenizer(r.prompt).input_ids, r.grammar, None, r.max_tokens)
            for i, r in enumerate(scenario.requests)
        ]
        from specgram_lab.builders.scripted import STAGE

        STAGE.clear()
        answers = self._answers(requests, scenario.k) if self.cell.engine.kind == "local" else None
        STAGE.set(scenario, self.tokenizer, answers)
        return requests

    def _answers(self, requests: list[Sent], k: int) -> list[list[int]]:
        """What the target itself says to ``requests``, as far as a draft in their last step can reach."""
        engine = self.llm.llm_engine
        answers: dict[str, list[int]] = {}
        for sent in requests:
            asked = self._parameters(replace(sent, max_tokens=sent.max_tokens + k + 1))
            engine.add_request(f"answer{sent.request_id}", {"prompt_token_ids": sent.prompt}, asked)
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
        return [answers[f"answer{sent.request_id}"] for sent in requests]

    def _parameters(self, sent: Sent) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        workload = self.cell.workload
        asked = grammars.to_vllm(sent.grammar, sent.schema) if sent.grammar.kind != "none" else None
        return SamplingParams(
            temperature=workload.temperature,
            top_p=workload.top_p,
            min_p=workload.min_p,
            repetition_penalty=workload.repetition_penalty,
            logit_bias={int(key): value for key, value in workload.logit_bias.items()} or None,
            min_tokens=workload.min_tokens,
            max_tokens=sent.max_tokens,
            skip_special_tokens=self.reasoning_end is None,
            ignore_eos=workload.ignore_eos,
            seed=None if workload.seed is None or workload.temperature == 0 else workload.seed + int(sent.request_id),
            structured_outputs=StructuredOutputsParams(**asked) if asked else None,
        )

    def run(self) -> None:
        """Drive all requests to their end. What the engine has given stays in `requests` also when it fails."""
        engine = self.llm.llm_engine
        by_id = {}
        begin = time.perf_counter()
        for sent in self.requests:
            try:
                engine.add_request(sent.request_id, {"prompt_token_ids": sent.prompt}, self._parameters(sent))
                by_id[sent.request_id] = sent
            except refusals() as error:
                sent.refused = " ".join(str(error).split())
        self._await_grammars()
        reported, finished = 0.0, 0
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    sent = by_id[output.request_id.partition("-")[0]]
                    sent.output = output
                    finished += output.finished
                now = time.perf_counter() - begin
                if now - reported >= PROGRESS_S:
                    reported = now
                    self.progress.write_text(f"{finished}/{len(self.requests)}", encoding="utf-8")
        finally:
            self.seconds = time.perf_counter() - begin
            self.output_tokens = sum(len(s.output.outputs[0].token_ids) for s in self.requests if s.output)

    def _await_grammars(self) -> None:
        """Let all grammars compile first: the same requests share a forward pass on every machine and in every run.

        Else a grammar that is ready a moment later changes the batches, and with them the texts at ties in bf16.
        """
        for request in self.llm.llm_engine.engine_core.engine_core.scheduler.requests.values():
            asked = request.structured_output_request
            while asked is not None and not asked.is_grammar_ready:
                time.sleep(GRAMMAR_POLL_S)

    def outcome(self) -> tuple[str, str]:
        """The cell's outcome and, unless it is ok, the reason."""
        refused = [s for s in self.requests if s.refused]
        if refused and len(refused) == len(self.requests):
            return "rejected_request", refused[0].refused
        if not self.output_tokens:
            return "no_data", "the engine gave no token"
        return "ok", ""

    def request_rows(self, run_id: str) -> list[dict[str, Any]]:
        """Rows of the table ``requests``, every output judged."""
        rows = []
        matches = self._matches()
        for sent in self.requests:
            row: dict[str, Any] = {
                "run_id": run_id,
                "request_id": sent.request_id,
                "prompt_id": sent.prompt_id,
                "repeat": sent.repeat,
                "prompt_tokens": len(sent.prompt),
            }
            if sent.output is None:
                row |= {"finish_reason": "rejected" if sent.refused else None, "class_detail": sent.refused}
                rows.append(row)
                continue
            completion = sent.output.outputs[0]
            row |= {
                "output_tokens": len(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "text": grammars.escape_surrogates(completion.text),
                "token_ids": list(completion.token_ids),
            }
            row |= self._judgement(sent, completion, matches.get(sent.request_id)) | self._reported(completion)
            rows.append(row)
        return rows

    def _matches(self) -> dict[str, grammars.TextMatch]:
        """What xgrammar's own matcher says of outputs that no other oracle can judge, by request."""
        asked = [s for s in self.requests if s.output and s.grammar.kind in ("ebnf", "structural_tag")]
        found: dict[str, grammars.TextMatch] = {}
        if not asked:
            return found
        with grammars.CompilerSession(models.model_dir(self.cell.target.model)) as session:  # seconds to start
            for sent in asked:
                text = sent.output.outputs[0].text
                if self.reasoning_end is not None:
                    text = text.partition(self.reasoning_end)[2]
                found[sent.request_id] = grammars.validate_texts(sent.grammar, [text], session)[0]
        return found

    def _judgement(self, sent: Sent, completion: Any, match: grammars.TextMatch | None) -> dict[str, Any]:
        if sent.grammar.kind == "none":
            return {}
        verdict = grammars.classify(
            sent.grammar,
            completion.text,
            completion.finish_reason,
            schema=sent.schema,
            match=match,
            reasoning_end=self.reasoning_end,
        )
        return {
            "output_class": str(verdict.kind.value),
            "class_detail": verdict.detail,
            "class_position": verdict.position,
        }

    @staticmethod
    def _reported(completion: Any) -> dict[str, Any]:
        metrics = getattr(completion, "spec_decode_metrics", None)
        if metrics is None:
            return {}
        content = metrics if isinstance(metrics, dict) else metrics.to_dict()
        return {
            "reported_spec_steps": content["num_spec_steps"],
            "reported_drafted": content["num_draft_tokens"],
            "reported_accepted": content["num_accepted_draft_tokens"],
            "reported_step_drafted": content.get("per_step_drafted", []),
            "reported_step_accepted": content.get("per_step_accepted", []),
        }

    def recorded(self, run_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows of ``steps`` and ``fsm_events`` from the recorder, under the lab's own request ids."""
        from specgram_lab.samplers.hooks import RECORDER

        def own(row: dict[str, Any]) -> dict[str, Any]:
            return {**row, "run_id": run_id, "request_id": row["request_id"].partition("-")[0]}

        events = [own(row) for row in RECORDER.fsm_events]
        for event in events:
            text = self.tokenizer.decode([t for t in event["token_ids"] if t >= 0])
            event["token_text"] = grammars.escape_surrogates(text)
        return [own(row) for row in RECORDER.steps], events
