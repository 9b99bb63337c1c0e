"""Estimates each draft's chance of acceptance, given that all before it were accepted, from its drafter's signal.

A drafter with a confidence head says so itself, in chances that may be calibrated; of others the margin between the
best two scores is turned into a chance by what came of such margins before. Neither looks at the draft itself, nor at
later ones: `Drafts.signal` does not.

Legend: B blocks, J drafts of a block, Z observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from glmspec.core.fields import Fields, read_json

MAX_MARGIN = 40.0  # a larger one tells nothing more
REFIT_STEPS = 100
_FIRST_REFIT_STEPS = 10  # twice as many each time, until they are REFIT_STEPS
_REMEMBERED = 1024  # observations a position
_PRIOR = np.array([0.5, 0.0])  # w, b: an even chance without a margin, 0.92 with one of 5
_RIDGE = np.array([4.0, 1.0])  # how firmly the prior is held, of w and b: against sums over the observations
_NEWTON_STEPS = 8
_EPSILON = 1e-6  # how far from 0 and 1 a confidence is kept


class Estimates(Protocol):
    """Chances of acceptance."""

    @property
    def exploring(self) -> bool:
        """True when all drafts of the next step should be verified, to learn of them."""
        ...

    def chances(self, signal_BJ: np.ndarray) -> np.ndarray:
        """float64 [B, J], each given that all drafts before it stand."""
        ...

    def observe(self, signal_BJ: np.ndarray, verified_B: np.ndarray, accepted_B: np.ndarray) -> None:
        """Learn from a step: how many drafts of each block were verified, and how many of those stand."""


class Confidence:
    """The drafter's own confidence c, as sigmoid(logit(c) / T_k) at position k (Guo et al., On Calibration of Modern
    Neural Networks, 2017). temperatures: one a position; None keeps c."""

    exploring = False

    def __init__(self, temperatures: Sequence[float] | None = None) -> None:
        self.temperatures = temperatures

    def chances(self, signal_BJ: np.ndarray) -> np.ndarray:
        """See `Estimates`."""
        return signal_BJ if self.temperatures is None else sigmoid(logit(signal_BJ) / np.array(self.temperatures))

    def observe(self, signal_BJ: np.ndarray, verified_B: np.ndarray, accepted_B: np.ndarray) -> None:
        """A confidence head learned all it knows in training."""


class Margins:
    """Chances sigmoid(w_k * min(margin, MAX_MARGIN) + b_k) at position k, refit to the newest observations every
    REFIT_STEPS steps, earlier at first. The step after a refit explores: what is never verified is never learned."""

    def __init__(self, drafts: int) -> None:
        self.weights_J2 = np.tile(_PRIOR, (drafts, 1))
        self._margin_JZ = np.zeros((drafts, _REMEMBERED))
        self._stood_JZ = np.zeros((drafts, _REMEMBERED), dtype=bool)
        self._seen_J = np.zeros(drafts, dtype=np.int64)
        self._steps, self._due = 0, _FIRST_REFIT_STEPS

    @property
    def exploring(self) -> bool:
        """See `Estimates`."""
        return self._steps == 0

    def chances(self, signal_BJ: np.ndarray) -> np.ndarray:
        """See `Estimates`."""
        w_J, b_J = self.weights_J2.T
        return sigmoid(w_J * np.minimum(signal_BJ, MAX_MARGIN) + b_J)

    def observe(self, signal_BJ: np.ndarray, verified_B: np.ndarray, accepted_B: np.ndarray) -> None:
        """See `Estimates`. A draft tells something only where all before it stand."""
        for position in range(len(self._seen_J)):
            tells_B = (verified_B > position) & (accepted_B >= position)
            self._remember(position, signal_BJ[tells_B, position], accepted_B[tells_B] > position)
        self._steps += 1
        if self._steps == self._due:
            self._steps, self._due = 0, min(2 * self._due, REFIT_STEPS)
            self._refit()

    def _remember(self, position: int, margin_Z: np.ndarray, stood_Z: np.ndarray) -> None:
        """Overwrite the oldest."""
        margin_Z, stood_Z = margin_Z[-_REMEMBERED:], stood_Z[-_REMEMBERED:]
        at_Z = (self._seen_J[position] + np.arange(len(margin_Z))) % _REMEMBERED
        self._margin_JZ[position, at_Z] = np.minimum(margin_Z, MAX_MARGIN)
        self._stood_JZ[position, at_Z] = stood_Z
        self._seen_J[position] += len(margin_Z)

    def _refit(self) -> None:
        for position, seen in enumerate(self._seen_J):
            count = min(seen, _REMEMBERED)
            margin_Z, stood_Z = self._margin_JZ[position, :count], self._stood_JZ[position, :count]
            self.weights_J2[position] = _logistic(margin_Z, stood_Z, self.weights_J2[position])


def _logistic(margin_Z: np.ndarray, stood_Z: np.ndarray, start_2: np.ndarray) -> np.ndarray:
    """w and b of the greatest posterior, by Newton's method: the observations' likelihood and a normal prior about
    _PRIOR. A step that makes it worse is halved."""
    x_Z2, y_Z = np.stack([margin_Z, np.ones_like(margin_Z)], 1), stood_Z.astype(np.float64)

    def loss(weights_2: np.ndarray) -> float:
        z_Z = x_Z2 @ weights_2
        return float(np.logaddexp(0, (1 - 2 * y_Z) * z_Z).sum() + (_RIDGE * (weights_2 - _PRIOR) ** 2).sum() / 2)

    weights_2, now = start_2, loss(start_2)
    for _ in range(_NEWTON_STEPS):
        p_Z = sigmoid(x_Z2 @ weights_2)
        slope_2 = x_Z2.T @ (p_Z - y_Z) + _RIDGE * (weights_2 - _PRIOR)
        curve_22 = (x_Z2 * (p_Z * (1 - p_Z))[:, None]).T @ x_Z2 + np.diag(_RIDGE)
        step_2 = np.linalg.solve(curve_22, slope_2)
        while (then := loss(weights_2 - step_2)) > now and np.abs(step_2).max() > 1e-9:
            step_2 = step_2 / 2
        weights_2, now = weights_2 - step_2, then
    return weights_2


def read_temperatures(path: Path) -> tuple[float, ...]:
    """From JSON, {"temperatures": [one a position]}. Raises `ConfigError` for anything else."""
    fields = Fields(read_json(path), str(path))
    values = fields.values.get("temperatures")
    if not isinstance(values, list) or not all(map(_positive, values)):
        fields.fail("temperatures", "a list of positive numbers, one a position")
    return tuple(map(float, values))


def sigmoid(z: np.ndarray) -> np.ndarray:
    """Without overflow."""
    return np.exp(-np.logaddexp(0, -z))


def logit(p: np.ndarray) -> np.ndarray:
    """The inverse of `sigmoid`, of chances that are kept a little away from 0 and 1."""
    p = np.clip(p, _EPSILON, 1 - _EPSILON)
    return np.log(p) - np.log1p(-p)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
