"""Products with FP8 weights under block scales: three faces, and compiled."""

from __future__ import annotations

import re

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import Case, assert_agree, example, interpret, reference
from support.networks import run

from glmspec.plugins import OPS, block_product
from glmspec.plugins.compiler import SMS, compile_variant
from glmspec.plugins.variants import real_variants

SIZES = {"N": 9, "C": 300, "R": 200, "Z": 3, "B": 2}  # the last block of each axis is partial


def case(prompts: bool = False, compute: torch.dtype = torch.float32, **sizes: int) -> Case:
    return example("block_product", SIZES | sizes, use="prompts" if prompts else "", compute=compute)


CASES = {
    "one row": case(N=1),
    "a block": case(),
    "a tile and a row": case(N=17),
    "bfloat16": case(compute=torch.bfloat16),
    "whole blocks": case(C=256, R=128, Z=2, B=1),
    "one block of columns": case(C=40, R=40, Z=1, B=1),
    "prompts": case(True, N=70),
    "prompts in bfloat16": case(True, torch.bfloat16, N=3),
}


@pytest.fixture(scope="module")
def found():
    return interpret(CASES)


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_reference(found, name):
    assert_agree(CASES[name], found[name].outputs, reference(CASES[name]))


@pytest.mark.parametrize("name", ["one row", "a block", "whole blocks", "one block of columns"])
def test_layers_equal_the_reference(name):
    one, names = CASES[name], ("x", "code", "step", "weight", "scale")
    inputs = dict(zip(names, one.inputs, strict=True))
    (layers,) = run(inputs, lambda *given: block_product.native(*given, prompts=0), ("weight", "scale"), regions=False)
    torch.testing.assert_close(layers, reference(one)[0], rtol=1e-5, atol=1e-5)


def test_the_reference_is_what_scales_and_codes_stand_for():
    """A number at a time."""
    x, code, step, weight, scale = CASES["one row"].inputs
    found = reference(CASES["one row"])[0]
    for row in (0, 127, 128, 199):
        terms = [
            float(code[0, c]) * float(step[0, c // 128]) * float(weight[row, c]) * float(scale[row // 128, c // 128])
            for c in range(300)
        ]
        assert float(found[0, row]) == pytest.approx(sum(terms), rel=1e-4, abs=1e-4)
    assert found.dtype == x.dtype


def test_kernels_compile():
    assert_compiles("block_product")


@pytest.mark.parametrize("sm", SMS)
def test_codes_are_multiplied_by_tensor_cores(sm):
    instruction = "wgmma.*e4m3.e4m3" if sm == "SM90" else r"tcgen05.mma.*kind::f8f6f4"
    for variant in real_variants(OPS["block_product"], sm):
        if not variant.plugin.name.endswith("_sum"):
            assert re.search(instruction, compile_variant(variant).ptx), variant.plugin.name
