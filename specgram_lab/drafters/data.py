"""What drafters learn from: prompts, a held-out split, and the target's own answers through a real engine.

Prompts come from `specgram_lab.drafters.bfcl` and from ``data/drafters/templates.json``. A prompt belongs to a group
(a function of BFCL, a topic, a kind of record); groups are held out whole, and no schema of a held-out group occurs
in training. All prompts of ``data/prompts`` are held out as well. The answers are those of an engine (V1, no drafter),
kept in the cache folder with its states; they can be made again from `SEED`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specgram_lab import capabilities, models, workloads
from specgram_lab.builders import options
from specgram_lab.drafters import bfcl
from specgram_lab.handover import PARENT
from specgram_lab.paths import DATA, cache_dir
from specgram_lab.spec import Cell, parse_cell

SEED = 20261129
HELD_OUT_PERCENT = 12
"""Share of the groups that no recipe sees."""
ROUNDS = 24
"""Into how many parts the training prompts of every stream are cut; training may begin when some are there."""
CONCURRENCY = 128
"""Requests in the engine at once: a step reads the weights once for all of them."""
KV_CACHE_MIB = 1024
WHOLE_PROMPTS = 256
"""Tokens a request that a step can take in. A seeded request whose prompt is split ends V1 on a CPU: it takes the
number back that the first part drew, and a CPU's generator has no offset to be set."""
MAX_TOKENS = 96
PROSE = ("topic/", "question/")

Kind = Literal["free", "json_schema", "json_object"]
Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Written:
    """One prompt of the corpus. ``group`` decides the split; ``schema`` is there where it can be asked as JSON."""

    prompt_id: str
    group: str
    free: str
    as_json: str = ""
    schema: dict[str, Any] | None = None

    def line(self, kind: Kind) -> dict[str, Any]:
        """The prompt as a line of a prompt file."""
        asked = self.free if kind == "free" else self.as_json
        line: dict[str, Any] = {"id": self.prompt_id, "messages": [{"role": "user", "content": asked}]}
        return line | {"schema": self.schema} if kind == "json_schema" else line


def split_of(group: str) -> Split:
    """Where a group belongs; a hash decides, so that adding prompts moves no other."""
    digest = hashlib.sha256(f"{SEED}/{group}".encode()).digest()
    return "heldout" if digest[0] * 100 < HELD_OUT_PERCENT * 256 else "train"


def corpus() -> dict[Split, list[Written]]:
    """All prompts by split, in a fixed order. Training prompts whose schema a held-out one has are left out."""
    parts: dict[Split, list[Written]] = {"train": [], "heldout": []}
    for prompt in [*_templates(), *_questions()]:
        parts[split_of(prompt.group)].append(prompt)
    unseen = {_canonical(p.schema) for p in parts["heldout"] if p.schema} | _lab_schemas()
    texts = _lab_texts()
    parts["train"] = [
        p for p in parts["train"] if _canonical(p.schema) not in unseen and not {p.free, p.as_json} & texts
    ]
    for split in parts.values():
        split.sort(key=lambda p: hashlib.sha256(f"{SEED}/{p.prompt_id}".encode()).digest())
    return parts


def _canonical(schema: Mapping[str, Any] | None) -> str:
    return json.dumps(schema, sort_keys=True)


def _lab_prompts() -> list[workloads.Prompt]:
    return [p for path in sorted((DATA / "prompts").glob("*.jsonl")) for p in workloads.read_prompts(path)]


def _lab_schemas() -> set[str]:
    return {_canonical(p.schema) for p in _lab_prompts() if p.schema}


def _lab_texts() -> set[str]:
    return {turn["content"] for p in _lab_prompts() for turn in p.chat() if turn["role"] == "user"}


def _questions() -> Iterator[Written]:
    for item in bfcl.items():
        as_json = f"{item.question}\nAnswer as JSON with {_listed(item.schema['required'])}." if item.schema else ""
        yield Written(f"bfcl-{item.item_id}", f"bfcl/{item.function}", item.question, as_json, item.schema)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _templates() -> Iterator[Written]:
    content = json.loads((DATA / "drafters" / "templates.json").read_text(encoding="utf-8"))
    for t, topic in enumerate(content["topics"]):
        for n, task in enumerate(content["tasks"]):
            yield Written(f"prose-{t}-{n}", f"topic/{topic}", task.format(topic))
    for n, question in enumerate(content["questions"]):
        yield Written(f"question-{n}", f"question/{question}", question)
    choose = random.Random(SEED)  # noqa: S311
    for t, (thing, fields) in enumerate(content["things"].items()):
        for n in range(24):
            names = choose.sample(fields, choose.randint(2, 4))
            schema = {
                "type": "object",
                "properties": {name: content["fields"][name] for name in names},
                "required": names,
                "additionalProperties": False,
            }
            asked = content["forms"][n % len(content["forms"])].format(thing, _listed(names))
            yield Written(f"record-{t}-{n}", f"thing/{thing}", f"Describe {thing} briefly.", asked, schema)


@dataclass(frozen=True)
class Chunk:
    """Prompts that one cell answers."""

    name: str
    split: Split
    kind: Kind
    temperature: float
    prompts: tuple[Written, ...]

    def first(self, limit: int | None) -> Chunk:
        """The same with its first ``limit`` prompts alone; as it is without."""
        return replace(self, prompts=self.prompts[:limit])

    def write(self, folder: Path) -> Path:
        """Write the prompt file, unless it stands there already."""
        path = folder / f"{self.name}.jsonl"
        text = "".join(json.dumps(p.line(self.kind)) + "\n" for p in self.prompts)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        return path

    def cell(self, folder: Path) -> Cell:
        """The cell that answers them; its prompt file is written to ``folder``."""
        return parse_cell(
            {
                "grammar": grammar(self.kind),
                "workload": {
                    "prompts": str(self.write(folder)),
                    "max_tokens": MAX_TOKENS,
                    "temperature": self.temperature,
                    "concurrency": CONCURRENCY,
                    "seed": SEED + int(hashlib.sha256(self.name.encode()).hexdigest()[:6], 16),
                },
                "engine": {
                    "runner": "v1",
                    "record": False,
                    "kv_cache_mib": KV_CACHE_MIB,
                    "max_num_batched_tokens": WHOLE_PROMPTS * CONCURRENCY,
                },
                "limits": {"timeout_s": 3600.0},
            }
        )


def grammar(kind: Kind) -> dict[str, Any]:
    """What a cell says of its grammar."""
    return {"kind": "none" if kind == "free" else kind, "per_prompt": kind == "json_schema"}


def chunks(rounds: int = ROUNDS) -> list[Chunk]:
    """All cells of the corpus: first the held-out ones, then ``rounds`` rounds in which every stream takes its turn.

    A stream is a kind of output at a temperature; each asks every prompt that fits it once, one part a round.
    """
    parts = corpus()
    made = [Chunk(f"heldout-{kind}", "heldout", kind, 0.0, p) for kind, p in _heldout(parts["heldout"]).items()]
    free = [p for p in parts["train"] if not p.group.startswith("thing/")]
    asked = [p for p in parts["train"] if p.schema]
    streams: tuple[tuple[str, Kind, float, list[Written]], ...] = (
        ("free-0", "free", 0.0, free),
        ("json_schema-0", "json_schema", 0.0, asked),
        ("free-0.7", "free", 0.7, free[::-1]),
        ("json_schema-0.7", "json_schema", 0.7, asked[::-1]),
        ("json_object-0", "json_object", 0.0, asked[1::4]),
        ("free-0.7-again", "free", 0.7, free[::2]),
    )
    for number in range(rounds):
        for name, kind, temperature, prompts in streams:
            part = tuple(prompts[number::ROUNDS])
            made.append(Chunk(f"train-{number:02d}-{name}", "train", kind, temperature, part))
    return made


def _heldout(prompts: list[Written]) -> dict[Kind, tuple[Written, ...]]:
    prose = [p for p in prompts if p.group.startswith(PROSE)][:48]
    questions = [p for p in prompts if p.group.startswith("bfcl/")][:48]
    asked = [p for p in prompts if p.schema]
    records = [p for p in asked if p.group.startswith("thing/")][:48]
    calls = [p for p in asked if p.group.startswith("bfcl/")][48:144]
    return {"free": (*prose, *questions), "json_schema": (*records, *calls)}


def folder() -> Path:
    """Where prompts and answers are kept."""
    return cache_dir() / "drafters" / "answers"


def generate(rounds: int, limit: int | None = None) -> int:
    """Answer what has not been answered yet, in a process of its own; resumable by chunk.

    Args:
        rounds: how many rounds of training prompts; the held-out ones belong to every number.
        limit: prompts of each chunk, for a trial in a cache folder of its own.

    Returns:
        The process's exit code; what it said besides its progress is in ``engine.log`` in `folder`.
    """
    prompts = folder() / "prompts"
    prompts.mkdir(parents=True, exist_ok=True)
    (cache_dir() / "drafters" / "states").mkdir(parents=True, exist_ok=True)
    models.ensure("smollm2-135m")
    cell = chunks(0)[0].cell(prompts)
    environment = {**os.environ, **options.environment(cell, capabilities.device(cell), folder())}
    environment = {key: value for key, value in environment.items() if value != ""}
    environment |= {PARENT: str(os.getpid()), "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    command = [sys.executable, "-m", "specgram_lab.drafters.answers", str(rounds), *([str(limit)] if limit else [])]
    with (folder() / "engine.log").open("ab") as log:
        return subprocess.run(command, env=environment, stderr=log, check=False).returncode
