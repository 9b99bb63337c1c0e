"""`NetworkModel`: a model that is a whole network, with the engine's inputs and outputs."""

from __future__ import annotations

from typing import Any

from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TensorSpec
from glmspec.network.graph import Network, Plugged
from glmspec.network.limits import EngineLimits
from glmspec.network.module import Module
from glmspec.network.trt import Backend
from glmspec.plugins.registration import author


class NetworkModel(Module):
    """The verifier, a drafter or a network on logits. name: of its network. illegal: ids that it never chooses."""

    name: str
    config: Any
    illegal: IllegalIds = ALL_LEGAL

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """Step inputs, tables and caches; the weights come from `weight_inputs`."""
        raise NotImplementedError(type(self).__name__)

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Authors the layers over `net.inputs` and marks the outputs."""
        raise NotImplementedError(type(self).__name__)

    def author(
        self, limits: EngineLimits, net_config: NetworkConfig, backend: Backend, plugged: Plugged = author
    ) -> Network:
        """The whole network, the same for every rank. plugged: what stands in for layers where the config asks for
        plugins. Raises `NetworkError` that names the layer at fault."""
        net = Network(self.name, net_config, backend, plugged)
        net.declare(self.input_specs(limits, net_config) + self.weight_inputs(net_config))
        for weight in self.weights():
            weight.bind(net)
        with net.scope(self.path):
            self.forward(net, limits)
        return net.finish()
