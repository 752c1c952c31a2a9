"""What a notebook on a sweep needs: acceptance and FSM failures of every combination with intervals, and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specgram_lab import figures, report, stats
from specgram_lab.lab import Results
from specgram_lab.sweeps.runner import CELLS, axes_of, read_cells

SEED: Final = 7
"""Of the bootstrap."""
BY: Final = ("drafter", "k", "grammar", "scheduling_effective")
"""Where the sweep has an axis ``drafter``, its labels stand for the methods: two draft models are two drafters."""
OTHER: Final = figures.Look("#997700", "p", "-", "")
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<")
SCHEDULINGS: Final = {"sync": ("-", True), "async": (":", False)}
"""Line style and whether the marker is filled."""
LABELS: Final = {
    "mean_acceptance_length": "mean acceptance length",
    "verified_acceptance_rate": "accepted / verified",
}


def drafting(results: Results) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The runs that are ok and have a drafter, which goes by its label where they are a sweep's, and their steps."""
    runs, steps, _ = report.drafting(results)
    cells = read_cells(results.folder) if (results.folder / CELLS).is_file() else None
    if cells is not None and "drafter" in axes_of(cells):
        labels = cells.set_index("run_id")["drafter"]
        runs = runs.assign(drafter=runs["run_id"].map(labels).astype("string"))
    return runs, steps


def looks(labels: Sequence[str]) -> dict[str, figures.Look]:
    """How each drafter is drawn: as its method is everywhere, the second of one method with another marker."""
    found: dict[str, figures.Look] = {}
    for label in labels:
        method = label.partition(" ")[0]
        base = figures.DRAFTERS.get(method, OTHER)
        before = sum(known.partition(" ")[0] == method for known in found)
        shown = base.label if label == method and base.label else label
        found[label] = base._replace(label=shown, marker=MARKERS[before] if before else base.marker)
    return found


def acceptance(results: Results) -> pd.DataFrame:
    """Acceptance of every combination that ran, counted as vllm#64156 proposes.

    Returns:
        One row a combination of `BY` and quantity of `stats.QUANTITIES` with the fields of `stats.Estimate`; prompts
        are resampled, as greedy repeats of one are copies. Also written to ``acceptance.csv``.
    """
    runs, steps = drafting(results)
    frame = stats.estimates(
        steps, seed=SEED, by=BY, countings=("rfc",), cluster=("prompt_id",), runs=runs, requests=results.requests
    )
    frame.to_csv(results.folder / "acceptance.csv", index=False)
    return frame


def verified(results: Results) -> pd.DataFrame:
    """Sums over the steps of every combination: drafted, grammar-invalid, verified and accepted tokens, spec steps.

    Also written to ``verified.csv``.
    """
    runs, steps = drafting(results)
    table = steps.merge(runs[["run_id", *BY]], on="run_id")
    table["grammar_invalid"] = table["drafted"] - table["grammar_valid"]
    table["spec_steps"] = (table["drafted"] > 0).astype("Int64")
    sums = ["spec_steps", "drafted", "grammar_invalid", "verified", "accepted"]
    frame = table.groupby(list(BY), sort=False)[sums].sum().reset_index()
    frame.to_csv(results.folder / "verified.csv", index=False)
    return frame


def failures(results: Results, by: Sequence[str] = ("drafter", "grammar", "scheduling_effective")) -> pd.DataFrame:
    """FSM events per verified token and requests hit, by phase, with Wilson intervals; all k together.

    Also written to ``fsm_rates.csv``.
    """
    runs, steps = drafting(results)
    frame = stats.fsm_rates(results.fsm_events, steps, by=by, runs=runs)
    frame.to_csv(results.folder / "fsm_rates.csv", index=False)
    return frame


def figure(results: Results, frame: pd.DataFrame, name: str = "sweep") -> Figure:
    """Mean acceptance length and verified acceptance rate over k, a column a grammar; saved as ``name`` (SVG, PNG).

    Colour and marker are the drafter's; asynchronous scheduling is dotted, with open markers.
    """
    grammars = list(dict.fromkeys(results.runs["grammar"]))
    drawn = looks(list(dict.fromkeys(frame["drafter"])))
    style: Any = figures.paper(columns=2)
    with mpl.rc_context(style):
        made, rows = plt.subplots(
            len(LABELS),
            len(grammars),
            sharex=True,
            sharey="row",
            squeeze=False,
            figsize=(6.75, 4.2),
            layout="constrained",
        )
        for quantity, row in zip(LABELS, rows, strict=True):
            for grammar, axes in zip(grammars, row, strict=True):
                own = frame[(frame["name"] == quantity) & (frame["grammar"] == grammar)]
                over_k(own, axes, drawn)
            row[0].set_ylabel(LABELS[quantity])
        for grammar, above, below in zip(grammars, rows[0], rows[-1], strict=True):
            above.set_title("no grammar" if grammar == "none" else grammar)
            below.set_xlabel("k")
        found: dict[str, Any] = {}
        for axes in rows.flat:
            handles, labels = axes.get_legend_handles_labels()
            found |= dict(zip(labels, handles, strict=True))
        made.legend(list(found.values()), list(found), loc="outside upper center", ncols=4)
        runs, _, note = report.drafting(results)
        note = "; ".join(filter(None, (note, report.build(results))))
        figures.add_caption(made, figures.caption(frame, run_ids=list(runs["run_id"]), note=note))
        figures.save(made, results.folder / name)
        plt.close(made)
    return made


def over_k(frame: pd.DataFrame, ax: Axes, drawn: Mapping[str, figures.Look]) -> Axes:
    """One quantity over k, a line a drafter and scheduling, with its intervals where there are any."""
    drafters = list(drawn)
    for (drafter, scheduling), line in frame.groupby(["drafter", "scheduling_effective"], sort=False):
        look = drawn[str(drafter)]
        style, filled = SCHEDULINGS[str(scheduling)]
        line = line.dropna(subset=["value"]).sort_values("k")
        value = line["value"].astype(float)
        ends = [(value - line["low"].astype(float)).fillna(0), (line["high"].astype(float) - value).fillna(0)]
        shift = 0.06 * (drafters.index(str(drafter)) - (len(drafters) - 1) / 2) + (0.03 if filled else -0.03)
        ax.errorbar(
            line["k"].astype(float) + shift, value, yerr=ends, color=look.color, marker=look.marker, linestyle=style,
            markerfacecolor=look.color if filled else "white", capsize=1.5, elinewidth=0.7, markersize=3.5,
            label=f"{look.label}, {scheduling}",
        )  # fmt: skip
    ax.set_xticks(sorted(frame["k"].astype(int).unique()))
    ax.grid(axis="y")
    return ax
