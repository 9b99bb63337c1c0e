"""The number formats of weights: how values go in and out.

A `Block` is a matrix [R, C] in one of `network/formats.py`'s formats: raw bits by field. Formulas are ModelOpt's
(`kernels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from glmspec.convert import on_device
from glmspec.network.formats import BLOCK, FORMATS, FP4_MAX, FP8_MAX, GROUP, QUANTIZED

# Raw bits: what numpy has no name for is an unsigned integer of the same size.
NUMPY = {
    "F32": np.float32,
    "BF16": np.uint16,
    "F16": np.uint16,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "U8": np.uint8,
    "BOOL": np.uint8,
}
TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _kernels() -> ModuleType:
    """The loops, imported when values are first computed: what reads headers only does without numba."""
    from glmspec.convert import kernels

    return kernels


@dataclass(frozen=True)
class Block:
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


def plain(format: str, tensor: torch.Tensor) -> Block:
    """A torch matrix [R, C] in a plain format."""
    dtype = FORMATS[format][""].dtype
    bits = tensor.to(TORCH[dtype]).contiguous()
    if NUMPY[dtype] is np.uint16:
        bits = bits.view(torch.uint16)
    return Block(format, {"": bits.numpy()})


def amax(block: Block) -> float:
    """Largest magnitude, NaN when a value is not finite."""
    bits, fields = block.fields[""], block.fields
    if block.format == "bfloat16":
        found = np.array([_kernels().amax_bits(bits, np.uint16(0x7FFF))], np.uint32) << 16
        value = float(found.view(np.float32)[0])
    elif block.format == "float32":
        found = np.array([_kernels().amax_bits(bits.view(np.uint32), np.uint32(0x7FFFFFFF))], np.uint32)
        value = float(found.view(np.float32)[0])
    elif block.format == "fp8_block":
        value = float(_kernels().amax_blocks(bits, fields["scale_inv"]))
    else:
        value = float(np.abs(to_float32(block)).max(initial=0.0))
    return value if np.isfinite(value) else float("nan")


def is_finite(block: Block) -> bool:
    """False for a quantized matrix with a NaN code, or with a scale that is no positive number. (Plain matrices are
    looked at when they are quantized.)"""
    if block.format not in QUANTIZED:
        return True
    if block.format == "fp8_block" and np.isnan(_kernels().amax_blocks(block.fields[""], block.fields["scale_inv"])):
        return False
    for suffix, field in FORMATS[block.format].items():
        bits = block.fields[suffix]
        if block.format != "fp8_block" and field.dtype == "F8_E4M3" and ((bits & 0x7F) == 0x7F).any():
            return False
        if field.dtype == "F32" and not (np.isfinite(bits) & (bits > 0)).all():
            return False
    return True


def to_float32(block: Block) -> np.ndarray:
    """The values, float32 [R, C]: code times scale, rounded once."""
    codes, fields = block.fields[""], block.fields
    if block.format == "float32":
        return codes
    if block.format == "fp8_block":
        out = np.empty(block.shape, np.float32)
        _kernels().blocks_to_float32(codes, fields["scale_inv"], out)
        if np.isnan(_kernels().amax_blocks(codes, fields["scale_inv"])):
            out[(codes & 0x7F) == 0x7F] = np.nan  # the kernel takes these codes for numbers
        return out
    if block.format == "nvfp4":
        out = np.empty(block.shape, np.float32)
        _kernels().fp4_to_float32(codes, fields["scale"], np.float32(fields["scale_2"].item()), out)
        return out
    values = block.tensor().float()
    if block.format in ("fp8", "fp8_rows"):
        values *= block.tensor("scale")
    return values.numpy()


def convert(block: Block, format: str, scale_from: float = 0.0, device: str = "cpu") -> Block:
    """The same matrix in another format; the very block when it has it already.
    scale_from: the largest magnitude that fp8's and nvfp4's one scale must reach (of all matrices that share it).
    device: where nvfp4 is computed."""
    if block.format == format:
        return block
    if format == "nvfp4":
        return _to_nvfp4(block, scale_from, device)
    if format in ("fp8", "fp8_block"):
        return _to_fp8(block, format, scale_from)
    return plain(format, block.values())


def one_scale(format: str, largest: float) -> np.float32:
    """fp8's `scale` or nvfp4's `scale_2`, float32. 1 when the matrix holds nothing but zeros: ModelOpt divides by 0."""
    most = np.float32(FP4_MAX * FP8_MAX if format == "nvfp4" else FP8_MAX)
    return (np.float32(largest) / most) or np.float32(1)


def _to_nvfp4(block: Block, largest: float, device: str) -> Block:
    rows, columns = block.shape
    scale_2 = one_scale("nvfp4", largest)
    packed, scales = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // GROUP), np.uint8)
    if device != "cpu":
        packed, scales = on_device.to_nvfp4(block.values(), scale_2, device)
    elif block.format == "bfloat16":
        _kernels().fp4_from_bits16(block.fields[""], scale_2, packed, scales)
    elif block.format == "fp8_block":
        _kernels().fp4_from_blocks(block.fields[""], block.fields["scale_inv"], scale_2, packed, scales)
    else:
        _kernels().fp4_from_float32(to_float32(block), scale_2, packed, scales)
    return Block("nvfp4", {"": packed, "scale": scales, "scale_2": np.full((1, 1), scale_2, np.float32)})


def _to_fp8(block: Block, format: str, largest: float) -> Block:
    """With one scale the quotient is rounded to the matrix's own precision first, as ModelOpt's is."""
    values = block.values()
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
    return Block(format, {"": codes.view(torch.uint8).numpy(), name: scales.contiguous().numpy()})
