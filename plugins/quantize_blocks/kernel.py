"""Rows to e4m3 codes with a scale a block (`glmspec.plugins.quantize_blocks`).

Legend: N rows, D columns, Z blocks of a row; b blocks of a program, c columns of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.float8 import to_float8


@triton.jit
def quantize_blocks_kernel(
    x_ND,
    N,
    code_ND,
    scale_NZ,
    D: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A block's scale is its amax / 448, but 1e-12 at least; codes are of x / scale."""
    block_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row_b, z_b = block_b // Z, block_b % Z
    column_bc = (z_b * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    here_bc = (row_b[:, None] < N) & (column_bc < D)
    at_bc = row_b[:, None] * D + column_bc
    x_bc = tl.load(x_ND + at_bc, mask=here_bc, other=0.0).to(tl.float32)
    scale_b = tl.maximum(tl.max(tl.abs(x_bc), 1) * (1 / 448.0), 1e-12)
    tl.store(scale_NZ + block_b, scale_b, mask=row_b < N)
    tl.store(code_ND + at_bc, to_float8(tl.div_rn(x_bc, scale_b[:, None])), mask=here_bc)
