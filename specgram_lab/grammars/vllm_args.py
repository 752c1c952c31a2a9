"""A grammar as vLLM's request parameters, and the structural tag of a set of tools; vllm itself is not imported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from specgram_lab.spec import Grammar, SpecError

TOOL_STYLES: Mapping[str, tuple[str, str, str]] = {
    "hermes": ('<tool_call>\n{{"name": {name}, "arguments": ', "}}\n</tool_call>", "json"),
    "qwen3_coder": ("<tool_call>\n<function={bare}>\n", "\n</function>\n</tool_call>", "qwen_xml"),
}
"""Begin and end of a call, and xgrammar's style of what is between; Hermes and Qwen3-Coder chat templates."""


def to_vllm(grammar: Grammar, prompt_schema: JsonValue = None) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``StructuredOutputsParams``; an empty dict for grammar ``none``.

    ``prompt_schema`` is what the prompt brings, for a grammar with ``per_prompt``. ``disable_any_whitespace`` and
    the backend are settings of the engine in vLLM (``structured_outputs_config``), not of a request.

    Raises:
        SpecError: a per-prompt grammar and a prompt without a schema.
    """
    if grammar.kind == "none":
        return {}
    if grammar.kind == "json_object":
        return {"json_object": True}
    if grammar.kind == "json_schema":
        schema = prompt_schema if grammar.per_prompt else grammar.value
        if not isinstance(schema, dict | bool):
            raise SpecError(f"grammar {grammar.label} takes each prompt's schema, and this prompt has {schema!r}")
        # As text: vLLM 0.32 takes a dict too, but skips its checks where the dict is empty, and takes no boolean.
        return {"json": json.dumps(schema, ensure_ascii=False)}
    if grammar.kind == "structural_tag":
        return {"structural_tag": json.dumps(grammar.value, ensure_ascii=False)}
    if grammar.kind == "ebnf":
        return {"grammar": grammar.value}
    if grammar.kind == "choice":
        return {"choice": list(grammar.value) if isinstance(grammar.value, list) else grammar.value}
    return {"regex": grammar.value}


def tools_grammar(tools: Sequence[Mapping[str, Any]], *, style: str = "hermes", at_least_one: bool = True) -> Grammar:
    """The structural tag that lets a model call ``tools``, each with arguments that obey its schema.

    Args:
        tools: as in a chat request: ``{"type": "function", "function": {"name", "parameters"}}``, or the inner
            object alone.
        style: one of `TOOL_STYLES`; ``hermes`` writes the call as JSON, ``qwen3_coder`` as XML-like parameters.
        at_least_one: exactly one call and nothing else (as ``tool_choice: required`` with one call); if False,
            free text in which ``<tool_call>`` starts a call.

    Raises:
        SpecError: no tools, a tool without a name, two of one name, an unknown style.
    """
    if style not in TOOL_STYLES:
        raise SpecError(f"tool style {style!r} is not known, there are {', '.join(TOOL_STYLES)}")
    if not tools:
        raise SpecError("a tools grammar needs at least one tool")
    tags = [_tag(number, tool, style) for number, tool in enumerate(tools)]
    begins = [tag["begin"] for tag in tags]
    for number, begin in enumerate(begins):
        if begin in begins[:number]:
            raise SpecError(f"tool {number} has the name of an earlier one")
    if at_least_one:
        content: dict[str, Any] = {"type": "or", "elements": tags} if len(tags) > 1 else tags[0]
    else:
        content = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    return Grammar(kind="structural_tag", value={"type": "structural_tag", "format": content}, name=f"tools-{style}")


def _tag(number: int, tool: Mapping[str, Any], style: str) -> dict[str, Any]:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise SpecError(f"tool {number} has no name")
    schema = function.get("parameters", {"type": "object", "properties": {}, "additionalProperties": False})
    if not isinstance(schema, dict):
        raise SpecError(f"tool {name} has parameters that are no schema: {schema!r}")
    begin, end, kind = TOOL_STYLES[style]
    return {
        "type": "tag",
        "begin": begin.format(name=json.dumps(name, ensure_ascii=False), bare=name),
        "content": {"type": "json_schema", "json_schema": schema, "style": kind},
        "end": end.format(),
    }
