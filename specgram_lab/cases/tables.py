"""Verdicts of cases as text for a terminal and as a frame for a notebook."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from specgram_lab import builds, cases
from specgram_lab.cases import Case, runs
from specgram_lab.cases.runs import Verdict

HEADS = ("build", "run", "switched on", "draft-probes", "commits", "died", "valid", "what happened", "verdict")
WIDTH = 116


def frame(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row a run and build, with the log's lines and what it means."""
    rows = [{"case": one.case, **_cells(one), "log lines": _counted(one.lines), "means": one.means} for one in verdicts]
    return pd.DataFrame(rows, columns=["case", *HEADS, "log lines", "means"])


def side_by_side(names: Sequence[str], versions: Sequence[str], folder: Path) -> pd.DataFrame:
    """Run cases on ``versions`` (every installed build where none is named); `frame`, also written to ``cases.csv``.

    Raises:
        BuildError: a version that is not installed.
    """
    for version in versions:
        builds.interpreter(version)
    here = [build.version for build in builds.listed() if build.usable and (not versions or build.version in versions)]
    table = frame(runs.run([cases.load(name) for name in names], here, folder / "cases"))
    table.to_csv(folder / "cases.csv", index=False)
    return table


def _cells(one: Verdict) -> dict[str, str]:
    ran = one.outcome == "ok"
    verdict = "as expected" if one.ok else "NOT AS EXPECTED"
    return {
        "build": one.build,
        "run": one.run,
        "switched on": ", ".join(one.switched_on),
        "draft-probes": str(one.events["draft-probe"]),
        "commits": str(one.events["commit"]),
        "died": str(one.died) if ran else one.outcome,
        "valid": _outputs(one) if ran else "",
        "what happened": one.happened,
        "verdict": verdict,
    }


def _outputs(one: Verdict) -> str:
    others = [f"{count} {kind}" for kind, count in sorted(one.classes.items()) if kind != "valid"]
    return f"{one.valid}/{one.requests}" + (f" ({', '.join(others)})" if others else "")


def _counted(lines: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind!r}" for kind, count in lines.items())


def to_text(case: Case, verdicts: Sequence[Verdict], absent: Sequence[str] = ()) -> str:
    """The case, a line a run and build with the engine's words and its meaning below, and how many are as expected."""
    rows = [_cells(one) for one in verdicts]
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in HEADS}
    text = [f"{case.name}: {case.title}", *textwrap.wrap(case.about, WIDTH), ""]
    text.append("  ".join(head.ljust(widths[head]) for head in HEADS).rstrip())
    for one, row in zip(verdicts, rows, strict=True):
        text.append("  ".join(row[head].ljust(widths[head]) for head in HEADS).rstrip())
        below = [f"log: {_counted(one.lines)}"] if one.lines else []
        below += [f"reason: {one.reason}"] if one.reason else []
        below += [one.means, *one.differences]
        for item in below:
            text += textwrap.wrap(item, WIDTH, initial_indent="    ", subsequent_indent="      ")
    met = sum(one.ok for one in verdicts)
    text += ["", f"{met} of {len(verdicts)} as expected"]
    if absent:
        text.append(f"not installed: {', '.join(absent)} (specgram builds add {absent[0]})")
    return "\n".join(text)
