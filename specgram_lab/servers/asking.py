"""What is asked of a server: a prompt with its grammar as the body of an OpenAI request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import JsonValue

from specgram_lab import grammars
from specgram_lab.spec import Grammar, SpecError, Workload
from specgram_lab.workloads import Prompt

Endpoint = Literal["chat", "completions"]
ToolChoice = Literal["auto", "required"]
_EXTRA: Mapping[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False}
"""vLLM's own sampling parameters with the values at which they are not sent."""


@dataclass(frozen=True)
class Ask:
    """One request. ``body`` is what `openai`'s ``create`` takes, the model left out.

    ``tools`` are those that the request offers; then ``grammar`` is ``none`` and each call's arguments are judged.
    """

    request_id: str
    prompt_id: str
    repeat: int
    grammar: Grammar
    body: Mapping[str, Any] = field(repr=False)
    schema: JsonValue = None
    tools: Sequence[Mapping[str, Any]] = ()
    endpoint: Endpoint = "chat"


def ask(
    number: int,
    prompt: Prompt,
    workload: Workload,
    grammar: Grammar | None = None,
    *,
    stream: bool = False,
    endpoint: Endpoint = "chat",
    tool_choice: ToolChoice = "auto",
) -> Ask:
    """The request for ``prompt``, sampled as ``workload`` says.

    Args:
        number: becomes the request's id.
        prompt: its tools are offered as they stand there.
        workload: sampling parameters.
        grammar: None takes the prompt's own: its tools, else its schema, else any JSON object.
        stream: let the answer come in pieces.
        endpoint: ``completions`` sends a bare text without a chat template, and knows no tools.
        tool_choice: ``auto`` lets the model answer without a call, ``required`` does not.

    Raises:
        SpecError: a prompt that the endpoint cannot take.
    """
    if grammar is None:
        own = Grammar(kind="json_schema", per_prompt=True) if prompt.schema is not None else Grammar(kind="json_object")
        grammar = Grammar() if prompt.tools else own
    body: dict[str, Any] = {"max_tokens": workload.max_tokens, "temperature": workload.temperature}
    if workload.top_p != 1:
        body["top_p"] = workload.top_p
    if workload.seed is not None and workload.temperature > 0:
        body["seed"] = workload.seed + number
    if workload.logit_bias:
        body["logit_bias"] = dict(workload.logit_bias)
    extra = {name: getattr(workload, name) for name, neutral in _EXTRA.items() if getattr(workload, name) != neutral}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if endpoint == "completions":
        if prompt.text is None:
            raise SpecError(f"prompt {prompt.prompt_id} is a chat; the endpoint completions takes a text")
        body["prompt"] = prompt.text
    else:
        body["messages"] = prompt.chat()
    if prompt.tools:
        if endpoint == "completions":
            raise SpecError(f"prompt {prompt.prompt_id} has tools; the endpoint completions takes none")
        body |= {"tools": [dict(tool) for tool in prompt.tools], "tool_choice": tool_choice}
    elif endpoint == "chat" and grammar.kind in ("json_object", "json_schema"):
        body["response_format"] = _response_format(grammar, prompt)
    elif grammar.kind != "none":
        extra["structured_outputs"] = grammars.to_vllm(grammar, prompt.schema)
    if extra:
        body["extra_body"] = extra
    schema = prompt.schema if grammar.per_prompt else None
    return Ask(str(number), prompt.prompt_id, prompt.repeat, grammar, body, schema, prompt.tools, endpoint)


def _response_format(grammar: Grammar, prompt: Prompt) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"type": "json_object"}
    schema = prompt.schema if grammar.per_prompt else grammar.value
    if not isinstance(schema, dict):
        raise SpecError(f"prompt {prompt.prompt_id} has no schema for grammar {grammar.label}")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
