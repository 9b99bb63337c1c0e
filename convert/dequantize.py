"""Quantized weights back to float32.

`stored(source, name)` describes how the weight `name` lies in a checkpoint: plain, FP8 with 128x128
block scales (`weight_scale_inv`), FP8 with one scale (`weight_scale`), or ModelOpt NVFP4
(`weight_scale`, `weight_scale_2`). What is decided is what the tensors say; lists in configs misname modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from glmspec.build.errors import CheckpointError
from glmspec.convert.source import Source

BLOCK = 128  # rows and columns that share a scale in native FP8 checkpoints
GROUP = 16  # columns that share a scale in NVFP4
_FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat([_FP4_VALUES, -_FP4_VALUES])
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Stored:
    """A weight as a checkpoint holds it. names: every tensor it is made of. shape, dtype: once read."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]


def stored(source: Source, name: str) -> Stored:
    """How `name` is stored. Raises `CheckpointError` for a missing tensor or scales that do not fit it."""
    if name not in source:
        raise CheckpointError(f"{source.folder}: tensor {name}: missing.")
    info = source.tensors[name]
    stem = name.removesuffix("weight")
    scales = [f"{stem}{suffix}" for suffix in ("weight_scale_inv", "weight_scale", "weight_scale_2")]
    block, single, second = (scale if scale in source else None for scale in scales)
    # Activation scales are left for a target that quantizes activations.
    extra = tuple(n for n in (f"{stem}input_scale",) if n in source and stem != name)
    if info.dtype == "F8_E4M3" and block:
        _check_blocks(source, name, block)
        return Stored((name, block, *extra), info.shape, "float32", lambda: _fp8_blocks(source, name, block))
    if info.dtype == "F8_E4M3" and single:
        return Stored((name, single, *extra), info.shape, "float32", lambda: _fp8_tensor(source, name, single))
    if info.dtype == "U8" and single and second:
        shape = (*info.shape[:-1], info.shape[-1] * 2)
        _check_groups(source, single, shape)
        names = (name, single, second, *extra)
        return Stored(names, shape, "float32", lambda: _nvfp4(source, name, single, second))
    if info.dtype in _FLOATS:
        return Stored((name,), info.shape, _FLOATS[info.dtype], lambda: source.read(name))
    raise CheckpointError(
        f"{source.folder}: tensor {name}: found {info.dtype} with scales {[s for s in (block, single, second) if s]}, "
        "expected BF16, F16, F32, FP8 with weight_scale_inv or weight_scale, "
        "or NVFP4 with weight_scale and weight_scale_2."
    )


def _check_blocks(source: Source, name: str, scale: str) -> None:
    rows, columns = source.tensors[name].shape
    _expect(source, scale, (-(-rows // BLOCK), -(-columns // BLOCK)))


def _check_groups(source: Source, scale: str, shape: tuple[int, ...]) -> None:
    _expect(source, scale, (*shape[:-1], shape[-1] // GROUP))


def _expect(source: Source, name: str, shape: tuple[int, ...]) -> None:
    found = source.tensors[name].shape
    if found != shape:
        raise CheckpointError(f"{source.folder}: tensor {name}: found shape {list(found)}, expected {list(shape)}.")


def _fp8_blocks(source: Source, name: str, scale: str) -> torch.Tensor:
    """float32 [rows, columns]; the last block of an axis may be partial."""
    weight = source.read(name).float()
    scale_RC = source.read(scale).float()
    wide = scale_RC.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight * wide


def _fp8_tensor(source: Source, name: str, scale: str) -> torch.Tensor:
    """float32, one scale or one a row."""
    factor = source.read(scale).float()
    return source.read(name).float() * (factor.reshape(-1, 1) if factor.numel() > 1 else factor.reshape(()))


def _nvfp4(source: Source, name: str, scale: str, second: str) -> torch.Tensor:
    """float32 [rows, columns]: element 2 i in the low nibble, a float8 scale every 16 columns, one scale over all."""
    packed = source.read(name)
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).int()
    factor = source.read(scale).float() * source.read(second).float()
    return _FP4[codes] * factor.repeat_interleave(GROUP, -1)
