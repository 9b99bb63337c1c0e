"""Acceptance statistics, by the published definitions.

length = 1 + accepted / steps; rate = accepted / proposed; position k = steps that accept at least k
drafts / steps. Counters are pooled before division: add `SpecStats` together, then ask.
"""

from __future__ import annotations

from typing import Any


class SpecStats:
    """Counters of speculative steps. num_spec_tokens: most drafts a step may propose."""

    def __init__(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.num_draft_tokens = 0
        self.acceptance_histogram = [0] * (num_spec_tokens + 1)  # steps by accepted drafts

    def record(self, proposed: int, accepted: int) -> None:
        """Count one step that proposed drafts. accepted: those of them that were emitted."""
        self.num_draft_tokens += proposed
        self.acceptance_histogram[accepted] += 1

    def add(self, other: SpecStats) -> None:
        """Pool another's counters into these."""
        self.num_draft_tokens += other.num_draft_tokens
        for accepted, steps in enumerate(other.acceptance_histogram):
            self.acceptance_histogram[accepted] += steps

    @property
    def num_steps(self) -> int:
        """Steps that proposed drafts."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted(self) -> int:
        """Drafts accepted and emitted."""
        return sum(accepted * steps for accepted, steps in enumerate(self.acceptance_histogram))

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a speculative step yields; None before the first."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted share of the proposed drafts; None before the first."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def position_rates(self) -> list[float]:
        """Share of steps that accept at least k drafts, for k = 1 up. Their sum is length - 1."""
        steps = max(self.num_steps, 1)
        return [sum(self.acceptance_histogram[k:]) / steps for k in range(1, self.num_spec_tokens + 1)]

    def to_json(self) -> dict[str, Any]:
        """The per-request shape that vLLM reports and AIPerf reads."""
        return {
            "num_spec_tokens": self.num_spec_tokens,
            "num_spec_steps": self.num_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.acceptance_histogram),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SpecStats:
        """The inverse of `to_json`."""
        stats = cls(value["num_spec_tokens"])
        stats.num_draft_tokens = value["num_draft_tokens"]
        stats.acceptance_histogram = list(value["acceptance_histogram"])
        return stats
