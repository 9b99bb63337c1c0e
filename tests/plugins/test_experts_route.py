"""Pairs of tokens and experts sorted by expert, and the sum over a token's experts: the kernels against plain torch.

Legend: N tokens, A experts a token, P = N * A pairs, D hidden.
"""

from __future__ import annotations

import pytest
import torch
from support.compiled import assert_sound
from support.faces import PROGRAMS, Case, interpret

from glmspec.plugins.compiler import SMS, compile_variant
from glmspec.plugins.experts import PLUGINS, route, summed
from glmspec.plugins.variants import Recorder, Shaped

INT = torch.int32
EXPERTS = 6
_G = torch.Generator().manual_seed(0)


def drawn(tokens: int, picks: int, low: int = 0, high: int = EXPERTS) -> torch.Tensor:
    return torch.randint(low, high, (tokens, picks), generator=_G, dtype=INT)


def constant(tokens: int, picks: int, expert: int) -> torch.Tensor:
    return torch.full((tokens, picks), expert, dtype=INT)


ANY = torch.randint(-(2**31), 2**31 - 1, (40, 3), generator=_G).to(INT)
ROUTES = {
    "one row": drawn(1, 2),
    "a block": drawn(9, 4),
    "more than a chunk": drawn(600, 4),
    "a chunk": drawn(512, 4),
    "all to one expert": constant(288, 2, 3),
    "all to the first": constant(7, 2, 0),
    "all to the last": constant(7, 2, EXPERTS - 1),
    "experts without tokens": drawn(30, 2, 2, 4),
    "a token's picks are one expert": drawn(9, 1).expand(9, 4).contiguous(),
    "skipped ids": drawn(40, 3, -3, EXPERTS + 4),
    "padded rows": torch.cat([drawn(5, 3), constant(11, 3, -1)]),
    "padded rows of more than a chunk": torch.cat([drawn(5, 4), constant(1100, 4, EXPERTS)]),
    "none is this rank's": constant(20, 2, EXPERTS),
    "any int32": ANY,
}
ROUTED = {name: Case("experts:route", [expert_NA], {"experts": EXPERTS}) for name, expert_NA in ROUTES.items()}


def sorted_pairs(expert_NA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ROUTE gives, in another way."""
    expert_P = expert_NA.flatten()
    of = [(expert_P == expert).nonzero().flatten() for expert in range(EXPERTS)]
    order_P = torch.full_like(expert_P, -1)
    valid = torch.cat(of).to(INT)
    order_P[: len(valid)] = valid
    count = torch.tensor([len(pairs) for pairs in of])
    return order_P, torch.stack([count.cumsum(0) - count, count], 1).to(INT)


def sum_case(expert_NA: torch.Tensor, columns: int, dtype: torch.dtype) -> Case:
    """Skipped pairs hold NaN."""
    out_PD = torch.randn(expert_NA.numel(), columns, generator=_G).to(dtype)
    out_PD[~here(expert_NA).flatten()] = float("nan")
    return Case("experts:summed", [out_PD, expert_NA], {"experts": EXPERTS})


def here(expert_NA: torch.Tensor) -> torch.Tensor:
    return (expert_NA >= 0) & (expert_NA < EXPERTS)


SUMMED = {
    "float32": sum_case(drawn(5, 4), 40, torch.float32),
    "bfloat16": sum_case(drawn(5, 4), 40, torch.bfloat16),
    "float16": sum_case(drawn(3, 8), 1200, torch.float16),
    "skipped ids": sum_case(ROUTES["skipped ids"], 17, torch.bfloat16),
    "padded rows": sum_case(ROUTES["padded rows"], 64, torch.bfloat16),
    "any int32": sum_case(ANY, 8, torch.float32),
}


@pytest.fixture(scope="module")
def interpreted():
    return interpret(ROUTED) | interpret({f"sum, {name}": case for name, case in SUMMED.items()})


@pytest.mark.parametrize("name", ROUTES)
def test_pairs_are_sorted(interpreted, name):
    for output, expected in zip(interpreted[name].outputs, sorted_pairs(ROUTES[name]), strict=True):
        assert output.dtype == expected.dtype and torch.equal(output, expected)


@pytest.mark.parametrize("name", SUMMED)
def test_picks_are_summed_in_order(interpreted, name):
    out_PD, expert_NA = SUMMED[name].inputs
    out_NAD = out_PD.float().nan_to_num().view(*expert_NA.shape, -1)
    total = torch.zeros_like(out_NAD[:, 0])
    for pick in range(expert_NA.shape[1]):
        total += out_NAD[:, pick]
    (output,) = interpreted[f"sum, {name}"].outputs
    assert output.dtype == out_PD.dtype and torch.equal(output, total.to(out_PD.dtype))


def test_the_cases_are_few_programs(interpreted):
    assert sum(result.programs for result in interpreted.values()) < PROGRAMS


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("experts", [256, 32])
def test_they_compile_within_their_limits(sm, experts):
    run, expert_NA = Recorder(sm), Shaped((-1, 8), "int32")
    route(run, expert_NA, experts=experts)
    for dtype in ("bfloat16", "float32"):
        summed(run, Shaped((-1, 6144), dtype), expert_NA, experts=experts)
    assert {variant.plugin.id for variant in run.variants} == {plugin.id for plugin in PLUGINS}
    for variant in run.variants:
        assert_sound(compile_variant(variant))
