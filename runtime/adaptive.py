"""How many drafts are verified, chosen anew every step: those whose verification pays.

A slot is one draft of one sequence. Its survival S is the product of the chances that it and all drafts before it
stand; verifying it costs a row and yields S tokens on average. Slots of all sequences compete: the best `budget` are
admitted, and since S never rises along a block those of a sequence are always its first.

    budget = argmax over n of (sequences + sum of the n best S) / (draft_ms[sequences] + verify_ms[sequences + n])

which is emitted tokens a millisecond: every sequence emits one token even if nothing of its block is verified.

Why this changes no law. Rejection sampling of a block (either way, see `plugins/reject.py`) draws from the target's
law for every length n of the block, and for a random n too if n is a stopping time of the drafts: whether draft j is
verified may depend on drafts before j, and on anything that is independent of this block, but not on draft j, on later
ones, or on the numbers that accept them. (Otherwise drafts would be picked by how good they are, and picked drafts do
not follow q.) So
  - the chance of draft j is computed from what the drafter knew before it chose draft j;
  - draft j ranks before or behind other slots by its own S alone: its sequence's later slots rank behind it whatever
    they are, and earlier ones before it;
  - the budget would look at every draft, so it is the one that the step before would have liked, as a share of the
    slots there are; the number of slots follows from lengths alone. The first step verifies all.
Estimates learn from steps that are over.

Legend: B blocks (sequences that draft), J drafts of a block, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from glmspec.build.errors import ConfigError
from glmspec.runtime.cost_table import CostTable, MadeFor
from glmspec.runtime.estimates import Confidence, Estimates, Margins
from glmspec.runtime.profile import costs_of

if TYPE_CHECKING:
    from glmspec.runtime.accept import Ballot, Verdict
    from glmspec.runtime.profile import Machinery
    from glmspec.runtime.propose import Drafts


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


@dataclass(frozen=True)
class Slots:
    """Drafts that may be verified, best first; of equals the one nearest its anchor, then the earliest sequence's.

    survival: float64 [S]. owner: int [S], whose each is. sequences: how many there are."""

    survival: np.ndarray
    owner: np.ndarray
    sequences: int

    @classmethod
    def of(cls, chance_BJ: np.ndarray, most: Sequence[int], threshold: float) -> Slots:
        """chance: of acceptance, given that all drafts before it stand. most: drafts that may be verified, of each."""
        survival_BJ = np.cumprod(chance_BJ, 1)  # of numbers up to 1: it cannot rise, in floating point either
        position_J = np.arange(chance_BJ.shape[1])
        may_BJ = (position_J < np.array(most)[:, None]) & (survival_BJ >= threshold)
        owner_S, position_S = np.nonzero(may_BJ)
        survival_S = survival_BJ[may_BJ]
        order_S = np.lexsort((owner_S, position_S, -survival_S))
        return cls(survival_S[order_S], owner_S[order_S], len(most))

    def best(self, budget: int) -> list[int]:
        """How many drafts of each sequence are among the best."""
        return np.bincount(self.owner[:budget], minlength=self.sequences).tolist()

    def budget(self, costs: CostTable) -> int:
        """How many of them, the best ones, yield most tokens a millisecond; the fewest of equals."""
        tokens = self.sequences + np.concatenate([[0.0], np.cumsum(self.survival)])
        rows = self.sequences + np.arange(len(tokens))
        return int(np.argmax(tokens / costs.step_ms(self.sequences, rows)))


class AdaptiveVerification:
    """Chooses how much of each block is verified. One object an engine: it remembers the step before."""

    def __init__(self, estimates: Estimates, costs: CostTable, threshold: float = 0.0) -> None:
        self.estimates, self.costs, self.threshold = estimates, costs, threshold
        self._liked = (1, 1)  # of how many slots how many, by the step before

    def choose(self, most: Sequence[int], drafts: Drafts) -> list[int]:
        """How many drafts of each block are verified, from 0 up. most: how many may be. drafts: the blocks."""
        offered, (liked, of) = sum(most), self._liked
        budget = offered if self.estimates.exploring else -(-liked * offered // of)
        slots = Slots.of(self.estimates.chances(_signal(drafts)), most, self.threshold)
        self._liked = (slots.budget(self.costs), max(offered, 1))
        return slots.best(budget)

    def learn(self, ballots: Sequence[Ballot], verdicts: Sequence[Verdict], drafts: Drafts) -> None:
        """What came of a step, in the order of its blocks."""
        verified_B = np.array([len(ballot.drafts) for ballot in ballots])
        accepted_B = np.array([verdict.accepted for verdict in verdicts])
        self.estimates.observe(_signal(drafts), verified_B, accepted_B)


def prepare(settings: Adaptive, machinery: Machinery, made_for: MadeFor) -> AdaptiveVerification:
    """For an engine's models. Raises `ConfigError` for settings that do not fit them."""
    drafter, temperatures = machinery.drafter, settings.temperatures
    if temperatures is not None and not drafter.confident:
        raise ConfigError(
            f"confidence temperatures: drafter {made_for.drafter!r} has no confidence head; leave them out."
        )
    if temperatures is not None and len(temperatures) != drafter.num_drafts:
        raise ConfigError(
            f"confidence temperatures: found {len(temperatures)}, expected {drafter.num_drafts}: one for every "
            f"draft of a block of drafter {made_for.drafter!r}. Fit them to this drafter."
        )
    estimates = Confidence(temperatures) if drafter.confident else Margins(drafter.num_drafts)
    return AdaptiveVerification(estimates, costs_of(settings.costs, machinery, made_for), settings.threshold)


def _signal(drafts: Drafts) -> np.ndarray:
    """float64 [B, J]."""
    return drafts.signal.double().numpy()
