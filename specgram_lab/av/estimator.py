"""vLLM's online acceptance estimator once more, in numpy, for replays and what-ifs without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

REFIT_INTERVAL = 100
DAMPING = np.float32(50.0)
RIDGE = np.float32(1e-3)
SLOPE, BIAS = np.float32(0.5), np.float32(-0.2)
"""Constants of vLLM's `OnlineAcceptanceEstimator` (0.30 to 0.33)."""


@dataclass
class Estimator:
    """One fit a policy: logistic in the log-odds of the drafter's best token, by damped Newton steps.

    The slope is shared by all draft positions, each has its own intercept; see `_accumulate_kernel`, `_refit_kernel`
    and `_predict_kernel` in vLLM's acceptance_estimator.py. `refit` is for every `REFIT_INTERVAL` engine steps.
    """

    policies: int
    k: int
    slope: Reals = field(init=False)
    intercepts: Reals = field(init=False)

    def __post_init__(self) -> None:
        self.slope = np.full(self.policies, SLOPE, dtype=np.float32)
        self.intercepts = np.full((self.policies, self.k), BIAS, dtype=np.float32)
        self._begin_round()

    def _begin_round(self) -> None:
        self.sums = np.zeros((6, self.policies, self.k), dtype=np.float32)  # a, b, c, g0, g1, n of `_refit_kernel`

    def predict(self, features: Reals) -> Reals:
        """Acceptance probabilities for ``features`` of shape (policies, places, k)."""
        odds = self.slope[:, None, None] * features + self.intercepts[:, None, :]
        return np.asarray(1 / (1 + np.exp(-odds)), dtype=np.float32)

    def observe(self, features: Reals, predictions: Reals, observed: Bools, label: Bools) -> None:
        """Add graded drafts to the normal equations."""
        seen = observed & ~np.isnan(features)
        feature, predicted = np.where(seen, features, 0), np.where(seen, predictions, 0)
        weight = predicted * (1 - predicted)
        residual = np.where(seen, label - predicted, 0)
        terms = (weight * feature * feature, weight * feature, weight, residual * feature, residual, seen)
        for at, term in enumerate(terms):
            self.sums[at] += term.sum(axis=1, dtype=np.float32)

    def refit(self) -> None:
        """One damped Newton step, as `_refit_kernel` takes it."""
        a, b, c, g0, g1, n = self.sums
        c = c + RIDGE
        total = n.sum(axis=1)
        step = (g0.sum(axis=1) - (b * g1 / c).sum(axis=1)) / (a.sum(axis=1) + RIDGE - (b * b / c).sum(axis=1))
        step = step * (total / (total + DAMPING))
        step = np.where(np.isfinite(step) & (self.slope + step >= 0), step, 0).astype(np.float32)
        shift = (g1 - b * step[:, None]) / c * (n / (n + DAMPING))
        self.slope = self.slope + step
        self.intercepts = self.intercepts + np.nan_to_num(shift, nan=0.0).astype(np.float32)
        self._begin_round()
