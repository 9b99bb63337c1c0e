"""Products with weights under block scales (`glmspec.plugins.block_product`).

Operands are swapped: weight rows are the matrix instruction's long side, the few rows of x its short one.

Legend: N rows, C columns, R rows of the weight, Z blocks of 128 columns, B blocks of the weight's rows, S splits of the
blocks of columns; of a program: t rows of x, m rows of the weight, c columns at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import as_stored


@triton.jit
def block_product(
    sum_mt, weight_mc, code_ct, scale_m, step_t, inside_m, here_t, start, stop,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum_mt, float32, with a product of codes over the columns from start to stop added. weight_mc, code_ct: pointers
    to the first BLOCK columns. scale_m, step_t: to the scales of the first 128, of the weight's rows and of x's."""
    c = tl.arange(0, BLOCK)
    for k in tl.range(start, stop, BLOCK):
        w_mc = tl.load(weight_mc + k, mask=inside_m[:, None] & (k + c < COLUMNS)[None, :], other=0.0)
        value_ct = tl.load(code_ct + k, mask=here_t[None, :] & (k + c < COLUMNS)[:, None], other=0.0)
        factor_m = tl.load(scale_m + k // 128, mask=inside_m, other=0.0)
        factor_t = tl.load(step_t + k // 128, mask=here_t, other=0.0)
        sum_mt += tl.dot(w_mc, value_ct) * (factor_m[:, None] * factor_t[None, :])
    return sum_mt


@triton.jit
def tile_product(
    code_NC, step_NZ, weight_RC, scale_BZ, N, split,
    C: tl.constexpr, R: tl.constexpr, Z: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program's tile, 128 rows of the weight by TILE rows of x, over one split of the columns: the sum, where it
    belongs in [N, R] and which of it are there."""
    t, c = tl.arange(0, TILE), tl.arange(0, BLOCK)
    n_t, row_m = tl.program_id(1).to(tl.int64) * TILE + t, tl.program_id(0) * 128 + tl.arange(0, 128)
    inside_m, here_t = row_m < R, n_t < N
    weight_mc = weight_RC + row_m.to(tl.int64)[:, None] * C + c[None, :]
    sum_mt = tl.zeros([128, TILE], tl.float32)
    sum_mt = block_product(
        sum_mt, weight_mc, code_NC + n_t[None, :] * C + c[:, None], scale_BZ + row_m // 128 * Z, step_NZ + n_t * Z,
        inside_m, here_t, split * Z // S * 128, (split + 1) * Z // S * 128, C, BLOCK,
    )  # fmt: skip
    return sum_mt, n_t[None, :] * R + row_m[:, None], inside_m[:, None] & here_t[None, :]


@triton.jit
def product_kernel(
    x_NC, code_NC, step_NZ, weight_RC, scale_BZ,
    N,
    out_NR,
    C: tl.constexpr, R: tl.constexpr, Z: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of the result. (x tells its dtype.)"""
    sum_mt, at_mt, here_mt = tile_product(code_NC, step_NZ, weight_RC, scale_BZ, N, 0, C, R, Z, 1, TILE, BLOCK)
    tl.store(out_NR + at_mt, as_stored(sum_mt, out_NR), mask=here_mt)


@triton.jit
def split_kernel(
    x_NC, code_NC, step_NZ, weight_RC, scale_BZ,
    N,
    out_SNR,
    C: tl.constexpr, R: tl.constexpr, Z: tl.constexpr, S: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of one split's sums."""
    split = tl.program_id(2)
    sum_mt, at_mt, here_mt = tile_product(code_NC, step_NZ, weight_RC, scale_BZ, N, split, C, R, Z, S, TILE, BLOCK)
    tl.store(out_SNR + split.to(tl.int64) * N * R + at_mt, sum_mt, mask=here_mt)


@triton.jit
def sum_kernel(x_NC, part_SNR, N, out_NR, R: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr):
    """The splits' sums, in their order."""
    n = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sum_r = tl.zeros([COLUMNS], tl.float32)
    for s in tl.static_range(S):
        sum_r += tl.load(part_SNR + (s * N.to(tl.int64) + n) * R + r, mask=r < R, other=0.0)
    tl.store(out_NR + n * R + r, as_stored(sum_r, out_NR), mask=r < R)
