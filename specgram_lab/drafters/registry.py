"""The trained drafters by name: where each lies, what its card says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specgram_lab.paths import DATA

NAMES = ("draft_model", "eagle3", "mtp", "dflash", "dflash2", "dspark")
CARD, WEIGHTS = "card.json", "model.safetensors"
COMPOSED = frozenset({"draft_model", "mtp"})
"""Drafters whose folder holds what was trained alone: the target's share is added in the cache folder."""


def folder(name: str) -> Path:
    """The checkpoint's folder, present or not."""
    return DATA / "drafters" / name


def is_trained(name: str) -> bool:
    """Whether ``name`` is a drafter whose checkpoint is there, with its card, which is written last."""
    return name in NAMES and (folder(name) / CARD).is_file()


def card(where: Path) -> dict[str, Any]:
    """What is known of the drafter in a folder; empty without a card."""
    path = where / CARD
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write_card(where: Path, content: dict[str, Any]) -> None:
    """Write a drafter's card into its folder."""
    (where / CARD).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def listing() -> list[dict[str, Any]]:
    """The drafters that are there, as ``specgram drafters list --json`` prints them.

    ``mal_json_schema`` and ``mal_free_text`` are mean acceptance lengths on the held-out prompts at temperature 0,
    from the card; None where they have not been measured.
    """
    rows = []
    for name in filter(is_trained, NAMES):
        about = card(folder(name))
        measured = about.get("measured", {})
        rows.append(
            {
                "name": name,
                "method": about.get("method", name),
                "k": about.get("k"),
                "mal_json_schema": measured.get("json_schema", {}).get("mean_acceptance_length"),
                "mal_free_text": measured.get("free", {}).get("mean_acceptance_length"),
                "bytes": sum(path.stat().st_size for path in folder(name).iterdir()),
                "card": str(folder(name) / CARD),
            }
        )
    return rows
