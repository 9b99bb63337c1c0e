"""What the generated code calls where one torch expression is not enough."""

from __future__ import annotations

import torch
from torch.nn import functional


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


def write_slots(offset_X: torch.Tensor, cumulative_X1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot, int64 [rows] each, of every packed row of a KV cache update."""
    counts, rows = cumulative_X1.diff(), int(cumulative_X1[-1])
    page = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=rows)
    slot = torch.arange(rows) - cumulative_X1[page] + offset_X[page]
    return page, slot


def kv_update(
    cache_XHPD: torch.Tensor, rows_NHD: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The cache with the rows written in place."""
    page, slot = where
    if cache_XHPD.shape[1] == 1:
        flat = cache_XHPD.view(-1, cache_XHPD.shape[3])
        flat.index_copy_(0, page * cache_XHPD.shape[2] + slot, rows_NHD.squeeze(1))
    else:
        cache_XHPD[page, :, slot] = rows_NHD
    return cache_XHPD


def shift(x: torch.Tensor, axis: int, by: int) -> torch.Tensor:
    """x moved towards higher indices along an axis, zeros coming in."""
    kept = x.narrow(axis, 0, x.shape[axis] - by)
    return functional.pad(kept, [0, 0] * (x.dim() - 1 - axis) + [by, 0])


def gather_nd(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """x at full coordinates over its leading axes."""
    return x[indices.unbind(-1)]
