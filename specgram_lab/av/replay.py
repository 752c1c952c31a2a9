"""What-if on recorded steps: what a budget, a smaller k or another cost curve would have verified and accepted.

No engine runs. The replay walks the recorded output again, engine step by engine step, as vLLM's synchronous scheduler
and adaptive verification (AV) would: whoever finished makes room for the next request, the policy picks the budget, the
best survival probabilities share it out (`reallocate_drafts`), the step gives what was accepted and one token more, and
the next draft is the one that belongs to where the text now ends. A shorter verification moves all later steps of that
request, and through the shared budget those of the others: a replay that only cut the recorded steps would be wrong
from the first cut on.

Which drafts are known, and when a replay is refused, is told in `specgram_lab.av.recording`. Exact, step by step, for
greedy runs of synchronous engines; the limits that are left:

- where the text ends, tokens beyond the end that a last step would have accepted are not counted, for they may never
  have been produced (``accepted`` counts the output's own tokens only);
- vLLM's online estimator learns from such tokens too: a replay in which it was fitted (every 100 steps) is marked
  ``inexact`` when a last step's verdict is not known;
- requests begin where they did in the recording, and in their order: one that overtakes another, as a server lets it
  where a grammar is still compiled, is not modelled;
- in bfloat16 a drafter's confidences depend a little on how many tokens were computed together (with SmolLM2 as its own
  draft model one draft in twenty differed between runs, by up to 0.03 of a probability). Where a shared budget was
  decided by less than `NARROW`, the step counts as ``narrow``: a real run may share it out the other way. So does one
  whose draft is known only from asking again, and was nearly another.

All policies are walked at once, as rows of numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from specgram_lab.av.costs import CostCurve, linear
from specgram_lab.av.estimator import REFIT_INTERVAL, Estimator
from specgram_lab.av.recording import ASKABLE, UNKNOWN, Bools, Ints, Recording, ReplayError, load
from specgram_lab.spec import Budget

__all__ = ["Recording", "ReplayError", "Replayed", "load", "replay"]

NARROW = 0.03
"""Survival probabilities that lie closer may be the other way round in another run of a bfloat16 engine."""


@dataclass(frozen=True)
class Replayed:
    """What became of each policy.

    ``totals`` has one row a policy: policy (its label), spec_steps, drafted, scheduled, verified, av_skipped, accepted,
    output_tokens, engine_steps, narrow, ``budget`` (mean over the steps with drafts), ``ms`` and ``tokens_per_s`` (as
    the cost curve has it, of steps without a prefill: the others cost what their prompts do), inexact, refused (why,
    empty if it was not; then all counts are missing).
    ``steps`` has one row a policy, engine step and request, with the columns of the ledger's steps that a replay knows;
    empty unless asked for.
    """

    totals: pd.DataFrame
    steps: pd.DataFrame


def replay(
    recording: Recording,
    budgets: Sequence[Budget],
    *,
    k: int | None = None,
    costs: CostCurve | None = None,
    arrivals: Sequence[int] | None = None,
    detail: bool = False,
) -> Replayed:
    """Walk ``recording`` under each of ``budgets``.

    Args:
        recording: what is known, from `load`.
        budgets: policies; ``off`` verifies everything, and ``native`` takes the argmax over its own cost curve (its
            ``costs``, else ``verify_cost``).
        k: a smaller draft length.
        costs: the curve that steps are priced by; without it each policy's own.
        arrivals: engine step from which each request is there, if not as recorded.
        detail: also give every step.

    Raises:
        ReplayError: a policy that reads its budgets from a scenario, or a k that cannot be replayed.
    """
    for budget in budgets:
        if budget.policy == "schedule":
            raise ReplayError("policy schedule takes its budgets from a scenario; there is none in a replay")
    if k is not None:
        recording = recording.with_k(k)
    walk = _Walk(recording, budgets, costs, arrivals, detail)
    while walk.left():
        walk.step()
    return walk.result()


def own_costs(budget: Budget) -> CostCurve:
    """The curve that a policy's cell runs with on a CPU."""
    return budget.costs if budget.costs is not None else linear(*budget.verify_cost)


class _Walk:
    """The state of all policies: rows are policies, columns the places of a batch."""

    def __init__(
        self,
        recording: Recording,
        budgets: Sequence[Budget],
        costs: CostCurve | None,
        arrivals: Sequence[int] | None,
        detail: bool,
    ) -> None:
        self.recording, self.budgets = recording, list(budgets)
        self.k = recording.confidences.shape[1]
        policies, places = len(budgets), recording.cell.workload.concurrency
        self.places = min(places, len(recording.requests))
        shape = (policies, self.places)
        came = recording.arrivals if arrivals is None else np.asarray(arrivals, dtype=np.int64)
        # first come, first served; one row more, for whoever comes after the last
        self.arrivals = np.concatenate((np.maximum.accumulate(came), [np.iinfo(np.int64).max]))
        self.now = 0
        self.request = np.full(shape, -1, dtype=np.int64)
        self.at = np.zeros(shape, dtype=np.int64)
        self.waiting = np.zeros(policies, dtype=np.int64)
        self.live = np.full((*shape, self.k), np.nan, dtype=np.float32)
        self.stale = np.ones((*shape, self.k), dtype=np.float32)
        self.features = self.live.copy()
        self.estimator = Estimator(policies, self.k) if recording.estimated else None
        self.rules = np.array([b.policy for b in budgets])
        self.values = np.array([b.value if b.value is not None else 0.0 for b in budgets])
        self.native = np.flatnonzero(self.rules == "native")
        size = (self.places, recording.max_batched_tokens + self.places * self.k)
        own = [own_costs(b).tables(*size) for b in budgets]
        self.own_draft, self.own_verify = (np.stack([pair[side] for pair in own]) for side in (0, 1))
        priced = own if costs is None else [costs.tables(*size)] * policies
        self.draft_ms, self.verify_ms = (np.stack([pair[side] for pair in priced]) for side in (0, 1))
        self.counts: dict[str, Any] = {name: np.zeros(policies, dtype=np.int64) for name in _COUNTS}
        self.ms = np.zeros(policies)
        self.refused: list[str] = [""] * policies
        self.broken = np.zeros(policies, dtype=bool)
        self.unsure = np.zeros(policies, dtype=bool)
        self.narrow = np.zeros(policies, dtype=bool)
        self.inexact = np.zeros(policies, dtype=bool)
        self.rows: list[dict[str, Any]] | None = [] if detail else None
        self.own_steps = np.zeros((policies, len(recording.requests)), dtype=np.int64) if detail else None

    def left(self) -> bool:
        """Whether a policy that goes on has requests."""
        waits = self.waiting < len(self.recording.requests)
        return bool((((self.request >= 0).any(axis=1) | waits) & ~self.broken).any())

    def step(self) -> None:
        """One engine step of every policy."""
        known = self.recording
        self._admit()
        here = self.request >= 0
        request = np.where(here, self.request, 0)
        prefill, decode = here & (self.at == 0), here & (self.at > 0)
        row = known.offsets[request] + self.at
        scheduled = np.where(decode, known.valid[row], 0)
        self._break((scheduled == UNKNOWN) & decode, "what the grammar says of the draft")
        self.narrow = (known.close[row] & decode).any(axis=1)
        scheduled = np.maximum(scheduled, 0)
        others = (np.where(prefill, known.prompt_tokens[request], decode)).sum(axis=1)
        self._break(
            (others + scheduled.sum(axis=1) > known.max_batched_tokens)[:, None] & prefill,
            "how the prompt is cut in chunks",
        )
        budget = self._budget(scheduled, others, here)
        verified = self._share(scheduled, budget)
        match = known.match[row]
        beyond = decode & (verified > match) & ~known.certain[row]
        self._break(beyond & (self.at + match < known.lengths[request]), "the drafter's next token")
        accepted = np.where(decode, np.minimum(verified, match), 0)
        left = known.lengths[request] - self.at
        committed = np.where(here, np.minimum(accepted + 1, left), 0)
        if self.estimator is not None:
            self._learn(verified, accepted, beyond)
        drafted = np.where(decode, known.drafted[row], 0)
        inside = np.minimum(accepted, committed)
        if self.rows is not None:
            self._note(here, drafted, scheduled, verified, inside, committed)
        sums = {
            "spec_steps": drafted > 0, "drafted": drafted, "scheduled": scheduled, "verified": verified,
            "accepted": inside, "output_tokens": committed,
        }  # fmt: skip
        for name, values in sums.items():
            self.counts[name] += values.sum(axis=1)
        some, priced = here.any(axis=1), here.any(axis=1) & ~prefill.any(axis=1)
        self.counts["engine_steps"] += some
        self.counts["narrow"] += some & self.narrow
        self.counts["priced_tokens"] += np.where(priced, committed.sum(axis=1), 0)
        self.counts["budgeted"] += scheduled.any(axis=1)
        every = np.arange(len(self.budgets))
        tokens = np.minimum(others + verified.sum(axis=1), self.verify_ms.shape[1] - 1)
        self.ms += np.where(priced, self.draft_ms[every, here.sum(axis=1)] + self.verify_ms[every, tokens], 0)
        self._advance(here, prefill, request, committed)
        self.now += 1

    def _admit(self) -> None:
        """Waiting requests take the free places, in their order."""
        free = self.request < 0
        if not (free.any(axis=1) & (self.waiting < len(self.recording.requests))).any():
            return
        candidate = np.minimum(self.waiting[:, None] + np.cumsum(free, axis=1) - 1, len(self.recording.requests))
        takes = free & (self.arrivals[candidate] <= self.now) & ~self.broken[:, None]
        self.request = np.where(takes, candidate, self.request)
        self.at = np.where(takes, 0, self.at)
        self.waiting += takes.sum(axis=1)

    def _budget(self, scheduled: Ints, others: Ints, here: Bools) -> Ints:
        total = scheduled.sum(axis=1)
        per_request = np.minimum(scheduled, self.values[:, None].astype(np.int64)).sum(axis=1)
        wanted = np.select(
            [self.rules == name for name in ("none", "fixed", "per_request", "fraction", "native")],
            [0 * total, self.values.astype(np.int64), per_request, np.floor(self.values * total).astype(np.int64), 0],
            total,
        )
        if len(self.native):
            wanted[self.native] = self._argmax(scheduled, others, here)
        return np.clip(wanted, 0, total)

    def _argmax(self, scheduled: Ints, others: Ints, here: Bools) -> Ints:
        """vLLM's own budget (`AdaptiveVerificationManager.get_num_tokens`), from the confidences of the step before."""
        rows = self.native
        slots = np.arange(self.k) < scheduled[rows, :, None]
        survival = np.cumprod(self.stale[rows].astype(np.float64), axis=2)
        self._break_rows(rows, _unknown(survival, slots), "the confidences of the draft before")
        scores = np.sort(np.where(slots, survival, -np.inf).reshape(len(rows), -1), axis=1)[:, ::-1]
        gained = np.where(np.isfinite(scores), scores, 0.0).cumsum(axis=1)
        requests = here[rows].sum(axis=1)
        hoped = requests[:, None] + np.concatenate((np.zeros((len(rows), 1)), gained), axis=1)
        sizes = np.arange(hoped.shape[1])
        tokens = np.minimum(others[rows, None] + sizes, self.own_verify.shape[1] - 1)
        cost = self.own_draft[rows, requests][:, None] + self.own_verify[rows[:, None], tokens]
        hoped[sizes > scheduled[rows].sum(axis=1)[:, None]] = -np.inf
        return np.asarray((hoped / cost).argmax(axis=1), dtype=np.int64)

    def _share(self, scheduled: Ints, budget: Ints) -> Ints:
        """Verified drafts of each request: the best survival probabilities win (`_assign_draft_token_budget`)."""
        total = scheduled.sum(axis=1)
        ranked = (budget > 0) & (budget < total)
        verified = np.where(
            ranked[:, None], np.minimum(scheduled, budget[:, None]), np.where(budget > 0, scheduled.T, 0).T
        )
        rows = np.flatnonzero(ranked & ((scheduled > 0).sum(axis=1) > 1))
        if not len(rows):
            return verified
        slots = np.arange(self.k) < scheduled[rows, :, None]
        survival = np.cumprod(self.live[rows].astype(np.float64), axis=2).astype(np.float32)
        self._break_rows(rows, _unknown(survival, slots), "the draft's confidences")
        flat = np.where(slots, survival, -np.inf).reshape(len(rows), -1)
        order = np.argsort(-flat, axis=1, kind="stable")
        wins = np.zeros(flat.shape, dtype=bool)
        last = budget[rows, None] + np.array([-1, 0])
        edge = np.take_along_axis(flat, np.take_along_axis(order, last, axis=1), axis=1)
        self.narrow[rows] |= edge[:, 0] - edge[:, 1] < NARROW
        np.put_along_axis(wins, order, np.arange(flat.shape[1]) < budget[rows, None], axis=1)
        verified[rows] = wins.reshape(slots.shape).sum(axis=2)
        return verified

    def _learn(self, verified: Ints, accepted: Ints, beyond: Bools) -> None:
        assert self.estimator is not None
        depth = np.arange(self.k)
        observed = (depth < verified[:, :, None]) & (depth <= accepted[:, :, None])
        observed &= ~(beyond[:, :, None] & (depth == accepted[:, :, None]))  # the text ends before the verdict
        self.unsure |= beyond.any(axis=1)
        self.estimator.observe(self.features, self.live, observed, depth < accepted[:, :, None])
        if (self.now + 1) % REFIT_INTERVAL == 0:
            self.estimator.refit()
            self.inexact |= self.unsure

    def _advance(self, here: Bools, prefill: Bools, request: Ints, committed: Ints) -> None:
        self.at = self.at + committed
        done = here & (self.at >= self.recording.lengths[request])
        self.stale = np.where(prefill[:, :, None], np.float32(1.0), self.live)
        self.features = self.recording.confidences[np.where(done, 0, self.recording.offsets[request] + self.at)]
        self.live = self.estimator.predict(self.features) if self.estimator is not None else self.features
        self.request = np.where(done, -1, self.request)

    def _note(
        self, here: Bools, drafted: Ints, scheduled: Ints, verified: Ints, accepted: Ints, committed: Ints
    ) -> None:
        assert self.rows is not None
        assert self.own_steps is not None
        for policy, place in np.argwhere(here & ~self.broken[:, None]):
            number = int(self.request[policy, place])
            values = (table[policy, place] for table in (drafted, scheduled, verified, accepted, committed))
            self.rows.append(
                {
                    "policy": self.budgets[policy].label,
                    "step": self.now,
                    "request_id": self.recording.requests[number],
                    "request_step": int(self.own_steps[policy, number]),
                    **dict(
                        zip(
                            ("drafted", "scheduled", "verified", "accepted", "committed"), map(int, values), strict=True
                        )
                    ),
                }
            )
            self.own_steps[policy, number] += 1

    def _break(self, where: Bools, what: str) -> None:
        self._break_rows(np.arange(len(self.budgets)), where, what)

    def _break_rows(self, rows: npt.NDArray[np.intp], where: Bools, what: str) -> None:
        """End the policies that came to a place of which nothing is known."""
        for policy in rows[where.any(axis=1)]:
            if self.broken[policy]:
                continue
            place = int(np.argmax(where[np.flatnonzero(rows == policy)[0]]))
            request = self.recording.requests[int(self.request[policy, place])]
            self.broken[policy] = True
            askable = self.recording.cell.drafter.method in ASKABLE
            self.refused[policy] = (
                f"{what} is not known for request {request} after {int(self.at[policy, place])} tokens;"
                f" {'the drafter asked again, or ' if askable else ''}a run with budget none would tell"
            )

    def result(self) -> Replayed:
        """The tables."""
        totals = pd.DataFrame({"policy": [budget.label for budget in self.budgets]})
        for name in _COUNTS:
            totals[name] = pd.array(self.counts[name], dtype="Int64")
        totals.insert(5, "av_skipped", totals["scheduled"] - totals["verified"])
        totals["budget"] = (totals["verified"] / totals["budgeted"]).astype("Float64")
        totals["ms"] = pd.array(self.ms, dtype="Float64")
        totals["tokens_per_s"] = totals["priced_tokens"] / totals["ms"].where(totals["ms"] > 0) * 1000
        totals.loc[self.broken, totals.columns[1:]] = pd.NA
        totals["inexact"] = self.inexact
        totals["refused"] = self.refused
        steps = pd.DataFrame(self.rows or [], columns=["policy", *_STEP_COLUMNS])
        return Replayed(totals.drop(columns=["budgeted", "priced_tokens"]), steps)


def _unknown(survival: npt.NDArray[Any], slots: Bools) -> Bools:
    """Which places have a scheduled draft of unknown confidence."""
    found: Bools = (np.isnan(survival) & slots).any(axis=2)
    return found


_COUNTS = (
    "spec_steps", "drafted", "scheduled", "verified", "accepted", "output_tokens", "engine_steps", "narrow", "budgeted",
    "priced_tokens",
)  # fmt: skip
_STEP_COLUMNS = (
    "step", "request_id", "request_step", "drafted", "scheduled", "verified", "accepted", "committed",
)  # fmt: skip
