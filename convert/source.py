"""A Hugging Face checkpoint folder, opened without reading its tensors.

Knows one file or a sharded index; every way such a folder can be broken is named: a shard that the
index lists and the disk lacks, a tensor the shard lacks, a file cut short.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from glmspec.build.configs.fields import read_json
from glmspec.build.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what its header says. dtype: safetensors' name, such as "BF16"."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Source:
    """The tensors of a checkpoint folder by name. Files stay memory-mapped; a read copies one tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.notes: list[str] = []
        self._handles: dict[Path, safe_open] = {}
        self.tensors: dict[str, TensorInfo] = {}
        if (folder / INDEX).exists():
            self._open_index()
        elif (folder / SINGLE).exists():
            self._take(folder / SINGLE, None)
        else:
            raise CheckpointError(f"{folder}: found neither {SINGLE} nor {INDEX}, expected one of them.")

    @property
    def files(self) -> list[Path]:
        """The tensor files in use, sorted."""
        return sorted(self._handles)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> torch.Tensor:
        """One tensor, copied from the file."""
        return self._handles[self.tensors[name].file].get_tensor(name)

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
        """Open a file; names: what the index says it holds, None for whatever is there."""
        try:
            handle = safe_open(path, framework="pt")
            held = set(handle.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error}). Download it again.") from None
        if names is not None and names - held:
            lacking = ", ".join(sorted(names - held)[:5])
            raise CheckpointError(f"{path}: {lacking}: the index says it is in this file, and it is not.")
        if names is not None and held - names:
            self.notes.append(f"{path.name} holds tensors the index does not name: {', '.join(sorted(held - names))}")
        self._handles[path] = handle
        for name in names or held:
            view = handle.get_slice(name)
            self.tensors[name] = TensorInfo(path, view.get_dtype(), tuple(view.get_shape()))
