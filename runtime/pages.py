"""Pages: who owns which rows of the caches, and where a step's rows are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glmspec.build.errors import RequestError

NULL_PAGE = 0  # pads page tables; nothing is written to it and it belongs to nobody


class PagePool:
    """The free pages. One pool serves the verifier's and the drafter's caches: they use the same page ids."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Own `count` pages. Raises `RequestError` when there are not that many; takes none then."""
        if count > len(self._free):
            raise RequestError(f"{count} cache pages are needed and {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Free pages again."""
        self._free.extend(pages)


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one sequence. pages: the sequence's own, in order."""

    pages: Sequence[int]
    start: int
    count: int


def write_plan(spans: Sequence[Span], page_size: int, num_pages: int) -> dict[str, np.ndarray]:
    """Where the spans' rows go, as network inputs (see `build/layers/paged.py`). Rows are numbered span after span."""
    position = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans])
    ordinal = position // page_size
    page = np.concatenate(
        [np.asarray(span.pages)[ordinal[at : at + span.count]] for at, span in zip(_starts(spans), spans, strict=True)]
    )
    order = np.argsort(page, kind="stable")  # rows of a page stay in order of position
    counts = np.bincount(page, minlength=num_pages)
    cumulative = np.zeros(num_pages + 1, dtype=np.int32)
    np.cumsum(counts, out=cumulative[1:])
    offset = np.zeros(num_pages, dtype=np.int32)
    written, first = np.unique(page, return_index=True)
    offset[written] = position[first] - ordinal[first] * page_size
    return {"write_order": order.astype(np.int32), "write_offset": offset, "write_cumulative": cumulative}


def page_table(owned: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """int32 [len(owned), width], padded with the null page. Longer lists are cut: their tail is not read yet."""
    table = np.full((len(owned), width), NULL_PAGE, dtype=np.int32)
    for row, pages in zip(table, owned, strict=True):
        count = min(len(pages), width)
        row[:count] = pages[:count]
    return table


def _starts(spans: Sequence[Span]) -> list[int]:
    starts, total = [], 0
    for span in spans:
        starts.append(total)
        total += span.count
    return starts
