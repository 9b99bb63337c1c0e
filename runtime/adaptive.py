"""Chooses, anew every step, how many drafts are verified: those whose verification pays.

A slot is one draft of one sequence. Its survival S is the product of the chances that it and all drafts before it
stand; after a draft that ends the answer it is 0, for nothing that follows could be emitted. Verifying a slot costs a
row and yields S tokens on average. Slots of all sequences compete, and the best `budget` would be the ones to verify:

    budget = argmax over n of (sequences + sum of the n best S) / (draft_ms[sequences] + verify_ms[sequences + n])

which is emitted tokens a millisecond: every sequence emits one token even if nothing of its block is verified. A price
is fair to a step if just these slots yield more. Steps verify every slot that yields more than the price that was
carried on from steps before, the first step all that can be emitted; after each the price moves towards the nearest
that would have been fair to it. S never rises along a block, so those of a sequence are always its first.

Why a price is carried and not a budget: a step of good blocks then verifies more than a step of bad ones. Where every
row costs the same, tokens a millisecond over many steps are most when all rows are bought at one price (Dinkelbach, On
Nonlinear Fractional Programming, 1967); the fewer sequences run, the more a fixed number of rows would lose.

Why answers keep the verifier's distribution. Rejection sampling of a block (either way, see `plugins/reject/`) draws
from it for every length n of the block, and for a random n too if n is a stopping time of the drafts: whether draft j
is verified may depend on drafts before j, and on anything that is independent of this block, but not on draft j, on
later ones, or on the numbers that accept them. (Otherwise drafts would be picked by how good they are, and picked
drafts do not follow q.) So
  - the chance of draft j is computed from what the drafter knew before it chose draft j;
  - a draft that ends the answer tells on those behind it, not on itself;
  - the price of a step would look at every draft, so the one it keeps to is that of steps before; nothing else of
    this step has a part in it, other sequences neither.
Estimates learn from steps that are over.

Legend: B blocks (sequences that draft), J drafts of a block, S slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from glmspec.core.errors import ConfigError
from glmspec.runtime.accept import DraftBlock
from glmspec.runtime.cost_table import CostTable, MeasuredOn
from glmspec.runtime.estimates import Confidence, Estimates, Margins
from glmspec.runtime.profile import LoadedModels, costs_of
from glmspec.runtime.propose import Drafts
from glmspec.runtime.sequence import Accepted

_STEPS = 5  # a step moves the price by this part of the way; the first few by more


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Settings. threshold: drafts of a lower survival are never verified. costs: a table, or the file that holds it or
    shall hold it once measured; None measures it whenever engines are loaded. temperatures: of a drafter's confidence,
    one a position."""

    threshold: float = 0.0
    costs: CostTable | Path | None = None
    temperatures: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"adaptive threshold: found {self.threshold:g}, expected 0 to 1.")


def survivals(chance_BJ: np.ndarray, ids: Sequence[Sequence[int]], endings: Sequence[Collection[int]]) -> np.ndarray:
    """Chances that a draft is emitted, float64 [B, J]. chance_BJ: of acceptance, given that all drafts before it stand.
    ids: the drafts. endings: tokens that end the answer, of each block."""
    ends_BJ = np.array([[token in ending for token in block] for block, ending in zip(ids, endings, strict=True)])
    ended_BJ = np.cumsum(ends_BJ, 1) > ends_BJ
    return np.where(ended_BJ, 0.0, np.cumprod(chance_BJ, 1))  # of numbers up to 1: it cannot rise, rounded either


def fair_prices(survival_S: np.ndarray, sequences: int, costs: CostTable) -> tuple[float, float]:
    """The lowest fair price, and the end of the range of fair prices (not fair itself): one is fair if it is exceeded
    by just the slots whose verification gives most tokens a millisecond, the fewest of equals."""
    best_S = np.sort(survival_S)[::-1]
    tokens = sequences + np.concatenate([[0.0], np.cumsum(best_S)])
    budget = np.argmax(tokens / costs.step_ms(sequences, sequences + np.arange(len(tokens))))
    edges = np.concatenate([[np.inf], best_S, [0.0]])
    return float(edges[budget + 1]), float(edges[budget])


class AdaptiveVerification:
    """Chooses how much of each block is verified. One object an engine: it remembers the steps before."""

    def __init__(self, estimates: Estimates, costs: CostTable, threshold: float = 0.0) -> None:
        self.estimates, self.costs, self.threshold = estimates, costs, threshold
        self._price, self._steps = 0.0, 0

    def choose(self, max_drafts: Sequence[int], drafts: Drafts, endings: Sequence[Collection[int]]) -> list[int]:
        """The number of drafts of each block to verify, from 0 up. max_drafts: how many may be. drafts: the blocks.
        endings: tokens that end the answer, of each."""
        survival_BJ = survivals(self.estimates.chances(_signal(drafts)), drafts.ids, endings)
        may_BJ = (np.arange(survival_BJ.shape[1]) < np.array(max_drafts)[:, None]) & (survival_BJ >= self.threshold)
        least = 0.0 if self.estimates.exploring else self._price
        self._steps = min(self._steps + 1, _STEPS)
        low, high = fair_prices(survival_BJ[may_BJ], len(max_drafts), self.costs)
        self._price += (min(max(self._price, low), high) - self._price) / self._steps
        return (may_BJ & (survival_BJ > least)).sum(1).tolist()

    def learn(self, blocks: Sequence[DraftBlock], accepted: Sequence[Accepted], drafts: Drafts) -> None:
        """Learn from a step. accepted: of each of its blocks."""
        verified_B = np.array([len(block.drafts) for block in blocks])
        accepted_B = np.array([outcome.count for outcome in accepted])
        self.estimates.observe(_signal(drafts), verified_B, accepted_B)


def prepare(settings: Adaptive, models: LoadedModels, measured_on: MeasuredOn) -> AdaptiveVerification:
    """Measures or reads the costs of an engine's models. Raises `ConfigError` for settings that do not fit them."""
    drafter, temperatures = models.drafter, settings.temperatures
    if temperatures is not None and not drafter.confident:
        raise ConfigError(
            f"confidence temperatures: drafter {measured_on.drafter!r} has no confidence head; leave them out."
        )
    if temperatures is not None and len(temperatures) != drafter.num_drafts:
        raise ConfigError(
            f"confidence temperatures: found {len(temperatures)}, expected {drafter.num_drafts}: one for every "
            f"draft of a block of drafter {measured_on.drafter!r}. Fit them to this drafter."
        )
    estimates = Confidence(temperatures) if drafter.confident else Margins(drafter.num_drafts)
    return AdaptiveVerification(estimates, costs_of(settings.costs, models, measured_on), settings.threshold)


def _signal(drafts: Drafts) -> np.ndarray:
    """The drafts' signal, float64 [B, J]."""
    return drafts.signal.double().numpy()
