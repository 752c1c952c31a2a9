"""One ledger, several countings: what an engine reported, or would have reported, for the steps that were recorded.

A counting says for each step whether it is a spec step and how many tokens were drafted, verified and accepted.

=============== ================================== ==================================== ======== ============
counting        spec step                          drafted                              verified source
=============== ================================== ==================================== ======== ============
engine          scheduled > 0                      scheduled - struck                   none     vLLM 0.28-0.33
legacy-sync     something is left to schedule      what is left of the grammar-valid    none     vLLM 0.28-0.33
legacy-async    a draft was scheduled              scheduled minus the invalid ones     none     vLLM 0.28-0.33
rfc             drafted > 0                        as proposed                          yes      vllm#64156
=============== ================================== ==================================== ======== ============

The three countings of vLLM 0.28-0.33 also need a step that sampled (`Scheduler.update_from_output`,
`make_spec_decoding_stats`, `RequestSpecDecodeMetrics`). ``engine`` is the rfc counting for a run whose
``engine_semantics`` is ``rfc``. `Counts` and what follows it hold the arithmetic that every counting shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

Counting = Literal["engine", "legacy-sync", "legacy-async", "rfc"]
COUNTINGS: Final[tuple[Counting, ...]] = get_args(Counting)
FATES: Final = ("drafted", "grammar-valid", "verified", "accepted")

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

_COUNTS = ("drafted", "grammar_valid", "scheduled", "struck", "verified", "padded", "accepted", "sampled", "committed")
_KEYS = ("run_id", "request_id", "step")


class SemanticsError(ValueError):
    """Steps or numbers that no counting can be made of, said in one sentence."""


def counted(steps: pd.DataFrame, counting: Counting, *, runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each step as ``counting`` counts it.

    Args:
        steps: rows of the ledger's ``steps`` table.
        counting: one of `COUNTINGS`.
        runs: the ledger's ``runs``. From it come ``engine_semantics`` and whether a run was sync or async; without it
            ``engine`` is taken to be vLLM 0.28-0.33's, and a draft that was not scheduled and has no grammar-valid
            token is taken to have been cut by a sync scheduler. A legacy counting of a run in its own scheduling is
            exact; of the other it is derived, and of a sync run the slots are unknown that an async scheduler would
            have filled with padding where the drafter proposed less than k.

    Returns:
        One row a step, same index and order: run_id, request_id, step, ``spec_step`` (0 or 1), ``drafted``,
        ``verified`` (NA where the counting has none), ``accepted`` (tokens), ``forward`` (draft tokens in the target's
        forward pass; for the scheduling that was not recorded they are derived, and with adaptive verification
        they are the least that can be said), ``breaks`` (the invariants that these numbers break, empty where none;
        a counting without ``verified`` is held against ``forward``).

    Raises:
        SemanticsError: an unknown counting, or a step with a count that is missing.
    """
    if counting not in COUNTINGS:
        raise SemanticsError(f"there is no counting {counting!r}, only {', '.join(COUNTINGS)}")
    count = {name: _ints(steps, name) for name in _COUNTS}
    judged = _bools(steps, "judged")
    if counting == "rfc":
        step, drafted, forward = _as_rfc(count)
        has_verified = np.ones(len(steps), dtype=bool)
    elif counting == "engine":
        has_verified = _run_is(steps, runs, "engine_semantics", "rfc")
        new, old = _as_rfc(count), _as_engine(count)
        step, drafted, forward = (np.where(has_verified, a, b) for a, b in zip(new, old, strict=True))
    else:
        sides = {side: _run_is(steps, runs, "scheduling_effective", side) for side in ("sync", "async")}
        derived = _as_legacy(count, judged, sides["async"], counting == "legacy-async")
        recorded = sides[counting.removeprefix("legacy-")]
        step, drafted, forward = (np.where(recorded, a, b) for a, b in zip(_as_engine(count), derived, strict=True))
        has_verified = np.zeros(len(steps), dtype=bool)
    drafted, forward = np.where(step, drafted, 0), np.where(step, forward, 0)
    accepted = np.where(step, count["accepted"], 0)
    result = steps.loc[:, list(_KEYS)].copy()
    result["spec_step"] = pd.array(step.astype(np.int64), dtype="Int64")
    result["drafted"] = pd.array(drafted, dtype="Int64")
    result["verified"] = pd.array(forward, dtype="Int64")
    result.loc[~has_verified, "verified"] = pd.NA
    result["accepted"] = pd.array(accepted, dtype="Int64")
    result["forward"] = pd.array(forward, dtype="Int64")
    result["breaks"] = pd.array(_breaks(drafted, forward, accepted), dtype="string")
    return result


def totals(
    steps: pd.DataFrame,
    by: Sequence[str] = ("run_id",),
    countings: Sequence[Counting] = COUNTINGS,
    *,
    runs: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """The counters and rates of each group under each counting; a ratio is a ratio of sums.

    Args:
        steps: rows of the ledger's ``steps`` table.
        by: columns of ``steps``, or of ``runs`` where ``steps`` has no such column; none for one group of all steps.
        countings: some of `COUNTINGS`.
        runs: the ledger's ``runs``; see `counted`. Its ``partial`` is carried over; steps of other runs are left out.

    Returns:
        One row a group and counting: the group's columns, ``counting``, ``spec_steps``, ``drafted``, ``verified``,
        ``accepted``, ``mean_acceptance_length`` (tokens a spec step, bonus included), ``acceptance_rate``,
        ``verified_acceptance_rate`` (fractions; NA where the denominator is 0 or missing, or nothing was proposed),
        ``breaks`` (invariants broken by a step), ``breaking_steps``, ``sum_breaks`` (those that the sums break too),
        ``output_tokens`` (committed in these steps), ``partial`` (one of the runs ended before its last request did)
        and ``warning``.
    """
    steps = of_runs(steps, runs)
    table = lookup(steps, by, runs)
    table["_proposed"] = _ints(steps, "drafted")
    table["_output"] = _ints(steps, "committed")
    table["_partial"] = _run_is(steps, runs, "partial", True)
    pieces: list[dict[str, Any]] = []
    for counting in countings:
        counts = counted(steps, counting, runs=runs).drop(columns=list(_KEYS))
        pieces += [{**key, "counting": counting, **_total(part)} for key, part in groups(table.join(counts), by)]
    columns = [*by, "counting", *_KINDS]
    result = pd.DataFrame(pieces, columns=columns).astype({**_KINDS, "counting": "string"})
    for name in by:
        result[name] = result[name].astype(table[name].dtype)
    return result.sort_values([*by], kind="stable", ignore_index=True) if by else result


def fates(steps: pd.DataFrame, by: Sequence[str] = ("run_id",), *, runs: pd.DataFrame | None = None) -> pd.DataFrame:
    """What became of the drafted tokens of each group: how many were grammar-valid, verified and accepted.

    Async scheduling verifies grammar-invalid tokens too, so ``verified`` may be more than ``grammar-valid``. Returns
    one row a group and ``fate`` (`FATES`, in that order) with ``tokens`` and ``share`` (of drafted; NA without drafts).
    Steps of runs that are not in ``runs`` are left out.
    """
    columns = [fate.replace("-", "_") for fate in FATES]
    steps = of_runs(steps, runs)
    table = lookup(steps, by, runs).join(steps[columns])
    rows: list[dict[str, Any]] = []
    for key, part in groups(table, by):
        sums = [int(part[column].sum()) for column in columns]
        rows += [
            {**key, "fate": fate, "tokens": tokens, "share": tokens / sums[0] if sums[0] else None}
            for fate, tokens in zip(FATES, sums, strict=True)
        ]
    return pd.DataFrame(rows, columns=[*by, "fate", "tokens", "share"]).astype({"tokens": "Int64", "share": "Float64"})


def reconcile(steps: pd.DataFrame, requests: pd.DataFrame, runs: pd.DataFrame) -> list[str]:
    """Where the engine's own numbers differ from the ``engine`` counting of its steps: one sentence each, both values.

    Compared are the counters of each run (``engine_*``), the metrics of each request (``reported_*``), and these step
    by step. What the engine did not report is not compared (`reported` says how much there was), nor is a run of
    which no step was recorded.
    """
    runs = runs[runs["run_id"].isin(steps["run_id"])]
    requests = requests[requests["run_id"].isin(steps["run_id"])]
    own = counted(steps, "engine", runs=runs)
    own = own[own["spec_step"] == 1]
    differences = []
    for _, run in runs.iterrows():
        mine = own[own["run_id"] == run["run_id"]]
        for column, value in zip(_RUN_COUNTERS, _sums(mine), strict=True):
            if pd.notna(run[column]) and int(run[column]) != value:
                differences.append(f"run {run['run_id']}: {column} is {run[column]}, its steps give {value}")
    by_request = dict(list(own.groupby(["run_id", "request_id"], sort=False)))
    nothing = own.iloc[:0]
    for _, request in requests.iterrows():
        mine = by_request.get((request["run_id"], request["request_id"]), nothing).sort_values("step")
        name = f"request {request['request_id']} of run {request['run_id']}"
        for column, value in zip(_REQUEST_COUNTERS, _sums(mine), strict=True):
            if pd.notna(request[column]) and int(request[column]) != value:
                differences.append(f"{name}: {column} is {request[column]}, its steps give {value}")
        for column, field in _STEP_LISTS.items():
            if (listed := _listed(request[column])) is not None:
                differences += _first_difference(name, column, listed, [int(v) for v in mine[field]])
    return differences


def reported(requests: pd.DataFrame, runs: pd.DataFrame) -> dict[str, int]:
    """How many values of each ``engine_*`` and ``reported_*`` column the engine gave, that is, `reconcile` compares."""
    given = {column: int(runs[column].notna().sum()) for column in _RUN_COUNTERS}
    given |= {column: int(requests[column].notna().sum()) for column in _REQUEST_COUNTERS}
    return given | {column: sum(_listed(v) is not None for v in requests[column]) for column in _STEP_LISTS}


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums of a counting; the bonus token of a step is no accepted draft.

    Raises:
        SemanticsError: a negative count, or more accepted than drafted or verified, or more verified than drafted.
    """

    spec_steps: int
    drafted: int
    accepted: int
    verified: int | None = None

    def __post_init__(self) -> None:
        for name in ("spec_steps", "drafted", "accepted", "verified"):
            if (getattr(self, name) or 0) < 0:
                raise SemanticsError(f"{name} is {getattr(self, name)}, a count is at least 0")
        if self.accepted > self.drafted:
            raise SemanticsError(
                f"accepted {self.accepted} is larger than drafted {self.drafted}: the bonus token of each spec step is "
                f"no accepted draft, emitted - spec steps would be {self.accepted - self.spec_steps}"
            )
        if self.verified is not None and not self.accepted <= self.verified <= self.drafted:
            raise SemanticsError(
                f"drafted >= verified >= accepted is broken by {self.drafted}, {self.verified}, {self.accepted}"
            )

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / spec steps, in tokens a spec step; None without a spec step."""
        return 1 + self.accepted / self.spec_steps if self.spec_steps else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted, a fraction; None without a drafted token."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def verified_acceptance_rate(self) -> float | None:
        """Accepted / verified, a fraction; None where ``verified`` is 0 or not known."""
        return self.accepted / self.verified if self.verified else None


def from_emitted(emitted: int, steps: int, k: int) -> Counts:
    """Counts of ``steps`` spec steps that each drafted ``k`` tokens and together emitted ``emitted``, bonus included.

    accepted = emitted - steps: every step emits the accepted drafts and one token of the target's own.

    Raises:
        SemanticsError: fewer tokens than steps, or more than k + 1 a step.
    """
    if k < 1 or steps < 0:
        raise SemanticsError(f"from_emitted needs k >= 1 and steps >= 0, got k={k} and steps={steps}")
    if not steps <= emitted <= steps * (k + 1):
        raise SemanticsError(
            f"{emitted} tokens in {steps} steps with k={k}: each step emits 1 (the bonus token) to {k + 1} tokens"
        )
    return Counts(spec_steps=steps, drafted=k * steps, accepted=emitted - steps)


def with_bonus(length: float, *, bonus: Literal["included", "excluded"]) -> float:
    """A mean acceptance length as this lab means it (bonus token included), from a source that says which it gives.

    Raises:
        SemanticsError: the length is impossible for that convention.
    """
    if bonus not in ("included", "excluded"):
        raise SemanticsError(f"bonus is {bonus!r}, allowed are 'included' and 'excluded'")
    least = 1.0 if bonus == "included" else 0.0
    if not length >= least:
        raise SemanticsError(f"a mean acceptance length with bonus {bonus} is at least {least:g}, got {length:g}")
    return length if bonus == "included" else length + 1


def check_length(length: float, rate: float, *, drafted: int, spec_steps: int, tolerance: float = 1e-6) -> None:
    """Check length - 1 = rate * drafted / spec steps: k is no stand-in for the mean draft length unless all are full.

    Raises:
        SemanticsError: the two sides differ by more than ``tolerance`` tokens; the message has both.
    """
    if not spec_steps:
        raise SemanticsError("a mean acceptance length and a rate cannot be compared without a spec step")
    expected = 1 + rate * drafted / spec_steps
    if not math.isclose(length, expected, rel_tol=0, abs_tol=tolerance):
        raise SemanticsError(
            f"mean acceptance length {length:g} does not fit acceptance rate {rate:g}: with {drafted} drafted tokens "
            f"in {spec_steps} spec steps it would be {expected:g}"
        )


def check_positions(length: float, per_position: Sequence[float], *, source: str, tolerance: float = 1e-6) -> None:
    """Check length = 1 + sum of the unconditional per-position rates; ``source`` names who read the numbers.

    Raises:
        SemanticsError: the two sides differ by more than ``tolerance`` tokens; the message has both and ``source``.
    """
    expected = 1 + math.fsum(per_position)
    if not math.isclose(length, expected, rel_tol=0, abs_tol=tolerance):
        raise SemanticsError(
            f"{source}: mean acceptance length {length:g} is not 1 + the sum of {len(per_position)} per-position rates "
            f"= {expected:g}"
        )


_RUN_COUNTERS = ("engine_num_drafts", "engine_draft_tokens", "engine_accepted_tokens")
_REQUEST_COUNTERS = ("reported_spec_steps", "reported_drafted", "reported_accepted")
_STEP_LISTS = {"reported_step_drafted": "drafted", "reported_step_accepted": "accepted"}
_INVARIANTS = ("drafted >= verified", "verified >= accepted", "drafted >= accepted")
_KINDS: dict[str, str] = {
    "spec_steps": "Int64", "drafted": "Int64", "verified": "Int64", "accepted": "Int64",
    "mean_acceptance_length": "Float64", "acceptance_rate": "Float64", "verified_acceptance_rate": "Float64",
    "breaks": "string", "breaking_steps": "Int64", "sum_breaks": "string",
    "output_tokens": "Int64", "partial": "boolean", "warning": "string",
}  # fmt: skip


def _as_rfc(count: dict[str, _Ints]) -> tuple[_Bools, _Ints, _Ints]:
    return count["drafted"] > 0, count["drafted"], count["verified"]


def _as_engine(count: dict[str, _Ints]) -> tuple[_Bools, _Ints, _Ints]:
    step = (count["scheduled"] > 0) & (count["sampled"] > 0)
    return step, count["scheduled"] - count["struck"], count["verified"]


def _as_legacy(
    count: dict[str, _Ints], judged: _Bools, async_run: _Bools, want_async: bool
) -> tuple[_Bools, _Ints, _Ints]:
    # For the scheduling that was not recorded. A judged draft loses its padding together with what the grammar refuses
    # (`strip_speculative_padding`), and a sync scheduler never adds what an async one schedules in advance. Whatever
    # else shortened the draft (length, token budget) shortens it in both schedulings.
    valid, scheduled, sampled = count["grammar_valid"], count["scheduled"], count["sampled"] > 0
    left = np.minimum(valid + np.where(judged | (async_run & ~np.bool_(want_async)), 0, count["padded"]), scheduled)
    if not want_async:
        return (left > 0) & sampled, left, np.minimum(count["verified"], left)
    cut = judged & ~async_run & (scheduled == valid) & (count["drafted"] > valid)  # by a sync scheduler
    step = ((scheduled > 0) | cut) & sampled
    more = np.where(cut & (count["verified"] == scheduled), count["drafted"] - valid, 0)
    return step, left, count["verified"] + more


def _breaks(drafted: _Ints, forward: _Ints, accepted: _Ints) -> list[str]:
    broken = (drafted < forward, forward < accepted, drafted < accepted)
    code = sum((found.astype(np.int64) << bit for bit, found in enumerate(broken)), np.zeros(len(drafted), np.int64))
    texts = [", ".join(name for bit, name in enumerate(_INVARIANTS) if number >> bit & 1) for number in range(8)]
    return [texts[number] for number in code]


def _total(part: pd.DataFrame) -> dict[str, object]:
    steps, drafted, accepted = _sums(part)
    verified = int(part["verified"].sum()) if bool(part["verified"].notna().all()) else None
    proposed, output = int(part["_proposed"].sum()), int(part["_output"].sum())
    broken = {name for text in part["breaks"].unique() for name in str(text).split(", ") if name}
    sums = np.array([drafted]), np.array([int(part["forward"].sum())]), np.array([accepted])
    warning = ""
    if proposed == 0:
        warning = f"no drafts were proposed in {output} tokens"
    elif drafted == 0:
        warning = f"this counting has no drafted tokens, the drafter proposed {proposed}"
    return {
        "spec_steps": steps, "drafted": drafted, "verified": verified, "accepted": accepted,
        "mean_acceptance_length": 1 + accepted / steps if steps and proposed else None,
        "acceptance_rate": accepted / drafted if drafted and proposed else None,
        "verified_acceptance_rate": accepted / verified if verified and proposed else None,
        "breaks": ", ".join(sorted(broken)), "breaking_steps": int((part["breaks"] != "").sum()),
        "sum_breaks": _breaks(*sums)[0],
        "output_tokens": output, "partial": bool(part["_partial"].any()), "warning": warning,
    }  # fmt: skip


def _sums(part: pd.DataFrame) -> tuple[int, int, int]:
    return int(part["spec_step"].sum()), int(part["drafted"].sum()), int(part["accepted"].sum())


def _first_difference(name: str, column: str, theirs: list[int], ours: list[int]) -> list[str]:
    if len(theirs) != len(ours):
        return [f"{name}: {column} has {len(theirs)} steps, its counted steps are {len(ours)}"]
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a != b:
            return [f"{name}: {column} is {a} at its counted step {number}, the recorded step gives {b}"]
    return []


def _listed(value: object) -> list[int] | None:
    return [int(v) for v in value] if isinstance(value, list | tuple | np.ndarray) else None


def _ints(steps: pd.DataFrame, name: str) -> _Ints:
    empty = int(steps[name].isna().sum())
    if empty:
        raise SemanticsError(f"steps.{name} is empty in {empty} of {len(steps)} rows; a counting needs every one")
    return steps[name].to_numpy(dtype=np.int64)


def _bools(steps: pd.DataFrame, name: str) -> _Bools:
    empty = int(steps[name].isna().sum())
    if empty:
        raise SemanticsError(f"steps.{name} is empty in {empty} of {len(steps)} rows; a counting needs every one")
    return steps[name].to_numpy(dtype=np.bool_)


def _run_is(steps: pd.DataFrame, runs: pd.DataFrame | None, column: str, value: object) -> _Bools:
    """For each step, whether its run has ``value`` in ``column``; False without runs."""
    if runs is None:
        return np.zeros(len(steps), dtype=np.bool_)
    matching = runs.loc[(runs[column] == value).fillna(False).astype(bool), "run_id"]
    return steps["run_id"].isin(matching).to_numpy(dtype=np.bool_)


def of_runs(data: pd.DataFrame, runs: pd.DataFrame | None) -> pd.DataFrame:
    """The rows that belong to ``runs`` (all without it), numbered anew."""
    kept = data if runs is None else data[data["run_id"].isin(runs["run_id"])]
    return kept.reset_index(drop=True)


def lookup(
    data: pd.DataFrame,
    names: Sequence[str],
    runs: pd.DataFrame | None = None,
    requests: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """The columns ``names`` of each row, taken from the row, its run or its request; the index is numbered anew.

    Raises:
        SemanticsError: none of the tables given has the column.
    """
    data = data.reset_index(drop=True)
    table = pd.DataFrame(index=data.index)
    for name in dict.fromkeys(names):
        if name in data:
            table[name] = data[name]
        elif runs is not None and name in runs:
            table[name] = data["run_id"].map(runs.set_index("run_id")[name]).astype(runs[name].dtype)
        elif requests is not None and name in requests:
            known = requests.set_index(["run_id", "request_id"])[name]
            table[name] = known.reindex(pd.MultiIndex.from_frame(data[["run_id", "request_id"]])).array
        else:
            raise SemanticsError(f"there is no column {name!r}, neither in the rows nor in the runs or requests given")
    return table


def groups(table: pd.DataFrame, by: Sequence[str]) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Each group's values of ``by`` and its rows, in sorted order; one group of all rows where ``by`` is empty."""
    if not by:
        return [({}, table)] if len(table) else []
    grouped = table.groupby(list(by), sort=True, dropna=False, observed=True)
    return [(dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True)), part) for key, part in grouped]
