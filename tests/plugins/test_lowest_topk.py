"""The k largest with the lowest column first among equals: the kernels against the reference, and compiled."""

from __future__ import annotations

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins.lowest_topk import TILE

INF = float("inf")
K = 2048
FAN = TILE // K


def scores(*dims: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed))


def short(score: torch.Tensor, k: int) -> Case:
    return Case("lowest_topk", [score], {"k": k})


def special() -> torch.Tensor:
    """Rows of everything that a float can be."""
    made = scores(9, 50)
    made[0] = -INF
    made[1, 7:] = -INF
    made[2, ::3] = INF
    made[3] = made[3].sign() * 0.0  # zeros of both signs
    made[4] = made[4].round()
    made[5] = made[5].abs() * 1e-42  # subnormal
    made[6] = made[6].sign() * 3e38
    made[7], made[8] = 0.0, torch.arange(50.0)
    return made


def long_rows() -> torch.Tensor:
    """Two groups of splits, the last split partly filled."""
    made = scores(6, FAN * TILE + TILE + 16)
    made[0].clamp_(min=0)
    made[1] = made[1].round()  # ties everywhere
    made[2], made[2, TILE - 5 : TILE + 5] = 0.0, 1.0  # all ties but a few, across a split
    made[3, :] = torch.arange(made.shape[1])  # the best are all in the last split
    made[4] = -made[3]  # in the first
    made[5] = -INF
    made[5, 100::100] = made[1, 100::100]  # fewer than K above -inf
    return made


CASES = {
    "a router": example("lowest_topk", {"N": 5, "L": 256}),
    "columns that are no power of two": short(scores(4, 100), 7),
    "everything is kept": short(scores(3, 8), 8),
    "one of one": short(scores(2, 1), 1),
    "all but one, mostly ties": short(scores(5, 40).sign() * 0.0, 39),
    "infinities, zeros, ties, tiny and huge": short(special(), 11),
    "a tile of K": example("lowest_topk", {"N": 2, "L": K}, use="context"),
    "a tile and one": example("lowest_topk", {"N": 2, "L": TILE + 1}, use="context"),
    "a K that is no power of two": short(scores(2, 2 * TILE + 3).round(decimals=2), 1000),
    "two groups of splits": short(long_rows(), K),
    "as many groups as splits meet last": short(scores(1, 5 * TILE).round(decimals=1), TILE // 2),
}
NAN_ROWS = torch.where(scores(3, TILE + 100) > 0.5, float("nan"), scores(3, TILE + 100))
NAN_ROWS[1] = float("nan")


@pytest.fixture(scope="module")
def interpreted():
    return interpret({**CASES, "NaN": short(NAN_ROWS, K)})


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def test_a_nan_sorts_as_its_bits_do(interpreted):
    assert_agree(short(NAN_ROWS, K), interpreted["NaN"].outputs, reference(short(NAN_ROWS, K)))


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_it_compiles_within_its_limits():
    assert_compiles("lowest_topk")
