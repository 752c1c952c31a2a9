"""Greedy text with a drafter against the target's own: where they part, whether it is a tie within bf16.

Verifying drafts and decoding one token at a time are different matrix shapes, whose bf16 sums may be rounded
differently. Where the target's two likeliest tokens are closer than that, either may be taken, and the text goes on
differently from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from specgram_lab import handover, models, workloads
from specgram_lab.spec import Workload

SPACINGS = 4
"""A gap of at most so many steps between neighbouring bf16 numbers of the logits' size is a tie. One step is what
rounding the logits costs; thirty layers of rounded sums before them cost a few more."""


@dataclass(frozen=True)
class Parting:
    """Where two answers to a prompt part: ``common`` tokens are the same, then the target alone took ``own``, and with
    the drafter it took ``other``; None where the answer ended."""

    prompt_id: str
    common: tuple[int, ...]
    own: int | None
    other: int | None


def partings(own: pd.DataFrame, other: pd.DataFrame) -> list[Parting]:
    """The requests of both runs whose tokens differ; both are tables ``requests``."""
    both = own.merge(other, on=["prompt_id", "repeat"], suffixes=("_own", "_other"), validate="one_to_one")
    found = []
    for name, first, second in zip(both["prompt_id"], both["token_ids_own"], both["token_ids_other"], strict=True):
        one, two = list(map(int, first)), list(map(int, second))
        if one == two:
            continue
        same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        ends: list[int | None] = [tokens[same] if same < len(tokens) else None for tokens in (one, two)]
        found.append(Parting(str(name), tuple(one[:same]), *ends))
    return found


def spacing(size: float) -> float:
    """The step between neighbouring bf16 numbers (8 significant bits) of this size."""
    return 2.0 ** (math.floor(math.log2(size)) - 7) if size > 0 else 2.0**-133


def compared(own: pd.DataFrame, other: pd.DataFrame, workload: Workload, target: str) -> dict[str, Any]:
    """How many requests have the target's own text, and how many of the others part at a tie.

    Args:
        own: table ``requests`` of a run without a drafter.
        other: the same of a run with one, of the same prompts.
        workload: what both ran.
        target: the model's name or folder; its logits are computed again in float32.

    Returns:
        ``requests``, ``differing``, ``ties``, and ``gaps``: how far the two tokens' logits are apart, in steps of bf16,
        the largest last, for each that differs but those of which one answer had ended.
    """
    apart = partings(own, other)
    asked = [parting for parting in apart if parting.own is not None and parting.other is not None]
    gaps = [abs(one - two) / spacing(max(abs(one), abs(two))) for one, two in _logits(asked, workload, target)]
    return {
        "requests": len(other),
        "differing": len(apart),
        "ties": sum(value <= SPACINGS for value in gaps),
        "gaps": sorted(round(value, 3) for value in gaps),
    }


def _logits(asked: Sequence[Parting], workload: Workload, target: str) -> list[list[float]]:
    """The logits of both tokens at each parting, in float32, from a process of its own."""
    if not asked:
        return []
    prompts = {p.prompt_id: p for p in workloads.load(workload)}
    questions = [
        {"chat": prompts[one.prompt_id].chat(), "answer": one.common, "tokens": (one.own, one.other)} for one in asked
    ]
    try:
        found: list[list[float]] = handover.ask_module(
            "specgram_lab.drafters.logits", questions, str(models.ensure(target))
        )
    except handover.ChildError as fault:
        raise models.ModelError(f"the logits of {target} could not be computed: {fault}") from fault
    return found
