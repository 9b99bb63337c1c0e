"""Rounding to NVFP4 by bits: e2m1 codes, two a byte, and an e4m3 scale for every 16 (`glmspec.plugins.rounding`).

Triton's interpreter can't convert to e2m1, so a conversion by the GPU could not be tested without one.

Legend: of a program: r rows, c columns, g groups of 16 of those columns, h bytes of their codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.float8 import to_float8


@triton.jit
def to_float4(x):
    """float32 -> the code of the nearest e2m1 (ties to even; 6 for what is greater), int32 below 16."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def quantized(x_rc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [ROWS, COLUMNS] -> codes int8 [ROWS, COLUMNS / 2], an even column's below, and scales float8_e4m3fn
    [ROWS, COLUMNS / 16]: a group's amax / 6."""
    x_rgc = tl.reshape(x_rc, [ROWS, COLUMNS // 16, 16])
    scale_rg = to_float8(tl.max(tl.abs(x_rgc), 2) * (1 / 6.0))
    step_rg = scale_rg.to(tl.float32)
    code_rgc = to_float4(tl.div_rn(x_rgc, tl.where(step_rg == 0.0, 1.0, step_rg)[:, :, None]))
    low_rh, high_rh = tl.split(tl.reshape(code_rgc, [ROWS, COLUMNS // 2, 2]))
    return (low_rh | (high_rh << 4)).to(tl.int8), scale_rg


# A code's three bits of size, where float32 has the end of its exponent and the begin of its mantissa, are 2^-126 of
# what they stand for (of 0.5 too, as float32 has numbers below 2^-126); times a scale and 2^126 would be too much.
NEARLY = tl.constexpr(2.0**110)


@triton.jit
def unpacked(byte, step):
    """Two codes a byte and their scale, float32 -> the values of the lower and the upper codes, times 2^-16, bfloat16.
    Exact: they have six bits."""
    byte = byte.to(tl.int32)
    low = ((byte & 7) << 22) | ((byte & 8) << 28)
    high = ((byte & 0x70) << 18) | ((byte & 0x80) << 24)
    step = step * NEARLY
    return cut(low.to(tl.float32, bitcast=True) * step), cut(high.to(tl.float32, bitcast=True) * step)


@triton.jit
def cut(x):
    """float32 that is a bfloat16 -> that."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def spread(step_mg, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """A scale for every group of 16, float8 [ROWS, BYTES / 8] -> one for each of its bytes, float32 [ROWS, BYTES]."""
    step_mg1 = tl.expand_dims(step_mg.to(tl.float32), 2)
    return tl.reshape(tl.broadcast_to(step_mg1, [ROWS, BYTES // 8, 8]), [ROWS, BYTES])
