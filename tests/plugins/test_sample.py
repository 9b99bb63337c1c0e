"""Sampling: the kernels against the reference, the law that they draw from, and compiled.

A kernel adds in float32 and in another order, so the running sum of its law may differ by some 1e-6 of the whole.
Numbers lie 2e-5 from where the token changes, on either side: no nearer, or the token might rightly differ, and no
further, so that a law which is off by more is seen.
"""

from __future__ import annotations

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins import draw, target_probs
from glmspec.plugins.sample import SPLIT

INF = float("inf")
APART = 2e-5  # between a number and where the token changes, of the whole
NEAR = 2e-6  # by which the kernels' running sum may be off
# Temperature, top-k, top-p, min-p.
SETTINGS = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2),
    (0.9, 12, 0.6, 0.05), (1.0, 1, 1.0, 0.0), (2.0, 0, 1e-6, 0.0), (1.0, 1000, 0.999, 0.0), (0.01, 3, 0.5, 0.0),
    (100.0, 0, 0.9, 0.9), (1.0, 0, 1.0, 1.0), (0.0, 3, 0.5, 0.3),
]  # fmt: skip


def sums(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Running sums of the law, float64 [R, V], of a whole of 1."""
    sum_RV = target_probs.reference(*inputs).double().cumsum(1)
    return sum_RV / sum_RV[:, -1:]


def beside(inputs: list[torch.Tensor], g: torch.Generator) -> torch.Tensor:
    """A number for every row: a little more or less than the running sum at some token, and away from all others."""
    sum_RV, found = sums(inputs), []
    for row_V in sum_RV:
        edges = torch.cat([torch.zeros(1).double(), row_V.unique()])
        wide = edges.diff() > 2 * APART
        tried = torch.cat([edges[:-1][wide] + APART, edges[1:][wide] - APART])
        found.append(tried[torch.randint(len(tried), (), generator=g)])
    return torch.stack(found).float()


def case(logits: torch.Tensor, settings: list[tuple[float, int, float, float]], u: torch.Tensor | None = None) -> Case:
    """Rows with their settings."""
    columns = [torch.tensor(column) for column in zip(*settings, strict=True)]
    inputs = [logits, *(x.to(torch.int32) if at == 1 else x.float() for at, x in enumerate(columns))]
    u = beside(inputs, torch.Generator().manual_seed(5)) if u is None else u
    return Case("sample", [*inputs, u])


def logits(kind: str, rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    z = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(3))
    if kind == "ties":
        z = z.round()
    elif kind == "masked":
        z[:, ::3] = -INF
        z[3, 2:] = -INF  # one token left
        z[2, 6:] = -INF  # fewer than top-k
    elif kind == "flat":
        z[:] = 0.5
    elif kind == "huge":
        z *= 1e4
    elif kind == "far":
        z -= 1e4
    return z.to(dtype)


def grid_case(rows: int) -> Case:
    """One row again and again, with numbers of an even grid."""
    one = torch.tensor([1.0, -2.0, 0.5, 2.0, 1.5, -0.5, 0.0, 1.2, -1.0, 0.1, 0.9]).expand(rows, -1).contiguous()
    return case(one, [(1.3, 8, 0.9, 0.05)] * rows, (torch.arange(rows) + 0.5) / rows)


def edge_case() -> Case:
    """Numbers at the very places where the token changes, as float32 has them."""
    z = logits("random", 1, 12).expand(12, -1).contiguous()
    made = case(z, [(0.8, 0, 0.95, 0.0)] * 12, torch.zeros(12))
    made.inputs[5] = sums(made.inputs[:5])[0].roll(1).float().clamp(max=1 - 2**-24)
    made.inputs[5][0] = 0.0
    return made


def cases() -> dict[str, Case]:
    rows, bf16 = len(SETTINGS), torch.bfloat16
    wide = 2 * SPLIT + 77
    some = [SETTINGS[at] for at in (0, 1, 2, 3, 5)]
    made = {kind: case(logits(kind, rows, 40), SETTINGS) for kind in ("random", "ties", "masked", "flat", "huge")}
    made |= {
        "far from zero": case(logits("far", 3, 40), SETTINGS[2:5]),
        "random, bfloat16": case(logits("random", rows, 33, bf16), SETTINGS),
        "three splits": case(logits("random", 5, wide), some),
        "three splits with ties, bfloat16": case(logits("random", 5, wide, bf16), some),
        "one token": case(logits("random", 2, 1), SETTINGS[:2]),
        "as many as a split": case(logits("random", 2, SPLIT), SETTINGS[1:3]),
        "whole vocabulary": case(logits("random", 1, 154_880, bf16), [(1.0, 40, 0.95, 0.0)]),
        "running sums that are exact": case(torch.zeros(4, 4), [SETTINGS[1]] * 4, torch.tensor([0.0, 0.25, 0.5, 0.75])),
        # The heat is less than half of what float32 tells apart there, so a heat more is no more.
        "a heat below rounding": case(
            torch.tensor([[1e4, 1e4 + 2**-10, 1e4 - 2**-10]]), [(4e-4, 0, 0.5, 0.0)], torch.tensor([0.05])
        ),
        "a top-p that float32 takes for 0": case(logits("random", 2, 40), [(1.0, 0, 0.0, 0.0), (2.0, 5, 0.0, 0.1)]),
        "the op's example": example("sample", {"R": 4, "V": 50}, seed=1),
    }
    made["three splits"].inputs[0][0, [5000, 8200]] = 30.0  # a greedy row's best, twice, not in the first split
    made["three splits"].inputs[0][1, :SPLIT] = -INF
    made["three splits"].inputs[5] = beside(made["three splits"].inputs[:5], torch.Generator().manual_seed(6))
    return made


CASES = cases()


@pytest.fixture(scope="module")
def interpreted():
    return interpret({**CASES, "grid": grid_case(28), "edges": edge_case()})


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def test_tokens_come_as_often_as_the_law_says(interpreted):
    """On an even grid of numbers the shares are the chances, to one step of the grid."""
    given = grid_case(28).inputs
    probs_V = target_probs.reference(*given[:5])[0]
    shares_V = torch.bincount(interpreted["grid"].outputs[0].long(), minlength=len(probs_V)) / 28
    assert (probs_V == 0).any() and (shares_V[probs_V == 0] == 0).all()
    assert (shares_V - probs_V).abs().max() <= 1 / 28


def test_where_the_token_changes_it_is_one_of_the_two(interpreted):
    """A differing token is the neighbour in the running sum, and one that the law has."""
    given = edge_case().inputs
    probs_RV, u_R = target_probs.reference(*given[:5]).double(), given[5]
    neighbours = [draw.reference(probs_RV, (u_R.double() + by).clamp(0, 1)).tolist() for by in (-NEAR, NEAR)]
    found = interpreted["edges"].outputs[0].tolist()
    assert all(token in pair for token, pair in zip(found, zip(*neighbours, strict=True), strict=True))
    assert all(probs_RV[0, token] > 0 for token in found) and len(set(found)) > 3


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_they_compile_within_their_limits():
    assert_compiles("sample")
