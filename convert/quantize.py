"""Compiled loops of quantization and dequantization, bit-exact with ModelOpt's formulas.

Matrices are numpy arrays seen as raw bits: bfloat16 as uint16, float8_e4m3 as uint8, float32 as float32. Every loop
releases the GIL, so threads run side by side.

NVFP4: groups of 16 columns share a float8 scale, s = e4m3(clamp(amax / (6 * scale_2), 2^-9, 448)), 1 for a group of
zeros; a code is the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 to w / (s * scale_2), ties to the even code, and element
2 i lies in the low nibble. FP8: a code is e4m3(w / scale).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from glmspec.network.formats import BLOCK, GROUP

_E4M3 = np.array(
    [
        (-1.0 if code & 0x80 else 1.0)
        * ((code & 7) / 512.0 if code & 0x78 == 0 else (1 + (code & 7) / 8) * 2.0 ** (((code >> 3) & 15) - 7))
        for code in range(256)
    ],
    dtype=np.float32,
)
_E4M3[[0x7F, 0xFF]] = np.nan
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_FP4[8] = -0.0


def _jit(function: Callable[..., Any]) -> Any:
    """Compiled at its first call, and kept on disk for the next process where numba finds a place for it."""
    make = functools.partial(numba.njit, nogil=True, error_model="numpy")
    try:
        return make(cache=True)(function)
    except RuntimeError:  # neither beside this file nor in a home folder: a read-only install, no HOME
        return make()(function)


# -- largest magnitude --------------------------------------------------------------------------


@_jit
def amax_bits(matrix: np.ndarray, mask: int) -> int:
    """Largest magnitude of bits [R, C] of bfloat16 (as uint16) or float32 (as uint32), as bits. mask: all but the
    sign's. Magnitudes order like their bits; NaN is above infinity."""
    best = matrix.dtype.type(0)
    for row in range(matrix.shape[0]):
        for column in range(matrix.shape[1]):
            best = max(best, matrix.dtype.type(matrix[row, column] & mask))
    return best


@_jit
def amax_blocks(codes: np.ndarray, scales: np.ndarray) -> np.float32:
    """Largest magnitude of FP8 codes [R, C] with block scales. NaN for a NaN code."""
    rows, columns = codes.shape
    best, most = np.float32(0), np.empty(columns, np.uint8)
    for top in range(0, rows, BLOCK):
        most[:] = 0
        for row in range(top, min(top + BLOCK, rows)):
            for column in range(columns):
                size = codes[row, column] & np.uint8(0x7F)
                most[column] = size if size > most[column] else most[column]
        for left in range(0, columns, BLOCK):
            value = np.abs(_E4M3[most[left : left + BLOCK].max()] * scales[top // BLOCK, left // BLOCK])
            if not value <= best:  # also when it is NaN
                best = value
    return best


# -- rows to float32 ----------------------------------------------------------------------------


@_jit
def _widen16(source: np.ndarray, bits: np.ndarray) -> None:
    """bfloat16 bits of a row to float32 bits."""
    for column in range(source.shape[0]):
        bits[column] = np.uint32(source[column]) << np.uint32(16)


@_jit
def _widen_codes(
    source: np.ndarray, scales: np.ndarray, bits: np.ndarray, small: np.ndarray, values: np.ndarray
) -> None:
    """FP8 codes of a row to float32, times a scale a column. bits, small: scratch, the same bytes seen as two types.

    A code's bits in the place of float32's stand for the value times 2^-120, exactly, subnormal codes too.
    """
    for column in range(source.shape[0]):
        code = np.uint32(source[column])
        bits[column] = np.uint32((code & np.uint32(0x7F)) << np.uint32(20)) | np.uint32(
            (code & np.uint32(0x80)) << np.uint32(24)
        )
    for column in range(source.shape[0]):
        values[column] = (small[column] * np.float32(2.0**120)) * scales[column]


@_jit
def _spread(scales: np.ndarray, wide: np.ndarray) -> None:
    """A row of block scales, one a column."""
    for column in range(wide.shape[0]):
        wide[column] = scales[column // BLOCK]


# -- NVFP4 --------------------------------------------------------------------------------------


@_jit
def _e4m3_code(value: float, box: np.ndarray, bits: np.ndarray) -> np.uint8:
    """Code of a value in [0, 448], nearest, ties to even. box, bits: the same 4 bytes as float32 and as uint32."""
    if value < np.float32(2.0**-6):
        return np.uint8(np.rint(value * np.float32(512)))
    box[0] = value
    rounded = bits[0] + np.uint32(0x7FFFF) + ((bits[0] >> np.uint32(20)) & np.uint32(1))
    return np.uint8((rounded >> np.uint32(20)) - np.uint32((127 - 7) << 3))


@_jit
def _fp4_row(values, bits, scale_2, packed, scales, codes, box, box_bits) -> None:
    """One row of float32 to NVFP4. codes: scratch."""
    full = np.float32(6) * scale_2
    for group in range(scales.shape[0]):
        left = group * GROUP
        most = np.uint32(0)
        for column in range(left, left + GROUP):
            most = max(most, np.uint32(bits[column] & np.uint32(0x7FFFFFFF)))
        box_bits[0] = most
        scale = box[0] / full
        if scale == 0:
            scale = np.float32(1)
        scale = min(max(scale, np.float32(2.0**-9)), np.float32(448))
        code = _e4m3_code(scale, box, box_bits)
        scales[group] = code
        divisor = _E4M3[code] * scale_2
        for column in range(left, left + GROUP):
            value = values[column] / divisor
            size = np.abs(value)
            level = (
                np.uint8(size > np.float32(0.25))
                + np.uint8(size >= np.float32(0.75))
                + np.uint8(size > np.float32(1.25))
                + np.uint8(size >= np.float32(1.75))
                + np.uint8(size > np.float32(2.5))
                + np.uint8(size >= np.float32(3.5))
                + np.uint8(size > np.float32(5.0))
            )
            codes[column] = np.uint8(level) | (np.uint8(value < np.float32(0)) << np.uint8(3))
    for pair in range(packed.shape[0]):
        packed[pair] = np.uint8(codes[2 * pair] | (codes[2 * pair + 1] << np.uint8(4)))


@_jit
def fp4_from_bits16(matrix, scale_2, packed, scales) -> None:
    """bfloat16 bits [R, C] -> packed uint8 [R, C/2], scales e4m3 [R, C/16]."""
    columns = matrix.shape[1]
    bits, codes = np.empty(columns, np.uint32), np.empty(columns, np.uint8)
    values, box = bits.view(np.float32), np.empty(1, np.float32)
    box_bits = box.view(np.uint32)
    for row in range(matrix.shape[0]):
        _widen16(matrix[row], bits)
        _fp4_row(values, bits, scale_2, packed[row], scales[row], codes, box, box_bits)


@_jit
def fp4_from_float32(matrix, scale_2, packed, scales) -> None:
    """float32 [R, C] -> packed uint8 [R, C/2], scales e4m3 [R, C/16]."""
    columns = matrix.shape[1]
    codes, box = np.empty(columns, np.uint8), np.empty(1, np.float32)
    box_bits = box.view(np.uint32)
    for row in range(matrix.shape[0]):
        values = matrix[row]
        _fp4_row(values, values.view(np.uint32), scale_2, packed[row], scales[row], codes, box, box_bits)


@_jit
def fp4_from_blocks(matrix, block_scales, scale_2, packed, scales) -> None:
    """FP8 codes [R, C] with block scales -> packed uint8 [R, C/2], scales e4m3 [R, C/16]."""
    columns = matrix.shape[1]
    small, values, wide = np.empty(columns, np.float32), np.empty(columns, np.float32), np.empty(columns, np.float32)
    codes, box = np.empty(columns, np.uint8), np.empty(1, np.float32)
    small_bits, bits, box_bits = small.view(np.uint32), values.view(np.uint32), box.view(np.uint32)
    for row in range(matrix.shape[0]):
        if row % BLOCK == 0:
            _spread(block_scales[row // BLOCK], wide)
        _widen_codes(matrix[row], wide, small_bits, small, values)
        _fp4_row(values, bits, scale_2, packed[row], scales[row], codes, box, box_bits)


@_jit
def fp4_to_float32(packed, scales, scale_2, out) -> None:
    """NVFP4 back to float32 [R, C]."""
    for row in range(packed.shape[0]):
        for group in range(scales.shape[1]):
            factor = _E4M3[scales[row, group]] * scale_2
            for pair in range(group * GROUP // 2, (group + 1) * GROUP // 2):
                both = packed[row, pair]
                out[row, 2 * pair] = _FP4[both & np.uint8(15)] * factor
                out[row, 2 * pair + 1] = _FP4[both >> np.uint8(4)] * factor


# -- FP8 with block scales ----------------------------------------------------------------------


@_jit
def blocks_to_float32(codes, scales, out) -> None:
    """FP8 codes [R, C] with block scales -> float32 [R, C]; the last block of an axis may be partial."""
    columns = codes.shape[1]
    small, wide = np.empty(columns, np.float32), np.empty(columns, np.float32)
    small_bits = small.view(np.uint32)
    for row in range(codes.shape[0]):
        if row % BLOCK == 0:
            _spread(scales[row // BLOCK], wide)
        _widen_codes(codes[row], wide, small_bits, small, out[row])
