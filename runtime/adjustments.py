"""A request's biases, penalties and forbidden tokens, as entries of the `adjust` op: row by row of a block.

The host knows the tokens, so it names the logits to change; a row sees the drafts before it. What crosses to the GPU is
as long as what is adjusted, and not as the vocabulary. Only tokens that may ever be adjusted are kept.

Legend: E tokens that may be adjusted: those of prompt and answer, and those that the request names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from glmspec.runtime.sampling import Sampling


@dataclass(frozen=True)
class Entries:
    """Changes of some logits of one row. tokens int [E], before, factor, after float32 [E]: see `plugins/adjust.py`."""

    tokens: np.ndarray
    before: np.ndarray
    factor: np.ndarray
    after: np.ndarray


UNCHANGED = Entries(
    np.zeros(1, dtype=np.int64),
    before=np.zeros(1, dtype=np.float32),
    factor=np.ones(1, dtype=np.float32),
    after=np.zeros(1, dtype=np.float32),
)


class Adjustments:
    """Makes a request's entries, row by row, and follows its answer. end_ids: tokens that end it, forbidden for the
    first `min_tokens`."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], end_ids: Collection[int]) -> None:
        self._sampling = sampling
        self._answer: list[int] = []
        self._place: dict[int, int] = {}  # of a token in the arrays below
        self._tokens_E = np.zeros(0, dtype=np.int64)
        self._count_E = np.zeros(0, dtype=np.float32)  # in the answer
        self._seen_E = np.zeros(0, dtype=bool)  # in prompt or answer
        self._bias_E = np.zeros(0, dtype=np.float32)
        biased = dict(sampling.logit_bias)
        named = self._places(biased)
        self._bias_E[named] = list(biased.values())
        if sampling.repetition_penalty != 1:  # nothing else asks for the prompt
            seen = self._places(prompt_ids)
            self._seen_E[seen] = True
        self._ends = self._places(end_ids) if sampling.min_tokens else []
        self._words = [(list(word[:-1]), self._places(word[-1:])) for word in sampling.bad_words]

    def append(self, tokens: Sequence[int]) -> None:
        """Make these part of the answer."""
        places = self._places(tokens)
        self._answer.extend(tokens)
        np.add.at(self._count_E, places, 1)
        self._seen_E[places] = True

    def rows(self, drafts: Sequence[int]) -> list[Entries]:
        """The entries of the row after the answer, and of the row after each draft: each sees the drafts before it."""
        places = self._places(drafts)
        count_E, seen_E, answer = self._count_E.copy(), self._seen_E.copy(), list(self._answer)
        rows = [self._row(answer, count_E, seen_E)]
        for draft, place in zip(drafts, places, strict=True):
            count_E[place] += 1
            seen_E[place] = True
            answer.append(draft)
            rows.append(self._row(answer, count_E, seen_E))
        return rows

    def _places(self, tokens: Iterable[int]) -> list[int]:
        """The places of tokens in the arrays; new ones are appended, unadjusted."""
        tokens = list(tokens)
        fresh = [token for token in dict.fromkeys(tokens) if token not in self._place]
        for token in fresh:
            self._place[token] = len(self._place)
        if fresh:
            more = len(fresh)
            self._tokens_E = np.concatenate([self._tokens_E, np.array(fresh, dtype=np.int64)])
            for name in ("_count_E", "_seen_E", "_bias_E"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(more, dtype=old.dtype)]))
        return [self._place[token] for token in tokens]

    def _row(self, answer: list[int], count_E: np.ndarray, seen_E: np.ndarray) -> Entries:
        sampling = self._sampling
        before_E = self._bias_E.copy()
        if len(answer) < sampling.min_tokens:
            before_E[self._ends] = -np.inf
        for lead, last in self._words:
            if not lead or answer[-len(lead) :] == lead:
                before_E[last] = -np.inf
        factor_E = np.where(seen_E, np.float32(sampling.repetition_penalty), np.float32(1))
        after_E = -np.float32(sampling.frequency_penalty) * count_E
        after_E -= np.float32(sampling.presence_penalty) * (count_E > 0)
        some = (before_E != 0) | (factor_E != 1) | (after_E != 0)
        return Entries(self._tokens_E[some], before_E[some], factor_E[some], after_E[some])
