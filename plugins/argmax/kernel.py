"""Argmax over the last axis where the lowest index wins a tie (`glmspec.plugins.argmax`).

A row is cut into splits, a program each, so that few rows fill a GPU too. Legend: N rows, V columns, Z splits of a row,
ZP padded, B columns of a split.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_kernel(x_NV, best_NZ, index_NZ, V: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of every BLOCK columns and its column. A NaN is as little as -inf."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)  # rows x columns may pass 2^31
    column_B = split * BLOCK + tl.arange(0, BLOCK)
    value_B = tl.load(x_NV + row * V + column_B, mask=column_B < V, other=float("-inf")).to(tl.float32)
    value_B = tl.where(value_B == value_B, value_B, float("-inf"))
    best = tl.max(value_B, 0)
    at = row * tl.num_programs(1) + split
    tl.store(best_NZ + at, best)
    tl.store(index_NZ + at, tl.min(tl.where(value_B == best, column_B, V), 0))


@triton.jit
def merge_kernel(best_NZ, index_NZ, index_N, Z: tl.constexpr, ZP: tl.constexpr):
    """The best split's column, the first of equals: int32 [N]. A row without anything above -inf gives 0."""
    row = tl.program_id(0).to(tl.int64)
    split_Z = tl.arange(0, ZP)
    best_Z = tl.load(best_NZ + row * Z + split_Z, mask=split_Z < Z, other=float("-inf"))
    index_Z = tl.load(index_NZ + row * Z + split_Z, mask=split_Z < Z, other=2**31 - 1)
    tl.store(index_N + row, tl.min(tl.where(best_Z == tl.max(best_Z, 0), index_Z, 2**31 - 1), 0))
