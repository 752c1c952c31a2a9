"""Figures: what is drawn is what the frame says, labels do not collide, and files are the same byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from ledgers import run_row, simulate, together
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from specgram_lab import figures, ledger, semantics, stats


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def frames() -> dict[str, Any]:
    made = together(
        simulate("none-000000000000", drafter="none", requests=4),
        simulate("ngram-000000000001", drafter="ngram", keep=0.4, requests=6, scheduling_requested="async"),
        simulate("draft-000000000002", scheduling="sync", requests=6, seed=1),
        simulate("draft-000000000003", scheduling="async", requests=6, seed=2),
    )
    runs, note = figures.groups(made["runs"])
    options: dict[str, Any] = {"by": ["group"], "runs": runs, "seed": 0, "resamples": 200}
    return {
        "runs": runs,
        "note": note,
        "estimates": stats.estimates(made["steps"], **options),
        "positions": stats.per_position(made["steps"], **options | {"by": ["group", "drafter"]}),
        "fsm": stats.fsm_rates(made["fsm_events"], made["steps"], by=["group"], runs=runs),
        "fates": semantics.fates(made["steps"], by=["group"], runs=runs),
    }


def draw_all(frames: dict[str, Any]) -> dict[str, Axes]:
    return {
        "length": figures.acceptance(frames["estimates"]),
        "rate": figures.acceptance(frames["estimates"], "acceptance_rate"),
        "positions": figures.position_panels(frames["positions"])[0],
        "position": figures.positions(frames["positions"]),
        "fates": figures.fates(frames["fates"]),
        "fsm": figures.fsm_rates(frames["fsm"]),
    }


def points(ax: Axes, label: str) -> np.ndarray:
    """x and y of the errorbar's markers with that label, row by row."""
    (container,) = [c for c in ax.containers if c.get_label() == label]
    return np.asarray(container[0].get_xydata())  # type: ignore[index]


# Groups are named after what ran


def test_groups_are_named_after_what_ran_and_say_what_was_asked(frames: dict[str, Any]) -> None:
    assert frames["runs"]["group"].tolist() == [
        "no drafter, sync", "n-gram, sync", "draft model, sync", "draft model, async",
    ]  # fmt: skip
    assert frames["note"] == "1 of 4 runs asked for scheduling async and ran with sync"
    same = ledger.frame("runs", [run_row(run_id=n, drafter="ngram", scheduling_requested=s) for n, s in ("as", "bs")])
    named, _ = figures.groups(same.assign(scheduling_requested=["async", "sync"]))
    assert named["group"].tolist() == ["n-gram", "n-gram"]


def test_groups_are_in_the_order_of_drafters_and_numbers_and_not_of_the_alphabet() -> None:
    runs = [run_row(run_id=str(k), drafter="ngram", k=k) for k in (16, 8, 2)]
    named, note = figures.groups(ledger.frame("runs", [*runs, run_row(run_id="0", drafter="none", k=0)]))
    assert list(named["group"].cat.categories) == ["no drafter", "n-gram, k=2", "n-gram, k=8", "n-gram, k=16"]
    assert note == ""
    with pytest.raises(figures.FigureError, match="no factor 'colour' to group by, only drafter, k"):
        figures.groups(named, ["colour"])
    assert figures.groups(ledger.frame("runs", []))[0].empty


# What is drawn is what the frame says


def test_lengths_and_their_intervals_are_those_of_the_frame(frames: dict[str, Any]) -> None:
    ax = figures.acceptance(frames["estimates"], countings=["engine", "rfc"])
    made = frames["estimates"].query("name == 'mean_acceptance_length' and counting == 'rfc'").dropna(subset=["value"])
    np.testing.assert_allclose(points(ax, "rfc (#64156)")[:, 0], made["value"].to_numpy(float))
    (bars,) = [c for c in ax.containers if c.get_label() == "rfc (#64156)"]
    ends = np.array([segment[:, 0] for segment in bars[2][0].get_segments()])  # type: ignore[index]
    np.testing.assert_allclose(ends, made[["low", "high"]].to_numpy(float))
    assert [label.get_text() for label in ax.get_yticklabels()] == list(frames["runs"]["group"])


def test_rates_are_percent_and_the_verified_rate_is_an_open_marker(frames: dict[str, Any]) -> None:
    ax = figures.acceptance(frames["estimates"], "acceptance_rate")
    made = (
        frames["estimates"].query("name == 'verified_acceptance_rate' and counting == 'rfc'").dropna(subset=["value"])
    )
    np.testing.assert_allclose(points(ax, "rfc, accepted / verified")[:, 0], 100 * made["value"].to_numpy(float))
    looks = {c.get_label(): c[0].get_markerfacecolor() for c in ax.containers}  # type: ignore[index]
    assert looks["rfc, accepted / verified"] == "white"
    assert looks["rfc (#64156)"] == figures.COUNTING_LOOKS["rfc"].color
    assert "engine, accepted / verified" not in looks


def test_a_group_without_drafts_keeps_its_row_and_says_why(frames: dict[str, Any]) -> None:
    for ax, text in (
        (figures.acceptance(frames["estimates"]), "no drafts were proposed in 80 tokens"),
        (figures.fates(frames["fates"]), "no drafts were proposed"),
        (figures.fsm_rates(frames["fsm"]), "there are no verified tokens"),
    ):
        assert [(t.get_text(), t.xy[1]) for t in ax.texts if "no " in t.get_text()] == [(text, 0)]  # type: ignore[attr-defined]


def test_bars_are_shares_with_their_counts(frames: dict[str, Any]) -> None:
    ax = figures.fates(frames["fates"])
    accepted = frames["fates"].query("fate == 'accepted'")
    (bars,) = [c for c in ax.containers if c.get_label() == "accepted"]
    widths = [bar.get_width() for bar in bars.patches]  # type: ignore[attr-defined]
    np.testing.assert_allclose(widths, 100 * accepted["share"].fillna(0).to_numpy(float))
    shown = {text.get_text() for text in ax.texts}
    assert {f"{n:,}" for n in accepted["tokens"][1:]} <= shown


def test_fsm_events_are_per_1000_tokens_by_phase(frames: dict[str, Any]) -> None:
    ax = figures.fsm_rates(frames["fsm"], per="drafted_token")
    made = (
        frames["fsm"].query("phase == 'draft-probe' and name == 'fsm_events_per_drafted_token'").dropna(subset="value")
    )
    np.testing.assert_allclose(points(ax, "draft probe (harmless)")[:, 0], 1000 * made["value"].to_numpy(float))
    assert ax.get_xlabel() == "FSM events\n(per 1000 drafted tokens)" or "per 1000 drafted" in ax.get_xlabel()


def test_positions_have_the_drafters_colour_and_groups_of_one_drafter_differ(frames: dict[str, Any]) -> None:
    ax = figures.positions(frames["positions"], "given_verified")
    lines = {c.get_label(): c[0] for c in ax.containers}  # type: ignore[index]
    assert to_hex(lines["n-gram, sync"].get_color()) == figures.DRAFTERS["ngram"].color
    pair = [lines["draft model, sync"], lines["draft model, async"]]
    assert pair[0].get_marker() == pair[1].get_marker() == figures.DRAFTERS["draft_model"].marker
    assert pair[0].get_linestyle() != pair[1].get_linestyle()
    made = frames["positions"].query("group == 'n-gram, sync' and definition == 'given_verified'")
    np.testing.assert_allclose(lines["n-gram, sync"].get_ydata(), 100 * made["value"].to_numpy(float))


def test_every_look_is_told_apart_twice() -> None:
    for table in (figures.DRAFTERS, figures.COUNTING_LOOKS, figures.PHASES):
        assert len({look.color for look in table.values()}) == len(table)
        assert len({(look.marker, look.linestyle) for look in table.values()}) == len(table)
    assert set(figures.COUNTING_LOOKS) == set(semantics.COUNTINGS)
    assert set(figures.FATE_LOOKS) == set(semantics.FATES)


# Layout


@pytest.mark.parametrize("columns", [1, 2])
def test_no_text_covers_another_and_the_legend_covers_no_data(frames: dict[str, Any], columns: int) -> None:
    with plt.rc_context(figures.paper(columns=columns)):
        for name, ax in draw_all(frames).items():
            figure = ax.figure
            figure.canvas.draw()
            labels = [t for t in [*ax.get_yticklabels(), *ax.get_xticklabels(), *ax.texts] if t.get_text()]
            boxes = [t.get_window_extent() for t in labels if t.get_visible()]
            overlaps = [
                (a, b)
                for i, a in enumerate(boxes)
                for b in boxes[i + 1 :]
                if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
            ]
            assert not overlaps, name
            legends = [*figure.legends, *([ax.get_legend()] if ax.get_legend() else [])]  # type: ignore[union-attr]
            assert legends, name
            for legend in legends:
                assert legend.get_window_extent().y0 >= ax.get_window_extent().y1 - 1, name
            assert figure.get_figwidth() == figures.paper(columns=columns)["figure.figsize"][0]  # type: ignore[union-attr]


def test_paper_is_plain_and_refuses_other_widths() -> None:
    before = dict(mpl.rcParams)
    for columns in (1, 2):
        assert set(figures.paper(columns=columns)) <= set(mpl.rcParams)
    assert dict(mpl.rcParams) == before
    with pytest.raises(figures.FigureError, match="1 or 2 columns, got 3"):
        figures.paper(columns=3)


def test_given_axes_are_used_and_no_figure_is_made(frames: dict[str, Any]) -> None:
    _, axes = plt.subplots(2, 2)
    drawn = [
        figures.acceptance(frames["estimates"], ax=axes[0, 0]), figures.positions(frames["positions"], ax=axes[0, 1]),
        figures.fates(frames["fates"], ax=axes[1, 0]), figures.fsm_rates(frames["fsm"], ax=axes[1, 1]),
    ]  # fmt: skip
    assert drawn == list(axes.flat)
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: figures.acceptance(f["estimates"], "speed"), "no figure of 'speed', only of mean_acceptance_length"),
        (
            lambda f: figures.fsm_rates(f["fsm"], per="hour"),
            "no fsm_events_per_hour, only fsm_events_per_drafted_token",
        ),
        (lambda f: figures.positions(f["positions"], "none"), "no definition 'none', only per_spec_step"),
        (lambda f: figures.position_panels(f["positions"], axes=[plt.figure().gca()]), "needs 3 axes, got 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(frames: dict[str, Any], call: Any, message: str) -> None:
    with pytest.raises(figures.FigureError, match=message):
        call(frames)


# Captions and files


def test_a_caption_says_n_method_seed_runs_and_what_is_odd(frames: dict[str, Any]) -> None:
    own = frames["estimates"].query("name == 'acceptance_rate'")
    text = figures.caption(own, run_ids=list(frames["runs"]["run_id"]), note=frames["note"])
    assert text == (
        "n = 6 requests, intervals: BCa bootstrap over requests, 95%, 200 resamples, seed 0. 1 of 4 runs asked for "
        "scheduling async and ran with sync. Runs 000000000000, 000000000001, 000000000002, 000000000003."
    )
    odd = own.assign(partial=True, low=pd.NA, high=pd.NA, reason="why")
    assert figures.caption(odd, run_ids=[str(n) for n in range(10)]) == (
        "12 values without an interval (why). Some runs ended early, what they did until then is counted. "
        "Runs 0, 1, 2, 3, 4, 5, 6, 7 and 2 more."
    )


def test_a_caption_lies_below_the_axes(frames: dict[str, Any]) -> None:
    ax = figures.acceptance(frames["estimates"])
    figures.add_caption(ax.figure, "A long sentence about nothing much. " * 8)  # type: ignore[arg-type]
    ax.figure.canvas.draw()
    text = ax.figure._supxlabel.get_window_extent()  # type: ignore[union-attr]
    assert text.y1 < ax.xaxis.label.get_window_extent().y0
    assert text.x1 <= ax.figure.bbox.x1


def test_saved_files_are_the_same_byte_for_byte(frames: dict[str, Any], tmp_path: Path) -> None:
    saved = []
    for folder in ("a", "b"):
        ax = figures.acceptance(frames["estimates"])
        saved.append(figures.save(ax.figure, tmp_path / folder / "length.v1"))  # type: ignore[arg-type]
    assert [path.name for path in saved[0]] == ["length.v1.svg", "length.v1.png"]
    for one, other in zip(*saved, strict=True):
        assert one.read_bytes() == other.read_bytes()
    svg = saved[0][0].read_text()
    assert "mean acceptance length" in svg
    assert "<dc:date>" not in svg
