"""Routed experts with FP8 weights or weights of the compute dtype: the launches of `moe`, `moe_fp8`, `moe_fp8_block`.

Each chain: the pairs by expert, x to codes (where activations are rounded), silu(gate) * up of tiles of an expert's
rows, down, the sum of a token's experts. Only weights of experts that are hit are read.

Legend: N tokens, A experts a token, P = N * A pairs, E experts, D hidden, G expert width, F = 2 G rows of gate (first)
and up, Z and K blocks of D, L blocks of G, R blocks of F, S blocks of rows of down.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glmspec.core.dtypes import FP8
from glmspec.plugins.experts import route, summed
from glmspec.plugins.quantize_blocks import QUANTIZE_BLOCKS
from glmspec.plugins.spec import Plugin, Runs, cdiv


def plain(run: Runs, x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, *, prompts) -> tuple:
    """Weights of x's dtype: four launches."""
    return _chain(run, x_ND, expert_NA, weight_NA, (gate_up_EFD,), (down_EDG,), (GATE_UP, DOWN), prompts)


def fp8(
    run: Runs,
    x_ND,
    expert_NA,
    weight_NA,
    gate_up_EFD,
    down_EDG,
    scale_E2,
    down_scale_E,
    input_E2=None,
    middle_E=None,
    *,
    prompts,
) -> tuple:
    """FP8 weights, a scale an expert and half; with scales of activations, or x's dtype for those: five launches, or
    four."""
    if input_E2 is None or middle_E is None:
        first, second = (gate_up_EFD, scale_E2), (down_EDG, down_scale_E)
        return _chain(run, x_ND, expert_NA, weight_NA, first, second, (GATE_UP_W8, DOWN_W8), prompts)
    (code_ND,) = run(QUANTIZE, x_ND, input_E2)
    first, second = (gate_up_EFD, scale_E2, input_E2, middle_E), (down_EDG, down_scale_E, middle_E)
    plugins = (GATE_UP_FP8, DOWN_FP8)
    return _chain(run, x_ND, expert_NA, weight_NA, first, second, plugins, prompts, codes=(code_ND,))


def fp8_block(
    run: Runs, x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, scale_ERK, down_scale_ESL, *, prompts
) -> tuple:
    """FP8 weights under scales of 128 x 128; activations rounded in blocks of 1 x 128: five launches."""
    codes = run(QUANTIZE_BLOCKS, x_ND)
    first, second, plugins = (gate_up_EFD, scale_ERK), (down_EDG, down_scale_ESL), (GATE_UP_BLOCKS, DOWN_BLOCKS)
    return _chain(run, x_ND, expert_NA, weight_NA, first, second, plugins, prompts, codes=codes)


def _chain(run, x_ND, expert_NA, weight_NA, first, second, plugins, prompts, codes=()) -> tuple:
    """first, second: a product's weight and scales. codes: x as the first product takes it, where that is not x."""
    experts, picks = run.shape(first[0])[0], run.shape(expert_NA)[1]
    order_P, range_E2 = route(run, expert_NA, experts=experts)
    sizes = {"picks": picks, "prompts": prompts}
    hidden = run(plugins[0], x_ND, *codes, order_P, range_E2, *first, **sizes)
    (out_PD,) = run(plugins[1], x_ND, *hidden, order_P, range_E2, *second, weight_NA, **sizes)
    return summed(run, out_PD, expert_NA, experts=experts)


_ROUTED = {"order_P": "int32", "range_E2": "int32"}
# Rows of a tile: few rows an expert have few tiles to fill, many share a read of the weights. BLOCK: columns at once,
# as many as shared memory holds twice.
_SIZES = {
    "G": lambda F: F // 2,
    "A": "picks",
    "TILE": lambda prompts: 64 if prompts else 16,
    "BLOCK": lambda prompts: 64 if prompts else 128,
}
_WIDE = {**_SIZES, "BLOCK": lambda prompts: 32 if prompts else 64}  # 16 bits a number
_BLOCKS = {**_SIZES, "TILE": lambda prompts: 32 if prompts else 16, "BLOCK": 64, "L": lambda G: cdiv(G, 128)}
_PRODUCT: dict[str, Any] = dict(
    op="experts_fp8", attributes={"picks": int, "prompts": int}, sizes=_SIZES, scalars=("P",)
)
_GATE_UP: dict[str, Any] = dict(
    function="gate_up_kernel", grid=(lambda P, TILE, E: cdiv(P, TILE) + E, lambda G, ROWS: cdiv(G, ROWS)), **_PRODUCT
)
_DOWN: dict[str, Any] = dict(
    function="down_kernel", grid=(lambda P, TILE, E: cdiv(P, TILE) + E, lambda D, ROWS: cdiv(D, ROWS)), **_PRODUCT
)
_DOWN |= {"outputs": {"out_PD": "T"}, "sizes": {key: _SIZES[key] for key in ("TILE", "BLOCK")}}
QUANTIZE = Plugin(
    name="experts_quantize_fp8",
    op="experts_fp8",
    function="quantize_kernel",
    inputs={"x_ND": "T", "input_E2": "float32"},
    outputs={"code_ND": FP8},
    scalars=("N",),
    grid=("N", lambda D, COLUMNS: cdiv(D, COLUMNS)),
    tiles={"": {"COLUMNS": 1024, "WARPS": 4}},
)
GATE_UP = Plugin(
    name="experts_gate_up",
    inputs={"x_ND": "T", **_ROUTED, "gate_up_EFD": "T"},
    absent=("code_ND", "scale_E2", "input_E2", "middle_E"),
    outputs={"hidden_PG": "T"},
    tiles={"": {"ROWS": 64, "WARPS": 4, "STAGES": 2}},
    **{**_GATE_UP, "sizes": _WIDE},
)
GATE_UP_W8 = replace(
    GATE_UP,
    name="experts_gate_up_w8",
    inputs={"x_ND": "T", **_ROUTED, "gate_up_EFD": FP8, "scale_E2": "float32"},
    absent=("code_ND", "input_E2", "middle_E"),
)
GATE_UP_FP8 = Plugin(
    name="experts_gate_up_fp8",
    inputs={
        "x_ND": "T",
        "code_ND": FP8,
        **_ROUTED,
        "gate_up_EFD": FP8,
        **dict.fromkeys(("scale_E2", "input_E2", "middle_E"), "float32"),
    },
    outputs={"hidden_PG": FP8},
    tiles={"": {"ROWS": 64, "WARPS": 4, "STAGES": 2}},
    **_GATE_UP,
)
DOWN = Plugin(
    name="experts_down",
    inputs={"x_ND": "T", "hidden_PG": "T", **_ROUTED, "down_EDG": "T", "weight_NA": "float32"},
    absent=("scale_E", "middle_E"),
    tiles={"": {"ROWS": 128, "WARPS": 4, "STAGES": 2}},
    **{**_DOWN, "sizes": {key: _WIDE[key] for key in ("TILE", "BLOCK")}},
)
DOWN_W8 = replace(
    DOWN,
    name="experts_down_w8",
    inputs={"x_ND": "T", "hidden_PG": "T", **_ROUTED, "down_EDG": FP8, "scale_E": "float32", "weight_NA": "float32"},
    absent=("middle_E",),
)
DOWN_FP8 = Plugin(
    name="experts_down_fp8",
    inputs={
        "x_ND": "T",
        "hidden_PG": FP8,
        **_ROUTED,
        "down_EDG": FP8,
        **dict.fromkeys(("scale_E", "middle_E", "weight_NA"), "float32"),
    },
    tiles={"": {"ROWS": 128, "WARPS": 4, "STAGES": 2}},
    **_DOWN,
)
GATE_UP_BLOCKS = Plugin(
    name="experts_gate_up_blocks",
    inputs={
        "x_ND": "T",
        "code_ND": FP8,
        "step_NZ": "float32",
        **_ROUTED,
        "gate_up_EFD": FP8,
        "scale_ERK": "float32",
    },
    outputs={"hidden_PG": FP8, "step_PL": "float32"},
    tiles={"": {"WARPS": 8, "STAGES": 2}},
    **{
        **_GATE_UP,
        "function": "gate_up_blocks_kernel",
        "sizes": _BLOCKS,
        "grid": (lambda P, TILE, E: cdiv(P, TILE) + E, "L"),
    },
)
DOWN_BLOCKS = Plugin(
    name="experts_down_blocks",
    inputs={
        "x_ND": "T",
        "hidden_PG": FP8,
        "step_PL": "float32",
        **_ROUTED,
        "down_EDG": FP8,
        **dict.fromkeys(("scale_EKL", "weight_NA"), "float32"),
    },
    tiles={"": {"WARPS": 4, "STAGES": 2}},
    **{
        **_DOWN,
        "function": "down_blocks_kernel",
        "sizes": {key: _BLOCKS[key] for key in ("TILE", "BLOCK")},
        "grid": (lambda P, TILE, E: cdiv(P, TILE) + E, "K"),
    },
)
PLUGINS = (
    QUANTIZE, GATE_UP, GATE_UP_W8, GATE_UP_FP8, GATE_UP_BLOCKS, DOWN, DOWN_W8, DOWN_FP8, DOWN_BLOCKS,
)  # fmt: skip
