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

from glmspec.plugins.compiler import SMS, Variant, compile_variant
from glmspec.plugins.experts_nvfp4 import CODED, GATE_UP, GATE_UP_LONG, PLUGINS, QUANTIZE, chain
from glmspec.plugins.quantize_blocks import to_e4m3
from glmspec.plugins.rounding import to_e2m1
from glmspec.plugins.spec import NoPlugin
from glmspec.plugins.variants import Recorder, Shaped

INT, BF16 = torch.int32, torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, BF16: 1.6e-2}  # relative to the largest, as ops have it
EXPERTS, PICKS = 5, 2
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
    inputs += [uniform(EXPERTS, 2, low=1e-3, high=4e-3), uniform(EXPERTS)]
    scales = [torch.tensor([0.3]), uniform(EXPERTS, low=0.1, high=0.4)]
    return Case("experts_nvfp4:chain", inputs + scales, {"prompts": prompts})


def wide(example: Case) -> Case:
    """The case without scales of activations."""
    return Case(example.op, example.inputs[:9], example.attributes)


def padded(example: Case) -> Case:
    """Padded rows hold NaN, and so do their routing weights."""
    x_ND, expert_NA, weight_NA, *others = example.inputs
    away = ((expert_NA < 0) | (expert_NA >= EXPERTS)).all(1)
    x_ND[away], weight_NA[away] = float("nan"), float("nan")
    return Case(example.op, [x_ND, expert_NA, weight_NA, *others], example.attributes)


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


def rounded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x.float()
    numbers, step = steps((x.float() / scale).to(x.dtype).float())
    return (numbers * step.float().unsqueeze(-1)).flatten(-2)


def expected(example: Case) -> torch.Tensor:
    """[N, D], an expert at a time."""
    x_ND, expert_NA, weight_NA, gate_up, gate_up_scale, down, down_scale, factor, down_factor, *scales = example.inputs
    input_1, middle = scales or (None, [None] * EXPERTS)
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
    "rows of more than a block": case(ids(5), hidden=1152),
    "all to one expert": case(constant(30, 2)),
    "all to the last": case(constant(9, EXPERTS - 1)),
    "experts without tokens": case(ids(30, 1, 3)),
    "a token's picks are one expert": case(ids(9, picks=1).expand(9, 2).contiguous()),
    "288 rows": case(ids(288)),
    "skipped ids": case(ids(40, -2, EXPERTS + 3)),
    "padded rows": padded(case(torch.cat([ids(5), constant(11, -1)]))),
    "none is this rank's": case(constant(9, EXPERTS)),
    "any int32": case(
        torch.where(
            torch.arange(9).view(9, 1) % 2 == 0, ids(9), torch.randint(-(2**31), 2**31 - 1, (9, 2), generator=_G)
        ).to(INT)
    ),
    "prompts": case(ids(150), hidden=256, width=128, prompts=1),
    "prompts, one row": case(ids(1), prompts=1),
    "prompts, padded rows": padded(case(torch.cat([ids(70), constant(60, EXPERTS)]), prompts=1)),
    "prompts, 2,000 rows": case(ids(2000), prompts=1),
}
WIDE = ("a block", "one row", "several parts and turns", "rows of more than a block", "padded rows", "prompts")
CASES |= {f"{name}, bfloat16": wide(CASES[name]) for name in WIDE}
ON_SM90 = ("a block", "several parts and turns", "parts that are no power of two", "prompts", "skipped ids")


@pytest.fixture(scope="module")
def interpreted():
    return interpret(CASES, "SM100")


@pytest.fixture(scope="module")
def interpreted_sm90():
    return interpret({name: CASES[name] for name in ON_SM90}, "SM90")


def assert_close(example: Case, outputs: tuple[torch.Tensor, ...]) -> None:
    (output,), wanted = outputs, expected(example)
    assert output.dtype == wanted.dtype and output.shape == wanted.shape and output.isfinite().all()
    assert (output == wanted).float().mean() > 0.95  # as the steps between are rounded in the same places
    worst = (output.float() - wanted.float()).abs().max()
    assert worst <= TOLERANCE[wanted.dtype] * wanted.float().abs().max()


@pytest.mark.parametrize("name", CASES)
def test_the_chain_equals_plain_torch(interpreted, name):
    assert_close(CASES[name], interpreted[name].outputs)


@pytest.mark.parametrize("name", ON_SM90)
def test_the_chain_of_sm90_equals_plain_torch(interpreted_sm90, name):
    assert_close(CASES[name], interpreted_sm90[name].outputs)


def test_x_is_rounded_to_the_very_codes():
    """Zeros of both signs, ties, rows of one size, what is beyond the largest scale, and a row of random numbers."""
    x = torch.randn(9, 256, generator=_G)
    x[1], x[2], x[3, 1::2], x[4] = 0.0, -0.0, 1e-30, 1e9
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[5] = torch.cat([ties, -ties]).repeat(16)
    x[6] = x[5] * torch.tensor(0.3)
    scale = torch.tensor([1.0])
    for dtype in (torch.float32, BF16):
        example = Case("experts_nvfp4:QUANTIZE", [x.to(dtype), scale])
        codes, step = interpret({"": example})[""].outputs
        numbers, wanted = steps((x.to(dtype).float() / scale).to(dtype).float())
        assert torch.equal(step.view(torch.uint8), wanted.view(torch.uint8))
        size = (numbers.abs().unsqueeze(-1) == torch.tensor(FP4[:8])).long().argmax(-1) + 8 * numbers.signbit()
        low, high = size.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
        assert torch.equal(codes.view(torch.uint8), (low | high << 4).to(torch.uint8))


def anything(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=_G).to(INT)


@pytest.mark.parametrize("long", ["", "_LONG"])
def test_any_routing_stays_within_its_memory(long):
    """TensorRT times kernels on arbitrary buffers. (An address beyond memory ends the interpreter.)"""
    x_ND, _, weight_NA, gate_up, gate_up_scale, down, down_scale, factor, down_factor, _, middle = case(ids(40)).inputs
    codes = torch.randint(-128, 128, (40, 64), generator=_G, dtype=torch.int8), to_e4m3(uniform(40, 8))
    places = torch.randint(-128, 128, (80, 32), generator=_G, dtype=torch.int8), to_e4m3(uniform(80, 4))
    cases = {}
    for name, routed in {
        "both": (anything(80), anything(EXPERTS, 2)),
        "places of pairs that are none": (
            anything(80),
            torch.tensor([[0, 20], [20, 20], [40, 20], [60, 19], [79, 1]], dtype=INT),
        ),
        "ranges that go beyond": (
            torch.arange(80, dtype=INT),
            torch.tensor([[70, 60], [80, 9], [-5, 80], [0, 2**31 - 1], [7, 0]], dtype=INT),
        ),
    }.items():
        gate_up_inputs = [*codes, x_ND, *routed, gate_up, gate_up_scale, factor, middle]
        cases[f"gate_up, {name}"] = Case(f"experts_nvfp4:GATE_UP{long}", gate_up_inputs, {"picks": PICKS})
        down_inputs = [*places, x_ND, *routed, down, down_scale, down_factor, weight_NA]
        cases[f"down, {name}"] = Case(f"experts_nvfp4:DOWN{long}", down_inputs)
        gate_up_16, down_16 = [x_ND, *gate_up_inputs[3:-1]], [x_ND[:, :64].repeat(2, 1), *down_inputs[3:]]
        cases[f"gate_up_16, {name}"] = Case(f"experts_nvfp4:GATE_UP_16{long}", gate_up_16, {"picks": PICKS})
        cases[f"down_16, {name}"] = Case(f"experts_nvfp4:DOWN_16{long}", down_16)
    assert set(interpret(cases, "SM100")) == set(cases)


@pytest.mark.parametrize(("hidden", "width"), [(192, 64), (128, 96)])
def test_what_the_plugins_do_not_take(hidden, width):
    with pytest.raises(NoPlugin, match="expected multiples of 128 and 64"):
        chain(Launcher(), *case(ids(3), hidden, width).inputs)


def test_activations_without_scales_are_bfloat16():
    with pytest.raises(NoPlugin, match="activations of float32 without scales, expected bfloat16"):
        chain(Launcher(), *wide(case(ids(3), dtype=torch.float32)).inputs)


@pytest.mark.parametrize(("tokens", "plugin"), [(512, GATE_UP), (2048, GATE_UP_LONG)])
def test_tiles_are_at_most_half_as_large_again_as_their_rows(tokens, plugin):
    picked = torch.stack([torch.randperm(256, generator=_G)[:8] for _ in range(tokens)])
    count, tile = torch.bincount(picked.flatten(), minlength=256), plugin.tile("SM100")["TILE"]
    assert ((count + tile - 1) // tile * tile).sum() <= 1.5 * picked.numel()


def test_the_cases_are_few_programs(interpreted, interpreted_sm90):
    results = {**interpreted, **interpreted_sm90}
    assert sum(result.programs for name, result in results.items() if "2,000" not in name) < 3 * PROGRAMS


PRODUCTS = re.compile(r"(?:tcgen05\.mma|wgmma\.mma_async)\.[\w.:]+")
CODED_PRODUCT = "mxf4nvf4.block_scale"
BF16_PRODUCT = {"SM90": "f32.bf16.bf16", "SM100": "kind::f16", "SM103": "kind::f16"}
SIZES = {"eight ranks": (6144, 256, 256), "eight ranks of whole experts": (6144, 2048, 32), "tiny": (128, 64, 8)}


def variants(sm: str, hidden: int, width: int, experts: int) -> list[Variant]:
    """Of both chains, for blocks and for prompts."""
    run, codes, scale = Recorder(sm), "int8", "float8_e4m3fn"
    shapes = [(-1, hidden), (-1, 8), (-1, 8), (experts, 2 * width, hidden // 2), (experts, 2 * width, hidden // 16)]
    shapes += [
        (experts, hidden, width // 2),
        (experts, hidden, width // 16),
        (experts, 2),
        (experts,),
        (1,),
        (experts,),
    ]
    dtypes = ["bfloat16", "int32", "float32", codes, scale, codes, scale, *["float32"] * 4]
    inputs = [Shaped(*shaped) for shaped in zip(shapes, dtypes, strict=True)]
    for given, prompts in ((11, 0), (11, 1), (9, 0), (9, 1)):
        chain(run, *inputs[:given], prompts=prompts)
    return [variant for variant in run.variants if variant.plugin in PLUGINS]


@pytest.mark.parametrize(
    ("sm", "sizes"),
    [*((sm, "eight ranks") for sm in SMS), ("SM100", "eight ranks of whole experts"), ("SM103", "tiny")],
)
def test_they_compile_within_their_limits(sm, sizes):
    """Products of codes are products of codes on the GPU, too, where it has them."""
    all_variants = variants(sm, *SIZES[sizes])
    assert {variant.plugin for variant in all_variants} == set(PLUGINS)
    for variant in all_variants:
        compiled = compile_variant(variant)
        assert_sound(compiled)
        if variant.plugin is not QUANTIZE:
            product = CODED_PRODUCT if sm != "SM90" and variant.plugin in CODED else BF16_PRODUCT[sm]
            products = PRODUCTS.findall(compiled.ptx)
            assert products and all(product in name for name in products), variant.name
            assert (".version 8.7" in compiled.ptx) == (sm == "SM100" and variant.plugin in CODED)
