"""A request being answered: its tokens, its pages, and how far the caches know it."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

from glmspec.runtime.adjustments import Adjustments
from glmspec.runtime.ending import Ending
from glmspec.runtime.noise import Noise, fresh_seed
from glmspec.runtime.request import Delta, Request, TokenLogprob
from glmspec.runtime.stats import SpecStats


@dataclass(frozen=True)
class Accepted:
    """The outcome of verifying a block. count: how many of its drafts are accepted. tokens: those drafts and the one
    that follows. logprobs: of each token, when the request wants them."""

    count: int
    tokens: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()


class Sequence:
    """One running or waiting request.

    tokens: prompt and answer so far; the newest is the anchor of the next block once all before it are cached.
    cached: tokens whose rows are in the verifier's caches. Rows of rejected drafts lie beyond and are overwritten.
    max_tokens: prompt and answer together. max_positions: that the drafter was made for, 0 for no drafter.
    """

    def __init__(
        self,
        request: Request,
        ending: Ending,
        max_tokens: int,
        stats: SpecStats,
        adjustments: Adjustments | None = None,
        max_positions: int = 0,
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt_ids)
        self.cached = 0
        self.pages: list[int] = []
        self.ring: list[int] = []  # pages of the drafter's sliding layers, which its rows go round in
        self.max_tokens = max_tokens
        self.stats = stats
        self.finish_reason: str | None = None
        self.adjustments = adjustments
        seed = request.sampling.seed
        self.noise = Noise(fresh_seed() if seed is None else seed)
        self.max_positions = max_positions
        self._ending = ending

    @property
    def finished(self) -> bool:
        """True once the answer is complete or the request was aborted."""
        return self.finish_reason is not None

    @property
    def pending(self) -> int:
        """Tokens that are known and not cached: the rest of the prompt, then the anchor alone."""
        return len(self.tokens) - self.cached

    @property
    def ending_tokens(self) -> abc.Collection[int]:
        """Tokens that end the answer."""
        return self._ending.tokens

    @property
    def may_draft(self) -> bool:
        """True while blocks may be drafted for this sequence, now or later: unless the request declines them, and up to
        the positions that the drafter was made for."""
        return self.request.speculate and len(self.tokens) + self.stats.num_spec_tokens <= self.max_positions

    @property
    def outgrew_drafter(self) -> bool:
        """True once nothing is drafted any more, because the sequence is longer than the drafter was made for."""
        return self.request.speculate and self.stats.num_spec_tokens > 0 and not self.may_draft

    def max_drafts(self, num_drafts: int) -> int:
        """The number of drafts that may be verified next: none before the first token of the answer, and no more than
        the answer may still hold. num_drafts: of a block."""
        if self.pending != 1 or len(self.tokens) == len(self.request.prompt_ids) or not self.may_draft:
            return 0
        return max(0, min(num_drafts, self.max_tokens - len(self.tokens) - 1))

    def advance(self, num_tokens: int, drafts: abc.Sequence[int], accepted: Accepted | None) -> Delta | None:
        """Account for rows that the verifier ran. num_tokens: pending tokens among them. drafts: those that followed.
        accepted: None when the prompt goes on. Returns what the answer gains."""
        if accepted is None:
            self.cached += num_tokens
            return None
        delta = self._ending.take(accepted.tokens)
        kept = min(accepted.count, len(delta.tokens))  # an end may lie before the last accepted draft
        if drafts:
            self.stats.record(len(drafts), kept)
        self.tokens.extend(delta.tokens)
        if self.adjustments is not None:
            self.adjustments.append(delta.tokens)
        # The cached rows of tokens that the end cut off are not part of the sequence.
        self.cached = min(self.cached + num_tokens + accepted.count, len(self.tokens))
        self.finish_reason = delta.finish_reason
        logprobs = accepted.logprobs[: len(delta.tokens)]
        return replace(delta, accepted=kept, rejected=tuple(drafts[accepted.count :]), logprobs=logprobs)
