"""Networks as the target compiles them, without its plugins: where plugins take a region's place, the region's outputs
are inputs of the network, and its inputs outputs. So TensorRT compiles just what it will compile around the plugins;
what those launch and write is their own rules' to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glmspec.core.dtypes import DTYPES
from glmspec.network.graph import Network, Tensor
from glmspec.plugins import OPS
from glmspec.plugins.spec import NoPlugin
from glmspec.plugins.variants import Recorder, as_read


@dataclass(frozen=True)
class Launched:
    """A plugin's launch. where: the module that it is part of. written: bytes, without what it changes in place."""

    where: str
    plugin: str
    written: int


class Cut:
    """Takes the place of plugin layers while a network is authored (see `Network`). sm: the GPU they are for."""

    def __init__(self, sm: str) -> None:
        self.sm = sm
        self.launches: list[Launched] = []

    def __call__(self, net: Network, op: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> list[Tensor]:
        """New inputs for what an op's plugins give; none where it has no plugins, or they do not take these sizes."""
        plugged, recorder = OPS[op].plugged, Recorder(self.sm)
        if plugged is None:
            return []
        try:
            outputs = plugged(recorder, *(as_read(x.shape, x.dtype) for x in inputs), **attributes)
        except NoPlugin:
            return []
        for launch in recorder.launches:
            shapes, dtypes = launch.plugin.output_shapes(launch.symbols), launch.plugin.dtypes(launch.compute)
            new = [name not in launch.plugin.aliased for name in launch.plugin.outputs]
            sizes = zip(shapes, dtypes[len(launch.inputs) :], new, strict=True)
            written = sum(DTYPES[dtype].size(math.prod(shape)) for shape, dtype, own in sizes if own)
            self.launches.append(Launched(net.where, launch.plugin.name, written))
        for tensor in inputs:
            if not (tensor.trt.is_network_input or tensor.trt.is_network_output):
                net.definition.mark_output(tensor.trt)
        first = len(self.launches)
        return [net.late_input(f"{net.where}/{op}.{first}:{at}", x.dtype, x.shape) for at, x in enumerate(outputs)]
