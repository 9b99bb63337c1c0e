"""Rounding to float8 (e4m3) by bits.

Triton's interpreter rounds in another way than a GPU does, so a plain cast could not be tested without a GPU. (It reads
finite float8 numbers as a GPU does: a plain cast from float8 is right.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float8(x):
    """float32 -> the nearest float8_e4m3fn (ties to even), +-448 for what is greater, NaN for NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448, the largest
    # Three bits of the mantissa stay (see `bfloat16.round_bits`); 120 is the difference of the exponents' biases.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, and so it is of float32 between 2^14 and 2^15.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
