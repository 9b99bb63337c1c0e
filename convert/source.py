"""A Hugging Face checkpoint folder, opened without reading its tensors.

Knows one file or a sharded index; every way such a folder can be broken is named: a shard that the
index lists and the disk lacks, a tensor the shard lacks, a file cut short.
"""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from glmspec.build.configs.fields import read_json
from glmspec.build.errors import CheckpointError
from glmspec.convert.declared import Declared, declared
from glmspec.convert.formats import NUMPY, TORCH

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what its header says. dtype: safetensors' name, such as "BF16". offset: in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0


class Source:
    """The tensors of a checkpoint folder by name. Rows are read when asked for; nothing is kept in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.notes: list[str] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()
        if (folder / INDEX).exists():
            self._open_index()
        elif (folder / SINGLE).exists():
            self._take(folder / SINGLE, None)
        else:
            raise CheckpointError(f"{folder}: found neither {SINGLE} nor {INDEX}, expected one of them.")

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    @property
    def files(self) -> list[Path]:
        """The tensor files in use, sorted."""
        return sorted({info.file for info in self.tensors.values()})

    @cached_property
    def declared(self) -> Declared:
        """What its configs say of quantization. Raises `ConfigError` for what is not understood or not supported."""
        return declared(self.folder, self.config)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> torch.Tensor:
        """One tensor, copied from the file."""
        info = self.tensors[name]
        return torch.from_numpy(self.rows(name)).view(TORCH[info.dtype]).reshape(info.shape)

    def rows(self, name: str, first: int = 0, count: int | None = None, columns: int | None = None) -> np.ndarray:
        """Raw bits [count, columns] of rows of a tensor seen as a matrix: its last dimension is the columns, unless
        said otherwise. Any thread may call it."""
        info = self.tensors[name]
        if columns is None:
            columns = info.shape[-1] if info.shape else 1
        rows = math.prod(info.shape) // max(1, columns)
        out = np.empty((rows - first if count is None else count, columns), NUMPY[info.dtype])
        view, at = memoryview(out).cast("B") if out.size else b"", info.offset + first * columns * out.itemsize
        while view:
            read = os.preadv(self._descriptor(info.file), [view], at)
            if not read:
                raise CheckpointError(f"{info.file}: tensor {name}: the file ends inside it. Download it again.")
            view, at = view[read:], at + read
        return out

    def _descriptor(self, path: Path) -> int:
        with self._opening:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]

    def _open_index(self) -> None:
        path = self.folder / INDEX
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: weight_map: found {weight_map!r}, expected names and their files.")
        by_file: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{path}: weight_map: {name}: found {file!r}, expected a file of this folder.")
            by_file.setdefault(file, set()).add(name)
        missing = [file for file in sorted(by_file) if not (self.folder / file).exists()]
        if missing:
            raise CheckpointError(
                f"{path}: shard {', '.join(missing)}: named in the index, not in the folder. Download it again."
            )
        for file, names in sorted(by_file.items()):
            self._take(self.folder / file, names)
        stray = sorted(p.name for p in self.folder.glob("*.safetensors") if p.name not in by_file)
        if stray:
            self.notes.append(f"files the index does not name were left alone: {', '.join(stray)}")

    def _take(self, path: Path, names: set[str] | None) -> None:
        """Read a file's header; names: what the index says it holds, None for whatever is there."""
        held = _header(path)
        if names is not None and names - held.keys():
            lacking = ", ".join(sorted(names - held.keys())[:5])
            raise CheckpointError(f"{path}: {lacking}: the index says it is in this file, and it is not.")
        if names is not None and held.keys() - names:
            surplus = ", ".join(sorted(held.keys() - names))
            self.notes.append(f"{path.name} holds tensors the index does not name: {surplus}")
        for name in names or held:
            dtype, shape, offset = held[name]
            self.tensors[name] = TensorInfo(path, dtype, shape, offset)


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """dtype, shape and place of every tensor; the library checks that the file is whole first."""
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}). Download it again.") from None
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    }
