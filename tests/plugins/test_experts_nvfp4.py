"""Routed experts with NVFP4 weights: the chain of kernels against plain torch, and compiled.

Legend: N tokens, A experts a token, P = N * A pairs, E experts, D hidden, C = D / 2 bytes of codes, S = D / 16 groups,
G expert width, F = 2 G, H = G / 2, Z = G / 16; B bytes and K groups of any row.
"""

from __future__ import annotations

import re

import pytest
import torch
from kernel_checks.launch import Launcher
from support.compiled import assert_sound
from support.faces import FP4, PROGRAMS, Case, interpret

from glmspec.plugins.compiler import SMS, compile_variant
from glmspec.plugins.experts_nvfp4 import PLUGINS, chain
from glmspec.plugins.quantize_blocks import to_e4m3
from glmspec.plugins.rounding import to_e2m1
from glmspec.plugins.spec import NoPlugin
from glmspec.plugins.variants import Recorder, Shaped

INT, BF16 = torch.int32, torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, BF16: 1.6e-2}  # relative to the largest, as ops have it
EXPERTS, PICKS = 4, 2
_G = torch.Generator().manual_seed(0)


def ids(tokens: int, low: int = 0, high: int = EXPERTS, picks: int = PICKS) -> torch.Tensor:
    return torch.randint(low, high, (tokens, picks), generator=_G, dtype=INT)


def constant(tokens: int, expert: int) -> torch.Tensor:
    return torch.full((tokens, PICKS), expert, dtype=INT)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return torch.rand(*shape, generator=_G) * (high - low) + low


def case(
    expert_NA: torch.Tensor, hidden: int = 128, width: int = 64, dtype: torch.dtype = BF16, prompts: int = 0
) -> Case:
    def weight(rows: int, columns: int) -> list[torch.Tensor]:
        codes = torch.randint(-128, 128, (EXPERTS, rows, columns // 2), generator=_G, dtype=torch.int8)
        return [codes, to_e4m3(uniform(EXPERTS, rows, columns // 16, low=0.1, high=2.0))]

    x_ND = torch.randn(len(expert_NA), hidden, generator=_G).to(dtype)
    inputs = [x_ND, expert_NA, uniform(*expert_NA.shape), *weight(2 * width, hidden), *weight(hidden, width)]
    inputs += [uniform(EXPERTS, 2, low=1e-3, high=4e-3), uniform(EXPERTS), torch.tensor([0.3])]
    return Case("experts_nvfp4:chain", [*inputs, uniform(EXPERTS, low=0.1, high=0.4)], {"prompts": prompts})


def padded(one: Case) -> Case:
    """Padded rows hold NaN, and so do their routing weights."""
    x_ND, expert_NA, weight_NA, *others = one.inputs
    away = ((expert_NA < 0) | (expert_NA >= EXPERTS)).all(1)
    x_ND[away], weight_NA[away] = float("nan"), float("nan")
    return Case(one.op, [x_ND, expert_NA, weight_NA, *others], one.attributes)


def steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., K * 16] -> its e2m1 values [..., K, 16] and e4m3 scales [..., K], as `rounding` has them."""
    groups = x.unflatten(-1, (-1, 16))
    step = to_e4m3(groups.abs().amax(-1) * (1 / 6))
    wide = step.float()
    return to_e2m1(groups / torch.where(wide == 0, 1.0, wide).unsqueeze(-1)), step


def values(codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """What codes [..., B] and scales [..., K] stand for."""
    pairs = codes.view(torch.uint8)
    numbers = torch.tensor(FP4)[torch.stack([pairs & 15, pairs >> 4], -1).long()].flatten(-2)
    return (numbers.unflatten(-1, (-1, 16)) * step.float().unsqueeze(-1)).flatten(-2)


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    numbers, step = steps((x.float() / scale).to(x.dtype).float())
    return (numbers * step.float().unsqueeze(-1)).flatten(-2)


def expected(one: Case) -> torch.Tensor:
    """[N, D], an expert at a time."""
    x_ND, expert_NA, weight_NA, gate_up, gate_up_scale, down, down_scale, factor, down_factor, input_1, middle = (
        one.inputs
    )
    dtype, out_ND = x_ND.dtype, torch.zeros(x_ND.shape)
    x = rounded(x_ND, input_1)
    for expert in range(EXPERTS):
        token, pick = (expert_NA == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ values(gate_up[expert], gate_up_scale[expert]).T).chunk(2, -1)
        gate, up = (gate * factor[expert, 0]).to(dtype), (up * factor[expert, 1]).to(dtype)
        hidden = rounded(torch.nn.functional.silu(gate) * up, middle[expert])
        y = (hidden @ values(down[expert], down_scale[expert]).T * down_factor[expert]).to(dtype).float()
        out_ND.index_add_(0, token, (y * weight_NA[token, pick].unsqueeze(1)).to(dtype).float())
    return out_ND.to(dtype)


CASES = {
    "a block": case(ids(9)),
    "one row": case(ids(1)),
    "float32": case(ids(9), dtype=torch.float32),
    "several parts and turns": case(ids(9), hidden=512, width=256),
    "parts that are no power of two": case(ids(9), hidden=384, width=192),
    "all to one expert": case(constant(30, 2)),
    "all to the last": case(constant(9, EXPERTS - 1)),
    "experts without tokens": case(ids(30, 1, 3)),
    "a token's picks are one expert": case(ids(9, picks=1).expand(9, 2).contiguous()),
    "288 rows": case(ids(288)),
    "skipped ids": case(ids(40, -2, EXPERTS + 3)),
    "padded rows": padded(case(torch.cat([ids(5), constant(11, -1)]))),
    "none is this rank's": case(constant(9, EXPERTS)),
    "any int32": case(torch.randint(-(2**31), 2**31 - 1, (9, 2), generator=_G).to(INT)),
    "prompts": case(ids(150), hidden=256, width=128, prompts=1),
    "prompts, one row": case(ids(1), prompts=1),
    "prompts, padded rows": padded(case(torch.cat([ids(70), constant(60, EXPERTS)]), prompts=1)),
    "prompts, 2,000 rows": case(ids(2000), prompts=1),
}
ON_SM90 = ("a block", "several parts and turns", "parts that are no power of two", "prompts", "skipped ids")


@pytest.fixture(scope="module")
def interpreted():
    return interpret(CASES, "SM100")


@pytest.fixture(scope="module")
def interpreted_sm90():
    return interpret({name: CASES[name] for name in ON_SM90}, "SM90")


def assert_close(one: Case, outputs: tuple[torch.Tensor, ...]) -> None:
    (found,), wanted = outputs, expected(one)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.isfinite().all()
    worst = (found.float() - wanted.float()).abs().max()
    print("off by", float(worst / wanted.float().abs().max().clamp(min=1e-30)))
    assert worst <= TOLERANCE[wanted.dtype] * wanted.float().abs().max()


@pytest.mark.parametrize("name", CASES)
def test_the_chain_equals_plain_torch(interpreted, name):
    assert_close(CASES[name], interpreted[name].outputs)


@pytest.mark.parametrize("name", ON_SM90)
def test_the_chain_of_sm90_equals_plain_torch(interpreted_sm90, name):
    assert_close(CASES[name], interpreted_sm90[name].outputs)
