"""Functions in torch that the generated step calls where a TensorRT layer is more than one torch expression.

Legend: N rows, H heads, F columns of a head, E half of the rotary columns, P pairs of columns, D hidden.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from glmspec.network.formats import FP4_MAX, GROUP
from glmspec.plugins import kv_append as append_op
from glmspec.plugins.quantize_blocks import to_e4m3
from glmspec.plugins.rounding import FP4_VALUES, to_e2m1, unpack

write_slots, kv_append, kv_update = append_op.slots, append_op.append, append_op.write


def topk(x: torch.Tensor, k: int, axis: int, largest: bool, lowest_wins: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """TensorRT's TopK, sorted. It leaves ties undefined: here the lowest index wins, or the highest, so that a
    test can show that a network does not depend on it."""
    if lowest_wins:
        values, indices = x.sort(dim=axis, descending=largest, stable=True)
    else:
        values, indices = x.flip(axis).sort(dim=axis, descending=largest, stable=True)
        indices = x.shape[axis] - 1 - indices
    return values.narrow(axis, 0, k), indices.narrow(axis, 0, k).to(torch.int32)


def rotation(cos_N1E: torch.Tensor, sin_N1E: torch.Tensor, columns: int) -> torch.Tensor:
    """The complex numbers that turn `columns` columns in pairs, [N, 1, 1, columns / 2]: ones where they pass."""
    passing = (0, columns // 2 - cos_N1E.shape[-1])
    cos, sin = functional.pad(cos_N1E.float(), passing, value=1.0), functional.pad(sin_N1E.float(), passing)
    return torch.complex(cos, sin).unsqueeze(1)


def rope_interleaved(x_NH1F: torch.Tensor, rotation_N11P: torch.Tensor) -> torch.Tensor:
    """Pairs (0, 1), (2, 3), ... multiplied by their complex number."""
    pairs = x_NH1F.float().reshape(*x_NH1F.shape[:-1], -1, 2)
    return torch.view_as_real(torch.view_as_complex(pairs) * rotation_N11P).flatten(-2).to(x_NH1F.dtype)


def rope_half_split(x_NH1F: torch.Tensor, cos_N1E: torch.Tensor, sin_N1E: torch.Tensor) -> torch.Tensor:
    """Pairs (0, E), (1, E + 1), ... of the leading columns rotated; the others pass."""
    half = cos_N1E.shape[-1]
    cos, sin = cos_N1E.unsqueeze(1), sin_N1E.unsqueeze(1)
    first, second = x_NH1F[..., :half], x_NH1F[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x_NH1F[..., 2 * half :]], -1)


def window(x: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """`size` places of an axis from `start` on, zeros where there are none."""
    have = x.shape[axis]
    first, last = max(start, 0), min(start + size, have)
    kept = x.narrow(axis, first, last - first)
    return functional.pad(kept, [0, 0] * (x.dim() - 1 - axis) + [first - start, start + size - last])


def gather_nd(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """x at full coordinates over its leading axes."""
    return x[indices.unbind(-1)]


def scatter_nd(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """x with updates at full coordinates over its leading axes."""
    return x.index_put(tuple(indices.long().unbind(-1)), updates)


def quantize(x: torch.Tensor, scale: torch.Tensor, block: list[int] | None, axis: int) -> torch.Tensor:
    """x / scale as float8_e4m3fn, saturating."""
    return to_e4m3(x.float() / _spread(scale, x.shape, block, axis))


def dequantize(
    q: torch.Tensor, scale: torch.Tensor, block: list[int] | None, axis: int, dtype: torch.dtype
) -> torch.Tensor:
    """q * scale, rounded once to dtype. q: float8, or NVFP4 codes two a byte."""
    values = unpack(q) if q.dtype == torch.uint8 else q.float()
    return (values * _spread(scale, values.shape, block, axis)).to(dtype)


def _spread(scale: torch.Tensor, shape: torch.Size, block: list[int] | None, axis: int) -> torch.Tensor:
    """A scale for every element, or one that broadcasts, float32."""
    wide = scale.float()
    if block is None and wide.dim() == len(shape):  # NVFP4: one for so many along the axis
        return wide.repeat_interleave(shape[axis] // wide.shape[axis], axis)
    if block is None:
        return wide if axis < 0 or not wide.dim() else wide.view([-1 if at == axis else 1 for at in range(len(shape))])
    for at, (size, by) in enumerate(zip(shape, block, strict=True)):
        if wide.shape[at] not in (1, size):  # one broadcasts
            wide = wide.repeat_interleave(by, at).narrow(at, 0, size)
    return wide


def dynamic_quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4: codes two a byte, the even element low, and a float8 scale a group."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    step = to_e4m3(groups.abs().amax(-1) * (1 / FP4_MAX) / scale)
    wide = (step.float() * scale).unsqueeze(-1)
    return pack(to_e2m1(groups / torch.where(wide == 0, 1.0, wide)).flatten(-2)), step


def pack(values: torch.Tensor) -> torch.Tensor:
    """e2m1 values as codes, two a byte."""
    size = torch.bucketize(values.abs(), values.new_tensor(FP4_VALUES[:8]))
    code = (size + 8 * torch.signbit(values)).to(torch.uint8)
    return code[..., 0::2] | code[..., 1::2] << 4
