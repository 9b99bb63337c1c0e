"""Small networks around one op, run on the reference executor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glmspec.core.dtypes import FP4
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.reader import read
from glmspec.network.trt import backend
from glmspec.runtime.executor import ReferenceExecutor

PLAIN = NetworkConfig(compute="float32")


def spec_of(name: str, tensor: torch.Tensor, dynamic: bool) -> TensorSpec:
    """An input like `tensor`; its first axis is a run-time size when `dynamic`."""
    dims = tuple(tensor.shape)
    if dynamic:
        dims = (f"{name}0", *dims[1:])
    if tensor.dtype == torch.uint8:  # NVFP4 codes, two a byte
        return TensorSpec(name, FP4, (*dims[:-1], 2 * tensor.shape[-1]))
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), dims)


def author(
    inputs: dict[str, torch.Tensor],
    body: Callable[..., object],
    static: tuple[str, ...] = (),
    net_config: NetworkConfig = PLAIN,
) -> Network:
    """A network with these inputs and the outputs `body` returns (a Tensor, or a tuple of them)."""
    net = Network("test", net_config, backend())
    net.declare([spec_of(name, tensor, name not in static) for name, tensor in inputs.items()])
    made = body(*(net.inputs[name] for name in inputs))
    for index, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
        assert isinstance(tensor, Tensor)
        dims = tuple(size if size >= 0 else f"o{index}{axis}" for axis, size in enumerate(tensor.shape))
        net.output(tensor, TensorSpec(f"out{index}", tensor.dtype, dims))
    return net.finish()


def run(
    inputs: dict[str, torch.Tensor],
    body: Callable[..., object],
    static: tuple[str, ...] = (),
    net_config: NetworkConfig = PLAIN,
    **options,
) -> list[torch.Tensor]:
    """Author and run once; the outputs in order."""
    net = author(inputs, body, static, net_config)
    executor = ReferenceExecutor(read(net.definition, net.backend), {}, {}, **options)
    out = executor.run(inputs)
    return [out[f"out{index}"] for index in range(len(out))]
