"""Estimates with intervals: ratios of sums over requests, rare rates, paired comparisons, acceptance per position.

A ratio is a ratio of sums: every token weighs the same, and a request that drafted more counts for more. The tokens of
one request are alike, so what is resampled is the request (cluster bootstrap), never the step. The default interval is
BCa (Efron 1987): acceptance ratios are skewed near 0 and 1 and a ratio of sums is biased with few requests, and BCa
corrects for both; the plain percentile interval is there for comparison. Both are too narrow with fewer than about ten
requests, which is why every estimate carries its n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from specgram_lab.semantics import COUNTINGS, Counting, counted, groups, lookup, of_runs

Quantity = Literal["mean_acceptance_length", "acceptance_rate", "verified_acceptance_rate"]
Interval = Literal["bca", "percentile"]

QUANTITIES: Final[Mapping[Quantity, tuple[str, str, float]]] = {
    "mean_acceptance_length": ("accepted", "spec_step", 1.0),
    "acceptance_rate": ("accepted", "drafted", 0.0),
    "verified_acceptance_rate": ("accepted", "verified", 0.0),
}
"""Numerator, denominator (columns of `semantics.counted`) and what is added to their ratio: the bonus token."""

REQUEST: Final = ("run_id", "request_id")
RESAMPLES: Final = 4000
_CELLS = 2_000_000  # resampling weights held at once
_NORMAL = NormalDist()
_METHODS: Mapping[str, str] = {"bca": "BCa", "percentile": "percentile"}
_CLUSTERS: Mapping[str, str] = {"request_id": "requests", "prompt_id": "prompts", "run_id": "runs"}

_Floats = npt.NDArray[np.float64]
_Statistic = Callable[[_Floats], _Floats]


class StatsError(ValueError):
    """Numbers that no estimate can be made of, said in one sentence."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval; a value or an interval that cannot be had is None and ``reason`` says why.

    ``n`` is the number of ``n_of`` (requests, pairs, verified tokens) that the interval rests on, ``method`` how it was
    made, ``numerator`` and ``denominator`` the sums behind ``value``.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    n_of: str
    method: str
    numerator: float | None = None
    denominator: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise StatsError(f"{self.name} has one end of an interval only: {self.low}, {self.high}")
        if self.low is not None and self.high is not None and not self.low <= self.high:
            raise StatsError(f"{self.name} has the interval {self.low} to {self.high}, low comes first")
        if (self.value is None or self.low is None) and not self.reason:
            raise StatsError(f"{self.name} lacks a value or an interval and gives no reason")


def ratio_of_sums(
    name: str,
    numerators: npt.ArrayLike,
    denominators: npt.ArrayLike,
    *,
    rng: np.random.Generator,
    plus: float = 0.0,
    n_of: str = "requests",
    interval: Interval = "bca",
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Estimate:
    """``plus`` + sum of numerators / sum of denominators, with a cluster bootstrap interval.

    Args:
        name: what is estimated.
        numerators: one sum a cluster.
        denominators: the same, aligned; clusters where both are 0 say nothing and are left out of ``n``.
        rng: the only source of chance; the same state gives the same interval.
        plus: a constant, such as the bonus token.
        n_of: what a cluster is.
        interval: ``bca`` or ``percentile``.
        resamples: how many times the clusters are drawn with replacement.
        confidence: the interval's nominal coverage, between 0 and 1.
    """
    table = np.stack([np.asarray(numerators, float), np.asarray(denominators, float)], axis=1)
    table = table[(table != 0).any(axis=1)]
    return _bootstrap(name, table, _ratio(plus), rng, n_of, interval, resamples, confidence)


def paired(
    name: str,
    first: npt.ArrayLike,
    second: npt.ArrayLike,
    *,
    rng: np.random.Generator,
    kind: Literal["difference", "ratio"] = "difference",
    plus: float = 0.0,
    n_of: str = "pairs",
    interval: Interval = "bca",
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Estimate:
    """Second minus first, or second / first, of two ratios of sums over the same clusters, drawn together.

    ``first`` and ``second`` have a row a cluster and the columns numerator, denominator; the rest is as in
    `ratio_of_sums`.
    """
    tables = [np.asarray(one, float).reshape(-1, 2) for one in (first, second)]
    if len(tables[0]) != len(tables[1]):
        raise StatsError(f"{name}: {len(tables[0])} clusters cannot be paired with {len(tables[1])}")
    if kind not in ("difference", "ratio"):
        raise StatsError(f"a paired comparison is a difference or a ratio, not {kind!r}")
    ratio = _ratio(plus)

    def statistic(sums: _Floats) -> _Floats:
        a, b = ratio(sums[..., :2]), ratio(sums[..., 2:])
        return b - a if kind == "difference" else np.divide(b, a, out=np.full_like(a, np.nan), where=a != 0)

    return _bootstrap(name, np.hstack(tables), statistic, rng, n_of, interval, resamples, confidence)


def rate(events: int, trials: int, *, event: str, per: str, confidence: float = 0.95) -> Estimate:
    """Events / trials with a Wilson interval (Wilson 1927); named ``<event>_per_<per>``.

    It holds for events that are rare and independent; where they come in bursts, use `ratio_of_sums` over requests.
    """
    if events < 0 or trials < 0:
        raise StatsError(f"{event}_per_{per} of {events} / {trials}: neither can be negative")
    name, method = f"{event}_per_{per}", f"Wilson {confidence:.0%}"
    n_of = f"{per.replace('_', ' ')}s"
    if trials == 0:
        return Estimate(name, None, None, None, 0, n_of, method, events, 0, f"there are no {n_of}")
    value = events / trials
    if events > trials:
        why = f"{events} events are more than {trials} {n_of}"
        return Estimate(name, value, None, None, trials, n_of, method, events, trials, why)
    z = _NORMAL.inv_cdf((1 + confidence) / 2)
    centre = (value + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * (value * (1 - value) / trials + z * z / (4 * trials * trials)) ** 0.5
    low, high = max(0.0, min(centre - half, value)), min(1.0, max(centre + half, value))
    return Estimate(name, value, low, high, trials, n_of, method, events, trials)


def estimates(
    steps: pd.DataFrame,
    *,
    seed: int,
    by: Sequence[str] = ("run_id",),
    countings: Sequence[Counting] = COUNTINGS,
    quantities: Sequence[Quantity] = tuple(QUANTITIES),
    cluster: Sequence[str] = REQUEST,
    runs: pd.DataFrame | None = None,
    requests: pd.DataFrame | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Acceptance of each group under each counting.

    Args:
        steps: rows of the ledger's ``steps`` table.
        seed: every group starts from it, so that its interval does not depend on the groups beside it.
        by: columns of steps, ``runs`` or ``requests``; none for one group of all steps.
        countings: see `specgram_lab.semantics`.
        quantities: keys of `QUANTITIES`.
        cluster: what is resampled. Greedy repeats of a prompt are copies of it: resample ``("prompt_id",)`` then.
        runs: the ledger's ``runs``; steps of other runs are left out.
        requests: the ledger's ``requests``.
        options: ``interval``, ``resamples`` and ``confidence`` of `ratio_of_sums`.

    Returns:
        One row a group, counting and quantity: the group's columns, ``counting``, ``partial``, and the fields of
        `Estimate` (``name`` is the quantity).
    """
    steps = of_runs(steps, runs)
    table = lookup(steps, [*by, *cluster], runs, requests)
    table["_proposed"], table["_output"] = steps["drafted"].to_numpy(), steps["committed"].to_numpy()
    early = set() if runs is None else set(runs.loc[runs["partial"].fillna(False).astype(bool), "run_id"])
    table["_partial"] = steps["run_id"].isin(early).to_numpy()
    rows = []
    for counting in countings:
        counts = counted(steps, counting, runs=runs)[["spec_step", "drafted", "verified", "accepted"]]
        for key, part in groups(table.join(counts.reset_index(drop=True)), by):
            head = {**key, "counting": counting, "partial": bool(part["_partial"].any())}
            clusters = part.groupby(list(cluster), sort=True, dropna=False)[list(counts)].sum()
            rows += [head | _quantity(name, part, clusters, cluster, seed, options) for name in quantities]
    return _tidy(rows, [*by, "counting", "partial"])


def compare(
    steps: pd.DataFrame,
    first: str,
    second: str,
    *,
    seed: int,
    on: Sequence[str] = ("request_id",),
    kind: Literal["difference", "ratio"] = "difference",
    counting: Counting = "rfc",
    quantities: Sequence[Quantity] = tuple(QUANTITIES),
    runs: pd.DataFrame | None = None,
    requests: pd.DataFrame | None = None,
    **options: Any,
) -> pd.DataFrame:
    """The run ``second`` against the run ``first``, request by request.

    ``on`` says which requests of the two belong together; those without a partner are left out and counted in
    ``unpaired``. Returns one row a quantity with ``first``, ``second``, ``kind``, ``counting``, ``unpaired`` and the
    fields of `Estimate`.
    """
    table = lookup(steps, ["run_id", *on], None, requests)
    counts = counted(steps, counting, runs=runs)[["spec_step", "drafted", "verified", "accepted"]]
    sums = table.join(counts.reset_index(drop=True)).groupby(["run_id", *on], sort=True)[list(counts)].sum()
    missing = [name for name in (first, second) if name not in sums.index.get_level_values("run_id")]
    if missing:
        raise StatsError(f"there are no steps of run {missing[0]}")
    a, b = (sums.xs(name, level="run_id") for name in (first, second))
    both = a.index.intersection(b.index)
    unpaired = len(a) + len(b) - 2 * len(both)
    head = {"first": first, "second": second, "kind": kind, "counting": counting, "unpaired": unpaired}
    rows = []
    for name in quantities:
        above, below, plus = QUANTITIES[name]
        sides = [one.loc[both, [above, below]].to_numpy(float) for one in (a, b)]
        rng = np.random.default_rng(seed)
        made = paired(name, *sides, rng=rng, kind=kind, plus=plus, **options)
        row = head | _with_seed(made, seed)
        if bool(counts.loc[steps["run_id"].isin([first, second]).to_numpy(), below].isna().any()):
            row["reason"] = f"this counting has no {below} tokens"
        rows.append(row)
    return _tidy(rows, list(head))


def per_position(
    steps: pd.DataFrame,
    *,
    seed: int,
    by: Sequence[str] = ("run_id",),
    cluster: Sequence[str] = REQUEST,
    runs: pd.DataFrame | None = None,
    requests: pd.DataFrame | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Acceptance at each draft position, by three definitions; ``position`` counts from 0 as vLLM's metric does.

    ``per_spec_step``: accepted at the position / spec steps; these add up to the mean acceptance length - 1, and fall
    where a draft was short or adaptive verification left the position out. ``given_verified``: / steps that verified
    the position. ``given_previous_accepted``: / steps that accepted the position before (spec steps for position 0);
    their product up to a position is its ``per_spec_step``. Arguments as in `estimates`; returns one row a group,
    definition and position with the fields of `Estimate`, ``numerator`` and ``denominator`` being counts of steps.
    """
    steps = of_runs(steps, runs)
    table = lookup(steps, [*by, *cluster], runs, requests)
    counts = steps[["drafted", "verified", "accepted"]].reset_index(drop=True)
    rows = []
    for key, part in groups(table.join(counts), by):
        spec = part[part["drafted"] > 0]
        codes, n = _codes(spec, cluster)
        for position in range(int(spec["drafted"].max()) if len(spec) else 0):
            hit = (spec["accepted"] > position).to_numpy(bool)
            denominators = {
                "per_spec_step": np.ones(len(spec), bool),
                "given_verified": (spec["verified"] > position).to_numpy(bool),
                "given_previous_accepted": (spec["accepted"] >= position).to_numpy(bool),
            }
            for definition, below in denominators.items():
                sums = [np.bincount(codes, weights=one, minlength=n) for one in (hit & below, below)]
                rng = np.random.default_rng(seed)
                made = ratio_of_sums("acceptance_rate", *sums, rng=rng, n_of=_unit(cluster), **options)
                rows.append({**key, "definition": definition, "position": position} | _with_seed(made, seed))
    return _tidy(rows, [*by, "definition", "position"])


def fsm_rates(
    fsm_events: pd.DataFrame,
    steps: pd.DataFrame,
    *,
    by: Sequence[str] = ("run_id",),
    runs: pd.DataFrame | None = None,
    confidence: float = 0.95,
) -> pd.DataFrame:
    """FSM events of each group and phase, per verified token, per drafted token, and requests hit per request.

    Both phases always have their rows: none seen is 0 with an upper end. Requests are those of ``steps``.
    Returns the group's columns, ``phase`` and the fields of `Estimate`.
    """
    steps, fsm_events = of_runs(steps, runs), of_runs(fsm_events, runs)
    table = lookup(steps, [*by, *REQUEST], runs, None)
    table = table.join(steps[["drafted", "verified"]].reset_index(drop=True))
    events = lookup(fsm_events, [*by, *REQUEST, "phase"], runs, None)
    hits = {tuple(key.values()): part for key, part in groups(events, by)}
    rows = []
    for key, part in groups(table, by):
        own = hits.get(tuple(key.values()), events.iloc[:0])
        for phase in ("draft-probe", "commit"):
            seen = own[own["phase"] == phase]
            hit, asked = (len(one[list(REQUEST)].drop_duplicates()) for one in (seen, part))
            ratios = (
                (len(seen), int(part["verified"].sum()), "fsm_events", "verified_token"),
                (len(seen), int(part["drafted"].sum()), "fsm_events", "drafted_token"),
                (hit, asked, "requests_with_fsm_event", "request"),
            )
            for above, below, event, per in ratios:
                made = rate(above, below, event=event, per=per, confidence=confidence)
                rows.append({**key, "phase": phase} | asdict(made))
    return _tidy(rows, [*by, "phase"])


def _ratio(plus: float) -> _Statistic:
    def statistic(sums: _Floats) -> _Floats:
        below = sums[..., 1]
        return plus + np.divide(sums[..., 0], below, out=np.full_like(below, np.nan), where=below != 0)

    return statistic


def _bootstrap(
    name: str,
    table: _Floats,
    statistic: _Statistic,
    rng: np.random.Generator,
    n_of: str,
    interval: Interval,
    resamples: int,
    confidence: float,
) -> Estimate:
    """An estimate of ``statistic`` (of column sums, on the last axis) from ``table``, one row a cluster."""
    if interval not in _METHODS or not 0 < confidence < 1 or resamples < 1:
        raise StatsError(
            f"{name}: interval is bca or percentile, confidence in (0, 1), resamples at least 1; "
            f"got {interval}, {confidence}, {resamples}"
        )
    n = len(table)
    method = f"{_METHODS[interval]} bootstrap over {n_of}, {confidence:.0%}, {resamples} resamples"
    sums = table.sum(axis=0)
    value = float(statistic(sums[None])[0])
    above, below = (float(sums[0]), float(sums[1])) if len(sums) == 2 else (None, None)

    def without(reason: str) -> Estimate:
        kept = value if np.isfinite(value) else None
        return Estimate(name, kept, None, None, n, n_of, method, above, below, reason)

    if not np.isfinite(value):
        return without(f"the denominator is 0 over all {n_of}")
    if n < 2:
        return without(f"an interval needs 2 {n_of}, there is {n}")
    left_out = statistic(sums - table)  # the jackknife: each cluster left out once
    if not np.isfinite(left_out).all():
        return without(f"one of {n} {n_of} has the whole denominator")
    weights = np.full(n, 1 / n)
    chunk = max(1, _CELLS // n)
    sizes = [min(chunk, resamples - start) for start in range(0, resamples, chunk)]
    drawn = np.concatenate([statistic(rng.multinomial(n, weights, size=size) @ table) for size in sizes])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < 0.99 * resamples:
        return without(f"the denominator is 0 in {resamples - len(drawn)} of {resamples} resamples")
    if np.ptp(drawn) <= 1e-12 * max(1.0, abs(value)):
        return without(f"all {n} {n_of} agree exactly, resampling them shows no spread")
    ends = np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    if interval == "bca":
        ends = _bca(value, drawn, left_out, ends)
    low, high = np.quantile(drawn, ends)
    return Estimate(name, value, float(low), float(high), n, n_of, method, above, below)


def _bca(value: float, drawn: _Floats, left_out: _Floats, ends: _Floats) -> _Floats:
    """The levels at which BCa reads the resampled distribution (Efron 1987, eq. 2.3; acceleration by jackknife)."""
    share = (np.mean(drawn < value) + np.mean(drawn <= value)) / 2
    if not 0 < share < 1:
        return ends
    bias = _NORMAL.inv_cdf(float(share))
    off = left_out.mean() - left_out
    spread = float((off**2).sum())
    acceleration = float((off**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    moved = [bias + _NORMAL.inv_cdf(float(end)) for end in ends]
    return np.array([_NORMAL.cdf(bias + z / (1 - acceleration * z)) for z in moved])


def _quantity(
    name: Quantity,
    part: pd.DataFrame,
    clusters: pd.DataFrame,
    cluster: Sequence[str],
    seed: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    above, below, plus = QUANTITIES[name]
    sums = clusters[[above, below]].to_numpy(float)
    made = ratio_of_sums(
        name, sums[:, 0], sums[:, 1], rng=np.random.default_rng(seed), plus=plus, n_of=_unit(cluster), **options
    )
    row = _with_seed(made, seed)
    reason = ""
    if int(part["_proposed"].sum()) == 0:
        reason = f"no drafts were proposed in {int(part['_output'].sum())} tokens"
    elif bool(part[below].isna().any()):
        reason = f"this counting has no {below} tokens"
        row["denominator"] = None
    if reason:
        row |= {"value": None, "low": None, "high": None, "reason": reason}
    return row


def _with_seed(made: Estimate, seed: int) -> dict[str, Any]:
    return asdict(made) | {"method": f"{made.method}, seed {seed}"}


def _unit(cluster: Sequence[str]) -> str:
    return _CLUSTERS.get(cluster[-1], f"{cluster[-1]}s")


def _codes(part: pd.DataFrame, cluster: Sequence[str]) -> tuple[npt.NDArray[np.int64], int]:
    grouped = part.groupby(list(cluster), sort=True, dropna=False)
    return grouped.ngroup().to_numpy().astype(np.int64), grouped.ngroups


def _tidy(rows: list[dict[str, Any]], head: Sequence[str]) -> pd.DataFrame:
    columns = [*head, *(field.name for field in fields(Estimate))]
    kinds = {"value": "Float64", "low": "Float64", "high": "Float64", "numerator": "Float64", "denominator": "Float64",
             "n": "Int64"}  # fmt: skip
    return pd.DataFrame(rows, columns=columns).astype(kinds)
