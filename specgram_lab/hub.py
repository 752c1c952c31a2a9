"""Models of a hub by name, as far as they lie in this machine's cache of it, or can be put there."""

from __future__ import annotations

import os
import re
from pathlib import Path

NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_name(name: str) -> bool:
    """Whether ``name`` can be a model of a hub: two words with a slash between, and no folder here."""
    return NAME.fullmatch(name) is not None and not name.startswith(".") and not Path(name).exists()


def cache() -> Path:
    """The hub's cache of this machine, as its own client finds it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def snapshot(name: str) -> Path | None:
    """The folder of the newest version of ``name`` in the cache, if its config lies there."""
    entry = cache() / f"models--{name.replace('/', '--')}"
    reference = entry / "refs" / "main"
    if not reference.is_file():
        return None
    folder = entry / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return folder if (folder / "config.json").is_file() else None


def offline() -> bool:
    """Whether the environment forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def download(name: str) -> Path:
    """Put ``name`` into the cache and return its folder.

    Raises:
        OSError: it cannot be had, in the words of the hub's client.
    """
    if offline():
        raise OSError("HF_HUB_OFFLINE is set")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, ignore_patterns=["*.pt", "*.bin", "*.pth", "*.pkl"]))
