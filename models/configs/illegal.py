"""Token ids that a head has rows for and the tokenizer does not know: no text is theirs, so they are never chosen.

They get -inf where logits leave the head of the verifier and of the MTP module, by a bias on the head, so nothing
behind knows of them. The bias is a table that the runtime makes of the spans in an engine directory's config.json; a
network has that input only where there are any.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class IllegalIds:
    """Spans of ids, each its first and the one after its last, in rising order; none by default."""

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def beside(cls, legal: Collection[int], vocab_size: int) -> IllegalIds:
        """The ids below `vocab_size` that are not among the legal ones: beyond the largest, and holes between them."""
        edges = [-1, *sorted(id for id in set(legal) if 0 <= id < vocab_size), vocab_size]
        return cls(tuple((left + 1, right) for left, right in pairwise(edges) if left + 1 < right))

    @classmethod
    def from_json(cls, value: list[list[int]]) -> IllegalIds:
        """The inverse of `to_json`."""
        return cls(tuple((first, stop) for first, stop in value))

    def to_json(self) -> list[list[int]]:
        """As config.json keeps them."""
        return [list(span) for span in self.spans]

    def __len__(self) -> int:
        return sum(stop - first for first, stop in self.spans)

    def __contains__(self, id: int) -> bool:
        return any(first <= id < stop for first, stop in self.spans)


ALL_LEGAL = IllegalIds()
