"""A request being answered: its tokens, its pages, and how far the caches know it."""

from __future__ import annotations

from glmspec.runtime.ending import Ending
from glmspec.runtime.request import Delta, Request
from glmspec.runtime.stats import SpecStats


class Sequence:
    """One running or waiting request.

    tokens: prompt and answer so far; the newest is the anchor of the next block once all before it are cached.
    cached: tokens whose rows are in the verifier's caches. Rows of rejected drafts lie beyond and are overwritten.
    """

    def __init__(self, request: Request, ending: Ending, most_tokens: int, stats: SpecStats) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.cached = 0
        self.pages: list[int] = []
        self.ring: list[int] = []  # pages of the drafter's sliding layers, which its rows go round in
        self.most_tokens = most_tokens  # prompt and answer together
        self.stats = stats
        self.finish_reason: str | None = None
        self._ending = ending

    @property
    def finished(self) -> bool:
        """True once the answer is complete or the request was aborted."""
        return self.finish_reason is not None

    @property
    def pending(self) -> int:
        """Tokens that are known and not cached: the rest of the prompt, then the anchor alone."""
        return len(self.tokens) - self.cached

    def may_draft(self, most: int, reach: int) -> bool:
        """Whether a block may be drafted now or later: once it is beyond the drafter's reach, it stays there."""
        return self.request.speculate and len(self.tokens) + most <= reach

    def drafts_wanted(self, most: int, reach: int) -> int:
        """Drafts worth verifying next: none during the prompt, none past what the answer may still hold.
        most: drafts in a block. reach: positions the drafter was trained for; beyond them it stays silent."""
        if self.pending != 1 or not self.may_draft(most, reach):
            return 0
        return max(0, min(most, self.most_tokens - len(self.tokens) - 1))

    def advance(self, ran: int, drafts: list[int], verdict: list[int]) -> Delta | None:
        """Account for a verified run of rows. ran: pending tokens among them. drafts: those that followed.
        verdict: the verifier's greedy token after the last pending token and after each draft; empty when the
        prompt goes on. Returns what the answer gains."""
        if not verdict:
            self.cached += ran
            return None
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == verdict[accepted]:
            accepted += 1
        delta = self._ending.take(verdict[: accepted + 1])
        if drafts:
            self.stats.record(len(drafts), min(accepted, len(delta.tokens)))
        self.tokens.extend(delta.tokens)
        # Rows of tokens that were cut off are not part of the sequence.
        self.cached = min(self.cached + ran + accepted, len(self.tokens))
        self.finish_reason = delta.finish_reason
        return delta
