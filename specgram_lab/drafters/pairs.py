"""How a trained drafter stands in a cell: which target, which method, which model."""

from __future__ import annotations

from typing import Any

from specgram_lab.drafters import registry
from specgram_lab.spec import BLOCKS

TARGET = "smollm2-135m"


def parts(name: str, k: int | None = None) -> dict[str, dict[str, Any]]:
    """``target`` and ``drafter`` of a cell with the trained drafter ``name``; its own k unless another is given.

    A multi-token-prediction module is no checkpoint of its own: the target is the one that holds it.
    """
    about = registry.card(registry.folder(name))
    drafter = {"method": about["method"], "model": name, "k": k or about["k"]}
    if about["method"] != "mtp":
        return {"target": {"model": TARGET}, "drafter": drafter}
    return {"target": {"model": name}, "drafter": {**drafter, "model": "target"}}


def lengths(name: str, asked: list[int]) -> list[int]:
    """Which of the draft lengths ``asked`` the drafter can be measured at."""
    about = registry.card(registry.folder(name))
    return [k for k in asked if about["method"] not in BLOCKS or k == about["k"]]
