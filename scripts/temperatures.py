"""Fits the temperatures of a drafter's confidence head (`--confidence-temperatures`) to what became of its drafts.

Legend: Z observations.
"""

from __future__ import annotations

import numpy as np

from glmspec.runtime.estimates import logit, sigmoid

LEAST, HALVINGS = 0.05, 50  # of 1 / T, whose greatest is 1 / LEAST; steps of the bisection


def fit_temperatures(
    positions_Z: np.ndarray, confidence_Z: np.ndarray, stood_Z: np.ndarray, drafts: int
) -> tuple[float, ...]:
    """The temperatures for `Confidence`, one a position, under which the observations are likeliest.

    positions_Z: int, from 0. confidence_Z: the drafter's, in [0, 1]. stood_Z: whether the draft was accepted; of drafts
    before which all stand. A position without observations keeps 1. The likelihood is concave in 1 / T, so its
    derivative is bisected, within [1/20, 20]."""
    temperatures = []
    for position in range(drafts):
        here_Z = positions_Z == position
        z_Z, y_Z = logit(confidence_Z[here_Z]), stood_Z[here_Z]
        least, middle, most = LEAST, 1.0, 1 / LEAST
        for _ in range(HALVINGS if here_Z.any() else 0):
            middle = (least * most) ** 0.5
            rises = (z_Z * (y_Z - sigmoid(middle * z_Z))).sum() > 0
            least, most = (middle, most) if rises else (least, middle)
        temperatures.append(1 / middle)
    return tuple(temperatures)
