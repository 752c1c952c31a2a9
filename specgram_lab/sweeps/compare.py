"""Two sides of one sweep, or two sweeps, held against each other pair by pair, and what that says in plain words.

Cells are paired by the labels that both sides have, repeat by repeat; within them requests by prompt. What is resampled
is the prompt: greedy repeats of a prompt are copies of it, and cells on the same prompts rise and fall together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from specgram_lab import lab, tables
from specgram_lab.semantics import Counting, counted
from specgram_lab.spec import SpecError
from specgram_lab.stats import QUANTITIES, Estimate, Quantity, paired
from specgram_lab.sweeps import runner

SEED: Final = 7
SPEED: Final = "seconds_per_output_token"
"""Of cells whose outputs are all whole and valid; its pairs are cells, so it needs repeats."""
ALL: Final = "all together"
_COUNTS = ["spec_step", "drafted", "verified", "accepted"]


@dataclass(frozen=True)
class Side:
    """Cells of a sweep with their tables; ``chosen`` are the labels by axis that all of them have."""

    name: str
    chosen: Mapping[str, str]
    cells: pd.DataFrame
    results: lab.Results


def side(text: str, folder: Path | None = None) -> Side:
    """A side by name: the folder of a collected sweep, or labels (``scheduling=sync,k=4``) of the one in ``folder``.

    Raises:
        SpecError: there is no such sweep, axis or label.
    """
    if folder is None or Path(text).is_dir():
        return Side(text, {}, runner.read_cells(Path(text)), lab.read(text))
    cells = runner.read_cells(folder)
    chosen = _labels(text, runner.axes_of(cells))
    for axis, label in chosen.items():
        if label not in set(cells[axis]):
            raise SpecError(f"axis {axis} has no value {label!r}, only {', '.join(cells[axis].unique())}")
    cells = cells[(cells[list(chosen)] == pd.Series(chosen)).all(axis=1)]
    if cells.empty:
        raise SpecError(f"{folder} has no cell with {text}")
    return Side(text, chosen, cells, lab.read(folder))


def _labels(text: str, axes: Sequence[str]) -> dict[str, str]:
    """``axis=label,axis=label``; a comma or an equals sign within a label stands for itself."""
    names = "|".join(map(re.escape, sorted(axes, key=len, reverse=True)))
    parts = re.split(rf",\s*(?=(?:{names})=)", text)
    found = dict(part.split("=", 1) for part in parts if re.match(rf"(?:{names})=", part))
    if len(found) != len(parts):
        raise SpecError(f"{text!r} is neither a folder nor AXIS=LABEL with an axis of {', '.join(axes)}")
    return found


def compare(
    first: Side,
    second: Side,
    *,
    counting: Counting = "rfc",
    quantities: Sequence[Quantity] = tuple(QUANTITIES),
    seed: int = SEED,
    **options: Any,
) -> pd.DataFrame:
    """The second side minus the first.

    Args:
        first: what is held against.
        second: what is held.
        counting: see `specgram_lab.semantics`.
        quantities: keys of `stats.QUANTITIES`; `SPEED` is always there.
        seed: of the bootstrap.
        options: ``interval``, ``resamples`` and ``confidence`` of `stats.paired`.

    Returns:
        One row a quantity and combination of the labels that both sides have and that differ (a column each), and,
        where there are several combinations, of `ALL`: ``first`` and ``second`` (the quantity on either side), the
        fields of `stats.Estimate` for the difference, ``pairs`` of cells, ``left_out`` (cells of either side without
        a good partner) and ``words``.

    Raises:
        SpecError: no cell of one side has a partner, or several could be one.
    """
    shared = [axis for axis in runner.axes_of(first.cells) if axis in second.cells.columns]
    axes = [axis for axis in shared if axis not in first.chosen and axis not in second.chosen]
    pairs, lost = _pairs(first, second, [*axes, "repeat"])
    varied = [axis for axis in axes if pairs[axis].nunique() > 1]
    sums = [_sums(one.results, pairs[column], counting) for one, column in ((first, "a"), (second, "b"))]
    speeds = [_speeds(one.results, pairs[column]) for one, column in ((first, "a"), (second, "b"))]
    rows = []
    for labels, part in _parts(pairs, varied):
        both = [_by_prompt(part, column, own) for column, own in zip("ab", sums, strict=True)]
        kept = both[0].index.intersection(both[1].index)
        clusters = [one.loc[kept].groupby(level="prompt_id").sum() for one in both]
        head = {**labels, "pairs": len(part), "left_out": lost}
        for name in quantities:
            above, below, plus = QUANTITIES[name]
            sides = [one[[above, below]].to_numpy(float) for one in clusters]
            rng = np.random.default_rng(seed)
            made = paired(name, *sides, rng=rng, plus=plus, n_of="prompts", **options)
            rows.append(head | _row(made, sides, plus))
        sides = _both_known(part, speeds)
        made = paired(SPEED, *sides, rng=np.random.default_rng(seed), n_of="pairs of cells", **options)
        rows.append(head | _row(made, sides, 0.0))
    return pd.DataFrame(rows)


def _pairs(first: Side, second: Side, on: list[str]) -> tuple[pd.DataFrame, int]:
    """Ids ``a`` and ``b`` of the good cells that belong together, and how many have no partner."""
    found = []
    for one, column in ((first, "a"), (second, "b")):
        runs = one.results.runs
        good = runs.loc[runs["outcome"].eq("ok").fillna(False), "run_id"]
        cells = one.cells[one.cells["run_id"].isin(good)]
        doubled = cells[cells.duplicated(on)]
        if not doubled.empty:
            labels = ", ".join(f"{axis} {doubled.iloc[0][axis]}" for axis in on)
            raise SpecError(f"{one.name} has several cells with {labels}: name the axis that tells them apart")
        found.append(cells[["run_id", *on]].rename(columns={"run_id": column}))
    pairs = found[0].merge(found[1], on=on)
    if pairs.empty:
        raise SpecError(f"no good cell of {first.name} has a partner among those of {second.name}")
    return pairs, len(first.cells) + len(second.cells) - 2 * len(pairs)


def _parts(pairs: pd.DataFrame, varied: list[str]) -> Iterable[tuple[dict[str, str], pd.DataFrame]]:
    if not varied:
        return [({}, pairs)]
    grouped = [(dict(zip(varied, map(str, key), strict=True)), part) for key, part in pairs.groupby(varied, sort=False)]
    return [*grouped, (dict.fromkeys(varied, ALL), pairs)]


def _sums(results: lab.Results, ids: pd.Series, counting: Counting) -> pd.DataFrame:
    """Counts by run, prompt and pass over the prompts."""
    runs, steps = (table[table["run_id"].isin(ids)] for table in (results.runs, results.steps))
    steps = steps.reset_index(drop=True)
    table = steps[["run_id", "request_id"]].join(counted(steps, counting, runs=runs)[_COUNTS])
    asked = results.requests[["run_id", "request_id", "prompt_id", "repeat"]].rename(columns={"repeat": "again"})
    merged = table.merge(asked, on=["run_id", "request_id"])
    return merged.groupby(["run_id", "prompt_id", "again"])[_COUNTS].sum()


def _by_prompt(part: pd.DataFrame, column: str, sums: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``sums`` that belong to the cells of ``part``, under the number of the pair in place of the run's id."""
    numbers = pd.Series(part.index, index=part[column], name="pair")
    own = sums.reset_index()
    own = own[own["run_id"].isin(numbers.index)]
    own = own.assign(pair=own["run_id"].map(numbers))
    return own.set_index(["pair", "prompt_id", "again"])[_COUNTS]


def _speeds(results: lab.Results, ids: pd.Series) -> pd.DataFrame:
    """Seconds and output tokens by run, of those whose speed `tables.summary` shows."""
    own = {name: table[table["run_id"].isin(ids)] for name, table in results.tables.items()}
    shown = tables.summary(own)
    fast = shown.loc[shown["output_tokens_per_s"].notna(), "run"]
    return own["runs"].set_index("run_id").loc[list(fast), ["generate_s", "output_tokens"]].astype(float)


def _both_known(part: pd.DataFrame, speeds: list[pd.DataFrame]) -> list[np.ndarray[Any, Any]]:
    known = part[part["a"].isin(speeds[0].index) & part["b"].isin(speeds[1].index)]
    return [own.loc[list(known[column])].to_numpy(float) for column, own in zip("ab", speeds, strict=True)]


def _row(made: Estimate, sides: list[np.ndarray[Any, Any]], plus: float) -> dict[str, Any]:
    values = [plus + one[:, 0].sum() / one[:, 1].sum() if len(one) and one[:, 1].sum() else None for one in sides]
    return {"first": values[0], "second": values[1]} | asdict(made) | {"words": words(made)}


def words(made: Estimate) -> str:
    """What a paired difference says."""
    if made.value is None:
        return f"cannot be compared: {made.reason}"
    if made.low is None or made.high is None:
        if made.value == 0:
            return f"no difference: {made.reason}"
        return f"{_way(made.value)}, but how sure that is cannot be said: {made.reason}"
    span = f"{_number(made.low)} to {_number(made.high)} over {made.n} {made.n_of}"
    if made.low <= 0 <= made.high:
        return f"no difference shown: {_number(made.value)} lies within what chance gives ({span})"
    return f"{_way(made.value)} ({span})"


def _way(value: float) -> str:
    return f"the second is {'higher' if value > 0 else 'lower'} by {abs(value):.3g}"


def _number(value: float) -> str:
    return f"{value:+.3g}"


def to_text(table: pd.DataFrame, first: str, second: str) -> str:
    """`compare` for a terminal."""
    labels = [str(name) for name in table.columns[: list(table.columns).index("pairs")]]
    lines = [f"first: {first}", f"second: {second}", ""]
    for row in table.to_dict("records"):
        where = ", ".join(dict.fromkeys(str(row[axis]) for axis in labels))
        both = " and ".join("none" if pd.isna(row[key]) else f"{row[key]:.4g}" for key in ("first", "second"))
        lines.append(f"{where}{': ' if where else ''}{row['name']} {both}: {row['words']}")
    lost = int(table["left_out"].iloc[0])
    lines += ["", f"{lost} cells have no good partner and are left out"] if lost else []
    return "\n".join(lines)
