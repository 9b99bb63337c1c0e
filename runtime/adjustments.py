"""A request's biases, penalties and forbidden tokens, as entries of the `adjust` op: row by row of a block.

Legend: V vocabulary, E entries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from glmspec.runtime.sampling import Sampling


@dataclass(frozen=True)
class Entries:
    """What happens to some logits of one row. tokens int [E], before, factor, after float32 [E]: see plugins/adjust."""

    tokens: np.ndarray
    before: np.ndarray
    factor: np.ndarray
    after: np.ndarray


class Adjustments:
    """Knows the answer so far. end_ids: tokens that end it, forbidden for the first `min_tokens`."""

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int], end_ids: Collection[int], vocab_size: int
    ) -> None:
        self._sampling = sampling
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._answer: list[int] = []
        self._count_V = np.zeros(vocab_size, dtype=np.float32)  # in the answer
        self._seen_V = np.zeros(vocab_size, dtype=bool)  # in prompt or answer
        self._seen_V[list(prompt_ids)] = True
        self._bias_V = np.zeros(vocab_size, dtype=np.float32)
        for token, bias in sampling.logit_bias:
            self._bias_V[token] = bias

    def tell(self, tokens: Sequence[int]) -> None:
        """These are part of the answer now."""
        self._answer.extend(tokens)
        np.add.at(self._count_V, list(tokens), 1)
        self._seen_V[list(tokens)] = True

    def rows(self, drafts: Sequence[int]) -> list[Entries]:
        """Of the row after the answer, and of the row after each draft: each sees the drafts before it."""
        made = [self._row(self._answer, self._count_V, self._seen_V)]
        count_V, seen_V, answer = self._count_V.copy(), self._seen_V.copy(), list(self._answer)
        for draft in drafts:
            count_V[draft] += 1
            seen_V[draft] = True
            answer.append(draft)
            made.append(self._row(answer, count_V, seen_V))
        return made

    def _row(self, answer: list[int], count_V: np.ndarray, seen_V: np.ndarray) -> Entries:
        sampling = self._sampling
        before_V = self._bias_V.copy()
        if len(answer) < sampling.min_tokens:
            before_V[self._end_ids] = -np.inf
        for word in sampling.bad_words:
            lead = list(word[:-1])
            if not lead or answer[-len(lead) :] == lead:
                before_V[word[-1]] = -np.inf
        factor_V = np.where(seen_V, np.float32(sampling.repetition_penalty), np.float32(1))
        after_V = -np.float32(sampling.frequency_penalty) * count_V
        after_V -= np.float32(sampling.presence_penalty) * (count_V > 0)
        tokens = np.flatnonzero((before_V != 0) | (factor_V != 1) | (after_V != 0))
        return Entries(tokens, before_V[tokens], factor_V[tokens], after_V[tokens])
