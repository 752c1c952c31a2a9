"""Figures: a tidy frame in, Axes out; nothing is shown, no global state is changed.

Sizes and fonts are plain rcParams (`paper`), to be applied with ``plt.rc_context``. Colours are fixed per drafter and
per counting in one table each (Paul Tol's muted scheme, Okabe and Ito's; both for colour-blind readers), and a marker
or line style says the same again. Without ``ax`` a function makes a figure of the current width whose height fits its
rows. Groups without a value keep their row and say why it is empty.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from PIL import Image

from specgram_lab.semantics import COUNTINGS, FATES


class FigureError(ValueError):
    """A frame that cannot be drawn, said in one sentence."""


class Look(NamedTuple):
    """How one thing looks everywhere: two of the three would be enough to tell it apart."""

    color: str
    marker: str
    linestyle: str
    label: str


DRAFTERS: Final[Mapping[str, Look]] = {
    "none": Look("#7f7f7f", "x", ":", "no drafter"),
    "ngram": Look("#332288", "o", "-", "n-gram"),
    "ngram_gpu": Look("#6699CC", "h", ":", "n-gram (V2's kernel)"),
    "draft_model": Look("#117733", "s", "--", "draft model"),
    "eagle3": Look("#CC6677", "^", "-.", "EAGLE-3"),
    "mtp": Look("#AA4499", "D", "-", "MTP"),
    "dflash": Look("#44AA99", "v", "--", "DFlash"),
    "dflash2": Look("#882255", "P", "-.", "DFlash2"),
    "dspark": Look("#999933", "X", "-", "DSpark"),
    "suffix": Look("#88CCEE", "<", "--", "suffix"),
    "scripted": Look("#000000", ">", "-.", "scripted"),
}
COUNTING_LOOKS: Final[Mapping[str, Look]] = {
    "engine": Look("#000000", "o", "-", "engine, as reported"),
    "legacy-sync": Look("#E69F00", "s", "--", "legacy-sync"),
    "legacy-async": Look("#D55E00", "^", "-.", "legacy-async"),
    "rfc": Look("#0072B2", "D", ":", "rfc (#64156)"),
}
PHASES: Final[Mapping[str, Look]] = {
    "draft-probe": Look("#56B4E9", "o", "-", "draft probe (harmless)"),
    "commit": Look("#D55E00", "s", "--", "commit (the request dies)"),
}
FATE_LOOKS: Final[Mapping[str, tuple[str, str]]] = {
    "drafted": ("#d0d0d0", ""),
    "grammar-valid": ("#9ecae1", "////"),
    "verified": ("#4292c6", "...."),
    "accepted": ("#08306b", ""),
}
"""Colour and hatch of each fate, from light to dark as tokens drop out."""
DEFINITIONS: Final[Mapping[str, str]] = {
    "per_spec_step": "per spec step",
    "given_verified": "given verified",
    "given_previous_accepted": "given the previous one accepted",
}

_WIDTHS: Mapping[int, float] = {1: 3.25, 2: 6.75}  # inches: column and text width of the ICML style
_NARROW = 5.0  # inches; below, labels are broken into lines
_SALT = "specgram_lab"
_FACTORS: Mapping[str, tuple[str, str | None]] = {
    "drafter": ("drafter", None),
    "k": ("k", None),
    "grammar": ("grammar", None),
    "whitespace": ("whitespace", None),
    "workload": ("workload", None),
    "scheduling": ("scheduling_effective", "scheduling_requested"),
    "runner": ("runner_effective", "runner_requested"),
    "budget": ("budget_effective", "budget_requested"),
    "device": ("device", None),
    "concurrency": ("concurrency", None),
}


_FIRST = [*DRAFTERS, "v1", "v2", "sync", "async", "off", "json_object", "json_schema"]
"""Values that come before others, and in this order, where runs are sorted into groups."""


def paper(*, columns: int = 1, fontsize: float = 8.0) -> dict[str, Any]:
    """The rcParams of a figure of 1 or 2 ``columns`` (3.25 or 6.75 inches wide) with text of ``fontsize`` points."""
    if columns not in _WIDTHS:
        raise FigureError(f"a figure has 1 or 2 columns, got {columns}")
    small = fontsize - 1
    return {
        "figure.figsize": (_WIDTHS[columns], 2.4),
        "figure.dpi": 150,
        "savefig.dpi": 300,
        "font.family": "sans-serif",
        "font.size": fontsize,
        "axes.titlesize": fontsize,
        "axes.labelsize": fontsize,
        "legend.fontsize": small,
        "xtick.labelsize": small,
        "ytick.labelsize": small,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": False,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.2,
        "lines.markersize": 4.5,
        "legend.frameon": False,
        "hatch.linewidth": 0.5,
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
    }


def groups(runs: pd.DataFrame, factors: Sequence[str] = tuple(_FACTORS)) -> tuple[pd.DataFrame, str]:
    """Name each run after what it really ran with, and say where that is not what was asked.

    Args:
        runs: the ledger's ``runs``.
        factors: some of drafter, k, grammar, whitespace, workload, scheduling, runner, budget, device, concurrency;
            the drafter and those that differ between the runs, in effect, make up the name.

    Returns:
        ``runs`` with an ordered column ``group``, and a sentence for the caption (empty where all were honoured).
    """
    unknown = [name for name in factors if name not in _FACTORS]
    if unknown:
        raise FigureError(f"there is no factor {unknown[0]!r} to group by, only {', '.join(_FACTORS)}")
    parts: list[pd.Series[str]] = []
    ranks: list[pd.Series[int]] = []
    notes: list[str] = []
    for name in factors:
        effective, requested = _FACTORS[name]
        shown = runs[effective].astype("string").fillna("unknown")
        bare = {"k": "drafter", "whitespace": "grammar_kind"}.get(name)  # means nothing where there is none of these
        varied = shown if bare is None else shown[runs[bare] != "none"]
        if name == "drafter" or varied.nunique() > 1:
            parts.append(_factor_label(name, shown, runs))
            order = [*_FIRST, *sorted(shown.unique(), key=_numbers_first)]
            ranks.append(shown.map(lambda value, order=order: order.index(value)))
        if requested is not None:
            asked = runs[requested].astype("string")
            pairs = pd.DataFrame({"asked": asked, "got": shown})[(asked.notna() & (asked != shown)).astype(bool)]
            for (wish, got), same in pairs.groupby(["asked", "got"]):
                notes.append(f"{len(same)} of {len(runs)} runs asked for {name} {wish} and ran with {got}")
    labels = [", ".join(part for part in row if part) for row in zip(*parts, strict=True)]
    by_rank = [label for _, label in sorted(zip(zip(*ranks, strict=True), labels, strict=True))]
    named = runs.copy()
    named["group"] = pd.Categorical(labels, categories=list(dict.fromkeys(by_rank)), ordered=True)
    return named, "; ".join(notes)


def _numbers_first(value: str) -> tuple[float, str]:
    return (float(value) if value.replace(".", "", 1).isdigit() else float("inf"), value)


def _factor_label(name: str, shown: pd.Series[str], runs: pd.DataFrame) -> pd.Series[str]:
    if name == "drafter":
        return shown.map(lambda drafter: DRAFTERS[drafter].label if drafter in DRAFTERS else drafter)
    if name == "k":
        return ("k=" + shown).where(runs["drafter"] != "none", "")
    if name == "grammar":
        return shown.where(shown != "none", "no grammar")
    if name in ("scheduling", "workload"):
        return shown
    return name + " " + shown


def acceptance(
    frame: pd.DataFrame,
    quantity: str = "mean_acceptance_length",
    *,
    countings: Sequence[str] = COUNTINGS,
    group: str = "group",
    ax: Axes | None = None,
) -> Axes:
    """``quantity`` of each group under each counting, a dot with its interval.

    Args:
        frame: `stats.estimates` grouped by ``group``.
        quantity: mean_acceptance_length or acceptance_rate; the latter also shows the rate of verified tokens, with
            an open marker, for the countings that have it.
        countings: which ones, in the order of the legend.
        group: the column that names the rows.
        ax: where to draw.
    """
    labels = {
        "mean_acceptance_length": "mean acceptance length (tokens per spec step, bonus included)",
        "acceptance_rate": "acceptance rate (% of drafted tokens)",
        "verified_acceptance_rate": "acceptance rate (% of verified tokens)",
    }
    if quantity not in labels:
        raise FigureError(f"there is no figure of {quantity!r}, only of {', '.join(labels)}")
    series = [(quantity, counting, COUNTING_LOOKS[counting], True) for counting in countings]
    if quantity == "acceptance_rate":
        verified = frame[frame["name"] == "verified_acceptance_rate"].dropna(subset=["value"])
        for counting in countings:
            if counting in set(verified["counting"]):
                look = COUNTING_LOOKS[counting]
                look = look._replace(label=f"{counting}, accepted / verified")
                series.append(("verified_acceptance_rate", counting, look, False))
    parts = [
        (frame[(frame["name"] == name) & (frame["counting"] == counting)], look, filled)
        for name, counting, look, filled in series
    ]
    ax = _dots(parts, group, 1 if quantity == "mean_acceptance_length" else 100, ax)
    if quantity == "mean_acceptance_length":
        ax.set_xlim(left=0.95)
    else:
        ax.set_xlim(-3, 103)
    _label_x(ax, labels[quantity])
    return ax


def fsm_rates(
    frame: pd.DataFrame, *, per: str = "verified_token", group: str = "group", ax: Axes | None = None
) -> Axes:
    """FSM events of each group by phase, per 1000 verified (or drafted) tokens, with Wilson intervals.

    ``frame`` is `stats.fsm_rates` grouped by ``group``; ``per`` is verified_token or drafted_token.
    """
    name = f"fsm_events_per_{per}"
    own = frame[frame["name"] == name]
    if own.empty:
        raise FigureError(f"the frame has no {name}, only {', '.join(sorted(set(frame['name']))) or 'no rows'}")
    ax = _dots([(own[own["phase"] == phase], look, True) for phase, look in PHASES.items()], group, 1000, ax)
    right = ax.get_xlim()[1]
    ax.set_xlim(-0.03 * right, right)
    _label_x(ax, f"FSM events (per 1000 {per.replace('_', ' ')}s)")
    return ax


def fates(frame: pd.DataFrame, *, group: str = "group", ax: Axes | None = None) -> Axes:
    """How many of the drafted tokens of each group were grammar-valid, verified, accepted: bars in % with their counts.

    ``frame`` is `semantics.fates` grouped by ``group``.
    """
    names = list(dict.fromkeys(frame[group]))
    ax = _axes(ax, 0.52 * len(names) + 0.95)
    height = 0.8 / len(FATES)
    for number, fate in enumerate(FATES):
        own = frame[frame["fate"] == fate].set_index(group).reindex(names)
        at = np.arange(len(names)) + (number - 1.5) * height
        color, hatch = FATE_LOOKS[fate]
        share = 100 * own["share"].astype("Float64").to_numpy(float, na_value=0.0)
        ax.barh(
            at, share, height, color=color, hatch=hatch, edgecolor="white" if hatch else color, linewidth=0, label=fate
        )
        for y, x, tokens, known in zip(at, share, own["tokens"], own["share"].notna(), strict=True):
            if known:
                ax.annotate(f"{int(tokens):,}", (x, y), (2, 0), textcoords="offset points", va="center", size="x-small")
    missing = frame[(frame["fate"] == "drafted") & frame["share"].isna()][group]
    for name in missing:
        _say(ax, names.index(name), "no drafts were proposed")
    _rows(ax, names)
    ax.set_xlim(0, 112)
    ax.set_xticks(range(0, 101, 20))
    _label_x(ax, "share of drafted tokens in % (at each bar: tokens)")
    _legend(ax)
    return ax


def positions(
    frame: pd.DataFrame,
    definition: str = "per_spec_step",
    *,
    group: str = "group",
    ax: Axes | None = None,
    legend: bool = True,
) -> Axes:
    """Acceptance at each draft position by one ``definition``, a line per group with its intervals.

    ``frame`` is `stats.per_position` grouped by ``group`` and ``drafter``; the drafter gives the colour and marker,
    and groups that share one differ in line style and shade.
    """
    if definition not in DEFINITIONS:
        raise FigureError(f"there is no definition {definition!r}, only {', '.join(DEFINITIONS)}")
    ax = _axes(ax, 2.4)
    own = frame[frame["definition"] == definition]
    names = own[[group, "drafter"]].drop_duplicates()
    place = names.groupby("drafter").cumcount()
    shift = np.linspace(-0.12, 0.12, len(names)) if len(names) > 1 else np.zeros(len(names))
    for offset, nth, (name, drafter) in zip(shift, place, names.itertuples(index=False, name=None), strict=True):
        line = own[own[group] == name].dropna(subset=["value"]).sort_values("position")
        look = _nth(DRAFTERS.get(drafter, DRAFTERS["scripted"]), int(nth))
        x, y = line["position"].to_numpy(float) + offset, 100 * line["value"].to_numpy(float)
        ax.errorbar(
            x, y, yerr=_bars(line, y, 100), color=look.color, marker=look.marker, linestyle=look.linestyle,
            markerfacecolor=look.color if nth % 2 == 0 else "white", markersize=3.5, elinewidth=0.8, capsize=0,
            label=name,
        )  # fmt: skip
    last = int(own["position"].max()) if len(own) else 0
    ax.set_xticks(range(0, last + 1, max(1, (last + 1) // 8)))
    ax.set_xlim(-0.4, last + 0.4)
    ax.set_ylim(0, 105)
    ax.set_yticks(range(0, 101, 25))
    ax.set_xlabel("draft position (first = 0)")
    ax.set_ylabel("accepted (%)")
    ax.set_title(DEFINITIONS[definition], loc="left")
    ax.grid(axis="y")
    if legend:
        _legend(ax)
    return ax


def position_panels(frame: pd.DataFrame, *, group: str = "group", axes: Sequence[Axes] | None = None) -> list[Axes]:
    """`positions` by all three definitions side by side, with one legend above them."""
    if axes is None:
        width = mpl.rcParams["figure.figsize"][0]
        height = 2.2 + 0.15 * frame[group].nunique() / 2
        _, made = plt.subplots(1, len(DEFINITIONS), figsize=(width, height), sharey=True, layout="constrained")
        axes = list(made)
    if len(axes) != len(DEFINITIONS):
        raise FigureError(f"position_panels needs {len(DEFINITIONS)} axes, got {len(axes)}")
    for ax, definition in zip(axes, DEFINITIONS, strict=True):
        positions(frame, definition, group=group, ax=ax, legend=False)
    for ax in axes[1:]:
        ax.set_ylabel("")
    figure = _figure(axes[0])
    handles, labels = _handles(axes[0])
    figure.legend(handles, labels, loc="outside upper center", ncols=_columns(labels, figure), handlelength=3)
    return list(axes)


def caption(frame: pd.DataFrame, *, run_ids: Sequence[str], note: str = "") -> str:
    """What a reader must know beside the figure: n, how the intervals were made, what is missing, which runs.

    ``frame`` is what was drawn (fields of `stats.Estimate`); of a run id the 12 hex digits are shown where it has them.
    """
    sentences = []
    if "n_of" in frame:
        for unit, part in frame[frame["low"].notna()].groupby("n_of", sort=False):
            low, high = int(part["n"].min()), int(part["n"].max())
            counts = f"{low}" if low == high else f"{low} to {high}"
            sentences.append(f"n = {counts} {unit}, intervals: {', '.join(dict.fromkeys(part['method']))}")
        bare = int((frame["value"].notna() & frame["low"].isna()).sum())
        if bare:
            reasons = dict.fromkeys(frame.loc[frame["value"].notna() & frame["low"].isna(), "reason"])
            sentences.append(f"{bare} values without an interval ({'; '.join(reasons)})")
    if note:
        sentences.append(note)
    if "partial" in frame and bool(frame["partial"].fillna(False).any()):
        sentences.append("some runs ended early, what they did until then is counted")
    short = [re.sub(r"^.*-([0-9a-f]{12})$", r"\1", run) for run in run_ids]
    more = f" and {len(short) - 8} more" if len(short) > 8 else ""
    sentences.append(f"Run{'s' if len(short) != 1 else ''} {', '.join(short[:8])}{more}")
    return (
        ". ".join(sentence[0].upper() + sentence[1:] if sentence[0] != "n" else sentence for sentence in sentences)
        + "."
    )


def add_caption(figure: Figure, text: str, *, fontsize: float = 6.0) -> None:
    """Write ``text`` below the figure, broken to its width; the layout makes room for it."""
    per_line = int(figure.get_figwidth() * 72 / (0.57 * fontsize))
    figure.supxlabel("\n".join(textwrap.wrap(text, per_line)), x=0.01, ha="left", fontsize=fontsize, color="#444444")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.svg and ``stem``.png, this with a palette; the same figure gives the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")]
    with mpl.rc_context({"svg.hashsalt": _SALT, "svg.fonttype": "none"}):
        figure.savefig(paths[0], bbox_inches="tight", pad_inches=0.03, metadata={"Date": None, "Creator": None})
        figure.savefig(paths[1], bbox_inches="tight", pad_inches=0.03, dpi=300, metadata={"Software": None})
    with Image.open(paths[1]) as image:
        few = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(paths[1], optimize=True, dpi=(300, 300))
    return paths


def _dots(parts: Sequence[tuple[pd.DataFrame, Look, bool]], group: str, scale: float, ax: Axes | None) -> Axes:
    names = list(dict.fromkeys(name for part, _, _ in parts for name in part[group]))
    ax = _axes(ax, max(0.32, 0.11 * len(parts)) * len(names) + 0.95)
    offsets = (np.arange(len(parts)) - (len(parts) - 1) / 2) * 0.72 / max(len(parts), 2)
    for (part, look, filled), offset in zip(parts, offsets, strict=True):
        own = part.dropna(subset=["value"])
        at = np.array([names.index(name) for name in own[group]]) + offset
        value = scale * own["value"].to_numpy(float)
        ax.errorbar(
            value, at, xerr=_bars(own, value, scale), linestyle="none", marker=look.marker, color=look.color,
            markerfacecolor=look.color if filled else "white", markersize=4, elinewidth=1.0, capsize=1.5,
            label=look.label,
        )  # fmt: skip
    for name in names:
        if all(part.loc[part[group] == name, "value"].isna().all() for part, _, _ in parts):
            reasons = [reason for part, _, _ in parts for reason in part.loc[part[group] == name, "reason"] if reason]
            _say(ax, names.index(name), reasons[0] if reasons else "no value")
    _rows(ax, names)
    ax.grid(axis="x")
    _legend(ax)
    return ax


def _bars(part: pd.DataFrame, value: Any, scale: float) -> Any:
    ends = [scale * part[name].to_numpy(float, na_value=np.nan) for name in ("low", "high")]
    return np.maximum([value - ends[0], ends[1] - value], 0)


def _rows(ax: Axes, names: Sequence[str]) -> None:
    narrow = _figure(ax).get_figwidth() < _NARROW
    ax.set_yticks(range(len(names)), [_broken(name) if narrow else name for name in names])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(names) - 0.5, -0.5)
    for between in range(1, len(names)):
        ax.axhline(between - 0.5, color="#eeeeee", linewidth=0.6, zorder=0)


def _broken(label: str) -> str:
    """A group's label in lines of about 22 letters, broken between its factors only."""
    kept = label.replace(" ", "\xa0").replace(",\xa0", ", ")
    return "\n".join(textwrap.wrap(kept, 22, break_long_words=False, break_on_hyphens=False))


def _say(ax: Axes, row: int, text: str) -> None:
    lines = "\n".join(textwrap.wrap(text, 26)) if _figure(ax).get_figwidth() < _NARROW else text
    at = ("axes fraction", "data")
    ax.annotate(lines, (0.03, row), xycoords=at, va="center", size="x-small", color="#666666", style="italic")


def _label_x(ax: Axes, text: str) -> None:
    ax.set_xlabel(text.replace(" (", "\n(", 1) if _figure(ax).get_figwidth() < _NARROW else text)


def _nth(look: Look, nth: int) -> Look:
    """The look of the nth group of one drafter: other line style, lighter shade."""
    styles = ["-", "--", ":", "-."]
    color = np.array(mpl.colors.to_rgb(look.color))
    lighter = mpl.colors.to_hex(tuple(color + (1 - color) * min(0.18 * nth, 0.6)))
    return look._replace(color=lighter, linestyle=styles[(styles.index(look.linestyle) + nth) % len(styles)])


def _axes(ax: Axes | None, height: float) -> Axes:
    if ax is not None:
        return ax
    _, made = plt.subplots(figsize=(mpl.rcParams["figure.figsize"][0], height), layout="constrained")
    return made


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    if figure is None:
        raise FigureError("the axes belong to no figure")
    return figure


def _columns(labels: Sequence[str], figure: Figure) -> int:
    """As many legend columns as the figure's width holds, a letter being half as wide as the font is high."""
    size = mpl.font_manager.FontProperties(size=mpl.rcParams["legend.fontsize"]).get_size_in_points()
    longest = max((len(label) for label in labels), default=1)
    return max(1, min(len(labels), int(figure.get_figwidth() * 72 / ((0.55 * longest + 5) * size))))


def _handles(ax: Axes) -> tuple[list[Any], list[str]]:
    handles, labels = ax.get_legend_handles_labels()
    return [handle[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles], labels


def _legend(ax: Axes) -> None:
    figure = _figure(ax)
    handles, labels = _handles(ax)
    if len(figure.axes) == 1:
        figure.legend(handles, labels, loc="outside upper center", ncols=_columns(labels, figure), handlelength=1.5)
    else:
        ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=1, handlelength=1.5)
