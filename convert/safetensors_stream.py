"""A safetensors file written one tensor at a time.

The library's own writer wants every tensor in memory; a 700 GB checkpoint needs the header first and
then a stream. Peak memory is one output tensor and what it is made of.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from glmspec.build.errors import CheckpointError

_NAMES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "int32": ("I32", 4)}


def write_stream(
    path: Path,
    specs: Iterable[tuple[str, str, tuple[int, ...]]],
    tensors: Iterable[torch.Tensor],
    metadata: dict[str, str],
) -> None:
    """Write `tensors`, in the order of `specs` (name, dtype, shape). Whole file or nothing."""
    header: dict[str, object] = {"__metadata__": metadata}
    specs, end = list(specs), 0
    for name, dtype, shape in specs:
        code, size = _NAMES[dtype]
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, shape), tensor in zip(specs, tensors, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != getattr(torch, dtype):
                raise CheckpointError(
                    f"tensor {name}: made {tensor.dtype}{list(tensor.shape)}, planned {dtype}{list(shape)}"
                )
            file.write(tensor.contiguous().view(torch.uint8).numpy().data if tensor.numel() else b"")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
