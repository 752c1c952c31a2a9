"""What a sweep will do: its cells, those that cannot run and why, how long it takes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from specgram_lab import capabilities, workloads
from specgram_lab.builders import options
from specgram_lab.scenarios import load_scenario
from specgram_lab.spec import Cell, SpecError
from specgram_lab.sweeps.definition import Sweep

START_S = 20.0
"""Seconds that an engine takes to be ready: median of the published quickstart on two CPU cores."""
TOKEN_S = 0.025
"""Seconds a token of an engine that serves four requests at once: the same."""
SCRIPTED_S = 0.5
"""Seconds that a scenario takes on a scripted engine which is there."""
SHOWN = 10


@dataclass(frozen=True)
class Planned:
    """A cell of a sweep: its labels by axis, its repeat from 0, and why it cannot run (None where it can)."""

    cell: Cell
    where: Mapping[str, str]
    repeat: int
    reason: str | None
    engine: str
    """Cells with the same one can share an engine's process."""


@dataclass(frozen=True)
class Estimate:
    """How long a plan takes; ``basis`` says what that was made of."""

    engines: int
    seconds: float
    basis: str


@dataclass(frozen=True)
class Plan:
    """All cells of a sweep, in the order of the axes, repeat after repeat."""

    sweep: Sweep
    cells: tuple[Planned, ...]

    @property
    def passes(self) -> list[list[Planned]]:
        """The cells as they run: at once, or each repeat by itself and every second one in reverse order."""
        if not self.sweep.alternating:
            return [list(self.cells)]
        parts = [[one for one in self.cells if one.repeat == repeat] for repeat in range(self.sweep.repeats)]
        return [part[::-1] if repeat % 2 else part for repeat, part in enumerate(parts)]

    def table(self) -> pd.DataFrame:
        """One row a cell: run_id, repeat, a column of labels for each axis, ``unsupported``, and the cell as JSON."""
        rows = [
            {"run_id": one.cell.cell_id, "repeat": one.repeat, **one.where}
            | {"unsupported": one.reason, "cell": json.dumps(one.cell.model_dump(mode="json", exclude_defaults=True))}
            for one in self.cells
        ]
        columns = ["run_id", "repeat", *self.sweep.axes, "unsupported", "cell"]
        return pd.DataFrame(rows, columns=columns).astype({"unsupported": "string"})


def plan(sweep: Sweep) -> Plan:
    """Every cell of ``sweep``, each asked whether it can run here.

    Raises:
        SpecError: a combination that no cell can be, or repeats of a workload without a seed.
    """
    known: dict[str, str | None] = {}
    cells = []
    combinations = sweep.combinations()
    engines = engine_keys([cell for _, cell in combinations])
    for repeat in range(sweep.repeats):
        for (where, cell), engine in zip(combinations, engines, strict=True):
            repeated = _repeated(cell, repeat) if sweep.repeats > 1 else cell
            asked = _setting(cell)  # all that `capabilities` looks at
            if asked not in known:
                known[asked] = capabilities.refusal(repeated)
            cells.append(Planned(repeated, where, repeat, known[asked], engine))
    return Plan(sweep, tuple(cells))


def engine_keys(cells: Sequence[Cell]) -> list[str]:
    """`options.engine_key` of every cell, found once for those that cannot differ in it: it may read a scenario."""
    known: dict[str, str] = {}
    keys = []
    for cell in cells:
        grammar, workload = cell.grammar, cell.workload
        own = f"{grammar.backend} {grammar.disable_any_whitespace} {workload.concurrency} {workload.scenario}"
        asked = f"{_setting(cell)} {own}"
        if asked not in known:
            known[asked] = options.engine_key(cell)
        keys.append(known[asked])
    return keys


def _setting(cell: Cell) -> str:
    return cell.model_dump_json(include={"target", "drafter", "engine"})


def _repeated(cell: Cell, repeat: int) -> Cell:
    seed = cell.workload.seed
    if seed is None:
        raise SpecError("repeats count the workload's seed on; give it one")
    return cell.model_copy(update={"workload": cell.workload.model_copy(update={"seed": seed + repeat})})


def estimate(made: Plan, finished: pd.DataFrame | None = None) -> Estimate:
    """The time that what is left of a plan takes, one engine at a time.

    Args:
        made: the plan.
        finished: rows of ``runs`` of the same sweep; they give the times where there are any, and are not run again.
            Without them every request is taken to be as long as it may be.
    """
    done = set() if finished is None else set(finished["run_id"])
    passes = [[one for one in part if one.reason is None and one.cell.cell_id not in done] for part in made.passes]
    engines = sum(len({one.engine for one in part}) for part in passes)
    measured = None if finished is None else finished[finished["outcome"].eq("ok").fillna(False)]
    if measured is None or measured.empty:
        lengths: dict[str, float] = {}
        seconds = engines * START_S + sum(_seconds(one.cell, lengths) for part in passes for one in part)
        basis = "from the quickstart's times on two CPU cores, every output as long as it may be: an upper guess"
        return Estimate(engines, seconds, basis)
    starts = measured.loc[measured["start_s"] > 0, "start_s"]
    start = float(starts.median()) if len(starts) else START_S
    cell = float(measured["generate_s"].mean())
    seconds = engines * start + sum(map(len, passes)) * cell
    return Estimate(
        engines, seconds, f"from {len(measured)} finished cells: {start:.1f} s a start, {cell:.1f} s a cell"
    )


def _seconds(cell: Cell, known: dict[str, float]) -> float:
    """The time a cell takes on an engine that is there; ``known`` keeps what was found, as prompts have to be read."""
    workload = cell.workload
    asked = f"{cell.engine.kind} {workload.model_dump_json(exclude={'seed'})}"
    if asked not in known:
        if workload.scenario is None:
            tokens = len(workloads.load(workload)) * workload.max_tokens * 4 / min(4, workload.concurrency)
        elif cell.engine.kind == "local":
            tokens = 4 * sum(request.max_tokens for request in load_scenario(workload.scenario).requests)
        else:
            tokens = SCRIPTED_S / TOKEN_S
        known[asked] = TOKEN_S * tokens
    return known[asked]


def to_text(made: Plan, guess: Estimate, workers: int = 1) -> str:
    """The plan for a terminal."""
    reasons = Counter(one.reason for one in made.cells if one.reason is not None)
    bad = sum(reasons.values())
    sweep = made.sweep
    axes = [f"  {name}: {', '.join(labels)}" for name, labels in sweep.axes.items()]
    lines = [f"{sweep.name}: {len(made.cells)} cells", *axes]
    if sweep.repeats > 1:
        lines.append(f"  repeats: {sweep.repeats}" + (", in alternating order" if sweep.alternating else ""))
    lines += [f"unsupported here: {bad}"] if bad else []
    lines += [f"  {count} x {reason}" for reason, count in reasons.most_common(SHOWN)]
    if len(reasons) > SHOWN:
        lines.append(f"  and {len(reasons) - SHOWN} more reasons")
    at_once = f", {workers} at a time" if workers > 1 else ""
    lines.append(f"engine starts: {guess.engines}{at_once}; about {_duration(guess.seconds / workers)} ({guess.basis})")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
