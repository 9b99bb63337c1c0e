"""Random numbers of one request, by their use and position: nothing else has any part in them.

Philox is a counter-based generator: its numbers are a function of key and counter, so those of a position need no
state, and are the same in whatever step, batch or order they are asked for.
"""

from __future__ import annotations

import numpy as np

_DRAW, _BLOCK = 0, 1  # keys: numbers of a position; numbers of the block after an anchor
_PER_COUNTER = 4  # numbers Philox makes of one counter


class Noise:
    """Uniform float32 numbers in [0, 1), multiples of 2^-23. seed: of the request, below 2^64."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def draws(self, position: int, count: int) -> np.ndarray:
        """The numbers that draw the tokens of `count` positions from `position` on, [count]."""
        raw = self._raw(_DRAW, (position, 0), _PER_COUNTER * count)
        return _uniform(raw[::_PER_COUNTER])

    def block(self, anchor: int, drafts: int) -> tuple[np.ndarray, np.ndarray, float]:
        """The numbers of the block after the anchor at this position: one draws each draft [drafts], one accepts each
        [drafts], and one draws the last token. No two blocks of a sequence have the same anchor, and the use of one
        block's numbers tells nothing of another's."""
        # The counter's second word: blocks do not overlap, however many numbers one takes.
        numbers = _uniform(self._raw(_BLOCK, (0, anchor), 2 * drafts + 1))
        return numbers[1::2], numbers[2::2], float(numbers[0])

    def _raw(self, use: int, place: tuple[int, int], count: int) -> np.ndarray:
        # Arrays, because numpy makes floats of a list with numbers beyond 2^63.
        key, counter = (np.array(words, dtype=np.uint64) for words in ((self.seed, use), (*place, 0, 0)))
        return np.random.Philox(key=key, counter=counter).random_raw(count)


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])


def _uniform(raw: np.ndarray) -> np.ndarray:
    return (raw >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)
