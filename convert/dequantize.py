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
_INTEGERS = ("I32", "I64")
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
        rows = info.shape[:1]
        _expect(source, single, (), (1,), rows, (*rows, 1))
        return Stored((name, single, *extra), info.shape, "float32", lambda: _fp8_tensor(source, name, single))
    if info.dtype == "U8" and single and second:
        shape = (*info.shape[:-1], info.shape[-1] * 2)
        _check_groups(source, name, shape, single, second)
        names = (name, single, second, *extra)
        return Stored(names, shape, "float32", lambda: _nvfp4(source, name, single, second))
    if info.dtype in _FLOATS:
        return Stored((name,), info.shape, _FLOATS[info.dtype], lambda: source.read(name))
    raise CheckpointError(
        f"{source.folder}: tensor {name}: found {info.dtype} with scales {[s for s in (block, single, second) if s]}, "
        "expected BF16, F16, F32, FP8 with weight_scale_inv or weight_scale, "
        "or NVFP4 with weight_scale and weight_scale_2."
    )


def stored_integers(source: Source, name: str) -> Stored:
    """A table of ids. Raises `CheckpointError` for a missing tensor or one that is not of integers."""
    if name not in source:
        raise CheckpointError(f"{source.folder}: tensor {name}: missing.")
    info = source.tensors[name]
    if info.dtype not in _INTEGERS:
        raise CheckpointError(f"{source.folder}: tensor {name}: found {info.dtype}, expected {' or '.join(_INTEGERS)}.")
    return Stored((name,), info.shape, "int32", lambda: source.read(name).to(torch.int32))


def _check_blocks(source: Source, name: str, scale: str) -> None:
    shape = source.tensors[name].shape
    if len(shape) != 2:
        raise CheckpointError(
            f"{source.folder}: tensor {name}: found shape {list(shape)} with block scales, expected 2-D."
        )
    _expect(source, scale, (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))


def _check_groups(source: Source, name: str, shape: tuple[int, ...], scale: str, second: str) -> None:
    if shape[-1] % GROUP:
        raise CheckpointError(
            f"{source.folder}: tensor {name}: found {shape[-1]} NVFP4 columns, expected a multiple of {GROUP}."
        )
    _expect(source, scale, (*shape[:-1], shape[-1] // GROUP))
    _expect(source, second, (), (1,))


def _expect(source: Source, name: str, *shapes: tuple[int, ...]) -> None:
    found = source.tensors[name].shape
    if found not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{source.folder}: tensor {name}: found shape {list(found)}, expected {wanted}.")


def _fp8_blocks(source: Source, name: str, scale: str) -> torch.Tensor:
    """float32 [rows, columns]; the last block of an axis may be partial."""
    weight = source.read(name).float()
    scale_RC = source.read(scale).float()
    wide = scale_RC.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight * wide


def _fp8_tensor(source: Source, name: str, scale: str) -> torch.Tensor:
    """float32, one scale or one a row."""
    weight, factor = source.read(name).float(), source.read(scale).float()
    return weight * (factor.reshape(-1, 1) if factor.numel() > 1 else factor.reshape(()))


def _nvfp4(source: Source, name: str, scale: str, second: str) -> torch.Tensor:
    """float32 [rows, columns]: element 2 i in the low nibble, a float8 scale every 16 columns, one scale over all."""
    packed = source.read(name)
    codes = torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2).int()
    factor = source.read(scale).float() * source.read(second).float()
    return _FP4[codes] * factor.repeat_interleave(GROUP, -1)
