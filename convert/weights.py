"""The weights of a model, opened once: the kind of folder is decided here, and the config read and checked.

Three things give weights: a converted `Checkpoint`, a `Conversion` of a Hugging Face folder that is yet to be written,
and a config alone, of a verifier (a `Conversion` of the tensors that it implies) or of a drafter (`Implied`). What is
built for them asks all of them the same: `Weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from glmspec.convert.checkpoint import config_of, open_converted
from glmspec.convert.conversion import AUTO, plan_conversion, plan_source
from glmspec.convert.implied import ImpliedSource
from glmspec.convert.names import ConvertOptions
from glmspec.core.errors import ConfigError
from glmspec.core.fields import read_json
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.kinds import Config, parse_config
from glmspec.models.dflash import SHARED_WEIGHTS
from glmspec.network.config import NetworkConfig, RankTensor
from glmspec.network.shards import Mapping


class Weights(Protocol):
    """A model's config, and what is known of its weights without reading them."""

    @property
    def config(self) -> Config:
        """The model's config, checked."""
        ...

    @property
    def hf_config(self) -> dict[str, Any]:
        """The Hugging Face config.json that it was made from."""
        ...

    @property
    def mapping(self) -> Mapping:
        """How the weights are divided among ranks."""
        ...

    @property
    def end_tokens(self) -> tuple[int, ...] | None:
        """Ids that end a text; None for a drafter."""
        ...

    @property
    def mtp(self) -> bool:
        """Whether a verifier's MTP module is among the weights."""
        ...

    @property
    def shared(self) -> dict[str, str]:
        """A drafter's weight -> the verifier's weight that stands in for it."""
        ...

    def rank_tensors(self, rank: int) -> dict[str, RankTensor]:
        """A rank's tensors, by name."""
        ...

    def net_config(self, compute: str) -> NetworkConfig:
        """How a network that takes these weights is authored. compute: its dtype."""
        ...


@dataclass(frozen=True)
class Implied:
    """A drafter of which only the config is there."""

    config: DrafterConfig
    hf_config: dict[str, Any]
    mapping: Mapping = field(default_factory=Mapping)
    shared: dict[str, str] = field(default_factory=lambda: dict(SHARED_WEIGHTS))
    end_tokens: tuple[int, ...] | None = None
    mtp: bool = False

    def rank_tensors(self, rank: int) -> dict[str, RankTensor]:
        """Nothing is known of its tensors."""
        return {}

    def net_config(self, compute: str) -> NetworkConfig:
        """Drafters are plain."""
        return NetworkConfig(compute=compute)


def open_weights(place: Path, options: ConvertOptions = AUTO, *, config_only: bool = False) -> Weights:
    """The weights in a folder. options: of a conversion, where one is due. config_only: no weights are looked for, a
    config.json (`place`, or in it) says what they would be. Raises naming the field, tensor or file at fault."""
    if config_only:
        return _by_config(place, options)
    if place.is_file():
        raise ConfigError(f"{place}: found a file, expected a checkpoint's folder (or --config-only).")
    return open_converted(place) or plan_conversion(place, options)


def _by_config(place: Path, options: ConvertOptions) -> Weights:
    path = place if place.is_file() else place / "config.json"
    record = read_json(path)
    converted = "hf_config" in record
    config = config_of(record, str(path)) if converted else parse_config(record, str(path))
    if isinstance(config, DrafterConfig):
        return Implied(config, record["hf_config"] if converted else record)
    if converted:
        raise ConfigError(
            f"{place}: --config-only: found a converted checkpoint, expected a Hugging Face config.json. Leave "
            "--config-only out: its files' headers are read, not their weights."
        )
    return plan_source(ImpliedSource(place), options)
