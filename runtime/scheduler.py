"""Schedules the next step: every sequence that decodes, then as much prompt as fits.

A sequence gets all the pages it can ever need when it is admitted, so nothing is preempted. Decoding
sequences always fit one step (the limits say so), and prompts share what is left, oldest first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from glmspec.network.limits import EngineLimits
from glmspec.runtime.pages import PagePool
from glmspec.runtime.sequence import Sequence

ABORTED = "aborted"


@dataclass(frozen=True)
class Share:
    """A sequence's share of a step. num_tokens: pending ones to run. num_drafts: how many drafts may be verified after
    them. completes: the sequence has no pending tokens left afterwards, so the step gives it its next token."""

    sequence: Sequence
    num_tokens: int
    num_drafts: int
    completes: bool


class Scheduler:
    """Waiting and running sequences, and the pages they own.

    num_drafts: drafts in a block, 0 without a drafter. ring_pages: pages of a sequence's ring, 0 where no layer of the
    drafter slides.
    """

    def __init__(self, limits: EngineLimits, num_drafts: int, ring_pages: int = 0) -> None:
        self.limits = limits
        self.num_drafts = num_drafts
        self.pool = PagePool(limits.num_pages)
        self.ring_pages = ring_pages
        self.rings = PagePool(limits.num_ring_pages(ring_pages))  # one for every sequence that may run
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is; harmless when it has finished."""
        if sequence.finished:
            return
        sequence.finish_reason = ABORTED
        if sequence in self.running:
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self) -> list[Share]:
        """The shares of the next step; empty when there is nothing to do."""
        self._admit()
        budget = self.limits.max_num_batched_tokens
        shares = []
        for sequence in sorted(self.running, key=lambda own: own.pending > 1):  # decoding first, else by age
            num_tokens = min(sequence.pending, budget)
            if num_tokens == 0:
                break
            num_drafts = sequence.max_drafts(self.num_drafts)
            shares.append(Share(sequence, num_tokens, num_drafts, completes=num_tokens == sequence.pending))
            budget -= num_tokens + num_drafts
        return shares

    def retire(self) -> None:
        """Take finished sequences out and free their pages."""
        for sequence in [*self.running]:
            if sequence.finished:
                self._release(sequence)

    def _admit(self) -> None:
        """Start waiting sequences, oldest first, while there are pages for the next."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            needed = -(-self.waiting[0].max_tokens // self.limits.page_size)
            if needed > self.pool.free:
                return
            sequence = self.waiting.popleft()
            sequence.pages = self.pool.take(needed)
            sequence.ring = self.rings.take(self.ring_pages)
            self.running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.pages)
        self.rings.give_back(sequence.ring)
        sequence.pages, sequence.ring = [], []
