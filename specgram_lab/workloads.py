"""The prompts of a workload: read from JSONL or given inline, checked before any model is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specgram_lab.paths import data_file
from specgram_lab.spec import SpecError, Workload

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("id", "text", "messages", "schema", "tools", "note")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """One request's prompt. Exactly one of ``text`` (as it stands) and ``messages`` (for the chat template) is set.

    ``schema`` is the JSON Schema that this prompt brings for a grammar with ``per_prompt``; ``tools`` are those that
    a request to a server offers, as the chat API has them; ``repeat`` counts the passes over the prompts from 0;
    ``note`` says what the prompt is for.
    """

    prompt_id: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    schema: dict[str, Any] | None = None
    note: str = ""
    repeat: int = 0
    tools: tuple[dict[str, Any], ...] = ()

    def chat(self) -> list[dict[str, str]]:
        """The messages as plain dicts; a bare text becomes one user turn."""
        if self.text is not None:
            return [{"role": "user", "content": self.text}]
        return [{"role": message.role, "content": message.content} for message in self.messages]


def load(workload: Workload, base: Path | None = None) -> list[Prompt]:
    """The requests of ``workload`` in order: ``limit`` cuts the prompts, then ``repeats`` passes follow each other.

    Args:
        workload: with ``prompts`` or ``inline``.
        base: the folder that a path in ``prompts`` is relative to.

    Raises:
        DataNotFoundError: there is no such prompt set; the message lists those that exist.
        SpecError: a line that is no prompt (with its number), an id that occurs twice, a text that no tokenizer
            can read, or a workload that has a scenario instead of prompts.
    """
    if workload.scenario is not None:
        raise SpecError(f"workload {workload.scenario} is a scenario, which has no prompts to load")
    if workload.inline:
        prompts = [Prompt(f"inline-{number}", text=text) for number, text in enumerate(workload.inline)]
        for prompt in prompts:
            _check_text(prompt.text or "", prompt.prompt_id)
    else:
        prompts = read_prompts(data_file("prompts", workload.prompts or "", base))
    prompts = prompts[: workload.limit]
    return [replace(prompt, repeat=repeat) for repeat in range(workload.repeats) for prompt in prompts]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a JSONL file (UTF-8 whatever the locale; empty lines are skipped).

    A line is an object with ``id``, one of ``text`` and ``messages``, and optionally ``schema`` (a JSON Schema, or
    the name of one in ``data/schemas``), ``tools`` (a list as in a chat request) and ``note``.

    Raises:
        SpecError: as for `load`.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from None
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    # Split at line feeds only: JSON strings may hold U+2028, at which str.splitlines would cut.
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path} line {number}"
        prompt = _prompt(_object(raw, where), where, path.parent)
        if prompt.prompt_id in lines:
            raise SpecError(
                f"{where} has the id {prompt.prompt_id!r}, which line {lines[prompt.prompt_id]} has already"
            )
        lines[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise SpecError(f"{path} holds no prompt: one JSON object a line is wanted")
    return prompts


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SpecError(f"{where} is not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise SpecError(f"{where} is not JSON at column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise SpecError(f"{where} is nested too deeply") from None
    if not isinstance(value, dict):
        raise SpecError(f"{where} is a {type(value).__name__}, an object is wanted")
    return value


def _prompt(item: Mapping[str, Any], where: str, folder: Path) -> Prompt:
    unknown = sorted(set(item) - set(_KEYS))
    if unknown:
        raise SpecError(f"{where} has the unknown key {unknown[0]!r}, allowed are {', '.join(_KEYS)}")
    prompt_id, note = item.get("id"), item.get("note", "")
    if not isinstance(prompt_id, str) or not prompt_id:
        raise SpecError(f"{where} needs an id, a text that is not empty")
    if not isinstance(note, str):
        raise SpecError(f"{where} has a note that is no text")
    _check_text(prompt_id, where)
    if ("text" in item) == ("messages" in item):
        raise SpecError(f"{where} needs exactly one of text and messages")
    schema = _schema(item.get("schema"), where, folder)
    tools = _tools(item.get("tools", []), where)
    if "text" in item:
        text = item["text"]
        if not isinstance(text, str) or not text:
            raise SpecError(f"{where} has a text that is empty or none")
        _check_text(text, where)
        return Prompt(prompt_id, text=text, schema=schema, note=note, tools=tools)
    return Prompt(prompt_id, messages=_messages(item["messages"], where), schema=schema, note=note, tools=tools)


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise SpecError(f"{where} has tools that are no list")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise SpecError(f"{where} has a tool that is not an object with a function that has a name: {tool!a:.80}")
    return tuple(value)


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise SpecError(f"{where} has messages that are not a list with at least one turn")
    turns = []
    for turn in value:
        if not isinstance(turn, dict) or set(turn) != {"role", "content"} or not isinstance(turn["content"], str):
            raise SpecError(f"{where} has a message that is not an object of role and content: {turn!a}")
        if turn["role"] not in ROLES:
            raise SpecError(f"{where} has the role {turn['role']!r}, allowed are {', '.join(ROLES)}")
        _check_text(turn["content"], where)
        turns.append(Message(turn["role"], turn["content"]))
    return tuple(turns)


def _schema(value: Any, where: str, folder: Path) -> dict[str, Any] | None:
    if isinstance(value, str):
        path = data_file("schemas", value, folder)
        value = _object(path.read_bytes(), str(path))
    if value is not None and not isinstance(value, dict):
        raise SpecError(f"{where} has a schema that is neither an object nor the name of one")
    return value


def _check_text(text: str, where: str) -> None:
    lone = _SURROGATE.search(text)
    if lone:
        raise SpecError(f"{where} holds the lone surrogate \\u{ord(lone.group()):04x}, which no tokenizer can read")
