"""`mask_embedding.pt` beside a drafter: the row that stands for the mask token instead of the embedding's own.

Drafters share the verifier's embedding, whose row of the mask token is seldom trained. vLLM and SGLang look for this
file: a tensor [hidden], or {"embedding": [hidden], "mask_token_id": int}. Here it becomes a weight of the drafter.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from glmspec.convert.beside import MASK_EMBEDDINGS
from glmspec.convert.source import Source
from glmspec.core.errors import CheckpointError
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.dflash import MASK_EMBEDDING

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOKEN = "mask_token_id"


def take_mask_embedding(source: Source, config: DrafterConfig) -> DrafterConfig:
    """The config of a drafter with its mask embedding, which becomes one of the source's tensors; as it is where the
    folder has none. Raises `CheckpointError` for a file that is no such row of this drafter."""
    rows = {path: _row(path, config) for name in MASK_EMBEDDINGS if (path := source.folder / name).is_file()}
    if not rows:
        return config
    (path, row), *others = rows.items()
    if any(not torch.equal(row, other) for _, other in others):
        raise CheckpointError(f"{source.folder}: {' and '.join(file.name for file in rows)} differ. Take one away.")
    if MASK_EMBEDDING in source:
        raise CheckpointError(f"{path}: tensor {MASK_EMBEDDING}: the weights hold one too. Which is right?")
    source.keep(MASK_EMBEDDING, path, row)
    return replace(config, mask_embedding=True)


def _row(path: Path, config: DrafterConfig) -> torch.Tensor:
    value = _load(path)
    if isinstance(value, dict):
        token = value.get(_TOKEN, config.mask_token_id)
        if (int(token) if isinstance(token, torch.Tensor) and token.numel() == 1 else token) != config.mask_token_id:
            raise CheckpointError(
                f"{path}: {_TOKEN}: found {token}, expected {config.mask_token_id}, as config.json says. It belongs to "
                "another drafter."
            )
        rows = [row for key, row in value.items() if key != _TOKEN]
        value = rows[0] if len(rows) == 1 else value
    width = config.hidden_size
    if not isinstance(value, torch.Tensor):
        kind = f"an object of {', '.join(map(str, value))}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise CheckpointError(f"{path}: found {kind}, expected a tensor, or embedding and {_TOKEN}.")
    if value.numel() != width or value.shape[-1] != width:
        raise CheckpointError(
            f"{path}: found shape {list(value.shape)}, expected [{width}], the drafter's hidden_size."
        )
    row = value.reshape(-1).contiguous()
    row = row if row.dtype in _DTYPES else row.float()
    if not row.isfinite().all():
        raise CheckpointError(f"{path}: holds numbers that are not finite. Download it again.")
    return row


def _load(path: Path) -> Any:
    """What the file holds: tensors and plain values only, never code."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, SafetensorError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{path}: not a mask embedding that can be read without running code ({reason}). Download it again, or "
            "take it away: the mask token's own row is used then, and fewer drafts may stand."
        ) from None
