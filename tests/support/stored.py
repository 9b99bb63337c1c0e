"""One stored weight in a checkpoint folder."""

from __future__ import annotations

import pytest
import torch

from glmspec.convert.formats import to_float32
from glmspec.convert.source import Source
from glmspec.convert.storage import StoredWeight, stored
from glmspec.core.errors import CheckpointError
from support.models import write_checkpoint

NAME = "layer.proj.weight"


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def keep(tmp_path, tensors: dict[str, torch.Tensor], name: str = NAME) -> StoredWeight:
    return stored(Source(write_checkpoint(tmp_path / "folder", tensors)), name)


def values(found: StoredWeight) -> torch.Tensor:
    """The weight as float32, in its own shape."""
    return torch.from_numpy(to_float32(found.read())).reshape(found.shape)


def refused(tmp_path, tensors: dict[str, torch.Tensor], *expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        keep(tmp_path, tensors).read()
    for text in expected:
        assert text in str(caught.value)
