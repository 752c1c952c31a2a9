"""Where the lab's data lies and where it keeps what it fetched or made."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
SUFFIXES = {"prompts": (".jsonl",), "schemas": (".json", ".ebnf", ".regex", ".txt"), "scenarios": (".yaml",)}


class DataNotFoundError(FileNotFoundError):
    """A named prompt set, schema or scenario that is not there."""


def cache_dir() -> Path:
    """Fetched and converted models; ``SPECGRAM_CACHE`` names another place than ``.cache`` beside the code."""
    return Path(os.environ.get("SPECGRAM_CACHE") or ROOT / ".cache")


def data_file(kind: str, name: str, base: Path | None = None) -> Path:
    """The file of a named item of ``data/<kind>``, or the path itself (relative to ``base``, then to the cwd).

    Raises:
        DataNotFoundError: with the names that exist.
    """
    for folder in (base, Path()):
        if folder is not None and (folder / name).is_file():
            return folder / name
    for suffix in SUFFIXES[kind]:
        candidate = DATA / kind / f"{name}{suffix}"
        if candidate.is_file():
            return candidate
    known = sorted(p.stem for p in (DATA / kind).glob("*") if p.suffix in SUFFIXES[kind])
    raise DataNotFoundError(
        f"no {kind.rstrip('s')} {name!r}: it is neither a file nor one of {', '.join(known) or 'none'}"
    )
