"""Notebooks x parameter sets, overnight: executed copies, their tables and figures, and a page that links them.

A batch is a YAML file; what an entry made lies in a folder of its own, with ``entry.json`` written last. What failed
runs again when the batch does, what is well does not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from specgram_lab import notebooks
from specgram_lab.handover import write_json
from specgram_lab.run import writing
from specgram_lab.spec import Model, SpecError, explain, read_yaml
from specgram_lab.sweeps import page
from specgram_lab.sweeps.runner import locked, terminable

ENTRY = "entry.json"
"""What became of an entry; without it the entry has not run."""


class Block(Model):
    """Every notebook with every set of parameters, which go by name."""

    notebooks: tuple[str, ...]
    sets: Annotated[dict[str, dict[str, JsonValue]], Field(min_length=1)]


class Batch(Model):
    """What stands in a batch's file."""

    name: str = "batch"
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Entry:
    """One notebook with one set of parameters."""

    notebook: Path
    set_name: str
    parameters: Mapping[str, Any]

    @property
    def entry_id(self) -> str:
        """A readable slug and 12 hex digits of what the notebook and its parameters are."""
        slug = re.sub(r"[^a-z0-9]+", "-", f"{self.notebook.stem} {self.set_name}".lower()).strip("-")[:60]
        content = self.notebook.read_bytes() + json.dumps(self.parameters, sort_keys=True).encode()
        return f"{slug}-{hashlib.sha256(content).hexdigest()[:12]}"


def load(path: Path) -> tuple[str, list[Entry]]:
    """The name and the entries of a batch's file; notebooks lie relative to it. Every parameter is checked.

    Raises:
        SpecError: with the file's name: it is no batch, a notebook is missing or has no cell of parameters, a parameter
            is unknown or would change on the way.
    """
    content = read_yaml(path)
    try:
        batch = Batch.model_validate(_tuples(content))
        entries = [
            Entry((path.parent / name).resolve(), set_name, parameters)
            for block in batch.blocks
            for name in block.notebooks
            for set_name, parameters in block.sets.items()
        ]
        for entry in entries:
            notebooks.checked(entry.notebook, entry.parameters)
    except OSError as error:
        raise SpecError(f"{path}: {error.filename} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise SpecError(f"{path}: {explain(error)}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    if not entries:
        raise SpecError(f"{path}: the batch has no entry")
    return batch.name, entries


def _tuples(content: Any) -> Any:
    """A list of blocks as the tuple that the model holds."""
    return (
        {**content, "blocks": tuple(content["blocks"])}
        if isinstance(content, dict) and "blocks" in content
        else content
    )


def run(
    name: str, entries: list[Entry], out: Path, told: Callable[[Entry, str], None] | None = None
) -> list[page.Made]:
    """Run the entries that are not well yet, one after another, and write the page anew after each.

    Args:
        name: the batch's.
        entries: see `load`.
        out: gets a folder an entry, and ``index.html``.
        told: called with each entry and its outcome.

    Raises:
        OutputFolderError: ``out`` cannot be written, or another runner works in it.
    """
    with writing(out), locked(out), terminable():
        made = [_known(entry, out) for entry in entries]
        for number, entry in enumerate(entries):
            if made[number].outcome != "ok":
                made[number] = _execute(entry, out)
                page.write(out, name, made)
            if told is not None:
                told(entry, made[number].outcome)
        page.write(out, name, made)
    return made


def _known(entry: Entry, out: Path) -> page.Made:
    """What became of an entry before."""
    folder = out / entry.entry_id
    found: dict[str, Any] = {"outcome": page.NOT_RUN, "reason": "", "seconds": 0.0, "seen": {}}
    if (folder / ENTRY).is_file():
        found = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
    return page.Made(entry.notebook.name, entry.set_name, dict(entry.parameters), folder, **found)


def _execute(entry: Entry, out: Path) -> page.Made:
    """Run an entry. Its folder keeps the cells that were finished in it, and nothing else of an earlier attempt."""
    folder = out / entry.entry_id
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if not path.is_dir():
            path.unlink()
    done = notebooks.execute(entry.notebook, folder, entry.parameters)
    found = {"outcome": done.outcome, "reason": done.reason, "seconds": done.seconds, "seen": done.parameters}
    write_json(folder / ENTRY, found)
    return _known(entry, out)
