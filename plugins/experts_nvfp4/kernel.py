"""Routed experts with NVFP4 weights, and activations in NVFP4 or in bfloat16 (`glmspec.plugins.experts_nvfp4`).

Operands are swapped: 128 rows of a weight are the matrix instruction's M, the rows of a tile its N, so that a tile may
have 16. Where a product is in bfloat16 (of activations that are, and of any on SM90), codes become that in registers,
those of even columns and of odd ones apart, as they lie in their bytes, and activations are read as words of two
columns: so nothing has to be moved between threads.

Legend: N tokens, A experts a token, P = N * A pairs, E experts of this rank, D hidden, C = D / 2 bytes of its codes,
S = D / 16 groups, G expert width, F = 2 G rows of gate (first) and up, H = G / 2 bytes of codes, Z = G / 16 groups;
of a program: r rows, c columns, m rows of a weight, t rows of a tile, h bytes of codes, g groups, f columns of the
width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import as_read, as_stored
from glmspec.plugins.experts.kernel import gated, largest, pairs_of, tile_of
from glmspec.plugins.experts_nvfp4.float4 import quantized, spread, unpacked

E2M1 = tl.constexpr("e2m1")  # a plain string is enough for a GPU, not for the interpreter


@triton.jit
def quantize_kernel(
    x_ND, input_E2, N, code_NC, scale_NS,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x / its scale, rounded to its dtype, then to NVFP4."""
    row_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    first = tl.program_id(1) * COLUMNS
    c, h, g = tl.arange(0, COLUMNS)[None, :], tl.arange(0, COLUMNS // 2)[None, :], tl.arange(0, COLUMNS // 16)[None, :]
    x_rc = tl.load(x_ND + row_r * D + first + c, mask=(row_r < N) & (first + c < D), other=0.0).to(tl.float32)
    x_rc = as_read(tl.div_rn(x_rc, largest(input_E2, E)), x_ND)
    code_rh, scale_rg = quantized(x_rc, ROWS, COLUMNS)
    byte_h, group_g = first // 2 + h, first // 16 + g
    tl.store(code_NC + row_r * (D // 2) + byte_h, code_rh, mask=(row_r < N) & (byte_h < D // 2))
    tl.store(scale_NS + row_r * (D // 16) + group_g, scale_rg, mask=(row_r < N) & (group_g < D // 16))


@triton.jit
def gate_up_kernel(
    code_NC, scale_NS, x_ND, order_P, range_E2, gate_up_EFC, groups_EFS, scale_E2, input_E2, middle_E,
    P,
    code_PH, scale_PZ,
    A: tl.constexpr, D: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a tile's rows for HALF columns of the width, rounded to NVFP4."""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        pair_t, _ = pairs_of(order_P, first, rows, P, TILE)
        token_t = (pair_t // A).to(tl.int64)
        m, h, g = tl.arange(0, 2 * HALF), tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK // 16)
        column = tl.program_id(1) * HALF
        row_m = column + tl.where(m < HALF, m, m - HALF + G)
        row_m1 = row_m.to(tl.int64)[:, None] + expert.to(tl.int64) * (2 * G)
        weight = as_bytes(gate_up_EFC) + row_m1 * (D // 2) + h[None, :]
        step = groups_EFS + row_m1 * (D // 16) + g[None, :]
        x = as_bytes(code_NC) + token_t[None, :] * (D // 2) + h[:, None]
        x_step = as_bytes(scale_NS) + token_t[:, None] * (D // 16) + g[None, :]
        sum_mt = tl.zeros([2 * HALF, TILE], tl.float32)
        # Scales of few rows are too few bytes for an asynchronous copy: they are read a step ahead, as bytes, because
        # Triton fails on a scale that a loop carries.
        byte_tg = tl.load(x_step)
        for k in tl.range(0, D // BLOCK, num_stages=STAGES):
            w_mh = tl.load(weight + k * (BLOCK // 2))
            x_ht = tl.load(x + k * (BLOCK // 2))
            w_mg = tl.load(step + k * (BLOCK // 16))
            next_tg = tl.load(x_step + tl.minimum(k + 1, D // BLOCK - 1) * (BLOCK // 16))
            x_tg = byte_tg.to(tl.float8e4nv, bitcast=True)
            sum_mt = with_product(sum_mt, w_mh, w_mg, x_ht, x_tg, SCALED)
            byte_tg = next_tg
        sum_mt *= largest(input_E2, E) * (1.0 if SCALED else 2.0**32)
        gate_mt, up_mt = tl.split(tl.permute(tl.reshape(sum_mt, [2, HALF, TILE]), [1, 2, 0]))
        y_tm = activated(gate_mt, up_mt, scale_E2 + 2 * expert, x_ND)
        y_tm = as_read(tl.div_rn(y_tm, tl.load(middle_E + expert)), x_ND)
        code_th, scale_tg = quantized(y_tm, TILE, HALF)
        place_t, there_t = first.to(tl.int64) + tl.arange(0, TILE), tl.arange(0, TILE) < rows
        byte, group = column // 2 + tl.arange(0, HALF // 2), column // 16 + tl.arange(0, HALF // 16)
        tl.store(code_PH + place_t[:, None] * (G // 2) + byte[None, :], code_th, mask=there_t[:, None])
        tl.store(scale_PZ + place_t[:, None] * (G // 16) + group[None, :], scale_tg, mask=there_t[:, None])


@triton.jit
def with_product(sum_mt, w_mh, w_mg, x_ht, x_tg, SCALED: tl.constexpr):
    """The sum with a product of codes more. SM90 has no instruction for that: there in bfloat16, in which they are
    exact, times 2^-32."""
    if SCALED:
        return tl.dot_scaled(w_mh, w_mg, E2M1, x_ht, x_tg, E2M1, sum_mt)
    low_mh, high_mh = unpacked(w_mh, spread(w_mg, w_mh.shape[0], w_mh.shape[1]))
    low_ht, high_ht = unpacked(x_ht, tl.trans(spread(x_tg, x_ht.shape[1], x_ht.shape[0])))
    return tl.dot(low_mh, low_ht, tl.dot(high_mh, high_ht, sum_mt))


@triton.jit
def as_bytes(pointer):
    """TensorRT has int8, a scaled product wants uint8. To convert what is loaded would cost a copy of it."""
    return pointer.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def activated(gate_mt, up_mt, scale_2, x_ND):
    """silu(gate) * up, the other way round; the products, silu and the result rounded to x's dtype."""
    gate_mt = as_read(gate_mt * tl.load(scale_2), x_ND)
    up_mt = as_read(up_mt * tl.load(scale_2 + 1), x_ND)
    return tl.trans(gated(gate_mt, up_mt, x_ND))


@triton.jit
def down_kernel(
    code_PH, scale_PZ, x_ND, order_P, range_E2, down_EDH, down_groups_EDZ, down_scale_E, middle_E, weight_NA,
    P,
    out_PD,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """The second product of a tile's rows for TURNS * ROWS columns, rounded to x's dtype, times the routing weight."""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        PARTS: tl.constexpr = G // BLOCK
        m, h, g = tl.arange(0, ROWS), tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK // 16)
        place_t = (first + tl.minimum(tl.arange(0, TILE), rows - 1)).to(tl.int64)
        x = as_bytes(code_PH) + place_t[None, :] * (G // 2) + h[:, None]
        x_step = as_bytes(scale_PZ) + place_t[:, None] * (G // 16) + g[None, :]
        weight = as_bytes(down_EDH) + expert.to(tl.int64) * (D * (G // 2)) + h[None, :]
        step = down_groups_EDZ + expert.to(tl.int64) * (D * (G // 16)) + g[None, :]
        middle = tl.load(middle_E + expert) * (1.0 if SCALED else 2.0**32)
        scale = tl.load(down_scale_E + expert)
        sum_mt = tl.zeros([ROWS, TILE], tl.float32)
        byte_tg = tl.load(x_step)
        # One loop over columns and the parts of their sums, so that weights are on their way all the time.
        for turn in tl.range(0, TURNS * PARTS, num_stages=STAGES):
            row_m, k = (tl.program_id(1) * TURNS + turn // PARTS) * ROWS + m, turn % PARTS
            w_mh = tl.load(weight + row_m[:, None] * (G // 2) + k * (BLOCK // 2))
            w_mg = tl.load(step + row_m[:, None] * (G // 16) + k * (BLOCK // 16))
            x_ht = tl.load(x + k * (BLOCK // 2))
            next_tg = tl.load(x_step + (turn + 1) % PARTS * (BLOCK // 16))
            x_tg = byte_tg.to(tl.float8e4nv, bitcast=True)
            sum_mt = with_product(sum_mt, w_mh, w_mg, x_ht, x_tg, SCALED)
            byte_tg = next_tg
            if k == PARTS - 1:
                store_weighed(sum_mt * middle * scale, row_m, first, rows, x_ND, order_P, weight_NA, P, out_PD, D, TILE)
                sum_mt = tl.zeros([ROWS, TILE], tl.float32)


@triton.jit
def store_weighed(
    y_mt, row_m, first, rows, x_ND, order_P, weight_NA, P, out_PD, D: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Rows of `down`, rounded to x's dtype, times the routing weights, where their pairs belong."""
    pair_t, here_t = pairs_of(order_P, first, rows, P, TILE)
    # The larger of the same twice: a plain load would be made again in the layout of y, by every thread for every row.
    share_t = tl.max(tl.load(weight_NA + pair_t[:, None] + tl.zeros([1, 2], tl.int32)), 1)
    y_tm = as_read(tl.trans(y_mt), x_ND) * share_t[:, None]
    at_tm = pair_t.to(tl.int64)[:, None] * D + row_m[None, :]
    tl.store(out_PD + at_tm, as_stored(y_tm, out_PD), mask=here_t[:, None])


@triton.jit
def with_product_16(sum_mt, w_mh, w_mg, word_ht):
    """The sum with a product more, of which `unpacked` leaves 2^-16."""
    low_mh, high_mh = unpacked(w_mh, spread(w_mg, w_mh.shape[0], w_mh.shape[1]))
    even_ht = (word_ht & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd_ht = (word_ht >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.dot(low_mh, even_ht, tl.dot(high_mh, odd_ht, sum_mt))


@triton.jit
def as_words(pointer):
    """Two bfloat16 are a word."""
    return pointer.to(tl.pointer_type(tl.uint32), bitcast=True)


@triton.jit
def gate_up_16_kernel(
    x_ND, order_P, range_E2, gate_up_EFC, groups_EFS, scale_E2,
    P,
    middle_PG,
    A: tl.constexpr, D: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    TILE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a tile's rows for HALF columns of the width."""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        pair_t, _ = pairs_of(order_P, first, rows, P, TILE)
        token_t = (pair_t // A).to(tl.int64)
        m, h, g = tl.arange(0, 2 * HALF), tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK // 16)
        column = tl.program_id(1) * HALF
        row_m = column + tl.where(m < HALF, m, m - HALF + G)
        row_m1 = row_m.to(tl.int64)[:, None] + expert.to(tl.int64) * (2 * G)
        weight = as_bytes(gate_up_EFC) + row_m1 * (D // 2) + h[None, :]
        step = groups_EFS + row_m1 * (D // 16) + g[None, :]
        x = as_words(x_ND) + token_t[None, :] * (D // 2) + h[:, None]
        sum_mt = tl.zeros([2 * HALF, TILE], tl.float32)
        for k in tl.range(0, D // BLOCK, num_stages=STAGES):
            w_mh, w_mg = tl.load(weight + k * (BLOCK // 2)), tl.load(step + k * (BLOCK // 16))
            sum_mt = with_product_16(sum_mt, w_mh, w_mg, tl.load(x + k * (BLOCK // 2)))
        gate_mt, up_mt = tl.split(tl.permute(tl.reshape(sum_mt * 65536.0, [2, HALF, TILE]), [1, 2, 0]))
        y_tf = activated(gate_mt, up_mt, scale_E2 + 2 * expert, x_ND)
        place_t, there_t = first.to(tl.int64) + tl.arange(0, TILE), tl.arange(0, TILE) < rows
        at_tf = middle_PG + place_t[:, None] * G + column + tl.arange(0, HALF)[None, :]
        tl.store(at_tf, as_stored(y_tf, middle_PG), mask=there_t[:, None])


@triton.jit
def down_16_kernel(
    middle_PG, order_P, range_E2, down_EDH, down_groups_EDZ, down_scale_E, weight_NA,
    P,
    out_PD,
    D: tl.constexpr, E: tl.constexpr, G: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The second product of a tile's rows for TURNS * ROWS columns, rounded, times the routing weight."""
    expert, first, rows = tile_of(range_E2, tl.program_id(0), P, TILE, E)
    if rows > 0:
        PARTS: tl.constexpr = G // BLOCK
        m, h, g = tl.arange(0, ROWS), tl.arange(0, BLOCK // 2), tl.arange(0, BLOCK // 16)
        place_t = (first + tl.minimum(tl.arange(0, TILE), rows - 1)).to(tl.int64)
        x = as_words(middle_PG) + place_t[None, :] * (G // 2) + h[:, None]
        weight = as_bytes(down_EDH) + expert.to(tl.int64) * (D * (G // 2)) + h[None, :]
        step = down_groups_EDZ + expert.to(tl.int64) * (D * (G // 16)) + g[None, :]
        scale = tl.load(down_scale_E + expert) * 65536.0
        sum_mt = tl.zeros([ROWS, TILE], tl.float32)
        for turn in tl.range(0, TURNS * PARTS, num_stages=STAGES):
            row_m, k = (tl.program_id(1) * TURNS + turn // PARTS) * ROWS + m, turn % PARTS
            w_mh = tl.load(weight + row_m[:, None] * (G // 2) + k * (BLOCK // 2))
            w_mg = tl.load(step + row_m[:, None] * (G // 16) + k * (BLOCK // 16))
            sum_mt = with_product_16(sum_mt, w_mh, w_mg, tl.load(x + k * (BLOCK // 2)))
            if k == PARTS - 1:
                store_weighed(sum_mt * scale, row_m, first, rows, out_PD, order_P, weight_NA, P, out_PD, D, TILE)
                sum_mt = tl.zeros([ROWS, TILE], tl.float32)
