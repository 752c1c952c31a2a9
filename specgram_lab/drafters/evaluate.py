"""How well a trained drafter drafts: held-out prompts, temperature 0, Model Runner V2, counted by the lab's ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from specgram_lab import ledger, stats
from specgram_lab.av import report as budgets
from specgram_lab.av import tables as budget_tables
from specgram_lab.drafters import data, pairs, registry, ties
from specgram_lab.run import Ended, Progress, run_cells
from specgram_lab.semantics import Counting
from specgram_lab.spec import Budget, Cell, SpecError, parse_cell

KINDS: tuple[data.Kind, ...] = ("json_schema", "free")
CONCURRENCY = 4
SEED = 1
COUNTING: Counting = "rfc"
"""A step counts once a draft was proposed, also where the grammar refused all of it."""


def cells(name: str, folder: Path, limit: int | None = None, **engine: Any) -> dict[data.Kind, Cell]:
    """One cell for each kind of output; ``engine`` overrides its settings (runner v2, sync).

    A drafter that says how sure it is runs with adaptive verification of all drafts, which records its confidences.
    """
    folder = folder.resolve()  # a part of the cells, however it was asked for
    pair = pairs.parts(name)
    sure = {"budget": {"policy": "all"}} if pair["drafter"]["method"] == "dspark" else {}
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[data.Kind, Cell] = {}
    for chunk in data.chunks(rounds=0):
        prompts = str(chunk.write(folder))
        made[chunk.kind] = parse_cell(
            {
                **pair,
                "grammar": data.grammar(chunk.kind),
                "workload": {
                    "prompts": prompts,
                    "limit": limit,
                    "max_tokens": data.MAX_TOKENS,
                    "concurrency": CONCURRENCY,
                },
                "engine": {"runner": "v2", **sure, **engine},
                "limits": {"timeout_s": 7200.0},
            }
        )
    return made


def evaluate(
    name: str, folder: Path, limit: int | None = None, progress: Progress | None = None, ended: Ended | None = None
) -> dict[str, Any]:
    """Run the held-out prompts and say what came out, by kind; finished cells are read, not run again.

    The same prompts run without a drafter too, once for all drafters of a target, and the texts are held against each
    other.
    """
    made = cells(name, folder / "prompts", limit)
    alone = {kind: without(cell) for kind, cell in made.items()}
    work = [(cell, folder / f"{name}-{kind}") for kind, cell in made.items()]
    own = [(cell, folder / f"none-{cell.cell_id}") for cell in alone.values()]
    rows = run_cells([*work, *own], progress, ended)
    results: dict[str, Any] = {}
    for number, (kind, cell) in enumerate(made.items()):
        tables = ledger.read_run(work[number][1])
        results[kind] = measured(tables, rows[number])
        if cell.engine.budget.policy != "off" and results[kind]["outcome"] == "ok":
            results[kind]["confidence"] = _confidence(tables["steps"], work[number][1])
        if results[kind]["outcome"] == rows[len(work) + number]["outcome"] == "ok":
            texts = ledger.read_run(own[number][1])["requests"]
            results[kind]["own_text"] = ties.compared(texts, tables["requests"], cell.workload, pairs.TARGET)
    return results


def _confidence(steps: pd.DataFrame, path: Path) -> list[dict[str, Any]]:
    """How far the drafter's confidences are from what came true, position by position."""
    seen = budgets.verdicts(steps, budget_tables.read([path])["av_proposals"])
    positions = _rounded(budgets.calibration(seen))
    for row in positions:
        row["bins"] = _rounded(budgets.reliability(seen[seen["position"] == row["position"]]))
    return positions


def pooled(kinds: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ``confidence`` of all held-out prompts together, from that of each kind: bins of the same width add up."""
    found: dict[int, list[dict[str, Any]]] = {}
    for one in kinds.values():
        for row in one.get("confidence", []):
            found.setdefault(int(row["position"]), []).extend(row["bins"])
    rows = []
    for position, parts in sorted(found.items()):
        bins = []
        for middle in sorted({part["bin"] for part in parts}):
            own = [part for part in parts if part["bin"] == middle]
            n = sum(part["n"] for part in own)
            right = stats.rate(round(sum(p["n"] * p["accepted"] for p in own)), n, event="accepted", per="draft_token")
            confidence = sum(part["n"] * part["confidence"] for part in own) / n
            bins.append(
                {"bin": middle, "confidence": _round(confidence), "accepted": _round(right.value), "n": n}
                | {"low": _round(right.low), "high": _round(right.high)}
            )
        error = budgets.calibration_error(pd.DataFrame(bins))
        n = sum(row["n"] for row in bins)
        rows.append({"position": position, "n": n, "expected_calibration_error": _round(error), "bins": bins})
    return rows


def without(cell: Cell) -> Cell:
    """The cell with the same target and no drafter."""
    engine = cell.engine.model_copy(update={"budget": Budget()})
    return parse_cell(
        cell.model_dump(mode="json") | {"drafter": {"method": "none"}, "engine": engine.model_dump(mode="json")}
    )


def measured(tables: dict[str, pd.DataFrame], row: pd.Series[Any]) -> dict[str, Any]:
    """Mean acceptance length and acceptance at each position with 95 % intervals, grammar-invalid share."""
    steps = tables["steps"]
    if row["outcome"] != "ok":
        return {"outcome": row["outcome"], "reason": row["reason"]}
    found = stats.estimates(
        steps, seed=SEED, by=(), countings=(COUNTING,), quantities=("mean_acceptance_length", "acceptance_rate")
    ).set_index("name")
    length = found.loc["mean_acceptance_length"].to_dict()
    positions = stats.per_position(steps, seed=SEED, by=())
    spec = steps[steps["drafted"] > 0]
    return {
        "outcome": "ok",
        "mean_acceptance_length": _round(length["value"]),
        "interval": [_round(length["low"]), _round(length["high"])],
        "requests": int(length["n"]),
        "spec_steps": len(spec),
        "acceptance_rate": _round(found.loc["acceptance_rate", "value"]),
        "per_position": _column(positions, "per_spec_step"),
        "per_position_low": _column(positions, "per_spec_step", "low"),
        "per_position_high": _column(positions, "per_spec_step", "high"),
        "given_previous_accepted": _column(positions, "given_previous_accepted"),
        "grammar_invalid_share": _round(1 - spec["grammar_valid"].sum() / spec["drafted"].sum()),
    }


def _column(positions: pd.DataFrame, definition: str, name: str = "value") -> list[float | None]:
    return [_round(v) for v in positions.loc[positions["definition"] == definition, name]]


def _rounded(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {str(key): value if isinstance(value, int) else _round(value) for key, value in row.items()}
        for row in frame.to_dict("records")
    ]


def _round(value: Any) -> float | None:
    return None if pd.isna(value) else round(float(value), 4)


def to_text(results: dict[str, dict[str, Any]]) -> str:
    """A line a drafter and kind."""
    lines = [
        f"{'drafter':<12} {'kind':<12} {'length':>7}  {'95 % interval':<16} {'invalid':>8}  {'own text':<22} "
        "accepted at position"
    ]
    for name, kinds in results.items():
        for kind, one in kinds.items():
            if one["outcome"] != "ok":
                lines.append(f"{name:<12} {kind:<12} {one['outcome']}: {one['reason']}")
                continue
            low, high = one["interval"]
            shares = " ".join(f"{share:.2f}" for share in one["per_position"])
            length, invalid = one["mean_acceptance_length"], one["grammar_invalid_share"]
            lines.append(
                f"{name:<12} {kind:<12} {length:>7.3f}  {low:.3f} to {high:.3f}   {invalid:>8.3f}  "
                f"{_own_text(one.get('own_text')):<22} {shares}"
            )
        together = pooled(kinds)
        if together:
            errors = ", ".join(f"{row['expected_calibration_error']:.3f} (n {row['n']})" for row in together)
            lines.append(f"{name:<12} confidence, all prompts: expected calibration error at position 1 to k: {errors}")
    return "\n".join(lines)


def _own_text(found: dict[str, Any] | None) -> str:
    """How many requests have the target's own text, and what the others are."""
    if found is None:
        return "not compared"
    same, apart = found["requests"] - found["differing"], found["differing"]
    return f"{same} of {found['requests']}" + (f", {found['ties']} of {apart} ties" if apart else "")


def chosen(names: Sequence[str]) -> list[str]:
    """The drafters asked for, or all that are there.

    Raises:
        SpecError: one that is not there.
    """
    there = [name for name in registry.NAMES if registry.is_trained(name)]
    for name in names:
        if name not in there:
            raise SpecError(f"no trained drafter {name!r}: there are {', '.join(there) or 'none'}")
    return list(names) or there
