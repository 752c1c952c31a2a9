"""Whether the estimators are right: real runs whose acceptance was planted, and how often the intervals cover it.

vLLM's ``rejection_sample_method="synthetic"`` accepts drafts with given unconditional rates per position, whatever the
tokens are; on a CPU only Model Runner V2 can. A run's estimate is held against them, and over many runs with other
seeds an interval of 95 % should cover them 95 % of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from specgram_lab import stats
from specgram_lab.spec import Cell, parse_cell

RATES = (0.8, 0.6, 0.3)
SEED_STEP = 10_000
"""Between the seeds of two runs: more than a run has requests, whose seeds follow its own."""


def cells(
    runs: int,
    *,
    rates: Sequence[float] = RATES,
    requests: int = 24,
    max_tokens: int = 40,
    engine: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """``runs`` cells with ``rates`` planted, which differ in their seeds only and so share an engine."""
    drafter = {"method": "draft_model", "model": "target", "k": len(rates), "rejection": "synthetic"}
    return [
        parse_cell(
            {
                "drafter": {**drafter, "synthetic_rates": list(rates)},
                "workload": {
                    "prompts": "prose", "limit": requests, "max_tokens": max_tokens, "ignore_eos": True,
                    "temperature": 1.0, "concurrency": 8, "seed": SEED_STEP * (number + 1),
                },
                "engine": {"runner": "v2", **(engine or {})},
            }
        )
        for number in range(runs)
    ]  # fmt: skip


def planted(rates: Sequence[float]) -> dict[tuple[str, int | None], float]:
    """The true value of each quantity: by definition and position, and the mean acceptance length."""
    values: dict[tuple[str, int | None], float] = {("mean_acceptance_length", None): 1 + sum(rates)}
    before = 1.0
    for position, rate in enumerate(rates):
        values["per_spec_step", position] = rate
        values["given_previous_accepted", position] = rate / before
        before = rate
    return values


def estimates(steps: pd.DataFrame, *, seed: int, **options: Any) -> pd.DataFrame:
    """What `specgram_lab.stats` says of each run: ``run_id``, ``quantity``, ``position`` and the estimate."""
    wanted = ["run_id", "quantity", "position", "value", "low", "high"]
    by_position = stats.per_position(steps, seed=seed, **options).rename(columns={"definition": "quantity"})
    length = stats.estimates(
        steps, seed=seed, countings=("rfc",), quantities=("mean_acceptance_length",), **options
    ).rename(columns={"name": "quantity"})
    length["position"] = pd.NA
    return pd.concat([part[wanted].astype({"position": "Int64"}) for part in (length, by_position)], ignore_index=True)


def coverage(found: pd.DataFrame, rates: Sequence[float]) -> pd.DataFrame:
    """How often the intervals of `estimates` cover what was planted, over all runs.

    Returns:
        One row a quantity: ``quantity``, ``position``, ``planted``, ``mean_estimate``, ``bias`` (their difference),
        ``runs``, ``covered``, ``coverage``, and ``low`` and ``high`` of its Wilson interval. A run without an interval
        does not cover.
    """
    rows = []
    for (quantity, position), value in planted(rates).items():
        place = found["position"].isna() if position is None else found["position"].eq(position).fillna(False)
        own = found[(found["quantity"] == quantity) & place]
        inside = (own["low"] <= value) & (value <= own["high"])
        covered = int(inside.fillna(False).sum())
        rate = stats.rate(covered, len(own), event="covered", per="run")
        mean = float(own["value"].mean())
        rows.append(
            {
                "quantity": quantity, "position": position, "planted": value, "mean_estimate": mean,
                "bias": mean - value, "runs": len(own), "covered": covered, "coverage": rate.value, "low": rate.low,
                "high": rate.high,
            }
        )  # fmt: skip
    return pd.DataFrame(rows).astype({"position": "Int64"})


def to_text(table: Iterable[Mapping[str, Any]] | pd.DataFrame) -> str:
    """The table for a terminal or a Markdown code block."""
    frame = table if isinstance(table, pd.DataFrame) else pd.DataFrame(list(table))
    return str(frame.round(4).to_string(index=False, na_rep=""))
