"""Scenarios run on an engine, held against what their files expect, as rows for the terminal and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specgram_lab import ledger, scenarios, semantics
from specgram_lab.run import run_cells
from specgram_lab.scenarios import Counts, Scenario, Side
from specgram_lab.spec import SpecError

EngineKind = Literal["scripted", "local"]
SAME_STEPS = "spec step = drafted > 0"
"""The invariant that an engine breaks which counts another number of steps than the drafter had proposals for."""
AS_PROPOSED = "drafted = proposed"
"""The invariant that an engine breaks which counts another number of drafted tokens than the drafter proposed."""

_HEADS = (
    ("scenario", "scenario"), ("scheduling", "sched"), ("scheduled", "scheduled"), ("drafted", "drafted"),
    ("grammar_valid", "valid"), ("verified", "verified"), ("accepted", "accepted"), ("spec_steps", "steps"),
    ("engine", "engine"), ("rfc", "rfc"), ("breaks", "engine breaks"), ("result", ""),
)  # fmt: skip
LEGEND = (
    "engine: its own counters, steps/drafted/accepted; rfc: the recorded steps counted as the RFC says, "
    "steps/drafted/verified/accepted; valid: grammar-valid"
)


@dataclass(frozen=True)
class Result:
    """One scenario in one scheduling.

    ``counts`` and ``rfc`` are None where the run did not end well (``reason`` says why). ``breaks`` names the
    invariants that the engine's own counters break, ``differences`` each count that is not as the file expects.
    """

    scenario: str
    scheduling: Side
    outcome: str
    reason: str
    counts: Counts | None
    rfc: dict[str, int] | None
    breaks: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """All that the scenario's file expects was met."""
        return self.outcome == "ok" and not self.differences

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "counts": self.counts.model_dump() if self.counts else None, "ok": self.ok}


def run(names: Sequence[str], sides: Sequence[Side], engine: EngineKind, folder: Path, **options: Any) -> list[Result]:
    """Run each scenario in each scheduling, each as a cell in a folder of its own below ``folder``.

    ``options`` are further fields of `specgram_lab.spec.Engine`.

    Raises:
        SpecError: a scenario that this engine cannot run, or that expects nothing of a scheduling asked for.
    """
    loaded = {name: scenarios.load_scenario(name) for name in names}
    for name, scenario in loaded.items():
        if engine == "local" and not scenario.local:
            raise SpecError(f"scenario {name} runs on the scripted engine only")
        missing = [side for side in sides if side not in scenario.expected]
        if missing:
            raise SpecError(f"scenario {name} expects nothing of {missing[0]} scheduling")
    asked = [(name, side) for name in names for side in sides]
    cells = [scenarios.cell(name, side, engine, **options) for name, side in asked]
    work = [(cell, folder / f"{loaded[name].name}-{side}") for cell, (name, side) in zip(cells, asked, strict=True)]
    rows = run_cells(work)
    results = []
    for (name, side), (_, where), row in zip(asked, work, rows, strict=True):
        if row["outcome"] != "ok":
            results.append(Result(loaded[name].name, side, row["outcome"], row["reason"], None, None, (), ()))
            continue
        tables = ledger.read_run(where)
        results.append(_result(loaded[name], side, tables))
    return results


def _result(scenario: Scenario, side: Side, tables: dict[str, Any]) -> Result:
    runs, steps = tables["runs"], tables["steps"]
    found = scenarios.counts(runs.iloc[0], steps)
    total = semantics.totals(steps, (), ("rfc", "engine"), runs=runs).set_index("counting")
    own = total.loc["rfc"].to_dict()
    rfc = {key: int(own[key]) for key in ("spec_steps", "drafted", "verified", "accepted")}
    breaks = tuple(filter(None, str(total.loc["engine", "breaks"]).split(", ")))
    breaks += (AS_PROPOSED,) if found.engine_draft_tokens != found.drafted else ()
    breaks += (SAME_STEPS,) if found.engine_drafts != found.spec_steps else ()
    wrong = scenarios.differences(scenario.expected[side], found)
    return Result(scenario.name, side, "ok", "", found, rfc, breaks, tuple(wrong))


def local_names() -> list[str]:
    """Names of the scenarios that a real engine can run."""
    return [name for name in scenarios.scenario_names() if scenarios.load_scenario(name).local]


def to_text(results: Sequence[Result]) -> str:
    """A line a result, and below it what is not as expected."""
    cells = [_cells(result) for result in results]
    widths = {key: max(len(head), *(len(row[key]) for row in cells)) for key, head in _HEADS}
    lines = ["  ".join(head.ljust(widths[key]) for key, head in _HEADS).rstrip()]
    for result, row in zip(results, cells, strict=True):
        lines.append("  ".join(row[key].ljust(widths[key]) for key, _ in _HEADS).rstrip())
        lines += [f"    {difference}" for difference in result.differences]
        lines += [f"    {result.outcome}: {result.reason}"] if result.outcome != "ok" else []
    met = sum(result.ok for result in results)
    return "\n".join([*lines, "", LEGEND, f"{met} of {len(results)} as expected"])


def _cells(result: Result) -> dict[str, str]:
    cells = dict.fromkeys((key for key, _ in _HEADS), "")
    cells |= {"scenario": result.scenario, "scheduling": result.scheduling, "breaks": "; ".join(result.breaks)}
    cells["result"] = "ok" if result.ok else "NOT AS EXPECTED"
    if result.counts is not None and result.rfc is not None:
        found = result.counts
        cells |= {key: str(value) for key, value in found.model_dump().items() if key in cells}
        cells["engine"] = f"{found.engine_drafts}/{found.engine_draft_tokens}/{found.engine_accepted}"
        cells["rfc"] = "/".join(str(value) for value in result.rfc.values())
    return cells
