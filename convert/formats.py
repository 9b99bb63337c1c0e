"""The number formats of weights: how values go in and out.

A `Matrix` is one [R, C] in one of `network/formats.py`'s formats: raw bits by field. Formulas are ModelOpt's
(`quantize.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from glmspec.convert import on_device
from glmspec.core.dtypes import HEADERS
from glmspec.network.formats import BLOCK, FORMATS, FP4_MAX, FP8_MAX, GROUP, QUANTIZED

# Raw bits: what numpy has no name for is an unsigned integer of the same size.
NUMPY = {header: np.dtype(one.raw) for header, one in HEADERS.items()}
TORCH = {header: getattr(torch, one.name) for header, one in HEADERS.items()}


def _loops() -> ModuleType:
    """The loops, imported when values are first computed: what reads headers only does without numba."""
    from glmspec.convert import quantize

    return quantize


@dataclass(frozen=True)
class Matrix:
    """A matrix in one format. fields: 2-D arrays of raw bits, as `FORMATS` lists them."""

    format: str
    fields: dict[str, np.ndarray]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        rows, columns = self.fields[""].shape
        return rows, columns * FORMATS[self.format][""].columns

    def tensor(self, suffix: str = "") -> torch.Tensor:
        """A field as a torch tensor of its own dtype, sharing memory."""
        return torch.from_numpy(self.fields[suffix]).view(TORCH[FORMATS[self.format][suffix].dtype])

    def values(self) -> torch.Tensor:
        """The numbers [R, C]: in the matrix's own precision, float32 where it is quantized."""
        return torch.from_numpy(to_float32(self)) if self.format in QUANTIZED else self.tensor()


def plain(format: str, tensor: torch.Tensor) -> Matrix:
    """A torch matrix [R, C] in a plain format."""
    dtype = FORMATS[format][""].dtype
    bits = tensor.to(TORCH[dtype]).contiguous()
    if NUMPY[dtype] == np.uint16:
        bits = bits.view(torch.uint16)
    return Matrix(format, {"": bits.numpy()})


def amax(matrix: Matrix) -> float:
    """Largest magnitude, NaN when a value is not finite."""
    bits, fields = matrix.fields[""], matrix.fields
    if matrix.format == "bfloat16":
        largest = np.array([_loops().amax_bits(bits, np.uint16(0x7FFF))], np.uint32) << 16
        value = float(largest.view(np.float32)[0])
    elif matrix.format == "float32":
        largest = np.array([_loops().amax_bits(bits.view(np.uint32), np.uint32(0x7FFFFFFF))], np.uint32)
        value = float(largest.view(np.float32)[0])
    elif matrix.format == "fp8_block":
        value = float(_loops().amax_blocks(bits, fields["scale_inv"]))
    else:
        value = float(np.abs(to_float32(matrix)).max(initial=0.0))
    return value if np.isfinite(value) else float("nan")


def is_finite(matrix: Matrix) -> bool:
    """False for a quantized matrix with a NaN code, or with a scale that is no positive number. (Plain matrices are
    looked at when they are quantized.)"""
    if matrix.format not in QUANTIZED:
        return True
    if matrix.format == "fp8_block" and np.isnan(_loops().amax_blocks(matrix.fields[""], matrix.fields["scale_inv"])):
        return False
    for suffix, field in FORMATS[matrix.format].items():
        bits = matrix.fields[suffix]
        if matrix.format != "fp8_block" and field.dtype == "F8_E4M3" and ((bits & 0x7F) == 0x7F).any():
            return False
        if field.dtype == "F32" and not (np.isfinite(bits) & (bits > 0)).all():
            return False
    return True


def to_float32(matrix: Matrix) -> np.ndarray:
    """The values, float32 [R, C]: code times scale, rounded once."""
    codes, fields = matrix.fields[""], matrix.fields
    if matrix.format == "float32":
        return codes
    if matrix.format == "fp8_block":
        out = np.empty(matrix.shape, np.float32)
        _loops().blocks_to_float32(codes, fields["scale_inv"], out)
        if np.isnan(_loops().amax_blocks(codes, fields["scale_inv"])):
            out[(codes & 0x7F) == 0x7F] = np.nan  # the kernel takes these codes for numbers
        return out
    if matrix.format == "nvfp4":
        out = np.empty(matrix.shape, np.float32)
        _loops().fp4_to_float32(codes, fields["scale"], np.float32(fields["scale_2"].item()), out)
        return out
    values = matrix.tensor().float()
    if matrix.format in ("fp8", "fp8_rows"):
        values *= matrix.tensor("scale")
    return values.numpy()


def convert(matrix: Matrix, format: str, scale_from: float = 0.0, device: str = "cpu") -> Matrix:
    """The same matrix in another format; the very object when it has it already.
    scale_from: the largest magnitude that fp8's and nvfp4's one scale must reach (of all matrices that share it).
    device: where nvfp4 is computed."""
    if matrix.format == format:
        return matrix
    if format == "nvfp4":
        return _to_nvfp4(matrix, scale_from, device)
    if format in ("fp8", "fp8_block"):
        return _to_fp8(matrix, format, scale_from)
    return plain(format, matrix.values())


def one_scale(format: str, largest: float) -> np.float32:
    """fp8's `scale` or nvfp4's `scale_2`, float32. 1 when the matrix holds nothing but zeros: ModelOpt divides by 0."""
    most = np.float32(FP4_MAX * FP8_MAX if format == "nvfp4" else FP8_MAX)
    return (np.float32(largest) / most) or np.float32(1)


def _to_nvfp4(matrix: Matrix, largest: float, device: str) -> Matrix:
    rows, columns = matrix.shape
    scale_2 = one_scale("nvfp4", largest)
    packed, scales = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // GROUP), np.uint8)
    if device != "cpu":
        packed, scales = on_device.to_nvfp4(matrix.values(), scale_2, device)
    elif matrix.format == "bfloat16":
        _loops().fp4_from_bits16(matrix.fields[""], scale_2, packed, scales)
    elif matrix.format == "fp8_block":
        _loops().fp4_from_blocks(matrix.fields[""], matrix.fields["scale_inv"], scale_2, packed, scales)
    else:
        _loops().fp4_from_float32(to_float32(matrix), scale_2, packed, scales)
    return Matrix("nvfp4", {"": packed, "scale": scales, "scale_2": np.full((1, 1), scale_2, np.float32)})


def _to_fp8(matrix: Matrix, format: str, largest: float) -> Matrix:
    """With one scale the quotient is rounded to the matrix's own precision first, as ModelOpt's is."""
    values = matrix.values()
    if format == "fp8":
        scale = torch.tensor(one_scale("fp8", largest))
        codes, name, scales = (values / scale).to(torch.float8_e4m3fn), "scale", scale.reshape(1, 1)
    else:
        rows, columns = values.shape
        padded = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
        most = padded.abs().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3)).float()
        scales, name = most / FP8_MAX, "scale_inv"
        scales[scales == 0] = 1.0
        wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        codes = (values / wide).to(torch.float8_e4m3fn)
    return Matrix(format, {"": codes.view(torch.uint8).numpy(), name: scales.contiguous().numpy()})
