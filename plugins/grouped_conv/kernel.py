"""The grouped dynamic convolution (`glmspec.plugins.grouped_conv`): one program a block and a few hundred columns.

Legend: B blocks, R rows, T taps, D columns, U groups, W columns of a group; g groups and w columns of a program. Rows
are few, so they are unrolled and stay in registers: everything is read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import as_stored


@triton.jit
def grouped_conv_kernel(
    x_BRD,
    base_2TD,
    delta_BR2TU,
    residual_BRD,
    y_BRD,
    R: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    U: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    GROUPS: tl.constexpr,
    side: tl.constexpr,
):
    """See `grouped_conv.reference`."""
    block = tl.program_id(0).to(tl.int64)
    group_g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column_w = tl.program_id(2) * WP + tl.arange(0, WP)
    there_g = group_g < U
    there_gw = there_g[:, None] & (column_w[None, :] < W)
    at_gw = group_g[:, None] * W + column_w[None, :]
    base_gw = ()
    for tap in tl.static_range(T):
        base = tl.load(base_2TD + (side * T + tap) * D + at_gw, mask=there_gw, other=0.0)
        base_gw = base_gw + (base.to(tl.float32),)
    # All reads stand before the first store: nothing is read ahead of a store that might be to the same place.
    x_gw, delta_g, residual_gw = (), (), ()
    for row in tl.static_range(R):
        row_gw = (block * R + row) * D + at_gw
        x_gw = x_gw + (tl.load(x_BRD + row_gw, mask=there_gw, other=0.0),)
        if residual_BRD is not None:
            residual_gw = residual_gw + (tl.load(residual_BRD + row_gw, mask=there_gw, other=0.0),)
        for tap in tl.static_range(T):
            delta_U = delta_BR2TU + (((block * R + row) * 2 + side) * T + tap) * U
            delta_g = delta_g + (tl.load(delta_U + group_g, mask=there_g, other=0.0),)
    for row in tl.static_range(R):
        y_gw = tl.zeros([GROUPS, WP], tl.float32)
        for tap in tl.static_range(min(T, row + 1)):
            kernel_gw = base_gw[tap] + delta_g[row * T + tap].to(tl.float32)[:, None]
            y_gw += kernel_gw * x_gw[row - tap].to(tl.float32)
        if residual_BRD is not None:
            y_gw = residual_gw[row].to(tl.float32) + y_gw
        tl.store(y_BRD + (block * R + row) * D + at_gw, as_stored(y_gw, y_BRD), mask=there_gw)
