"""Where a trained drafter runs: runners, scheduling, adaptive verification, grammars; and vLLM's reason where not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specgram_lab import lab, tables
from specgram_lab.drafters import pairs
from specgram_lab.spec import Cell

SUFFIX = {"method": "suffix", "k": 3}
"""Needs no weights, but a package that the lab does not install."""
ACROSS = ["runner", "scheduling", "budget", "grammar"]


def cells(names: Sequence[str], grammars: Sequence[Mapping[str, Any]], workload: Mapping[str, Any]) -> list[Cell]:
    """Each drafter of ``names`` at its own k, and suffix, everywhere.

    In every combination of V1 and V2, synchronous and asynchronous scheduling, adaptive verification of all drafts or
    none of it, and ``grammars``.
    """
    asked = [pairs.parts(name) for name in names] + [{"target": {"model": pairs.TARGET}, "drafter": SUFFIX}]
    return [
        cell
        for part in asked
        for policy in ("off", "all")
        for cell in lab.grid(
            drafters=[part["drafter"]],
            target=part["target"],
            grammars=grammars,
            workload=workload,
            runners=["v1", "v2"],
            schedulings=["sync", "async"],
            engine={"budget": {"policy": policy}},
        )
    ]


def table(results: lab.Results) -> pd.DataFrame:
    """A row a run: ``drafter``, k, runner, scheduling, budget, grammar, ``length``, outcome and reason.

    ``length`` is the mean acceptance length (rfc counting). An engine that changed what was asked for has the outcome
    ``changed``, and the reason says into what.
    """
    lengths = tables.summary(results.tables).set_index("run")["mean_acceptance_length"]
    rows = []
    for run in results.runs.to_dict("records"):
        asked = {name: run[f"{name}_requested"] for name in ACROSS[:3]}
        got = {name: run[f"{name}_effective"] for name in asked}
        row = {"drafter": run["drafter"], "k": run["k"], **asked, "grammar": run["grammar"]}
        row |= {"length": lengths[run["run_id"]], "outcome": run["outcome"], "reason": run["reason"]}
        if run["outcome"] == "ok" and got != asked:
            changed = [f"{name} {got[name]} instead of {asked[name]}" for name in asked if got[name] != asked[name]]
            row |= {"outcome": "changed", "reason": f"the engine ran with {', '.join(changed)}"}
        rows.append(row)
    return pd.DataFrame(rows)


def matrix(found: pd.DataFrame) -> pd.DataFrame:
    """`table` with a row a drafter and a column a combination: the length, ``-`` where it did not run so."""
    shown = found.assign(shown=[f"{x:.2f}" if ok == "ok" else "-" for x, ok in found[["length", "outcome"]].to_numpy()])
    return shown.pivot(index=["drafter", "k"], columns=ACROSS, values="shown")


def reasons(found: pd.DataFrame) -> str:
    """Why combinations did not run: a line a reason, with the drafters it holds for."""
    groups = found[found["outcome"] != "ok"].groupby("reason", sort=False)["drafter"]
    return "\n".join(f"{reason} ({', '.join(dict.fromkeys(drafters))})" for reason, drafters in groups)
