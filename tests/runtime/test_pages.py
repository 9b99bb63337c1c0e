"""Who owns cache pages, and where a step's rows are written."""

from __future__ import annotations

import random

import numpy as np
import pytest

from glmspec.build.errors import RequestError
from glmspec.runtime.pages import NULL_PAGE, PagePool, Span, page_table, write_plan

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
    order, offset, cumulative = plan["write_order"], plan["write_offset"], plan["write_cumulative"]
    assert {array.dtype for array in plan.values()} == {np.dtype(np.int32)}
    assert (len(order), len(offset), len(cumulative)) == (len(rows), NUM_PAGES, NUM_PAGES + 1)
    assert (cumulative[0], cumulative[-1]) == (0, len(rows))
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
