"""DSA index scores and top-k: the kernels against the reference, and compiled.

Values are small whole numbers, so sums are exact in any order and ties are many. The interpreter multiplies bfloat16
wrongly: the kernel's way of 16-bit numbers is tested in float16.
"""

from __future__ import annotations

import pytest
import torch
from kernel_checks.launch import Launcher
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins.index_topk import INDEX_SCORES
from glmspec.plugins.lowest_topk import TILE
from glmspec.plugins.spec import NoPlugin

INT = torch.int32
SCORES = INDEX_SCORES.tile("SM90")["TILE"]


def case(
    segments: list[tuple[int, list[int | None]]],
    slots: int,
    *,
    k: int = 8,
    pages: int = 6,
    page_size: int = 4,
    heads: int = 2,
    dim: int = 16,
    compute: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """segments: of which sequence each is, and its slots' positions. Tokens are shuffled; free slots hold token 0."""
    g = torch.Generator().manual_seed(seed)
    whole = lambda *dims: torch.randint(-2, 3, dims, generator=g).to(compute)  # noqa: E731
    sequences = 1 + max(sequence for sequence, _ in segments)
    pool = sequences * pages + 3
    table = (torch.randperm(pool - 1, generator=g)[: sequences * pages] + 1).view(sequences, pages).to(INT)
    places = [(at, slot, p) for at, (_, told) in enumerate(segments) for slot, p in enumerate(told) if p is not None]
    places = [places[at] for at in torch.randperm(len(places), generator=g).tolist()]
    rows = torch.zeros(len(segments), slots, dtype=INT)
    for token, (segment, slot, _) in enumerate(places):
        rows[segment, slot] = token
    inputs = [
        whole(len(places), heads, dim),
        torch.randint(-3, 9, (len(places), heads), generator=g).float() / 4,
        whole(pool, 1, page_size, dim),
        table[[sequence for sequence, _ in segments]],
        rows,
        torch.tensor([[segment, slot] for segment, slot, _ in places], dtype=INT),
        torch.tensor([p for _, _, p in places], dtype=INT),
    ]
    return Case("index_topk", inputs, {"k": k, "at_once": 2})


def changed(one: Case, **inputs: torch.Tensor) -> Case:
    """With other inputs, by name."""
    given = [inputs.get(name, x) for name, x in zip(one.spec.inputs, one.inputs, strict=True)]
    return Case(one.op, given, one.attributes)


# Two sequences; the first in two segments, one of them with free slots.
MIXED = [(0, [0, 7, 11]), (0, [8, 23]), (1, [3])]
LONG = [(0, [SCORES - 1, SCORES]), (1, [300])]
FREE = [None] * 15
NARROW = case([(0, [7, 23])], 2)
SEVERAL = case(LONG, 4, k=50, pages=20, page_size=16)
CASES = {
    "segments with free slots": case(MIXED, 4),
    "a head, a row, a K of one": case([(0, [17])], 1, heads=1, k=1),
    "heads and dims that are no powers of two": case(MIXED, 4, heads=5, dim=24, k=5),
    "more heads than eight": case([(0, [7, 23])], 2, heads=9),
    "several tiles": SEVERAL,
    "all scores are zero": changed(NARROW, q_NHD=torch.zeros_like(NARROW.inputs[0])),
    "no score above zero": changed(NARROW, weight_NH=-NARROW.inputs[1].abs()),
    "contexts shorter than K": case([(0, [0, 3, 48]), (1, [99])], 3, k=64, pages=25),
    "K is the whole table": case([(0, [7, 23])], 2, k=24),
    # More slots than are looked at at once.
    "the last slot the furthest": case([(0, [*FREE, 1, 200])], 17, pages=13, page_size=16),
    "the first slot the furthest": case([(0, [200, *FREE, 1])], 17, pages=13, page_size=16),
    "an example": example("index_topk", {"N": 3, "H": 4, "D": 16, "G": 1, "S": 4, "M": 33, "X": 40, "P": 64}),
    "16-bit, segments with free slots": case(MIXED, 4, compute=torch.float16),
    "16-bit, odd sizes": case(LONG, 4, heads=5, dim=24, k=50, pages=20, page_size=16, compute=torch.float16),
    # A list as long as half a tile makes two groups of three splits.
    "two groups of splits": case([(0, [2 * TILE + 100, TILE])], 2, k=TILE // 2, pages=515, page_size=64),
}
ON_SM100 = {name: CASES[name] for name in ("segments with free slots", "several tiles")}


@pytest.fixture(scope="module")
def interpreted():
    """SM90's tiles hold two slots, SM100's one."""
    other = interpret(ON_SM100, "SM100")
    return interpret(CASES) | {f"{name}, SM100": one for name, one in other.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


@pytest.mark.parametrize("name", ON_SM100)
def test_they_do_with_other_tiles(interpreted, name):
    assert_agree(CASES[name], interpreted[f"{name}, SM100"].outputs, reference(CASES[name]))


@pytest.mark.parametrize(("k", "page_size", "why"), [(TILE, 4, "k: found"), (8, 6, "page size: found 6")])
def test_other_sizes_keep_the_layers(k, page_size, why):
    run = Launcher()
    one = case(MIXED, 4, k=k, page_size=page_size)
    with pytest.raises(NoPlugin, match=why):
        one.spec.plugged(run, *one.inputs, **one.attributes)
    assert not run.programs


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_it_compiles_within_its_limits():
    assert_compiles("index_topk")
