"""Figures of `specgram_lab.av.report`: tidy frame in, Axes out; and the widget that replays while one turns a knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specgram_lab import figures, stats
from specgram_lab.av.costs import CostCurve
from specgram_lab.av.recording import Recording
from specgram_lab.av.report import scaled, what_if

STYLE = figures.paper(columns=2)
_DOT = {"linestyle": "", "color": "#1b6ca8", "markersize": 4}
_SHARES: dict[str, tuple[str, dict[str, Any]]] = {
    "p recorded": ("expected, as fitted", _DOT | {"marker": "o"}),
    "p spared": ("expected, without verdicts on invalid tokens", _DOT | {"marker": "s", "mfc": "none"}),
    "p real": ("real", _DOT | {"marker": "x", "color": "#222222"}),
}
"""Columns of `specgram_lab.av.report.spoiled`: what they are called and how they are drawn."""


def keep(figure: Figure, folder: Path, name: str, note: str) -> Figure:
    """Put ``note`` below the figure, save it as ``name`` (SVG and PNG) and give it back."""
    figures.add_caption(figure, note)
    figures.save(figure, folder / name)
    plt.close(figure)
    return figure


def reliability(frame: pd.DataFrame, ax: Axes, *, counts: bool = True) -> Axes:
    """Confidence against acceptance, with intervals; a calibrated drafter lies on the diagonal. ``counts``: how many
    drafts a dot stands for is written beside it."""
    ax.plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle="--")
    below, above = frame["accepted"] - frame["low"], frame["high"] - frame["accepted"]
    ax.errorbar(frame["confidence"], frame["accepted"], yerr=[below, above], fmt="o", color="#1b6ca8", capsize=2)
    for row in frame.itertuples() if counts else ():
        ax.annotate(str(row.n), (row.confidence, row.accepted), xytext=(3, 3), textcoords="offset points", fontsize=5)
    ax.set(xlabel="confidence", ylabel="accepted, of those judged", xlim=(0, 1), ylim=(-0.02, 1.02))
    return ax


def calibration(found: Mapping[str, Sequence[Mapping[str, Any]]], figure: Figure) -> Figure:
    """`reliability` of each position in columns, of each kind of output in rows, the calibration error above.

    ``found``: by kind, what `specgram_lab.drafters.evaluate` says of a drafter's ``confidence``.
    """
    columns = max(map(len, found.values()))
    axes = figure.subplots(len(found), columns, sharex=True, sharey=True, squeeze=False)
    for row, (kind, positions) in zip(axes, found.items(), strict=True):
        for ax, one in zip(row, positions, strict=False):
            reliability(pd.DataFrame(one["bins"]), ax, counts=False)
            error, n = one["expected_calibration_error"], int(one["n"])
            ax.set_title(f"{kind}, position {int(one['position']) + 1}\nerror {error:.3f}, n = {n}", fontsize=6)
            ax.set(xlabel="", ylabel="")
    for ax in axes[-1]:
        ax.set_xlabel("confidence")
    figure.supylabel("accepted, of those judged", fontsize=7)
    return figure


def landing(frame: pd.DataFrame, curves: Sequence[CostCurve], figure: Figure) -> Figure:
    """How often each share of the scheduled drafts was the best budget, a row a drafter, a column a curve: ``frame`` as
    `specgram_lab.av.report.landing`, with the columns that tell runs apart."""
    drafters = list(dict.fromkeys(frame["drafter"]))
    axes = figure.subplots(len(drafters), len(curves), sharex=True, sharey=True, squeeze=False)
    looks = _looks(frame)
    for row, drafter in zip(axes, drafters, strict=True):
        for ax, curve in zip(row, curves, strict=True):
            own = frame[(frame["drafter"] == drafter) & (frame["budget"] == f"native({curve.name})")]
            for key, part in own.groupby(["grammar", "concurrency"]):
                steps = part.groupby("share")["steps"].sum().sort_index().cumsum()
                shares = pd.concat([pd.Series({-0.02: 0.0}), steps / steps.iloc[-1]])
                ax.plot(shares.index, shares, drawstyle="steps-post", **looks[key] | {"marker": ""})
            ax.set(xlim=(-0.02, 1.02), ylim=(0, 1.02))
    return _grid(figure, axes, drafters, curves, "verified share of the scheduled drafts", "steps at or below")


def policies(frame: pd.DataFrame, curves: Sequence[CostCurve], figure: Figure) -> Figure:
    """Estimated tokens a second under each policy, over those of budget *all* on the same curve: ``frame`` as
    `specgram_lab.av.report.table`, a row a drafter, a column a curve; of ``native`` the one on that curve."""
    drafters = list(dict.fromkeys(frame["drafter"]))
    labels = [one for one in dict.fromkeys(frame["budget"]) if not one.startswith("native(")]
    axes = figure.subplots(len(drafters), len(curves), sharex=True, sharey="row", squeeze=False)
    looks = _looks(frame)
    for row, drafter in zip(axes, drafters, strict=True):
        for ax, curve in zip(row, curves, strict=True):
            ax.axhline(1, color="#999999", linewidth=0.8, linestyle="--")
            for key, part in frame[frame["drafter"] == drafter].groupby(["grammar", "concurrency"]):
                speeds = part.set_index("budget")[f"tokens_per_s: {curve.name}"]
                gains = speeds.reindex([*labels, f"native({curve.name})"]) / speeds["all"]
                ax.plot(range(len(gains)), gains, **looks[key] | {"linewidth": 0.5})
            ax.set_xticks(range(len(labels) + 1), [*labels, "native"], rotation=40, ha="right", fontsize=5)
    return _grid(figure, axes, drafters, curves, "", "estimated tokens/s over those of budget all")


def _looks(frame: pd.DataFrame) -> dict[Any, dict[str, Any]]:
    """A line for each grammar and number of requests: colour is how many, open and dashed what obeys a grammar."""
    grammars, numbers = (sorted(set(frame[name])) for name in ("grammar", "concurrency"))
    colours = ("#222222", "#c8553d", "#1b6ca8", "#4f772d")
    return {
        (grammar, number): {
            "color": colours[numbers.index(number) % len(colours)],
            "linestyle": "-" if grammar == "none" else "--",
            "marker": "o",
            "markersize": 3,
            "markerfacecolor": colours[numbers.index(number) % len(colours)] if grammar == "none" else "white",
            "label": f"{'no grammar' if grammar == 'none' else grammar}, {number} at once",
        }
        for number in numbers
        for grammar in grammars
    }


def _grid(
    figure: Figure, axes: Any, drafters: Sequence[str], curves: Sequence[CostCurve], x_label: str, y_label: str
) -> Figure:
    """Name rows and columns once, and what the lines are."""
    for ax, curve in zip(axes[0], curves, strict=True):
        ax.set_title(curve.name, fontsize=7)
    for row, drafter in zip(axes, drafters, strict=True):
        row[0].set_ylabel(drafter)
    axes[-1][len(curves) // 2].set_xlabel(x_label)
    figure.supylabel(y_label, fontsize=7)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=6)
    return figure


def drift(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Coefficients over engine steps: ``frame`` has step, name, value and ``which`` (one line style each)."""
    names = list(dict.fromkeys(frame["name"]))
    colours = dict(zip(names, ["#222222", "#1b6ca8", "#c8553d", "#4f772d", "#8e6c8a", "#b08900"], strict=False))
    for style, (which, part) in zip(("-", "--", ":", "-."), frame.groupby("which", sort=False), strict=False):
        for name, line in part.groupby("name", sort=False):
            colour = colours.get(str(name), "#777777")
            label = f"{name}, {which}"
            ax.plot(line["step"], line["value"], style, color=colour, label=label, drawstyle="steps-post")
    ax.set(xlabel="engine step", ylabel="coefficient")
    return ax


def drifts(fits: Mapping[str, pd.DataFrame], figure: Figure) -> Figure:
    """`drift` of each run, by what it is called; one legend for all."""
    axes = figure.subplots(-(-len(fits) // 2), min(2, len(fits)), sharex=True, sharey=True, squeeze=False)
    for (name, frame), ax in zip(fits.items(), axes.flat, strict=False):
        drift(frame, ax).set_title(name)
    named = {label: line for ax in axes.flat for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=4, fontsize=6)
    return figure


def spoiling(spoiled: pd.DataFrame, taught: pd.DataFrame, figure: Figure) -> Figure:
    """What grammar-invalid drafts do under asynchronous scheduling and not under synchronous, a row a run.

    Left, of the drafts' first tokens that the grammar accepts, the share that the target keeps: as the estimator
    expects it, as it would without the verdicts on invalid tokens, and as it was (``spoiled``). Right the share of
    verified tokens that the grammar refuses (``taught``). Both frames as `specgram_lab.av.report` has them.
    """
    rows = taught.sort_values(["scheduling", "drafter", "budget"], ascending=False).reset_index(drop=True)
    keys = ["drafter", "scheduling", "budget"]
    found = spoiled.set_index(keys)
    left, right = figure.subplots(1, 2, sharey=True)
    for number, row in rows.iterrows():
        key = tuple(row[name] for name in keys)
        if key in found.index:
            for column, (_, look) in _SHARES.items():
                left.plot(found.loc[key, column], number, **look)
        one = stats.rate(int(row["invalid"]), int(row["verified"]), event="invalid", per="verified")
        low, value, high = (100 * (end or 0.0) for end in (one.low, one.value, one.high))
        right.errorbar(value, number, xerr=[[value - low], [high - value]], fmt="o", color="#c8553d", capsize=1.5)
    left.set_yticks(range(len(rows)), [", ".join(row[name] for name in keys) for _, row in rows.iterrows()], fontsize=6)
    left.set_xlabel("accepted, of grammar-valid first draft tokens")
    right.set_xlabel("grammar-invalid, % of verified tokens")
    for ax in (left, right):
        ax.grid(axis="x")
    marks = [left.plot([], [], **look)[0] for _, look in _SHARES.values()]
    figure.legend(marks, [name for name, _ in _SHARES.values()], loc="outside upper center", ncols=3, fontsize=6)
    return figure


def explore(known: Mapping[tuple[Any, ...], Recording], curves: Sequence[CostCurve]) -> Any:
    """A widget: choose a recording and a cost curve, make tokens dearer or cheaper, and see the budget move.

    ``known``: recordings by what tells them apart, such as drafter, grammar and concurrency.
    """
    import ipywidgets as widgets  # type: ignore[import-untyped]
    from IPython.display import display

    which = widgets.Dropdown(options={", ".join(map(str, key)): key for key in known}, description="run")
    curve = widgets.Dropdown(options={one.name: number for number, one in enumerate(curves)}, description="curve")
    factor = widgets.FloatLogSlider(value=1.0, base=10, min=-1.5, max=1.5, step=0.05, description="x tokens")
    shown = widgets.Output()

    def show(_: Any = None) -> None:
        table = what_if(known[which.value], scaled(curves[curve.value], factor.value))
        shown.clear_output(wait=True)
        with shown:
            display(table.head(12))  # type: ignore[no-untyped-call]

    for control in (which, curve, factor):
        control.observe(show, names="value")
    show()
    return widgets.VBox([widgets.HBox([which, curve, factor]), shown])
