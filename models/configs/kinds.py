"""Which model a config.json is of: read here, before anything that takes seconds to import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glmspec.core.errors import ConfigError
from glmspec.core.fields import read_json
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.drafter_dialects import ARCHITECTURES as DRAFTERS
from glmspec.models.configs.verifier import ARCHITECTURE as VERIFIER
from glmspec.models.configs.verifier import VerifierConfig

Config = VerifierConfig | DrafterConfig


def parse_config(hf: dict[str, Any], source: str) -> Config:
    """The frozen config of a Hugging Face config.json, its kind decided by `architectures`."""
    names = hf.get("architectures")
    if names == [VERIFIER]:
        return VerifierConfig.from_hf(hf, source)
    if isinstance(names, list) and len(names) == 1 and names[0] in DRAFTERS:
        return DrafterConfig.from_hf(hf, source)
    model_type = hf.get("model_type") or hf.get("speculators_model_type")
    raise ConfigError(
        f"{source}: architectures: found {names!r} (model_type {model_type!r}), expected {VERIFIER}"
        f" or a drafter ({', '.join(DRAFTERS)})."
    )


def check_config(place: Path) -> None:
    """Raise `ConfigError` for a checkpoint whose config.json alone says that it can't be used. place: its folder, a
    converted one too, or a config.json by any name."""
    path = place if place.is_file() else place / "config.json"
    if not place.is_file() and not path.exists() and any(place.glob("snapshots/*/config.json")):
        snapshot = next(place.glob("snapshots/*/config.json")).parent
        raise ConfigError(f"{place}: found a hub cache's folder, expected a checkpoint's. Give {snapshot}.")
    record = read_json(path)
    producer = record.get("producer")
    if not {"hf_config", "architectures"} & record.keys() and isinstance(producer, dict) and producer.get("kind"):
        raise ConfigError(
            f"{place}: found {producer.get('name')}'s {producer['kind']}, expected a checkpoint; give that folder."
        )
    parse_config(record.get("hf_config", record), str(path))


def check_configs(verifier: Path, drafters: Sequence[Path]) -> None:
    """`check_config` of each."""
    for place in (verifier, *drafters):
        check_config(place)
