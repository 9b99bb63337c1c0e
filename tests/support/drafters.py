"""The golden drafters (`scripts/oracle/drafter_goldens.py`): loaded through the converter, and run on the executor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.network_model import NetworkModel
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Anchor, pack_blocks
from glmspec.runtime.pages import Span
from support.models import DATA, convert_and_load, features_as_taps, write_checkpoint

FILE = DATA / "drafters" / "family.safetensors"
TENSORS = load_file(FILE)
with safe_open(FILE, "pt") as _file:
    VARIANTS: dict[str, dict[str, Any]] = json.loads(_file.metadata()["variants"])
LIMITS = EngineLimits(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, page_size=8, segment_rows=9, block_rows=9
)
# Of three sequences: where whole contexts lie, and the windows of sliding layers.
PAGES, RINGS = [[3, 1, 5], [2, 7, 4], [6, 8, 9]], [[1, 2], [4, 3], [5, 6]]


class Converted:
    """Each variation's config and tensors (the verifier's where it shares them), converted once."""

    def __init__(self, home: Path) -> None:
        self.home, self.made = home, {}

    def __call__(self, name: str) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
        if name not in self.made:
            one, place = VARIANTS[name], self.home / str(len(self.made))
            own = {tensor: TENSORS[key].clone() for tensor, key in one["own"].items()}
            checkpoint, tensors = convert_and_load(write_checkpoint(place / "hf", own, one["config"]), place / "ours")
            verifier = {ours: TENSORS[one["verifier"][theirs]] for ours, theirs in checkpoint.shared.items()}
            self.made[name] = (checkpoint.config, {**tensors, **verifier})
        return self.made[name]


def golden(name: str, key: str) -> torch.Tensor:
    return TENSORS[f"{name}/{key}"]


def load(model: NetworkModel | DrafterConfig, tensors: dict[str, torch.Tensor], **options: Any) -> Model:
    """A drafter on the reference executor, float32; of a config, the one that drafts greedily."""
    model = model_of(model) if isinstance(model, DrafterConfig) else model
    return Model(model, LIMITS, NetworkConfig(compute="float32"), [tensors], **options)


def draft(model: Model, name: str, blocks: list[int] | None = None, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """A golden's blocks (all of them, or these, some perhaps often), each after its own piece of the golden's context.
    more: further inputs."""
    config, anchors, positions = model.config, golden(name, "anchors").tolist(), golden(name, "positions").tolist()
    wanted = range(len(anchors)) if blocks is None else blocks
    kept = [Span(PAGES[at], 0, positions[at], RINGS[at]) for at in sorted(set(wanted))]
    rows = [row for span in kept for row in range(span.count)]
    drafted = [Anchor(PAGES[at], anchors[at], positions[at], RINGS[at]) for at in wanted]
    taps = features_as_taps(config, TENSORS[f"features/{len(config.taps) * config.hidden_size}"])
    return model.run(pack_blocks(rows, kept, drafted, LIMITS) | taps | more)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
