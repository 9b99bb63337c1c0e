"""Argmax: the kernel against the reference, and compiled."""

from __future__ import annotations

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, interpret, reference

from glmspec.plugins.argmax import ARGMAX_SPLIT

TILE = ARGMAX_SPLIT.tile("SM90")["BLOCK"]
INF = float("inf")


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {
        "random": torch.randn(7, 33, generator=g),
        "ties": torch.randn(20, 9, generator=g).round(),
        "equal rows": torch.full((3, 64), -2.5),
        "one column": torch.randn(2, 1, generator=g),
        "one row": torch.randn(1, 1000, generator=g),
        "rows of -inf": torch.full((3, 33), -INF),
        "zeros of both signs": torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, 0.0], [-1.0, -0.0, 0.0]]),
        "inf and the largest": torch.tensor([[3e38, INF, INF, -INF], [-3e38, -INF, -3e38, -INF]]),
        "a tile": torch.randn(2, TILE, generator=g),
        "a tile and one": torch.randn(2, TILE + 1, generator=g).clamp(max=-1),
        "ties across tiles": torch.randn(4, 2 * TILE + 77, generator=g).clamp(max=1),
        "whole vocabulary": torch.randn(2, 154_880, generator=g).clamp(max=4),
    }
    made["rows of -inf"][1, -1] = -3e38  # one of them has something else at its end
    made["a tile and one"][0, -1] = 0.0  # the maximum is alone in the last tile
    ties = made["ties across tiles"]
    ties[0, [TILE - 1, TILE]] = 5.0
    ties[1, [3, TILE + 2]] = 5.0  # the lower column in the higher lane
    ties[2, [1, TILE, 2 * TILE + 76]] = 5.0
    ties[3], ties[3, -1] = -INF, -3e38  # all but the last column, and all but the last split
    made["whole vocabulary"][0, [70_000, 154_879]] = 9.0
    return made


CASES = {
    f"{name}, {dtype}": Case("argmax", [x.to(dtype)])
    for dtype in (torch.bfloat16, torch.float32)
    for name, x in inputs().items()
}
NAN_ROWS = torch.full((3, TILE + 4), float("nan"))
NAN_ROWS[0, 1:3] = torch.tensor([1.0, 2.0])
NAN_ROWS[1, TILE] = -5.0


@pytest.fixture(scope="module")
def interpreted():
    return interpret({**CASES, "NaN": Case("argmax", [NAN_ROWS])})


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def test_a_nan_never_wins(interpreted):
    assert interpreted["NaN"].outputs[0].tolist() == [2, TILE, 0]


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_it_compiles_within_its_limits():
    assert_compiles("argmax")
