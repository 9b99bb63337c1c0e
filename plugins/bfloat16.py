"""Rounding to bfloat16 by bits.

Triton's interpreter cuts the low bits off where a GPU rounds, so a plain cast could not be tested without a GPU.
Whole numbers are treated alike by both.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_bits(x):
    """float32 -> the uint32 whose upper half is x rounded to the nearest bfloat16 (ties to even), lower half zero."""
    bits = x.to(tl.uint32, bitcast=True)
    # Half a unit of the last place that stays, less one when that place is even: its carry rounds.
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, nearest, 0x7FC00000)  # the carry would turn some NaNs into numbers


@triton.jit
def rounded(x):
    """float32 -> the nearest bfloat16, as a float32."""
    return round_bits(x).to(tl.float32, bitcast=True)


@triton.jit
def to_bfloat16(x):
    """float32 -> the nearest bfloat16."""
    return (round_bits(x) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def as_stored(x, pointer):
    """float32 -> the nearest that a pointer's memory can hold, in its dtype."""
    return to_bfloat16(x) if pointer.dtype.element_ty == tl.bfloat16 else x.to(pointer.dtype.element_ty)


@triton.jit
def as_read(x, pointer):
    """float32 -> what would be read after storing it behind a pointer, as a float32."""
    return rounded(x) if pointer.dtype.element_ty == tl.bfloat16 else x.to(pointer.dtype.element_ty).to(tl.float32)
