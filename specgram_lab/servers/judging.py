"""Answers judged: each text, or each call of a tool, has one class, with the reason and the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specgram_lab import grammars
from specgram_lab.grammars import OutputClass, OutputVerdict
from specgram_lab.servers.answers import Answer, Outcome
from specgram_lab.spec import Grammar

WRONG = frozenset(
    {
        OutputClass.INVALID, OutputClass.WHITESPACE_RUNAWAY, OutputClass.NUMBER_RUNAWAY,
        OutputClass.DESYNC_AFTER_END, OutputClass.EMPTY,
    }
)  # fmt: skip
"""Classes that a structured output should never have; a truncated one only needs more tokens."""
FINISH: Mapping[str, str] = {"tool_calls": "stop", "function_call": "stop"}
"""The chat API's reasons that are vLLM's ``stop``."""
_MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>", "<｜tool")


@dataclass(frozen=True)
class Judged:
    """An answer and its verdict; None where no whole answer came. ``where`` names the call the verdict is about."""

    answer: Answer
    verdict: OutputVerdict | None
    where: str = ""


def judge(answer: Answer) -> Judged:
    """The verdict on one answer; of several tool calls the first that is not valid."""
    if answer.outcome is not Outcome.OK:
        return Judged(answer, None)
    finish = FINISH.get(answer.finish_reason or "", answer.finish_reason)
    if answer.ask.tools:
        return _judge_calls(answer, finish)
    verdict = grammars.classify(answer.ask.grammar, answer.text, finish, schema=answer.ask.schema)
    return Judged(answer, verdict)


def _judge_calls(answer: Answer, finish: str | None) -> Judged:
    if not answer.calls:
        return Judged(answer, _without_call(answer.text, finish))
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in answer.ask.tools}
    for number, call in enumerate(answer.calls):
        where = f"call {number + 1}"
        if call.name not in parameters:
            return Judged(answer, OutputVerdict(OutputClass.INVALID, f"there is no tool {call.name!a}"), where)
        verdict = _arguments(parameters[call.name], call.arguments, finish)
        if verdict.kind is not OutputClass.VALID:
            return Judged(answer, verdict, where)
    return Judged(answer, OutputVerdict(OutputClass.VALID))


def _arguments(schema: Any, text: str, finish: str | None) -> OutputVerdict:
    grammar = Grammar(kind="json_schema", value=schema) if isinstance(schema, dict) else Grammar(kind="json_object")
    return grammars.classify(grammar, text, finish)


def _without_call(text: str, finish: str | None) -> OutputVerdict:
    found = [at for mark in _MARKS if (at := text.find(mark)) >= 0]
    if found:
        cut = finish == "length"
        kind = OutputClass.TRUNCATED if cut else OutputClass.INVALID
        why = "a tool call that max_tokens cut" if cut else "a tool call that the server's parser did not recognise"
        return OutputVerdict(kind, why, min(found))
    if not text.strip():
        return OutputVerdict(OutputClass.EMPTY, "neither a call nor a text", 0)
    return OutputVerdict(OutputClass.NOT_JUDGED, "the model answered without calling a tool")
