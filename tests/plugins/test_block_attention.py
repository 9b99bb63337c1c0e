"""Attention of a drafter's block: the kernels against the reference, and compiled.

bfloat16 products are wrong in Triton's interpreter, so they are tested in float16, of which all else is the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_checks.launch import Launcher
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins.block_attention import plugged
from glmspec.plugins.spec import NoPlugin

HALF, INT = torch.float16, torch.int32
SMALL = {"B": 2, "R": 3, "H": 2, "J": 1, "D": 12, "P": 16, "M": 4, "X": 12}
NAMES = ["q", "k", "v", "k_cache", "v_cache", "table", "anchor", "start"]


def case(sizes=None, *, causal=False, window=0, relative=False, use="", compute=torch.float32, **changed) -> Case:
    """The op's example, masked in some way, with other inputs by name."""
    made = example("block_attention", SMALL | (sizes or {}), use=use, compute=compute)
    names = NAMES[: len(made.inputs)]
    inputs = [changed.get(name, x) for name, x in zip(names, made.inputs, strict=True)]
    return Case("block_attention", inputs, dict(scale=0.4, causal=causal, window=window, relative=relative))


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT)


def poisoned(made: Case) -> Case:
    """Whatever stands outside of every block's context is NaN, and so are the pages that no table has."""
    caches = [cache.clone() for cache in made.inputs[3:5]]
    start_B = made.inputs[7] if len(made.inputs) > 7 else torch.zeros(2, dtype=INT)
    seen = torch.zeros(caches[0].shape[0], caches[0].shape[2], dtype=torch.bool)
    for table, anchor, start in zip(made.inputs[5].tolist(), made.inputs[6].tolist(), start_B.tolist(), strict=True):
        for column in range(anchor - start):
            position = start + column
            if not made.attributes["window"] or position >= anchor - made.attributes["window"]:
                seen[table[column // 16], column % 16] = True
    for cache in caches:
        cache.transpose(1, 2)[~seen] = float("nan")
    return replace(made, inputs=[*made.inputs[:3], *caches, *made.inputs[5:]])


MASKS = [
    {"causal": False, "window": 9, "relative": False},
    {"causal": True, "window": 9, "relative": False},
    {"causal": False, "window": 9, "relative": True},
    {"causal": True, "window": 2, "relative": True},
    {"causal": False, "window": 2, "relative": True},
    {"causal": False, "window": 37, "relative": False},
]
ONE = {"B": 3, "R": 2, "D": 4, "M": 40, "X": 121}  # several tiles a split
CASES = {
    "whole context": case(),
    "causal": case(causal=True),
    "two key/value heads": case({"H": 6, "J": 2}),
    **{f"{mask}": case(**mask, anchor=ints(52, 33)) for mask in MASKS},
    "a ring": case(use="ring", window=30),
    "a causal ring": case(use="ring", window=30, causal=True),
    "a relative ring": case(use="ring", window=30, relative=True),
    "a ring later than the window": case(use="ring", window=64, start=ints(96, 160), anchor=ints(96 + 33, 160 + 64)),
    "no context, and one row": case(anchor=ints(0, 1)),
    "no context in a window": case(window=5, anchor=ints(0, 1)),
    "a page, and a page and a row": case(anchor=ints(16, 17)),
    "a full table": case(anchor=ints(64, 63)),
    "a table too short for the anchor": case(use="ring", window=0, start=ints(0, 16), anchor=ints(64, 80)),
    "several tiles a split": case(ONE),
    "several tiles a split, in a window": case(ONE, window=80),
    "more rows than a tile": case({"R": 37, "H": 2, "B": 1, "X": 5}, causal=True),
    "more queries than a program has": case({"R": 9, "H": 16, "B": 1, "X": 5}),
    "as many columns as a power of two": case({"D": 32, "P": 32, "X": 9}),
    "pages of 48": case({"P": 48, "M": 2, "X": 5}, window=50),
    "half": case(compute=HALF),
    "half, the full width": replace(
        case({"B": 1, "R": 8, "H": 6, "J": 1, "D": 128, "P": 64, "M": 1, "X": 2}, compute=HALF),
        attributes={"scale": 0.0884, "causal": True, "window": 40, "relative": False},
    ),
    "large scores of both signs": case({}, q=example("block_attention", SMALL).inputs[0] * 60),
}
HIDDEN = {
    "whole context": poisoned(case()),
    "a window": poisoned(case(window=9)),
    "a ring": poisoned(case(use="ring", window=30)),
}


@pytest.fixture(scope="module")
def interpreted():
    return interpret({**CASES, **{f"hidden, {name}": made for name, made in HIDDEN.items()}})


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_row_sees_is_not_read(interpreted, name):
    made = HIDDEN[name]
    clean = replace(made, inputs=[x.nan_to_num() if x.is_floating_point() else x for x in made.inputs])
    assert_agree(made, interpreted[f"hidden, {name}"].outputs, reference(clean))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [({"P": 8, "X": 30}, "pages of 8 rows, expected a multiple of 16"), ({"D": 80}, "float32 heads of 80 columns")],
)
def test_what_the_plugins_do_not_take(sizes, told):
    made = case(sizes)
    with pytest.raises(NoPlugin, match=told):
        plugged(Launcher(), *made.inputs, **made.attributes)


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_they_compile_within_their_limits():
    assert_compiles("block_attention")
