"""A loaded model: its network, weights, tables and caches, ready to run steps.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glmspec.core.dtypes import FP4
from glmspec.core.errors import EngineError
from glmspec.models.configs.illegal import IllegalIds
from glmspec.models.layers.basic import EXPERT_START, LEGAL_BIAS, VOCABULARY_START
from glmspec.models.layers.paged import RING_TABLE
from glmspec.models.network_model import NetworkModel
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import CACHE, TABLE, WEIGHT, Contract, TensorSpec
from glmspec.network.limits import EngineLimits
from glmspec.network.reader import read
from glmspec.network.shards import Mapping
from glmspec.network.trt import backend
from glmspec.runtime.executor import LockstepExecutor, ReferenceExecutor, Tensors


class Model:
    """One network on the reference executor, all of its ranks.

    weights: by rank, plain ones in any float dtype. network_sha256: the hash that the network must have, else
    `EngineError`. ring_pages: pages that every sequence must own for sliding layers, 0 where none slides."""

    def __init__(
        self,
        model: NetworkModel,
        limits: EngineLimits,
        net_config: NetworkConfig,
        weights: Sequence[Tensors],
        *,
        network_sha256: str | None = None,
        **executor_options: Any,
    ) -> None:
        net = model.author(limits, net_config, backend())
        graph = read(net.definition, net.backend)
        self.network_sha256 = graph.content_hash()
        if network_sha256 and network_sha256 != self.network_sha256:
            raise EngineError(
                f"{net.name}: the engine was built for network {network_sha256[:12]} "
                f"and this version of glmspec authors {self.network_sha256[:12]}. Build the engine directory again."
            )
        self.config = model.config
        self.contract: Contract = net.contract()
        tables = [spec.dims for spec in self.contract.inputs if spec.name == RING_TABLE]
        self.ring_pages = int(tables[0][1]) if tables else 0
        self.tap_names = [spec.name for spec in self.contract.inputs if spec.name.startswith("tap.")]
        self.weights = [{spec.name: _weight(spec, own) for spec in self.contract.of_role(WEIGHT)} for own in weights]
        rank_tables = [
            {spec.name: _table(spec, model, net_config.mapping, rank) for spec in self.contract.of_role(TABLE)}
            for rank in range(net_config.mapping.tp)
        ]
        pages = {"X": limits.num_pages, "XR": limits.num_ring_pages(self.ring_pages)}
        # Zeros, because a masked row still enters a sum: 0 * NaN would poison it.
        self.caches = [{spec.name: _zeros(spec, pages) for spec in self.contract.of_role(CACHE)} for _ in self.weights]
        bound = [own | table for own, table in zip(self.weights, rank_tables, strict=True)]
        if net_config.mapping.tp == 1:
            self.executor = ReferenceExecutor(graph, bound[0], self.caches[0], **executor_options)
        else:
            self.executor = LockstepExecutor(graph, bound, self.caches, **executor_options)

    def run(self, inputs: Tensors) -> Tensors:
        """Run one step. `contract` has the names, shapes and dtypes of inputs and outputs."""
        return self.executor.run(inputs)


def _table(spec: TensorSpec, model: NetworkModel, mapping: Mapping, rank: int) -> torch.Tensor:
    """A rank's table input: the rotary table, which tokens are legal, or where its part of the vocabulary or of the
    experts begins."""
    config = model.config
    if spec.name == LEGAL_BIAS:
        return legal_bias(spec, model.illegal)
    if spec.name == VOCABULARY_START:
        return torch.tensor([rank * -(-config.vocab_size // mapping.tp)], dtype=torch.int32)
    if spec.name == EXPERT_START:
        return torch.tensor([mapping.expert_group(rank) * config.n_routed_experts // mapping.ep], dtype=torch.int32)
    return rope_table(spec, config.rope_theta)


def legal_bias(spec: TensorSpec, illegal: IllegalIds) -> torch.Tensor:
    """[V]: -inf of illegal ids, 0 of others."""
    bias_V = torch.zeros(spec.sizes, dtype=getattr(torch, spec.dtype))
    for first, stop in illegal.spans:
        bias_V[first:stop] = -torch.inf
    return bias_V


def rope_table(spec: TensorSpec, theta: float) -> torch.Tensor:
    """[positions, columns]: cosines, then sines, of position * theta ** (-2 i / columns), angles in float32."""
    positions, columns = spec.sizes
    inverse = 1.0 / theta ** (torch.arange(0, columns, 2, dtype=torch.float32) / columns)
    angle = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * inverse
    return torch.cat([angle.cos(), angle.sin()], 1).to(getattr(torch, spec.dtype))


def _weight(spec: TensorSpec, weights: Tensors) -> torch.Tensor:
    if spec.name not in weights:
        raise EngineError(f"weight {spec}: not in the checkpoint the engine was built for")
    tensor = weights[spec.name]
    if spec.dtype in (FP4, "int8"):  # codes, two a byte
        return tensor if spec.dtype == FP4 else tensor.view(torch.int8)
    return tensor.to(getattr(torch, spec.dtype))


def _zeros(spec: TensorSpec, pages: dict[str, int]) -> torch.Tensor:
    return torch.zeros(
        [pages[dim] if isinstance(dim, str) else dim for dim in spec.dims], dtype=getattr(torch, spec.dtype)
    )
