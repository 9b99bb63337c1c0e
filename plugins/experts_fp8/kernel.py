"""Products of routed experts with FP8 weights, or with weights of the compute dtype (`glmspec.plugins.experts_fp8`).

A program multiplies a tile of one expert's rows by some rows of its weight. Operands are swapped: weight rows are the
matrix instruction's long side, the few rows of a tile its short one. Sums are float32.

Legend: N tokens, A experts a token, P = N * A pairs, E experts, D hidden, G expert width, F = 2 G rows of gate (first)
and up; Z and K blocks of D, L blocks of G, R blocks of F; of a program: t rows of a tile, m rows of the weight, c
columns at once, g columns of G.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import as_read, as_stored
from glmspec.plugins.block_product.kernel import block_product
from glmspec.plugins.experts.kernel import gated, largest, pairs_of, tile_of
from glmspec.plugins.float8 import to_float8


@triton.jit
def hidden_of(sum_mt, x_ND, ROWS: tl.constexpr, TILE: tl.constexpr):
    """[ROWS, TILE] silu(gate) * up, rounded to x's dtype after each step; gate's rows are the first of `m`."""
    gate_gt, up_gt = tl.split(tl.permute(tl.reshape(as_read(sum_mt, x_ND), [2, ROWS, TILE]), [1, 2, 0]))
    return gated(gate_gt, up_gt, x_ND)


@triton.jit
def quantize_kernel(x_ND, input_E2, N, code_ND, D: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr):
    """x / its scale to e4m3."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_c = tl.load(x_ND + n * D + c, mask=c < D, other=0.0).to(tl.float32)
    tl.store(code_ND + n * D + c, to_float8(tl.div_rn(x_c, largest(input_E2, E))), mask=c < D)


@triton.jit
def product(sum_mt, weight_mc, x_ct, inside_m, here_t, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """sum_mt with a product over all columns added; the pointers are those of the first block of columns. Weights that
    are narrower than x are widened."""
    c = tl.arange(0, BLOCK)
    for k in tl.range(0, COLUMNS, BLOCK):
        if COLUMNS % BLOCK == 0:
            w_mc = tl.load(weight_mc + k, mask=inside_m[:, None], other=0.0)
            value_ct = tl.load(x_ct + k, mask=here_t[None, :], other=0.0)
        else:
            w_mc = tl.load(weight_mc + k, mask=inside_m[:, None] & (k + c < COLUMNS)[None, :], other=0.0)
            value_ct = tl.load(x_ct + k, mask=here_t[None, :] & (k + c < COLUMNS)[:, None], other=0.0)
        sum_mt = tl.dot(w_mc.to(value_ct.dtype), value_ct, sum_mt, input_precision="ieee")
    return sum_mt


@triton.jit
def gate_up_kernel(
    x_ND, code_ND, order_P, range_E2, gate_up_EFD, scale_E2, input_E2, middle_E,
    P,
    hidden_PG,
    A: tl.constexpr, D: tl.constexpr, G: tl.constexpr, E: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a tile, for ROWS columns of the width: codes of it / middle where activations have scales,
    else x's dtype."""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        pair_t, here_t = pairs_of(order_P, first, rows, P, TILE)
        m, c, t, g = tl.arange(0, 2 * ROWS), tl.arange(0, BLOCK), tl.arange(0, TILE), tl.arange(0, ROWS)
        column_m, column_g = tl.program_id(1) * ROWS + m % ROWS, tl.program_id(1) * ROWS + g
        row_m = m // ROWS * G + column_m
        weight_mc = gate_up_EFD + (expert.to(tl.int64) * (2 * G) + row_m)[:, None] * D + c[None, :]
        at_ct = (pair_t // A).to(tl.int64)[None, :] * D + c[:, None]
        sum_mt = tl.zeros([2 * ROWS, TILE], tl.float32)
        if code_ND is None:
            sum_mt = product(sum_mt, weight_mc, x_ND + at_ct, column_m < G, here_t, D, BLOCK)
        else:
            sum_mt = product(sum_mt, weight_mc, code_ND + at_ct, column_m < G, here_t, D, BLOCK)
            sum_mt = sum_mt * largest(input_E2, E)
        if scale_E2 is not None:
            sum_mt = sum_mt * tl.load(scale_E2 + 2 * expert + m // ROWS)[:, None]
        hidden_gt = hidden_of(sum_mt, x_ND, ROWS, TILE)
        out_gt = hidden_PG + (first + t).to(tl.int64)[None, :] * G + column_g[:, None]
        inside_gt = (column_g < G)[:, None] & here_t[None, :]
        if code_ND is None:
            tl.store(out_gt, as_stored(hidden_gt, hidden_PG), mask=inside_gt)
        else:
            tl.store(out_gt, to_float8(tl.div_rn(hidden_gt, tl.load(middle_E + expert))), mask=inside_gt)


@triton.jit
def down_kernel(
    x_ND, hidden_PG, order_P, range_E2, down_EDG, scale_E, middle_E, weight_NA,
    P,
    out_PD,
    D: tl.constexpr, G: tl.constexpr, E: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile's ROWS columns of the result, times the routing weights, each at its own pair. (x tells its dtype.)"""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        pair_t, here_t = pairs_of(order_P, first, rows, P, TILE)
        c, t = tl.arange(0, BLOCK), tl.arange(0, TILE)
        row_m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        weight_mc = down_EDG + (expert.to(tl.int64) * D + row_m)[:, None] * G + c[None, :]
        hidden_ct = hidden_PG + (first + t).to(tl.int64)[None, :] * G + c[:, None]
        sum_mt = tl.zeros([ROWS, TILE], tl.float32)
        sum_mt = product(sum_mt, weight_mc, hidden_ct, row_m < D, here_t, G, BLOCK)
        if middle_E is not None:
            sum_mt = sum_mt * tl.load(middle_E + expert)
        if scale_E is not None:
            sum_mt = sum_mt * tl.load(scale_E + expert)
        share_t = tl.load(weight_NA + pair_t, mask=here_t, other=0.0)
        out_mt = out_PD + pair_t.to(tl.int64)[None, :] * D + row_m[:, None]
        value_mt = as_stored(as_read(sum_mt, x_ND) * share_t[None, :], out_PD)
        tl.store(out_mt, value_mt, mask=(row_m < D)[:, None] & here_t[None, :])


@triton.jit
def gate_up_blocks_kernel(
    x_ND, code_ND, step_NZ, order_P, range_E2, gate_up_EFD, scale_ERK,
    P,
    hidden_PG, step_PL,
    A: tl.constexpr, D: tl.constexpr, G: tl.constexpr, E: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    Z: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a tile, for 128 columns of the width: codes, and a step for each row."""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        pair_t, here_t = pairs_of(order_P, first, rows, P, TILE)
        m, c, t = tl.arange(0, 256), tl.arange(0, BLOCK), tl.arange(0, TILE)
        block = tl.program_id(1)
        column_m, column_g = block * 128 + m % 128, block * 128 + tl.arange(0, 128)
        row_m = m // 128 * G + column_m
        weight_mc = gate_up_EFD + (expert.to(tl.int64) * (2 * G) + row_m)[:, None] * D + c[None, :]
        scale_m = scale_ERK + (expert * R + m // 128 * (R // 2) + block) * K
        token_t = (pair_t // A).to(tl.int64)
        sum_mt = tl.zeros([256, TILE], tl.float32)
        sum_mt = block_product(
            sum_mt, weight_mc, code_ND + token_t[None, :] * D + c[:, None], scale_m, step_NZ + token_t * Z,
            column_m < G, here_t, 0, D, D, BLOCK,
        )  # fmt: skip
        hidden_gt = tl.where((column_g < G)[:, None], hidden_of(sum_mt, x_ND, 128, TILE), 0.0)
        step_t = tl.maximum(tl.max(tl.abs(hidden_gt), 0) * (1 / 448.0), 1e-12)
        place_t = (first + t).to(tl.int64)
        code_gt = to_float8(tl.div_rn(hidden_gt, tl.broadcast_to(step_t[None, :], [128, TILE])))
        inside_gt = (column_g < G)[:, None] & here_t[None, :]
        tl.store(hidden_PG + place_t[None, :] * G + column_g[:, None], code_gt, mask=inside_gt)
        tl.store(step_PL + place_t * L + block, step_t, mask=here_t)


@triton.jit
def down_blocks_kernel(
    x_ND, hidden_PG, step_PL, order_P, range_E2, down_EDG, scale_EKL, weight_NA,
    P,
    out_PD,
    D: tl.constexpr, G: tl.constexpr, E: tl.constexpr, K: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """As `down_kernel`, 128 columns of the result."""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        pair_t, here_t = pairs_of(order_P, first, rows, P, TILE)
        c, t, block = tl.arange(0, BLOCK), tl.arange(0, TILE), tl.program_id(1)
        row_m = block * 128 + tl.arange(0, 128)
        weight_mc = down_EDG + (expert.to(tl.int64) * D + row_m)[:, None] * G + c[None, :]
        place_t = (first + t).to(tl.int64)
        scale_m = scale_EKL + (expert * K + row_m // 128) * L
        sum_mt = tl.zeros([128, TILE], tl.float32)
        sum_mt = block_product(
            sum_mt, weight_mc, hidden_PG + place_t[None, :] * G + c[:, None], scale_m, step_PL + place_t * L,
            row_m < D, here_t, 0, G, G, BLOCK,
        )  # fmt: skip
        share_t = tl.load(weight_NA + pair_t, mask=here_t, other=0.0)
        out_mt = out_PD + pair_t.to(tl.int64)[None, :] * D + row_m[:, None]
        value_mt = as_stored(as_read(sum_mt, x_ND) * share_t[None, :], out_PD)
        tl.store(out_mt, value_mt, mask=(row_m < D)[:, None] & here_t[None, :])
