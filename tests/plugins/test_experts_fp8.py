"""Grouped experts with FP8 weights and with plain ones: the kernels against the references, and compiled.

Legend: N tokens, A experts a token, E experts, D hidden, G expert width.
"""

from __future__ import annotations

import re

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import Case, assert_agree, interpret, reference

from glmspec.plugins import OPS
from glmspec.plugins.compiler import SMS, compile_variant
from glmspec.plugins.variants import real_variants

INT, FP8 = torch.int32, torch.float8_e4m3fn
E, D, G = 5, 192, 144  # a second block of D and of G is partial
_G = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_G)


def weights(format: str, compute: torch.dtype) -> list[torch.Tensor]:
    """Of an op, in its order."""
    if format in ("moe", "moe, prompts"):
        return [(rand(E, 2 * G, D) / D**0.5).to(compute), (rand(E, D, G) / G**0.5).to(compute)]
    codes = [(rand(E, 2 * G, D) * 100).to(FP8), (rand(E, D, G) * 100).to(FP8)]
    if format.startswith("moe_fp8_block"):
        return [*codes, torch.rand(E, 4, 2, generator=_G) / 1e3, torch.rand(E, 2, 2, generator=_G) / 1e3]
    scales = [torch.rand(E, 2, generator=_G) / 1e3, torch.rand(E, generator=_G) / 1e3]
    inputs = [torch.rand(E, 2, generator=_G) / 50, torch.rand(E, generator=_G) / 200 + 0.005]
    return codes + scales + (inputs if "weights only" not in format else [])


def routed(tokens: int, picks: int, way: str) -> torch.Tensor:
    if way == "one expert":
        return torch.full((tokens, picks), 3, dtype=INT)
    if way == "any int32":
        ids = torch.randint(-(2**31), 2**31 - 1, (tokens, picks), generator=_G).to(INT)
        return torch.where(torch.rand(tokens, picks, generator=_G) < 0.5, ids, ids % E)
    low, high = {"any": (0, E), "some": (1, 3), "others'": (-2, E + 3), "nobody's": (E, E + 2)}[way]
    return torch.randint(low, high, (tokens, picks), generator=_G, dtype=INT)


FORMATS = ["moe", "moe, prompts", "moe_fp8", "moe_fp8, prompts", "moe_fp8, weights only", "moe_fp8_block",
           "moe_fp8_block, prompts"]  # fmt: skip
ROUTES = [(1, "any"), (9, "any"), (20, "some"), (40, "one expert"), (7, "nobody's"), (12, "any int32")]


def case(format: str, tokens: int, way: str, compute: torch.dtype = torch.float32) -> Case:
    expert_NA = routed(tokens, 2, way)
    tokens_of = [rand(tokens, D).to(compute), expert_NA, torch.rand(tokens, 2, generator=_G)]
    op, _, rest = format.partition(",")
    return Case(op, tokens_of + weights(format, compute), {"prompts": int("prompts" in rest)})


CASES = {f"{format}, {dtype}": case(format, 9, "others'", dtype)
         for format in FORMATS for dtype in (torch.float32, torch.bfloat16)}  # fmt: skip
CASES |= {f"moe_fp8, {tokens} tokens, {way}": case("moe_fp8", tokens, way) for tokens, way in ROUTES}
CASES |= {f"moe_fp8_block, {tokens} tokens, {way}": case("moe_fp8_block", tokens, way) for tokens, way in ROUTES[3:]}
CASES |= {"moe_fp8, prompts, 288 tokens": case("moe_fp8, prompts", 288, "any")}


@pytest.fixture(scope="module")
def found():
    return interpret(CASES)


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference(found, name):
    assert_agree(CASES[name], found[name].outputs, reference(CASES[name]))


@pytest.mark.parametrize("op", ["moe", "moe_fp8", "moe_fp8_block"])
def test_kernels_compile(op):
    assert_compiles(op)


@pytest.mark.parametrize("sm", SMS)
def test_fp8_codes_are_multiplied_by_tensor_cores(sm):
    instruction = "wgmma.*e4m3.e4m3" if sm == "SM90" else r"tcgen05.mma.*kind::f8f6f4"
    multiplying = ("_gate_up_fp8", "_down_fp8", "_blocks")
    for op in ("moe_fp8", "moe_fp8_block"):
        for variant in real_variants(OPS[op], sm):
            if variant.plugin.name.endswith(multiplying) and variant.plugin.op == "experts_fp8":
                assert re.search(instruction, compile_variant(variant).ptx), variant.plugin.name


def test_a_chunk_computes_half_as_much_again_as_it_needs():
    """512 rows, 8 picks of 256 experts: tiles of 16 rows, of which most are full."""
    expert_NA = torch.stack([torch.randperm(256, generator=_G)[:8] for _ in range(512)])
    rows = expert_NA.flatten().bincount(minlength=256)
    assert int((-(-rows // 16) * 16).sum()) <= 1.5 * int(rows.sum())
