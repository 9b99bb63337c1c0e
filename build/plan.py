"""Ahead-of-time compilation: a network to a serialized TensorRT plan.

Needs no GPU with tensorrt_rtx (SM120). The plan holds no weights: they are inputs.
"""

from __future__ import annotations

from glmspec.build.configs.limits import EngineLimits
from glmspec.build.errors import NetworkError
from glmspec.build.network.graph import Network


def build_plan(net: Network, limits: EngineLimits, index_topk: int, compute_capability: str) -> bytes:
    """The serialized engine. index_topk: K of the network's DSA top-k, 0 when it has none.
    compute_capability: such as "SM120". Raises `NetworkError` with the layer's module path."""
    trt = net.api
    config = net.builder.create_builder_config()
    if hasattr(config, "num_compute_capabilities"):  # tensorrt_rtx: build for a GPU that is not here
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, compute_capability), 0)
    net.backend.take_errors()
    if config.add_optimization_profile(_profile(net, limits.ranges(index_topk))) < 0:
        raise NetworkError(f"{net.name}: TensorRT refuses the ranges of its inputs: {net.backend.take_errors()}")
    plan = net.builder.build_serialized_network(net.definition, config)
    complaint = net.backend.take_errors()
    if plan is None:
        raise NetworkError(f"{net.name}: TensorRT could not build the network: {complaint or 'it gave no reason'}")
    return bytes(plan)


def _profile(net: Network, ranges: dict[str, tuple[int, int, int]]):
    """One profile over every run-time size."""
    profile = net.builder.create_optimization_profile()
    for spec in net.contract().inputs:
        if any(isinstance(dim, str) for dim in spec.dims):
            shapes = [tuple(d if isinstance(d, int) else ranges[d][bound] for d in spec.dims) for bound in range(3)]
            profile.set_shape(spec.name, *shapes)
    return profile
