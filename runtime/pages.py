"""Pages: sequences own the caches' rows by the page, and a step's rows are written where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glmspec.core.errors import RequestError

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
    """Consecutive positions of one sequence. pages: the sequence's own, in order. ring: those that its rows go round in
    where a drafter's layers slide."""

    pages: Sequence[int]
    start: int
    count: int
    ring: Sequence[int] = ()

    @property
    def positions(self) -> np.ndarray:
        """int64 [count], ascending."""
        return np.arange(self.start, self.start + self.count)


def write_plan(spans: Sequence[Span], page_size: int, num_pages: int) -> dict[str, np.ndarray]:
    """Says where the spans' rows are written, as network inputs (see `models/layers/paged.py`). Rows are numbered span
    after span."""
    page = np.concatenate([np.asarray(span.pages)[span.positions // page_size] for span in spans])
    slot = np.concatenate([span.positions for span in spans]) % page_size
    return _plan(np.arange(len(slot)), page, slot, num_pages)


def ring_write_plan(spans: Sequence[Span], page_size: int, num_pages: int) -> dict[str, np.ndarray]:
    """Says the same for the spans' rings: page ordinal o of a sequence lies in its ring page o mod their number. Rows
    that a later row of the span would overwrite are left out, so a page gets rows of one ordinal only."""
    rows, pages, slots, first = [], [], [], 0
    for span in spans:
        last = (span.start + span.count - 1) // page_size
        start = max(span.start, (last + 1 - len(span.ring)) * page_size)
        position = np.arange(start, span.start + span.count)
        rows.append(first + position - span.start)
        pages.append(np.asarray(span.ring)[position // page_size % len(span.ring)])
        slots.append(position % page_size)
        first += span.count
    plan = _plan(np.concatenate(rows), np.concatenate(pages), np.concatenate(slots), num_pages)
    return {f"ring_{name}": array for name, array in plan.items()}


def _plan(row: np.ndarray, page: np.ndarray, slot: np.ndarray, num_pages: int) -> dict[str, np.ndarray]:
    """The plan that writes row[i] to slot[i] of page[i]. The rows of a page come in order of position."""
    order = np.argsort(page, kind="stable")  # rows of a page stay in order of position
    counts = np.bincount(page, minlength=num_pages)
    cumulative = np.zeros(num_pages + 1, dtype=np.int32)
    np.cumsum(counts, out=cumulative[1:])
    offset = np.zeros(num_pages, dtype=np.int32)
    written, first = np.unique(page, return_index=True)
    offset[written] = slot[first]
    return {"write_order": row[order].astype(np.int32), "write_offset": offset, "write_cumulative": cumulative}


def page_table(owned: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """int32 [len(owned), width], padded with the null page. Longer lists are cut: their tail is not read yet."""
    table = np.full((len(owned), width), NULL_PAGE, dtype=np.int32)
    for row, pages in zip(table, owned, strict=True):
        count = min(len(pages), width)
        row[:count] = pages[:count]
    return table


def ring_page_table(
    rings: Sequence[Sequence[int]], positions: Sequence[int], page_size: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [len(rings), width], each ring's pages from its oldest to the one before `positions`, and where they begin,
    int32 [len(rings)]. A ring that is empty gives null pages."""
    first = np.maximum(-(-np.asarray(positions) // page_size) - width, 0)
    table = np.full((len(rings), width), NULL_PAGE, dtype=np.int32)
    for row, ring, ordinal in zip(table, rings, first, strict=True):
        if len(ring):
            row[:] = np.asarray(ring)[(ordinal + np.arange(width)) % width]
    return table, (first * page_size).astype(np.int32)
