"""A loaded model: its network, weights, tables and caches, ready to run steps."""

from __future__ import annotations

from typing import Any

import torch

from glmspec.build.configs.drafter import DrafterConfig
from glmspec.build.configs.limits import EngineLimits
from glmspec.build.configs.verifier import VerifierConfig
from glmspec.build.errors import EngineError
from glmspec.build.models.registry import model_of
from glmspec.build.network.contract import CACHE, TABLE, WEIGHT, Contract, TensorSpec
from glmspec.build.network.reader import read
from glmspec.build.trt import backend
from glmspec.runtime.executor import ReferenceExecutor


class Model:
    """One network on the reference executor. weights: float tensors by name, in any float dtype."""

    def __init__(
        self,
        config: VerifierConfig | DrafterConfig,
        limits: EngineLimits,
        compute: str,
        weights: dict[str, torch.Tensor],
        *,
        taps: tuple[int, ...] = (),
        network_sha256: str | None = None,
        **executor_options: Any,
    ) -> None:
        net = model_of(config, taps).author(limits, compute, backend())
        graph = read(net.definition, net.backend)
        self.network_sha256 = graph.content_hash()
        if network_sha256 not in (None, self.network_sha256):
            raise EngineError(
                f"{net.name}: the engine was built for network {network_sha256[:12]} "
                f"and this version of glmspec authors {self.network_sha256[:12]}. Build the engine directory again."
            )
        self.config = config
        self.contract: Contract = net.contract()
        self.tap_names = [spec.name for spec in self.contract.inputs if spec.name.startswith("tap.")]
        self.weights = {spec.name: _weight(spec, weights) for spec in self.contract.of_role(WEIGHT)}
        tables = {spec.name: rope_table(spec, config.rope_theta) for spec in self.contract.of_role(TABLE)}
        # Zeros, because a masked row still enters a sum: 0 * NaN would poison it.
        self.caches = {spec.name: _zeros(spec, limits) for spec in self.contract.of_role(CACHE)}
        self.executor = ReferenceExecutor(graph, self.weights | tables, self.caches, **executor_options)

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One step: see the contract for names and shapes."""
        return self.executor.run(inputs)


def rope_table(spec: TensorSpec, theta: float) -> torch.Tensor:
    """[positions, columns]: cosines, then sines, of position * theta ** (-2 i / columns), angles in float32."""
    positions, columns = spec.dims
    inverse = 1.0 / theta ** (torch.arange(0, columns, 2, dtype=torch.float32) / columns)
    angle = torch.arange(positions, dtype=torch.float32).unsqueeze(1) * inverse
    return torch.cat([angle.cos(), angle.sin()], 1).to(getattr(torch, spec.dtype))


def _weight(spec: TensorSpec, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    if spec.name not in weights:
        raise EngineError(f"weight {spec}: not in the checkpoint the engine was built for")
    return weights[spec.name].to(getattr(torch, spec.dtype))


def _zeros(spec: TensorSpec, limits: EngineLimits) -> torch.Tensor:
    dims = [limits.num_pages if dim == "X" else dim for dim in spec.dims]
    return torch.zeros(dims, dtype=getattr(torch, spec.dtype))
