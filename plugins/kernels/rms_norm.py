"""RMSNorm over the last axis, in float32 inside (`glmspec.plugins.rms_norm`).

N rows, D columns, B lanes of a tile. One program walks one row twice: for the sum of the squares, then (out of a
cache) to write.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.kernels.bfloat16 import rounded, to_bfloat16


@triton.jit
def rms_norm_kernel(x_ND, weight_D, width, eps_bits, out_ND, BLOCK: tl.constexpr):
    """x [N, D], weight [D] -> [N, D] in x's dtype. width: D.

    eps_bits: the bits of eps as a float32, for TensorRT's ahead-of-time plugins pass no floats.
    """
    row = tl.program_id(0).to(tl.int64)  # rows x columns may pass 2^31
    x_D, out_D = x_ND + row * width, out_ND + row * width
    lane_B = tl.arange(0, BLOCK)
    sum_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column_B = start + lane_B
        value_B = tl.load(x_D + column_B, mask=column_B < width, other=0.0).to(tl.float32)
        sum_B += value_B * value_B
    # Exact division and root: one of each a row costs nothing, and the approximate ones flip roundings.
    mean = tl.div_rn(tl.sum(sum_B, 0), width.to(tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps_bits.to(tl.float32, bitcast=True)))
    for start in range(0, width, BLOCK):
        column_B = start + lane_B
        inside_B = column_B < width
        value_B = tl.load(x_D + column_B, mask=inside_B, other=0.0).to(tl.float32)
        weight_B = tl.load(weight_D + column_B, mask=inside_B, other=0.0).to(tl.float32)
        normed_B = value_B * scale
        if out_ND.dtype.element_ty == tl.bfloat16:
            # Rounded before the weight, as the reference does; the product of two bfloat16 is exact in float32.
            tl.store(out_D + column_B, to_bfloat16(rounded(normed_B) * weight_B), mask=inside_B)
        else:
            tl.store(out_D + column_B, normed_B * weight_B, mask=inside_B)
