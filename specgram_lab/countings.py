"""What a notebook on countings needs: scenarios, dashboards before and after, and the bias of unconditional rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from specgram_lab import figures, lab, scenario_runs, scenarios, semantics, stats
from specgram_lab.scenario_runs import EngineKind

SEED = 7
"""Of the bootstrap."""
WORDS = ("drafted", "grammar_valid", "scheduled", "verified", "accepted", "spec_steps")


def scenario_table(names: Sequence[str], engine: EngineKind, folder: Path) -> pd.DataFrame:
    """Scenarios run on ``engine`` in both schedulings, one row each; also written to ``scenarios-<engine>.csv``.

    Returns:
        ``scenario``, ``scheduling``, the counts of the ledger, ``engine`` and ``rfc`` (as texts, see
        `scenario_runs.LEGEND`), ``engine_breaks`` and ``as_expected``.
    """
    results = scenario_runs.run(names, scenarios.SIDES, engine, folder / f"scenarios-{engine}")
    rows = []
    for result in results:
        row: dict[str, object] = {"scenario": result.scenario, "scheduling": result.scheduling}
        if result.counts is not None and result.rfc is not None:
            found = result.counts
            row |= {word: getattr(found, word) for word in WORDS}
            row["engine"] = f"{found.engine_drafts}/{found.engine_draft_tokens}/{found.engine_accepted}"
            row["rfc"] = "/".join(str(value) for value in result.rfc.values())
        rows.append(row | {"engine_breaks": "; ".join(result.breaks), "as_expected": result.ok})
    table = pd.DataFrame(rows)
    table.to_csv(folder / f"scenarios-{engine}.csv", index=False)
    return table


def dashboard(results: lab.Results, folder: Path) -> pd.DataFrame:
    """What a dashboard shows of each run, from the engine's counting and from the proposal's.

    Returns:
        One row a run that has a drafter: ``group``, tokens per spec step and acceptance rate before
        (``engine``) and after (``rfc``), the verified acceptance rate, drafted tokens before and after, and how many
        steps break an invariant before. Also written to ``dashboard.csv``.
    """
    good = results.runs[(results.runs["outcome"] == "ok") & (results.runs["drafter"] != "none")]
    runs, _ = figures.groups(good)
    total = semantics.totals(results.steps, ("group",), ("engine", "rfc"), runs=runs).set_index(["group", "counting"])
    before, after = (total.xs(counting, level="counting") for counting in ("engine", "rfc"))
    table = pd.DataFrame(
        {
            "length_before": before["mean_acceptance_length"],
            "length_after": after["mean_acceptance_length"],
            "rate_before": before["acceptance_rate"],
            "rate_after": after["acceptance_rate"],
            "verified_rate_after": after["verified_acceptance_rate"],
            "spec_steps_before": before["spec_steps"],
            "spec_steps_after": after["spec_steps"],
            "drafted_before": before["drafted"],
            "drafted_after": after["drafted"],
            "verified_after": after["verified"],
            "accepted": after["accepted"],
            "breaking_steps_before": before["breaking_steps"],
            "breaks_before": before["breaks"],
        }
    ).reset_index()
    table.to_csv(folder / "dashboard.csv", index=False)
    return table


def position_bias(results: lab.Results, rates: Sequence[float], folder: Path) -> pd.DataFrame:
    """Per-position acceptance of runs with planted unconditional ``rates``, and how far each definition is off.

    ``per_spec_step`` is what vLLM exports; where adaptive verification leaves a position out it cannot be accepted
    there, so the rate falls below the planted one. Returns ``group``, ``position``, ``planted``, ``per_spec_step``,
    its interval and ``bias``, and ``given_verified``. Also written to ``position_bias.csv``.
    """
    runs, _ = figures.groups(results.runs[results.runs["outcome"] == "ok"])
    found = stats.per_position(results.steps, seed=SEED, by=("group",), runs=runs)
    wide = found.pivot_table(index=["group", "position"], columns="definition", values="value", observed=True)
    unconditional = found[found["definition"] == "per_spec_step"].set_index(["group", "position"])[["low", "high"]]
    table = wide[["per_spec_step", "given_verified"]].join(unconditional).reset_index()
    table["planted"] = [rates[int(position)] for position in table["position"]]
    table["bias"] = table["per_spec_step"] - table["planted"]
    table = table[["group", "position", "planted", "per_spec_step", "low", "high", "bias", "given_verified"]]
    table.to_csv(folder / "position_bias.csv", index=False)
    return table
