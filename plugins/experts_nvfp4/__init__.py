"""Routed experts whose weights are NVFP4: e2m1 codes, two a byte (an even column's below), an e4m3 scale for every 16
columns and a float32 scale an expert (of gate and up: one each). Five launches:

    ROUTE, QUANTIZE, GATE_UP, DOWN, SUM     activations in NVFP4 too (`rounding.py`): x, and the input of `down`

Gate and up together are 128 rows of the matrix instruction, and tiles have 16 rows of one expert, or 64 where steps
have so many rows that an expert has many: more would multiply what is not there.

Legend: N tokens, A experts a token, P = N * A pairs (sorted by expert in `code` and `scale`), E experts of this rank, D
hidden, C = D / 2 bytes of its codes, S = D / 16 groups, G expert width, F = 2 G rows of gate (first) and up, H = G / 2
bytes of codes, Z = G / 16 groups.
"""

from __future__ import annotations

from typing import Any

from glmspec.core.dtypes import FP8
from glmspec.plugins.experts import ROUTE, SUM
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
    input_E2,
    middle_E,
    *,
    prompts: int,
) -> tuple:
    """x in the compute dtype, ids int32, routing weights float32, codes int8, their groups' scales float8 -> [N, D].

    input, middle: what x (by the largest) and `down`'s input are divided by before they are rounded. Products are
    multiplied by that and by the weights' scale. prompts: 1 where an expert has many rows.
    """
    _check(run, x_ND, gate_up_EFC)
    experts, picks = run.shape(gate_up_EFC)[0], run.shape(expert_NA)[1]
    gate_up, down = (GATE_UP_LONG, DOWN_LONG) if prompts else (GATE_UP, DOWN)
    order_P, range_E2 = run(ROUTE, expert_NA, experts=experts)
    code_NC, scale_NS = run(QUANTIZE, x_ND, input_E2)
    routed = (x_ND, order_P, range_E2)
    weights = (gate_up_EFC, groups_EFS, scale_E2, input_E2, middle_E)
    code_PH, scale_PZ = run(gate_up, code_NC, scale_NS, *routed, *weights, picks=picks)
    (out_PD,) = run(
        down, code_PH, scale_PZ, *routed, down_EDH, down_groups_EDZ, down_scale_E, middle_E, weight_NA
    )
    return run(SUM, out_PD, expert_NA, experts=experts)


def _check(run: Runs, x_ND, gate_up_EFC) -> None:
    """Whole tiles alone are multiplied."""
    hidden, width = run.shape(x_ND)[1], run.shape(gate_up_EFC)[1] // 2
    if hidden % _ROWS or width % (_ROWS // 2):
        raise NoPlugin(f"experts_nvfp4: {hidden} columns and a width of {width}, expected multiples of 128 and 64")


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
# Instructions on blocks of 16 with one scale need PTX 8.8. x only tells the dtype that results are rounded to.
_NEWER = {"SM100": {"PTX": 88}}
_PLACES = {"code_PH": "int8", "scale_PZ": FP8}
_ROUTED = {"x_ND": "T", "order_P": "int32", "range_E2": "int32"}
# WIDE: columns of a weight that are read at once, as many as with STAGES fit into 48 KB.
_GATE_UP: dict[str, Any] = dict(
    op="experts_nvfp4",
    function="gate_up_kernel",
    inputs={
        "code_NC": "int8",
        "scale_NS": FP8,
        **_ROUTED,
        "gate_up_EFC": "int8",
        "groups_EFS": FP8,
        "scale_E2": "float32",
        "input_E2": "float32",
        "middle_E": "float32",
    },
    outputs=_PLACES,
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
    inputs={
        **_PLACES,
        **_ROUTED,
        "down_EDH": "int8",
        "down_groups_EDZ": FP8,
        "down_scale_E": "float32",
        "middle_E": "float32",
        "weight_NA": "float32",
    },
    outputs={"out_PD": "T"},
    sizes={
        "G": lambda H: 2 * H,
        "BLOCK": lambda G, WIDE: min(WIDE, G & -G),
        "TURNS": lambda D, G, BLOCK, ROWS: min(max(1, 8 * BLOCK // G), (D // ROWS) & -(D // ROWS)) if G > BLOCK else 1,
    },
    scalars=("P",),
    grid=(lambda P, E, TILE: cdiv(P, TILE) + E, lambda D, ROWS, TURNS: D // (ROWS * TURNS)),
)


def _tiles(rows: int, wide: int, stages: int, sm90: int, **more: int) -> dict[str, dict[str, int]]:
    """sm90: columns at once there, where they are multiplied in bfloat16."""
    tile = {"TILE": rows, "WIDE": wide, "STAGES": stages, "SCALED": 1, "WARPS": 4, **more}
    return {"": tile, "SM90": {"SCALED": 0, "WIDE": sm90, "STAGES": 3}, **_NEWER}


GATE_UP = Plugin(name="experts_nvfp4_gate_up", tiles=_tiles(16, 256, 3, 128, HALF=64), **_GATE_UP)
GATE_UP_LONG = Plugin(name="experts_nvfp4_gate_up_long", tiles=_tiles(64, 128, 4, 64, HALF=64), **_GATE_UP)
DOWN = Plugin(name="experts_nvfp4_down", tiles=_tiles(16, 128, 4, 128, ROWS=_ROWS), **_DOWN)
DOWN_LONG = Plugin(name="experts_nvfp4_down_long", tiles=_tiles(64, 128, 4, 64, ROWS=_ROWS), **_DOWN)
PLUGINS = (QUANTIZE, GATE_UP, GATE_UP_LONG, DOWN, DOWN_LONG)
