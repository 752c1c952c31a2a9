"""Cases run on builds: a verdict for each run, held against what the case's file expects."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from specgram_lab import builds, ledger, scenarios
from specgram_lab.cases import Case, Run
from specgram_lab.cases.definition import SOME
from specgram_lab.handover import CELL_BEGINS
from specgram_lab.run import LOG, run_cells
from specgram_lab.servers.log import LogReport, read_log
from specgram_lab.spec import Cell

PHASES = ("draft-probe", "commit")
ABOUT_REFUSALS = ("Failed to advance FSM", "during bitmask fill", "Terminating request")
"""What the engine's lines about a refused token hold, one of each kind."""

Happened = Literal[
    "nothing amiss", "log lines only", "blanks to the limit", "request dies", "engine ends", "refused at start",
    "patch refused",
]  # fmt: skip
HAPPENED: tuple[Happened, ...] = get_args(Happened)


@dataclass(frozen=True)
class Verdict:
    """What came of one run on one build.

    ``events`` counts FSM events by phase as the recorder saw them happen, ``logged`` as the engine's log tells them
    apart; ``lines`` the log's lines by kind. ``valid`` of ``requests`` outputs obey their grammar. ``differences`` from
    the expectation are sentences.
    """

    case: str
    run: str
    build: str
    switched_on: tuple[str, ...]
    outcome: str
    reason: str
    events: dict[str, int]
    logged: dict[str, int]
    lines: dict[str, int]
    died: int
    valid: int
    requests: int
    classes: dict[str, int]
    differences: tuple[str, ...]
    means: str

    @property
    def ok(self) -> bool:
        """All is as the case's file expects."""
        return not self.differences

    @property
    def happened(self) -> Happened:
        """What a user would have seen, in a few words."""
        if self.outcome == "unsupported":
            return "refused at start"
        if self.outcome != "ok":
            return "patch refused" if " is for vLLM " in self.reason else "engine ends"
        if self.died:
            return "request dies"
        if self.events["draft-probe"]:
            return "log lines only"
        return "blanks to the limit" if self.classes.get("whitespace_runaway") else "nothing amiss"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "happened": self.happened, "ok": self.ok}


def usable(case: Case, wanted: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The builds of ``case`` that are installed, and those that are not.

    Raises:
        BuildError: one that is wanted is not installed, or the case has no run on it.
    """
    for version in wanted:
        builds.interpreter(version)
        if version not in case.builds:
            raise builds.BuildError(f"case {case.name} has no run on vLLM {version}; it names {', '.join(case.builds)}")
    chosen = [version for version in case.builds if not wanted or version in wanted]
    here = [version for version in chosen if builds.find(version).usable]
    return here, [version for version in chosen if version not in here]


def run(chosen: Sequence[Case], versions: Sequence[str], folder: Path) -> list[Verdict]:
    """Run cases on ``versions``, each run as a cell in a folder of its own below ``folder``; cells share engines."""
    asked = [(case, one, build) for case in chosen for one in case.runs for build in one.builds if build in versions]
    cells = [one.cell_on(build) for _, one, build in asked]
    places = [folder / f"{case.name}-{case.runs.index(one) + 1:02}-{build}" for case, one, build in asked]
    rows = run_cells(list(zip(cells, places, strict=True)))
    return [
        _verdict(*what, cell, row, place) for what, cell, row, place in zip(asked, cells, rows, places, strict=True)
    ]


def _verdict(case: Case, one: Run, version: str, cell: Cell, row: pd.Series, folder: Path) -> Verdict:
    tables = ledger.read_run(folder)
    requests, events = tables["requests"], tables["fsm_events"]
    lines = _lines(folder, cell)
    logged = _read(lines)
    classes = Counter(str(kind) for kind in requests["output_class"].dropna())
    found = Verdict(
        case=case.name,
        run=one.name,
        build=version,
        switched_on=_switched_on(cell),
        outcome=str(row["outcome"]),
        reason="" if pd.isna(row["reason"]) else str(row["reason"]),
        events={phase: int((events["phase"] == phase).sum()) for phase in PHASES},
        logged={phase: logged.phases[phase] for phase in PHASES},
        lines={kind: count for kind in ABOUT_REFUSALS if (count := sum(kind in line for line in lines))},
        died=int((requests["finish_reason"] == "error").sum()),
        valid=classes["valid"],
        requests=len(requests),
        classes=dict(classes),
        differences=(),
        means=one.means,
    )
    wrong = differences(one, found, row, tables)
    return Verdict(**{**vars(found), "differences": tuple(wrong)})


def _switched_on(cell: Cell) -> tuple[str, ...]:
    engine = cell.engine
    on: list[str] = [engine.kind, engine.runner, engine.scheduling]
    on += [f"pipeline parallel {engine.pipeline_parallel}"] if engine.pipeline_parallel > 1 else []
    on += [f"budget {engine.budget.label}"] if engine.budget.policy != "off" else []
    on += ["no drafter"] if cell.drafter.method == "none" else []
    return (*on, *engine.patches)


def differences(one: Run, found: Verdict, row: pd.Series, tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Each thing that is not as the run expects, with both values."""
    expected = one.expected
    pairs: list[tuple[str, object, object]] = [("outcome", found.outcome, expected.outcome)]
    wrong = []
    if expected.outcome != "unsupported":
        pairs += [("draft-probe events", found.events["draft-probe"], expected.draft_probe)]
        pairs += [("commit events", found.events["commit"], expected.commit)]
        pairs += [("lines", found.lines, expected.lines)]
        pairs += [("phases in the log", found.logged, found.events)]
    if expected.outcome == "ok":
        valid = expected.of - expected.died if expected.valid is None else expected.valid
        pairs += [("requests that died", found.died, expected.died), ("requests", found.requests, expected.of)]
        pairs += [("valid outputs", found.valid, valid)]
    if expected.classes:
        pairs += [("classes of outputs", found.classes, expected.classes)]
    if expected.reason not in found.reason:
        wrong.append(f"the reason is {found.reason!r}, expected was one with {expected.reason!r}")
    wrong += [f"{name}: {got}, expected {wanted}" for name, got, wanted in pairs if not _met(got, wanted)]
    if found.outcome != expected.outcome and found.reason:
        wrong.append(f"{found.outcome}: {found.reason}")
    if expected.counts and one.scenario is not None and found.outcome == "ok":
        scenario = scenarios.load_scenario(one.scenario)
        counts = scenarios.counts(row, tables["steps"])
        wrong += scenarios.differences(scenario.expected[one.scheduling], counts)
    return wrong


def _met(got: object, wanted: object) -> bool:
    if isinstance(wanted, dict) and isinstance(got, dict):
        return got.keys() == wanted.keys() and all(_met(got[key], wanted[key]) for key in wanted)
    return isinstance(got, int) and got > 0 if wanted == SOME else got == wanted


def _lines(folder: Path, cell: Cell) -> list[str]:
    """The lines about refused tokens that the engine logged from where it took up ``cell`` to the next one."""
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    own = text.partition(f"{CELL_BEGINS}{cell.cell_id}")[2].partition(CELL_BEGINS)[0]
    return [line for line in own.splitlines() if any(kind in line for kind in ABOUT_REFUSALS)]


def _read(lines: Sequence[str]) -> LogReport:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / LOG
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return read_log(path)
