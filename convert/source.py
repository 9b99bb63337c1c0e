"""A Hugging Face checkpoint folder, opened without reading its tensors.

Knows one file or a sharded index; every way such a folder can be broken is named: a shard that the
index lists and the disk lacks, a tensor the shard lacks, a file cut short, a second set of weights that says otherwise.
"""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from glmspec.convert.beside import (
    MASK_EMBEDDINGS,
    OTHER_WEIGHTS,
    PICKLED,
    Beside,
    file_kind,
    is_pointer,
    matching,
    survey,
)
from glmspec.convert.declared import Declared, declared
from glmspec.convert.formats import NUMPY, TORCH
from glmspec.convert.origin import mixed_revisions
from glmspec.convert.terms import Terms, read_terms
from glmspec.core.errors import CheckpointError
from glmspec.core.fields import read_json
from glmspec.core.sealed import MANIFEST

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_COMPARED = 1 << 16  # bytes at both ends of a tensor by which copies of it are compared


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what its header says. dtype: safetensors' name, such as "BF16". offset: in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    size: int = 0  # bytes


class Source:
    """The tensors of a checkpoint folder by name. Rows are read when asked for; nothing is kept in memory but a mask
    embedding. beside: what else lies in the folder. terms: of its licence."""

    beside, terms = Beside(), Terms()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.notes: list[str] = []
        self.known_digests: dict[str, str] = {}  # of files of weights that were hashed before, by their names
        self.tensors: dict[str, TensorInfo] = {}
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._kept: dict[str, np.ndarray] = {}  # rows of tensors that lie in no safetensors file
        if (folder / INDEX).exists():
            self._open_index()
        elif (folder / SINGLE).exists():
            self._take(folder / SINGLE, None)
        else:
            raise CheckpointError(
                f"{folder}: found neither {SINGLE} nor {INDEX}, expected one of them{_instead(folder)}."
            )
        self._refuse_rivals()
        self._survey()

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
        if name in self._kept:
            return self._kept[name].reshape(-1, columns)[first : None if count is None else first + count]
        rows = math.prod(info.shape) // max(1, columns)
        out = np.empty((rows - first if count is None else count, columns), NUMPY[info.dtype])
        view, at = out.data.cast("B") if out.size else b"", info.offset + first * columns * out.itemsize
        while view:
            read = os.preadv(self._descriptor(info.file), [view], at)
            if not read:
                raise CheckpointError(f"{info.file}: tensor {name}: the file ends inside it. Download it again.")
            view, at = view[read:], at + read
        return out

    def keep(self, name: str, path: Path, tensor: torch.Tensor) -> None:
        """Add a tensor that was read from a file which is no safetensors file of weights."""
        dtype = next(dtype for dtype, kind in TORCH.items() if kind is tensor.dtype)
        self._kept[name] = tensor.contiguous().view(torch.uint8).numpy().view(NUMPY[dtype])
        self.tensors[name] = TensorInfo(path, dtype, tuple(tensor.shape), size=tensor.nbytes)

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

    def _refuse_rivals(self) -> None:
        """Files of weights that are not read: noted, but refused where they hold everything a second time and say
        otherwise, or as much under other names."""
        if (self.folder / ADAPTER).exists():
            raise CheckpointError(
                f"{self.folder}: {ADAPTER}: an adapter lies beside the weights, and is not applied here. Merge it into "
                "them, or move its files away."
            )
        used = {path.name for path in self.files}
        names = [path.name for path in sorted(self.folder.glob("*.safetensors")) if path.name not in used]
        stray = [name for name in names if name not in MASK_EMBEDDINGS and file_kind(name) is None]
        if not stray:
            return
        self.notes.append(f"files of weights that are not used were left alone: {', '.join(stray)}")
        held = {name: info for file in stray if (path := self.folder / file) for name, info in _tensors(path).items()}
        same = held.keys() & self.tensors.keys()
        ours, theirs = (sum(info.size for info in tensors.values()) for tensors in (self.tensors, held))
        whole = self.tensors.keys() <= held.keys() or (not same and theirs >= ours / 2)
        other = next((name for name in sorted(same) if not self._alike(self.tensors[name], held[name])), None)
        if whole and (other or not same):
            first = INDEX if (self.folder / INDEX).exists() else SINGLE
            apart = f"they differ in {other}" if other else "their tensors have other names"
            raise CheckpointError(
                f"{self.folder}: two sets of weights, {first} and {', '.join(stray)}: {apart}. Which is right? Move "
                "the other one away."
            )

    def _alike(self, ours: TensorInfo, theirs: TensorInfo) -> bool:
        """Whether two tensors agree in type, shape and the bytes at both ends."""
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return False
        count = min(ours.size, _COMPARED)
        return all(
            len({os.pread(self._descriptor(info.file), count, info.offset + at) for info in (ours, theirs)}) == 1
            for at in {0, ours.size - count}
        )

    def _survey(self) -> None:
        weights = [path.name for path in self.folder.glob("*.safetensors") if file_kind(path.name) is None]
        self.beside = survey(self.folder, self.config, weights)
        record = self.folder / MANIFEST
        known = read_json(record).get("license") if record.exists() else None
        self.terms = read_terms(self.folder, self.beside.licences, known)
        self.beside = replace(self.beside, licences=self.terms.files)
        warning = [self.terms.warning] if self.terms.warning else []
        self.notes += [*self.beside.notes, *warning, *self.terms.notes, *mixed_revisions(self.files)]

    def _take(self, path: Path, names: set[str] | None) -> None:
        """Read a file's header; names: what the index says it holds, None for whatever is there."""
        held = _tensors(path)
        if names is not None and names - held.keys():
            lacking = ", ".join(sorted(names - held.keys())[:5])
            raise CheckpointError(f"{path}: {lacking}: the index says it is in this file, and it is not.")
        if names is not None and held.keys() - names:
            surplus = ", ".join(sorted(held.keys() - names))
            self.notes.append(f"{path.name} holds tensors the index does not name: {surplus}")
        self.tensors |= {name: held[name] for name in names or held}


def _instead(folder: Path) -> str:
    """What a folder without tensors that can be read holds instead."""
    files = matching(folder, (*PICKLED, *OTHER_WEIGHTS, "*.safetensors"))
    if files:
        return f"; {', '.join(files[:3])}: not read (pickles never are). Get or make safetensors files"
    return ". Download them; a config alone is enough for `inspect`, `convert --dry-run` and `validate --config-only`"


def _tensors(path: Path) -> dict[str, TensorInfo]:
    """dtype, shape and place of every tensor; the library checks that the file is whole first."""
    if path.is_file() and is_pointer(path):
        raise CheckpointError(f"{path}: a pointer of Git LFS, not a whole safetensors file. Download it again.")
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error}). Download it again.") from None
    header.pop("__metadata__", None)
    return {
        name: TensorInfo(path, entry["dtype"], tuple(entry["shape"]), 8 + size + begin, end - begin)
        for name, entry in header.items()
        for begin, end in [entry["data_offsets"]]
    }
