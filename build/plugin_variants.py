"""The plugins that a deployment's networks use, and the kernels they need.

Networks that are checked and planned with hold TensorRT's layers only; a plugin takes the place of a region when a
network is compiled by a TensorRT that has plugins. Both have the same inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmspec.build.deployment import Deployment
from glmspec.build.settings import PLUGINS_OFF, PLUGINS_ON
from glmspec.core.errors import ConfigError
from glmspec.core.sealed import check_files, open_sealed
from glmspec.network.reader import Graph, read
from glmspec.network.trt import Backend
from glmspec.plugins.compiler import Variant
from glmspec.plugins.variants import network_variants, regions_of


def open_kernels(folder: Path) -> dict[str, Any]:
    """The record of a folder that `plugins` wrote, its files compared with their digests."""
    again = "Compile the plugins again."
    record = open_sealed(folder / "config.json", {"kernels_for": str, "files": dict}, again)
    check_files(folder, record["files"], again)
    return record


@dataclass(frozen=True)
class PluginVariants:
    """variants: to be compiled. kept: why regions keep TensorRT's layers, a reason once."""

    variants: tuple[Variant, ...] = ()
    kept: tuple[str, ...] = ()


def variants_of(deployment: Deployment, graphs: list[Graph]) -> PluginVariants:
    """What networks, read back, need. Nothing where plugins are off, or the target's TensorRT has none."""
    if deployment.plugins == PLUGINS_OFF or not deployment.has_plugins:
        return PluginVariants()
    regions = [region for graph in graphs for region in regions_of(graph)]
    variants, kept = network_variants(regions, deployment.target.gpu)
    return PluginVariants(tuple(variants), tuple(kept))


def graphs_of(deployment: Deployment, backend: Backend) -> list[Graph]:
    """Every network of every profile."""
    nets = [
        deployment.author(member, profile, backend)
        for member in deployment.members
        for profile in deployment.profiles(member)
    ]
    return [read(net.definition, net.backend) for net in nets]


def check_plugins(deployment: Deployment, graphs: list[Graph]) -> None:
    """With `--plugins on`: every region that has plugins must get them. Raises `ConfigError` with the reasons."""
    if deployment.plugins != PLUGINS_ON:
        return
    kept = variants_of(deployment, graphs).kept
    if kept:
        raise ConfigError(f"--plugins on: found sizes that plugins do not take; use auto. {'; '.join(kept)}")
