"""Rows written to a paged cache: the kernel against the reference, and compiled."""

from __future__ import annotations

import pytest
import torch
from kernel_checks.launch import Launcher
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins.kv_append import APPEND, plugged
from glmspec.plugins.spec import NoPlugin

INT, WIDTH = torch.int32, APPEND.tile("SM90")["WIDTH"]
SMALL = {"N": 13, "L": 13, "X": 7, "J": 1, "P": 8, "D": 12}


def case(sizes: dict[str, int], **given) -> Case:
    """The op's example."""
    return example("kv_append", SMALL | sizes, **given)


def planned(counts: dict[int, int], pages: int, order: int, heads: int = 2, compute=torch.float32) -> Case:
    """So many rows to some pages, from slot 1 on, with an order of this length."""
    g = torch.Generator().manual_seed(len(counts))
    counts_X = torch.zeros(pages, dtype=INT)
    counts_X[list(counts)] = torch.tensor(list(counts.values()), dtype=INT)
    cumulative = torch.cat([torch.zeros(1), counts_X.cumsum(0)]).to(INT)
    inputs = [
        torch.randn(pages, heads, 4, 3, generator=g).to(compute),
        torch.randn(9, heads, 3, generator=g).to(compute),
        torch.randperm(9, generator=g)[:order].to(INT),
        torch.ones(pages, dtype=INT),
        cumulative,
    ]
    return Case("kv_append", inputs)


def every_bfloat16() -> Case:
    """Every bfloat16 there is, in 64 rows that fill a page."""
    rows = torch.arange(65536, dtype=INT).to(torch.uint16).view(torch.bfloat16).view(64, 1, 1024)
    cache = torch.zeros(3, 1, 64, 1024).to(torch.float8_e4m3fn)
    plan = [torch.arange(64, dtype=INT), torch.zeros(3, dtype=INT), torch.tensor([0, 0, 64, 64], dtype=INT)]
    return Case("kv_append", [cache, rows, *plan, torch.tensor([1.0])])


def by_hand() -> Case:
    """What is too large, ties and a zero."""
    rows = torch.tensor([[[500.0, -1e9, 17.0, 19.0, -0.0]]])
    plan = [torch.tensor([0], dtype=INT), torch.zeros(1, dtype=INT), torch.tensor([0, 1], dtype=INT)]
    return Case("kv_append", [torch.zeros(1, 1, 2, 5).to(torch.float8_e4m3fn), rows, *plan, torch.tensor([1.0])])


CASES = {
    "random": case({}),
    "bfloat16": case({}, compute=torch.bfloat16),
    "as many columns as a power of two": case({"D": 16, "J": 2}),
    "three heads": case({"J": 3, "D": 5}),
    "a full page": planned({3: 3}, pages=5, order=3),
    "one row": planned({4: 1}, pages=9, order=1, heads=1),
    "nothing": planned({}, pages=5, order=0),
    "the first page and the last": planned({0: 2, 8: 3}, pages=9, order=5),
    "rows left out": planned({1: 2, 2: 1}, pages=4, order=3),
    "an order longer than the plan": planned({1: 2, 3: 1}, pages=4, order=9),
    "an order, and a plan of nothing": planned({}, pages=5, order=9),
    **{
        f"{pages} pages": planned({0: 1, pages // 2: 3, pages // 2 + 1: 2, pages - 1: 2}, pages=pages, order=8)
        for pages in (WIDTH - 1, WIDTH, 3 * WIDTH + 5, WIDTH * WIDTH + 700)
    },
    # The places between two that are looked at first are more than are looked at together.
    "so many pages that they are searched twice": planned(
        {WIDTH - 1: 1, WIDTH + 1: 3, WIDTH + 2: 2, WIDTH + 3: 1}, pages=WIDTH * WIDTH + 700, order=7
    ),
    "pages side by side": planned({5: 3, 6: 3, 7: 3}, pages=WIDTH * 2, order=9),
    "one page": planned({0: 3}, pages=1, order=3),
    "float8": case({"J": 2}, use="fp8"),
    "float8 of bfloat16": case({}, use="fp8", compute=torch.bfloat16),
    "float8 by hand": by_hand(),
    "float8 of every bfloat16": every_bfloat16(),
}


@pytest.fixture(scope="module")
def interpreted():
    return interpret(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def test_float8_saturates_and_rounds_to_even(interpreted):
    """Literally, so that nothing is compared with itself."""
    found = interpreted["float8 by hand"].outputs[0][0, 0]
    assert found.float().tolist() == [[448.0, -448.0, 16.0, 20.0, -0.0], [0.0] * 5]


@pytest.mark.parametrize(("use", "scales", "told"), [("", 1, "float32 with a scale"), ("fp8", 0, "without a scale")])
def test_what_the_plugins_do_not_take(use, scales, told):
    with pytest.raises(NoPlugin, match=told):
        plugged(Launcher(), *case({}, use=use).inputs[:5], *[torch.ones(1)] * scales)


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_it_compiles_within_its_limits():
    assert_compiles("kv_append")
