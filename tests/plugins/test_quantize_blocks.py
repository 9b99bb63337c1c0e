"""FP8 codes with a scale a block: the kernel against the reference, byte for byte, and compiled."""

from __future__ import annotations

import pytest
import torch
from kernel_checks.launch import Launcher
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, example, interpret, reference

from glmspec.plugins.spec import NoPlugin

BLOCK = 128


def case(x: torch.Tensor) -> Case:
    return Case("quantize_blocks", [x])


def every_bfloat16() -> torch.Tensor:
    """All finite ones, sorted, so that a block's are of one size and none is lost below another."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.isfinite()].float().sort().values.to(torch.bfloat16)
    return torch.nn.functional.pad(x, (0, -len(x) % (16 * BLOCK))).view(-1, 16 * BLOCK)


def grid() -> torch.Tensor:
    """Blocks whose scale is one: multiples of 2^-11 up to 4, of 2^-3 up to 448, of both signs. All codes, all ties."""
    fine, coarse = torch.arange(0, 4, 2**-11), torch.arange(0, 448.1, 2**-3)
    x = torch.cat([fine, -fine, coarse, -coarse])
    x = torch.nn.functional.pad(x, (0, -len(x) % (BLOCK - 1))).view(-1, BLOCK - 1)
    x = torch.cat([x, torch.full((len(x), 1), 448.0)], 1)
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 8)).view(-1, 8 * BLOCK)


def edges() -> torch.Tensor:
    """Zeros of both signs, the least and greatest numbers, a block below the least scale, one value a block."""
    x = torch.zeros(6, 3 * BLOCK + 17)
    x[1] = -0.0
    x[2, ::BLOCK] = 3e38
    x[3, 1::2], x[3, ::2] = 1e-42, -1e-38
    x[4, ::7] = 4.4e-10
    x[5, -1] = -5.0
    return x


def rand(*dims: int) -> torch.Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(0))


CASES = {
    "example": example("quantize_blocks", {"N": 5, "D": 512}),
    "example, bfloat16": example("quantize_blocks", {"N": 5, "D": 512}, compute=torch.bfloat16),
    "a partial block": case(rand(7, 200)),
    "a partial block, bfloat16": case(rand(3, 300).bfloat16()),
    "narrower than a block": case(rand(5, 40)),
    "one block": case(rand(1, BLOCK)),
    "every bfloat16": case(every_bfloat16()),
    "every code and tie": case(grid()),
    "edges": case(edges()),
    "edges, bfloat16": case(edges().bfloat16()),
}
NOT_NUMBERS = case(rand(2, 2 * BLOCK))
NOT_NUMBERS.inputs[0][0, 3], NOT_NUMBERS.inputs[0][1, BLOCK] = float("nan"), float("inf")


@pytest.fixture(scope="module")
def interpreted():
    return interpret({**CASES, "not numbers": NOT_NUMBERS})


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(interpreted, name):
    codes, scales = interpreted[name].outputs
    expected, wanted = reference(CASES[name])
    assert codes.dtype == expected.dtype and torch.equal(scales, wanted)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


def test_what_is_not_a_number_does_no_harm_to_other_blocks(interpreted):
    codes, scales = interpreted["not numbers"].outputs
    expected, wanted = reference(NOT_NUMBERS)
    assert codes[0, 3].isnan() and codes[1, BLOCK].isnan()
    for row, first in ((0, BLOCK), (1, 0)):
        assert scales[row, first // BLOCK] == wanted[row, first // BLOCK]
        here = slice(first, first + BLOCK)
        assert torch.equal(codes[row, here].view(torch.uint8), expected[row, here].view(torch.uint8))


def test_experts_keep_their_layers():
    one = case(rand(2, 3, BLOCK))
    with pytest.raises(NoPlugin, match="found 3 dimensions"):
        one.spec.plugged(Launcher(), *one.inputs)


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_it_compiles_within_its_limits():
    assert_compiles("quantize_blocks")
