"""Who owns cache pages, and where a step's rows are written."""

from __future__ import annotations

import random

import numpy as np
import pytest

from glmspec.core.errors import RequestError
from glmspec.network.limits import EngineLimits
from glmspec.runtime.pages import (
    NULL_PAGE,
    PagePool,
    Span,
    page_table,
    ring_page_table,
    ring_write_plan,
    write_plan,
)

NUM_PAGES = 24


@pytest.mark.parametrize("seed", range(10))
def test_the_pool_never_leaks_nor_hands_a_page_twice(seed):
    rng = random.Random(seed)
    pool, owned = PagePool(NUM_PAGES), []
    for _ in range(300):
        if owned and rng.random() < 0.5:
            pool.give_back(owned.pop(rng.randrange(len(owned))))
        elif (count := rng.randint(0, 9)) <= pool.free:
            owned.append(pool.take(count))
            assert len(owned[-1]) == count
        else:
            with pytest.raises(RequestError, match=f"^{count} cache pages are needed and {pool.free} are free$"):
                pool.take(count)
        held = [page for pages in owned for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(1, NUM_PAGES))  # the null page is nobody's
        assert pool.free + len(held) == NUM_PAGES - 1


def test_a_take_that_fails_takes_nothing():
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(RequestError):
        pool.take(3)
    assert pool.free == 2
    assert len(pool.take(2)) == 2


# write_plan against a model that places every row by itself. A cache is {(page, slot): what was written}.


def run_plan(cache: dict, spans, rows, page_size: int) -> None:
    """What TensorRT's KV update does: page by page, the ordered rows from the page's offset on."""
    plan = write_plan(spans, page_size, NUM_PAGES)
    assert len(plan["write_order"]) == len(rows)
    carry_out(cache, plan, rows, page_size)


def carry_out(cache: dict, plan: dict[str, np.ndarray], rows, page_size: int, prefix: str = "") -> None:
    order, offset, cumulative = (plan[f"{prefix}write_{name}"] for name in ("order", "offset", "cumulative"))
    assert {array.dtype for array in plan.values()} == {np.dtype(np.int32)}
    assert (len(offset), len(cumulative)) == (NUM_PAGES, NUM_PAGES + 1)
    assert (cumulative[0], cumulative[-1]) == (0, len(order))
    for page in range(NUM_PAGES):
        for k, at in enumerate(range(cumulative[page], cumulative[page + 1])):
            slot = int(offset[page]) + k
            assert slot < page_size, "a row runs past its page"
            cache[page, slot] = rows[order[at]]


def place_rows(cache: dict, spans, rows, page_size: int) -> None:
    row = iter(rows)
    for span in spans:
        for position in range(span.start, span.start + span.count):
            cache[span.pages[position // page_size], position % page_size] = next(row)


@pytest.mark.parametrize("seed", range(60))
def test_write_plan_equals_placing_every_row(seed):
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 7])
    pages = rng.sample(range(1, NUM_PAGES), NUM_PAGES - 1)
    spans = []
    while len(pages) >= 5 and len(spans) < 4:
        own, pages = pages[:5], pages[5:]
        start = rng.randrange(5 * page_size)
        spans.append(Span(own, start, rng.randint(1, 5 * page_size - start)))
    rows = [object() for _ in range(sum(span.count for span in spans))]
    found, expected = {}, {}
    run_plan(found, spans, rows, page_size)
    place_rows(expected, spans, rows, page_size)
    assert found == expected


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_end_inside_a_page_go_on_where_they_stopped(seed):
    """Two sequences grow by odd amounts and step back over rejected rows; the caches hold their newest rows."""
    rng = random.Random(seed)
    page_size, cache, length = 4, {}, [0, 0]
    pages = rng.sample(range(1, NUM_PAGES), 20)
    owned, texts = (pages[:10], pages[10:]), ([None] * 40, [None] * 40)
    while min(length) < 40:
        spans, rows = [], []
        for who in (0, 1):
            start = max(0, length[who] - rng.choice([0, 0, 1, 3]))
            count = min(rng.randint(1, 9), 40 - start)
            if count:
                spans.append(Span(owned[who], start, count))
                made = [object() for _ in range(count)]
                texts[who][start : start + count] = made
                rows += made
                length[who] = start + count
        run_plan(cache, spans, rows, page_size)
    for own, text in zip(owned, texts, strict=True):
        assert [cache[own[at // page_size], at % page_size] for at in range(40)] == text
    assert not any(page == NULL_PAGE for page, _ in cache)


def test_page_tables_are_padded_with_the_null_page_and_cut():
    table = page_table([[5, 3], [7, 1, 2, 9], []], 3)
    assert table.tolist() == [[5, 3, NULL_PAGE], [7, 1, 2], [NULL_PAGE] * 3]
    assert table.dtype == np.int32


# Rings. A window is [position - window, position) for every position; a ring's pages hold each of their rows' newest.


def limits_of(page_size: int, max_model_len: int) -> EngineLimits:
    sizes = dict(max_num_seqs=3, max_num_batched_tokens=99, segment_rows=9, block_rows=5)
    return EngineLimits(max_model_len=max_model_len, page_size=page_size, **sizes)


@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 21, 60, 100])
def test_a_ring_holds_a_window_wherever_it_begins(page_size, window):
    limits = limits_of(page_size, 64)
    most = max((at - 1) // page_size - max(0, at - window) // page_size + 1 for at in range(1, 65))
    found = limits.ring_pages(window)
    assert most <= found <= limits.pages_per_sequence
    assert found <= -(-window // page_size) + 1
    assert limits.num_ring_pages(found) == 3 * found + 1
    assert limits.ring_pages(0) == 0


def test_the_ranges_of_rings_are_there_where_a_layer_slides():
    limits = limits_of(4, 64)  # a window of 8 rows has three pages
    for ranges, rows in zip(limits.profiles(0, 8).values(), (15, 36), strict=True):
        assert (ranges["CR"], ranges["XR"], ranges["XR+1"]) == ((1, 5, rows), (2, 10, 10), (3, 11, 11))
    for with_rings, without in zip(limits.profiles(7, 8).values(), limits.profiles(7).values(), strict=True):
        assert {symbol: with_rings[symbol] for symbol in without} == without
        assert with_rings.keys() - without.keys() == {"CR", "XR", "XR+1"}


@pytest.mark.parametrize("seed", range(40))
def test_rings_hold_the_newest_rows_however_sequences_grow(seed):
    """Three sequences append chunks, many longer than a ring; after each step every window is found by its table."""
    rng = random.Random(seed)
    page_size, width = rng.choice([1, 2, 4, 7]), rng.randint(2, 5)
    window = (width - 1) * page_size
    free = rng.sample(range(1, NUM_PAGES), NUM_PAGES - 1)
    rings, length, cache, texts = [[free.pop() for _ in range(width)] for _ in range(3)], [0] * 3, {}, [[], [], []]
    for _ in range(12):
        spans, rows = [], []
        for who in rng.sample(range(3), rng.randint(1, 3)):
            count = rng.choice([1, 2, page_size, rng.randint(1, 9 * page_size)])
            made = [(who, length[who] + at) for at in range(count)]
            spans.append(Span([], length[who], count, rings[who]))
            texts[who] += made
            rows += made
            length[who] += count
        plan = ring_write_plan(spans, page_size, NUM_PAGES)
        written: dict = {}
        carry_out(written, plan, rows, page_size, "ring_")
        ordinals = {(page, position // page_size) for (page, _), (_, position) in written.items()}
        assert len({page for page, _ in ordinals}) == len(ordinals)  # a page gets rows of one ordinal
        ends = [(span.start, span.start + span.count) for span in spans]
        needed = sum(
            at // page_size > (end - 1) // page_size - width for start, end in ends for at in range(start, end)
        )
        assert len(written) == len(plan["ring_write_order"]) == needed
        cache |= written
        table, start = ring_page_table(rings, length, page_size, width)
        assert (table.dtype, start.dtype, table.shape) == (np.int32, np.int32, (3, width))
        for who in range(3):
            for at in range(max(0, length[who] - window), length[who]):
                column, slot = divmod(at - start[who], page_size)
                assert cache[table[who][column], slot] == texts[who][at]
    assert not any(page == NULL_PAGE for page, _ in cache)


def test_a_ring_s_table_by_hand():
    """Pages of 4, a ring of 3: ordinal o lies in page o mod 3, and the last ordinal is that of the row before."""
    ring = [50, 51, 52]
    table, start = ring_page_table([ring] * 6 + [[]], [0, 5, 12, 13, 16, 17, 0], 4, 3)
    assert table.tolist() == [
        [50, 51, 52], [50, 51, 52], [50, 51, 52], [51, 52, 50], [51, 52, 50], [52, 50, 51], [NULL_PAGE] * 3,
    ]  # fmt: skip
    assert start.tolist() == [0, 0, 0, 4, 4, 8, 0]


def test_a_chunk_longer_than_its_ring_by_hand():
    """Positions 2 to 17 in pages of 4, a ring of 3: of ordinals 2, 3 and 4, which are rows 6 to 15 of the chunk."""
    plan = ring_write_plan([Span([], 2, 16, [7, 5, 6])], 4, 8)
    assert plan["ring_write_order"].tolist() == [14, 15, 6, 7, 8, 9, 10, 11, 12, 13]
    assert plan["ring_write_cumulative"].tolist() == [0, 0, 0, 0, 0, 0, 2, 6, 10]
    assert not plan["ring_write_offset"].any()
    assert ring_write_plan([Span([], 2, 1, [7, 5, 6])], 4, 8)["ring_write_offset"].tolist() == [0] * 7 + [2]
