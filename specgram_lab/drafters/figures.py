"""Figures of what `specgram_lab.drafters.evaluate` measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from specgram_lab import figures

KINDS = {"free": ("free text", "-"), "json_schema": ("JSON schema", "--")}


def positions(measured: Mapping[str, Mapping[str, Mapping[str, Any]]], figure: Figure) -> Figure:
    """Share of the spec steps whose draft at each position was accepted, with intervals: a panel a drafter.

    ``measured``: by drafter and kind of output, what `specgram_lab.drafters.evaluate.evaluate` gives.
    """
    columns = min(3, len(measured))
    axes = figure.subplots(-(-len(measured) // columns), columns, sharex=True, sharey=True, squeeze=False)
    for ax in axes.flat[len(measured) :]:
        ax.set_axis_off()
    for ax, (name, kinds) in zip(axes.flat, measured.items(), strict=False):
        look = figures.DRAFTERS[name]
        for kind, one in kinds.items():
            if one["outcome"] != "ok":
                continue
            label, style = KINDS[kind]
            shares = one["per_position"]
            ends = [
                [100 * abs((share if end is None else end) - share) for share, end in zip(shares, side, strict=True)]
                for side in (one["per_position_low"], one["per_position_high"])
            ]
            length, (low, high) = one["mean_acceptance_length"], one["interval"]
            ax.errorbar(
                range(1, len(shares) + 1),
                [100 * share for share in shares],
                yerr=ends,
                color=look.color,
                linestyle=style,
                marker=look.marker,
                markerfacecolor=look.color if style == "-" else "white",
                capsize=1.5,
                elinewidth=0.7,
                markersize=3.5,
                label=f"{label}: {length:.2f} [{low:.2f}, {high:.2f}]",
            )
        ax.set_title(look.label)
        ax.set_xticks(range(1, 6))
        ax.legend(fontsize=5.5, title="mean acceptance length", title_fontsize=5.5)
    axes[0][0].set_ylim(0, None)
    for ax in axes[-1]:
        ax.set_xlabel("position in the draft")
    figure.supylabel("accepted, % of spec steps", fontsize=7)
    return figure
