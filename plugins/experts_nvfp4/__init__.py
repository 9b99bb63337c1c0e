"""Routed experts whose weights are NVFP4: e2m1 codes, two a byte (an even column's below), an e4m3 scale for every 16
columns and a float32 scale an expert (of gate and up: one each). A chain of launches:

    ROUTE, QUANTIZE, GATE_UP, DOWN, SUM     activations in NVFP4 too (`rounding.py`): x, and the input of `down`
    ROUTE, GATE_UP_16, DOWN_16, SUM         activations in bfloat16

Gate and up together are 128 rows of the matrix instruction, and tiles have 16 rows of one expert, or 64 for steps of so
many rows that experts fill them: 512 tokens of 8 picks among 256 experts are 1.46 times their rows in tiles of 16 (and
4 times in tiles of 64), 2,048 tokens 1.48 times in tiles of 64 and 8,192 tokens 1.13 times.

Legend: N tokens, A experts a token, P = N * A pairs (by expert in `code`, `scale`, `middle`), E experts of this rank, D
hidden, C = D / 2 bytes of its codes, S = D / 16 groups, G expert width, F = 2 G rows of gate (first) and up, H = G / 2
bytes of codes, Z = G / 16 groups.
"""

from __future__ import annotations

from typing import Any

from glmspec.core.dtypes import FP8
from glmspec.network.formats import whole_tiles
from glmspec.plugins.experts import route, summed
from glmspec.plugins.spec import NoPlugin, Plugin, Runs, cdiv, pow2

_ROWS = 128  # of a weight: the matrix instruction's


def chain(
    run: Runs,
    x_ND,
    expert_NA,
    weight_NA,
    gate_up_EFC,
    down_EDH,
    groups_EFS,
    down_groups_EDZ,
    scale_E2,
    down_scale_E,
    input_E2=None,
    middle_E=None,
    *,
    prompts: int,
) -> tuple:
    """x in the compute dtype, ids int32, routing weights float32, codes int8, their groups' scales float8 -> [N, D].

    input, middle: what x (by the largest) and `down`'s input are divided by before they are rounded; both or none, and
    none leaves them in bfloat16. prompts: 1 where an expert has many rows.
    """
    _check(run, x_ND, gate_up_EFC, input_E2)
    experts, picks = run.shape(gate_up_EFC)[0], run.shape(expert_NA)[1]
    routed = route(run, expert_NA, experts=experts)
    weights, down_weights = (gate_up_EFC, groups_EFS, scale_E2), (down_EDH, down_groups_EDZ, down_scale_E)
    if input_E2 is None:
        gate_up, down = (GATE_UP_16_LONG, DOWN_16_LONG) if prompts else (GATE_UP_16, DOWN_16)
        (middle_PG,) = run(gate_up, x_ND, *routed, *weights, picks=picks)
        (out_PD,) = run(down, middle_PG, *routed, *down_weights, weight_NA)
    else:
        gate_up, down = (GATE_UP_LONG, DOWN_LONG) if prompts else (GATE_UP, DOWN)
        codes = run(QUANTIZE, x_ND, input_E2)
        places = run(gate_up, *codes, x_ND, *routed, *weights, input_E2, middle_E, picks=picks)
        (out_PD,) = run(down, *places, x_ND, *routed, *down_weights, middle_E, weight_NA)
    return summed(run, out_PD, expert_NA, experts=experts)


def _check(run: Runs, x_ND, gate_up_EFC, input_E2) -> None:
    """Whole tiles alone are multiplied, and weights become bfloat16 where activations are no codes."""
    hidden, width = run.shape(x_ND)[1], run.shape(gate_up_EFC)[1] // 2
    if not whole_tiles(hidden, width):
        raise NoPlugin(f"experts_nvfp4: {hidden} columns and a width of {width}, expected multiples of 128 and 64")
    if input_E2 is None and run.dtype(x_ND) != "bfloat16":
        raise NoPlugin(f"experts_nvfp4: activations of {run.dtype(x_ND)} without scales, expected bfloat16")


QUANTIZE = Plugin(
    name="experts_nvfp4_quantize",
    op="experts_nvfp4",
    function="quantize_kernel",
    inputs={"x_ND": "T", "input_E2": "float32"},
    outputs={"code_NC": "int8", "scale_NS": FP8},
    sizes={
        "C": lambda D: D // 2,
        "S": lambda D: D // 16,
        "COLUMNS": lambda D, TILE: min(TILE, pow2(D)),
        "ROWS": lambda TILE, COLUMNS: TILE // COLUMNS,
    },
    scalars=("N",),
    grid=(lambda N, ROWS: cdiv(N, ROWS), lambda D, COLUMNS: cdiv(D, COLUMNS)),
    tiles={"": {"TILE": 1024, "WARPS": 4}},
)
# Instructions on blocks of 16 with one scale need PTX 8.7. x only tells the dtype that results are rounded to.
_NEWER = {"SM100": {"PTX": 87}}
_SCALES, _SHARES = {"input_E2": "float32", "middle_E": "float32"}, {"weight_NA": "float32"}
_PLACES = {"code_PH": "int8", "scale_PZ": FP8}
_ROUTED = {"order_P": "int32", "range_E2": "int32"}
_WEIGHTS = {"gate_up_EFC": "int8", "groups_EFS": FP8, "scale_E2": "float32"}
_DOWN_WEIGHTS = {"down_EDH": "int8", "down_groups_EDZ": FP8, "down_scale_E": "float32"}
_GATE_UP: dict[str, Any] = dict(
    op="experts_nvfp4",
    function="gate_up_kernel",
    attributes={"picks": int},
    sizes={
        "A": "picks",
        "G": lambda F: F // 2,
        "H": lambda F: F // 4,
        "Z": lambda F: F // 32,
        "BLOCK": lambda D, WIDE: min(WIDE, D & -D),
    },
    scalars=("P",),
    grid=(lambda P, E, TILE: cdiv(P, TILE) + E, lambda G, HALF: G // HALF),
)
_DOWN: dict[str, Any] = dict(
    op="experts_nvfp4",
    function="down_kernel",
    outputs={"out_PD": "T"},
    sizes={
        "G": lambda H: 2 * H,
        "BLOCK": lambda G, WIDE: min(WIDE, G & -G),
        "TURNS": lambda D, G, BLOCK, ROWS: min(max(1, 8 * BLOCK // G), (D // ROWS) & -(D // ROWS)) if G > BLOCK else 1,
    },
    scalars=("P",),
    grid=(lambda P, E, TILE: cdiv(P, TILE) + E, lambda D, ROWS, TURNS: D // (ROWS * TURNS)),
)
_GATE_UP_CODES: dict[str, Any] = dict(
    inputs={"code_NC": "int8", "scale_NS": FP8, "x_ND": "T", **_ROUTED, **_WEIGHTS, **_SCALES},
    outputs=_PLACES,
    **_GATE_UP,
)
_DOWN_CODES: dict[str, Any] = dict(
    inputs={**_PLACES, "x_ND": "T", **_ROUTED, **_DOWN_WEIGHTS, "middle_E": "float32", **_SHARES}, **_DOWN
)
_GATE_UP_WIDE: dict[str, Any] = dict(
    inputs={"x_ND": "T", **_ROUTED, **_WEIGHTS},
    outputs={"middle_PG": "T"},
    **{**_GATE_UP, "function": "gate_up_16_kernel"},
)
_DOWN_WIDE: dict[str, Any] = dict(
    inputs={"middle_PG": "T", **_ROUTED, **_DOWN_WEIGHTS, **_SHARES}, **{**_DOWN, "function": "down_16_kernel"}
)


def _tiles(rows: int, wide: int, stages: int, sm90: int, **more: int) -> dict[str, dict[str, int]]:
    """wide: columns of a weight that are read at once, as many as with `stages` fit into 48 KB. sm90: those there,
    where codes are multiplied in bfloat16, in 3 stages."""
    tile = {"TILE": rows, "WIDE": wide, "STAGES": stages, "SCALED": 1, "WARPS": 4, **more}
    return {"": tile, "SM90": {"SCALED": 0, "WIDE": sm90, "STAGES": 3}, **_NEWER}


GATE_UP = Plugin(name="experts_nvfp4_gate_up", tiles=_tiles(16, 256, 3, 128, HALF=64), **_GATE_UP_CODES)
GATE_UP_LONG = Plugin(name="experts_nvfp4_gate_up_long", tiles=_tiles(64, 128, 4, 64, HALF=64), **_GATE_UP_CODES)
DOWN = Plugin(name="experts_nvfp4_down", tiles=_tiles(16, 128, 4, 128, ROWS=_ROWS), **_DOWN_CODES)
DOWN_LONG = Plugin(name="experts_nvfp4_down_long", tiles=_tiles(64, 128, 4, 64, ROWS=_ROWS), **_DOWN_CODES)


def _wide_tiles(rows: int, wide: int, **more: int) -> dict[str, dict[str, int]]:
    return {"": {"TILE": rows, "WIDE": wide, "STAGES": 3, "WARPS": 4, **more}}


GATE_UP_16 = Plugin(name="experts_nvfp4_gate_up_16", tiles=_wide_tiles(16, 128, HALF=64), **_GATE_UP_WIDE)
GATE_UP_16_LONG = Plugin(name="experts_nvfp4_gate_up_16_long", tiles=_wide_tiles(64, 64, HALF=64), **_GATE_UP_WIDE)
DOWN_16 = Plugin(name="experts_nvfp4_down_16", tiles=_wide_tiles(16, 128, ROWS=_ROWS), **_DOWN_WIDE)
DOWN_16_LONG = Plugin(name="experts_nvfp4_down_16_long", tiles=_wide_tiles(64, 64, ROWS=_ROWS), **_DOWN_WIDE)
CODED = (QUANTIZE, GATE_UP, GATE_UP_LONG, DOWN, DOWN_LONG)
PLUGINS = (*CODED, GATE_UP_16, GATE_UP_16_LONG, DOWN_16, DOWN_16_LONG)
