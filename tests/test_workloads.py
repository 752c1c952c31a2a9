"""Prompt files: what is read, what is refused with which sentence, and that the lab's own sets are sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specgram_lab.grammars import oracle, tools_grammar
from specgram_lab.grammars.enforcement import findings
from specgram_lab.paths import DATA, DataNotFoundError
from specgram_lab.spec import SpecError, Workload, parse_cell
from specgram_lab.workloads import load, read_prompts

SETS = {"records": 32, "tools": 16, "prose": 24, "copy": 12, "configs": 12}


def _file(folder: Path, *lines: Any) -> Path:
    path = folder / "set.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line, ensure_ascii=True).encode() for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


def test_inline_limit_and_repeats() -> None:
    prompts = load(Workload(inline=("one", "two", "three"), limit=2, repeats=2))
    assert [(p.prompt_id, p.text, p.repeat) for p in prompts] == [
        ("inline-0", "one", 0),
        ("inline-1", "two", 0),
        ("inline-0", "one", 1),
        ("inline-1", "two", 1),
    ]
    assert prompts[0].chat() == [{"role": "user", "content": "one"}]


def test_line_forms(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text('{"type": "boolean"}')
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = _file(
        tmp_path,
        b"\xef\xbb\xbf" + json.dumps({"id": "a", "text": "line\u2028break"}, ensure_ascii=False).encode(),
        b"",
        {"id": "b", "messages": turns, "schema": {"type": "null"}, "note": "why"},
        {"id": "c", "text": "t", "schema": "own.json"},
        {"id": "d", "text": "t", "schema": "server"},
    )
    first, second, third, fourth = read_prompts(path)
    assert first.text == "line\u2028break"
    assert (second.chat(), second.schema, second.note) == (turns, {"type": "null"}, "why")
    assert third.schema == {"type": "boolean"}
    assert fourth.schema is not None
    assert "region" in fourth.schema["properties"]
    assert load(Workload(prompts="set.jsonl", limit=1), tmp_path) == [first]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([{"id": "a", "text": "t"}, b'{"id": "b", "text": }'], "line 2 is not JSON at column 21"),
        ([b'{"id": "a", "text": "\xff"}'], "line 1 is not UTF-8 at byte 22"),
        ([[1]], "line 1 is a list, an object is wanted"),
        ([{"id": "a", "text": "t"}, b"", {"id": "a", "text": "u"}], "line 3 has the id 'a', which line 1 has already"),
        ([{"id": "a", "text": "x \ud83d y"}], "line 1 holds the lone surrogate \\ud83d, which no tokenizer can read"),
        ([{"text": "t"}], "line 1 needs an id"),
        ([{"id": "a"}], "line 1 needs exactly one of text and messages"),
        ([{"id": "a", "text": "t", "messages": []}], "line 1 needs exactly one of text and messages"),
        ([{"id": "a", "text": ""}], "line 1 has a text that is empty"),
        ([{"id": "a", "prompt": "t"}], "line 1 has the unknown key 'prompt', allowed are id, text, messages"),
        ([{"id": "a", "messages": []}], "line 1 has messages that are not a list with at least one turn"),
        ([{"id": "a", "messages": [{"role": "bot", "content": ""}]}], "line 1 has the role 'bot', allowed are system"),
        ([{"id": "a", "messages": ["hi"]}], "line 1 has a message that is not an object of role and content"),
        ([{"id": "a", "text": "t", "schema": 3}], "line 1 has a schema that is neither an object nor the name"),
        ([{"id": "a", "text": "t", "note": 3}], "line 1 has a note that is no text"),
        ([b""], "holds no prompt"),
    ],
)
def test_refused_with_one_sentence(tmp_path: Path, lines: list[Any], sentence: str) -> None:
    path = _file(tmp_path, *lines)
    with pytest.raises(SpecError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert sentence in message
    assert message.startswith(str(path))
    assert "\n" not in message
    message.encode("utf-8")


def test_missing_sets() -> None:
    with pytest.raises(
        DataNotFoundError, match=r"no prompt 'record': .* one of configs, copy, prose, records, .*tools"
    ):
        load(Workload(prompts="record"))
    with pytest.raises(SpecError, match="is a scenario"):
        load(Workload(scenario="mixed"))


def test_reading_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    path = _file(tmp_path, json.dumps({"id": "a", "text": "naïve 🚀"}, ensure_ascii=False).encode())
    code = (
        "import sys; from pathlib import Path; from specgram_lab.workloads import read_prompts\n"
        "print(ascii(read_prompts(Path(sys.argv[1]))[0].text))"
    )
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(DATA.parent),
    }
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == ascii("naïve 🚀"), done.stderr


@pytest.mark.parametrize("name", SETS)
def test_own_sets(name: str) -> None:
    prompts = load(Workload(prompts=name))
    assert len(prompts) >= SETS[name]
    for prompt in prompts:
        # about four characters a token: prompt and answer fit a context of 512
        assert sum(len(turn["content"]) for turn in prompt.chat()) < 900
        if name in ("records", "copy", "configs"):
            assert prompt.schema is not None
            assert not oracle.schema_fault(prompt.schema)
            assert not [str(finding) for finding in findings(prompt.schema)], "xgrammar would drop a part of it"
            assert _bounded(prompt.schema), prompt.prompt_id
        else:
            assert prompt.schema is None


def _bounded(schema: dict[str, Any]) -> bool:
    """Whether a small model cannot help but end: strings and lists have a maximum, objects are closed."""
    kinds = schema.get("type", "")
    if kinds == "object":
        closed = schema.get("additionalProperties") is False
        return closed and all(_bounded(value) for value in schema["properties"].values())
    if kinds == "array":
        return "maxItems" in schema and _bounded(schema["items"])
    if "string" in kinds:
        return "maxLength" in schema or "pattern" in schema
    return "enum" in schema or "const" in schema or kinds == "boolean" or {"minimum", "maximum"} <= set(schema)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            (name, "json_schema")
            for name in ("server", "ship", "person", "kind_note", "boolean", "unicode", "records_list")
        ),
        ("sql", "ebnf"),
        ("arithmetic", "ebnf"),
        ("date", "regex"),
        ("version", "regex"),
        ("sentiment", "choice"),
        ("tools", "structural_tag"),
    ],
)
def test_own_schemas_load_by_name(name: str, kind: str) -> None:
    cell = parse_cell({"workload": {"prompts": "prose"}, "grammar": {"kind": kind, "file": name}})
    assert cell.grammar.label == name
    if kind == "json_schema":
        assert isinstance(cell.grammar.value, dict)
        assert _bounded(cell.grammar.value)


def test_tools_file_is_the_tag_of_the_toolset() -> None:
    tools = json.loads((DATA / "schemas" / "toolset.json").read_text(encoding="utf-8"))
    assert json.loads((DATA / "schemas" / "tools.json").read_text(encoding="utf-8")) == tools_grammar(tools).value
