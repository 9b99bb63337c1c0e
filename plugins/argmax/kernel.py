"""Argmax over the last axis where the lowest index wins a tie (`glmspec.plugins.argmax`).

N rows, V columns, B lanes of a tile. One program walks one row, a tile at a time; every lane keeps the best value
it has seen and its column.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def argmax_kernel(x_NV, index_N, V: tl.constexpr, BLOCK: tl.constexpr):
    """x [N, V] -> int32 [N]. A NaN never wins; a row without anything above -inf gives 0."""
    row = tl.program_id(0).to(tl.int64)  # rows x columns may pass 2^31
    x_V = x_NV + row * V
    lane_B = tl.arange(0, BLOCK)
    best_B = tl.full([BLOCK], float("-inf"), tl.float32)
    index_B = lane_B  # so that lane 0 answers for a row of -inf
    for start in range(0, V, BLOCK):
        column_B = start + lane_B
        value_B = tl.load(x_V + column_B, mask=column_B < V, other=float("-inf")).to(tl.float32)
        better_B = value_B > best_B  # strictly: an equal one further right loses
        best_B = tl.where(better_B, value_B, best_B)
        index_B = tl.where(better_B, column_B, index_B)
    # Lanes interleave, so among the lanes that hold the maximum the lowest column must be looked for.
    best = tl.max(best_B, 0)
    tl.store(index_N + row, tl.min(tl.where(best_B == best, index_B, V), 0))
