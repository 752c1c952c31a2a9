"""The verdicts of all cases on all builds as one figure: a row a run, a column a build, a mark for what happened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specgram_lab import figures
from specgram_lab.cases.runs import HAPPENED, Happened

LOOKS: Final[Mapping[Happened, tuple[str, str]]] = {
    "nothing amiss": ("#009E73", "o"),
    "log lines only": ("#F0E442", "D"),
    "blanks to the limit": ("#CC79A7", "s"),
    "request dies": ("#D55E00", "X"),
    "engine ends": ("#000000", "X"),
    "refused at start": ("#bbbbbb", "v"),
    "patch refused": ("#ffffff", "v"),
}
"""Colour (Okabe and Ito's) and marker of what happened."""
ROW_INCHES: Final = 0.135


def side_by_side(frame: pd.DataFrame, titles: Mapping[str, str]) -> Figure:
    """All cases below each other; ``frame`` is `specgram_lab.cases.tables.frame`, ``titles`` says what a case is."""
    cases = list(dict.fromkeys(frame["case"]))
    builds = sorted(set(frame["build"]))
    rows = {case: list(dict.fromkeys(_label(row) for row in _of(frame, case))) for case in cases}
    heights = [len(names) + 1.6 for names in rows.values()]
    style: Any = figures.paper(columns=2, fontsize=7.0)
    with mpl.rc_context(style):
        width = mpl.rcParams["figure.figsize"][0]
        figure, panels = plt.subplots(
            len(cases), figsize=(width, ROW_INCHES * sum(heights) + 0.7), layout="constrained", squeeze=False,
            sharex=True, height_ratios=heights,
        )  # fmt: skip
        for case, ax in zip(cases, panels[:, 0], strict=True):
            _panel(_of(frame, case), rows[case], builds, ax)
            ax.set_title(f"{case}  {titles.get(case, '')}", loc="left", fontweight="bold")
        _legend(figure, [kind for kind in HAPPENED if (frame["what happened"] == kind).any()])
    return figure


def keep(frame: pd.DataFrame, titles: Mapping[str, str], folder: Path, name: str = "verdicts") -> Figure:
    """`side_by_side` with a caption, saved in ``folder`` as SVG and PNG."""
    figure = side_by_side(frame, titles)
    met = int((frame["verdict"] == "as expected").sum())
    real = frame[frame["switched on"].str.startswith("local")]
    named = [f"{case} {', '.join(dict.fromkeys(runs))}" for case, runs in real.groupby("case")["run"]]
    figures.add_caption(
        figure,
        f"{met} of {len(frame)} runs gave the verdict that their case's file states (a red edge: another one). A number"
        " is how many drafts were shown to the grammar and refused. No mark: no run on that build. All on the"
        f" model-free engine{', but on a real one: ' if named else ''}{'; '.join(named)}.",
    )
    figures.save(figure, folder / name)
    plt.close(figure)
    return figure


def _of(frame: pd.DataFrame, case: str) -> list[dict[str, str]]:
    return [{str(k): v for k, v in row.items()} for row in frame[frame["case"] == case].to_dict("records")]


def _label(row: Mapping[str, str]) -> str:
    asynchronous = "async" in row["switched on"].split(", ") and "async" not in row["run"]
    return row["run"] + (", async" if asynchronous else "")


def _panel(rows: list[dict[str, str]], names: list[str], builds: list[str], ax: Axes) -> None:
    for row in rows:
        at = builds.index(row["build"]), names.index(_label(row))
        colour, marker = LOOKS[row["what happened"]]  # type: ignore[index]
        edge = "#222222" if row["verdict"] == "as expected" else "#ff0000"
        ax.plot(*at, marker, color=colour, markeredgecolor=edge, markeredgewidth=0.5, markersize=5.5)
        if row["draft-probes"] != "0":
            ax.annotate(row["draft-probes"], at, xytext=(6, -2), textcoords="offset points", fontsize=5.5)
    ax.set_yticks(range(len(names)), names, fontsize=6)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xticks(range(len(builds)), builds)
    ax.set_xlim(-0.5, len(builds) - 0.5)
    ax.tick_params(length=0, labelbottom=True, labelsize=6)
    ax.grid(axis="y", color="#eeeeee")
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def _legend(figure: Figure, kinds: list[Happened]) -> None:
    handles = [
        mpl.lines.Line2D(
            [], [], linestyle="none", marker=LOOKS[kind][1], color=LOOKS[kind][0], markeredgecolor="#222222",
            markeredgewidth=0.5, markersize=5.5,
        )
        for kind in kinds
    ]  # fmt: skip
    figure.legend(handles, kinds, loc="outside upper center", ncols=4, handletextpad=0.2)
