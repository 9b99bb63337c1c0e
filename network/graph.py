"""`Network` and `Tensor`: TensorRT's INetworkDefinition behind names, scopes and regions.

A network is written once, on INetworkDefinition: there is no ONNX and no second graph. Model files see only `ops`;
`trt.py` picks the TensorRT. Every layer is named after the module that made it ("model.layers.0.self_attn/matmul.5")
and its output shape is read at once, so a mistake is reported where it was made.

Weights are network inputs. Engines hold none, so they are small, build anywhere, and fit any checkpoint of their shape.

A region is a run of layers that together are one op of `glmspec.plugins`; the layers' metadata says so, and a reader
of the network (the reference executor) may replace the region by the op's reference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from glmspec.core.errors import NetworkError
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import Contract, TensorSpec
from glmspec.network.trt import Backend


class Tensor:
    """A value in a network, which the ops take and return. Operators broadcast like NumPy's."""

    __slots__ = ("net", "trt")

    def __init__(self, net: Network, trt_tensor: Any) -> None:
        self.net = net
        self.trt = trt_tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions; -1 where known only at run time."""
        return tuple(self.trt.shape)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.trt.shape)

    @property
    def dtype(self) -> str:
        """Torch-style name, such as "float32"."""
        return self.net.backend.dtype_name(self.trt.dtype)

    def _binary(self, other: Tensor | float, kind: str, flip: bool = False) -> Tensor:
        return self.net.elementwise(other, self, kind) if flip else self.net.elementwise(self, other, kind)

    # fmt: off
    def __add__(self, other): return self._binary(other, "SUM")
    def __radd__(self, other): return self._binary(other, "SUM", True)
    def __sub__(self, other): return self._binary(other, "SUB")
    def __rsub__(self, other): return self._binary(other, "SUB", True)
    def __mul__(self, other): return self._binary(other, "PROD")
    def __rmul__(self, other): return self._binary(other, "PROD", True)
    def __truediv__(self, other): return self._binary(other, "DIV")
    def __floordiv__(self, other): return self._binary(other, "FLOOR_DIV")
    def __gt__(self, other): return self._binary(other, "GREATER")
    def __lt__(self, other): return self._binary(other, "LESS")
    def __and__(self, other): return self._binary(other, "AND")
    def __or__(self, other): return self._binary(other, "OR")
    def equals(self, other): return self._binary(other, "EQUAL")
    # fmt: on


@dataclass
class _Region:
    """An op being authored: its first layer carries the description."""

    op: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    attributes: dict[str, Any]
    first: Any = None


# An op's outputs by plugin layers; none where its layers are to stand (`glmspec.plugins.registration.author`).
Plugged = Callable[["Network", str, Sequence[Tensor], Mapping[str, Any]], list[Tensor]]


class Network:
    """A network being authored. name: shown in errors and kept in the plan. plugged: makes plugin layers, where the
    config asks for them."""

    def __init__(self, name: str, net_config: NetworkConfig, backend: Backend, plugged: Plugged | None = None) -> None:
        self.backend = backend
        self.api = backend.api
        self.name = name
        self.config = net_config
        self._plugged = plugged if net_config.plugins else None
        backend.take_errors()
        self.builder = backend.builder()
        flags = 1 << int(self.api.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.definition = self.builder.create_network(flags)
        self.definition.name = name  # else the plan's bytes change with a counter
        self.inputs: dict[str, Tensor] = {}
        self._specs: list[TensorSpec] = []
        self._outputs: list[TensorSpec] = []
        self._scope: list[str] = []
        self._regions: list[_Region] = []
        self._region: int | None = None  # number of the open region
        self._counts: Counter[str] = Counter()
        self._constants: dict[tuple, Tensor] = {}
        self.kernels: dict[Any, None] = {}  # variants that its plugins launch (`glmspec.plugins.compiler`)
        self.shared: dict[tuple, Any] = {}  # values that several modules compute of one tensor, by name and tensor
        self._arrays: list[np.ndarray] = []  # TensorRT reads a constant's memory at build time

    @property
    def compute(self) -> str:
        """Dtype of the residual stream, and of every weight and activation that names none."""
        return self.config.compute

    # -- interface -------------------------------------------------------------------------

    def declare(self, specs: Sequence[TensorSpec]) -> None:
        """Make network inputs. All of them come before the first layer (TensorRT is quadratic otherwise)."""
        if self.definition.num_layers:
            raise NetworkError(f"{self.name}: inputs must be declared before the first layer")
        for spec in map(self.config.fixed, specs):
            dims = tuple(dim if isinstance(dim, int) else -1 for dim in spec.dims)
            given = self.definition.add_input(spec.name, self.backend.dtype(spec.dtype), dims)
            if given is None:
                raise NetworkError(f"{self.name}: input {spec}: {self.backend.take_errors()}")
            for axis, dim in enumerate(spec.dims):
                if isinstance(dim, str):
                    given.set_dimension_name(axis, dim)
            self.inputs[spec.name] = Tensor(self, given)
            self._specs.append(spec)

    def late_input(self, name: str, dtype: str, dims: Sequence[int]) -> Tensor:
        """An input in place of what layers would compute; no part of the contract."""
        return Tensor(self, self.definition.add_input(name, self.backend.dtype(dtype), tuple(dims)))

    def output(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Mark an output. Raises `NetworkError` when the tensor does not fit `spec`."""
        spec = self.config.fixed(spec)
        fits = tensor.rank == len(spec.dims) and all(
            isinstance(dim, str) or size in (dim, -1) for size, dim in zip(tensor.shape, spec.dims, strict=False)
        )
        if tensor.dtype != spec.dtype or not fits:
            raise NetworkError(f"{self.name}: output {spec}: the network gives {tensor.dtype}{list(tensor.shape)}")
        tensor.trt.name = spec.name
        if not tensor.trt.is_network_input:  # a late one
            self.definition.mark_output(tensor.trt)
        self._outputs.append(spec)

    def contract(self) -> Contract:
        """The inputs and outputs declared so far."""
        return Contract(tuple(self._specs), tuple(self._outputs))

    # -- names -----------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """The module whose layers are being made."""
        return self._scope[-1] if self._scope else self.name

    @contextmanager
    def scope(self, path: str) -> Iterator[None]:
        """Name the layers made inside after a module path."""
        self._scope.append(path)
        try:
            yield
        finally:
            self._scope.pop()

    @contextmanager
    def region(self, op: str, inputs: Sequence[Tensor], attributes: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Tag the layers made inside as one op. The caller appends its outputs to the yielded list, unless they are
        there: plugins have made them."""
        if self._region is not None:  # an op used inside another one belongs to it, and is layers as that is
            yield []
            return
        self._regions.append(_Region(op, list(inputs), [], attributes))
        self._region = len(self._regions)
        try:
            if self._plugged is not None:
                self._regions[-1].outputs += self._plugged(self, op, inputs, attributes)
            yield self._regions[-1].outputs
        finally:
            self._region = None

    def finish(self) -> Network:
        """Write the regions' heads into the metadata, now that every tensor has its final name; returns self."""
        for number, region in enumerate(self._regions, 1):
            head = {
                "region": number,
                "op": region.op,
                "inputs": [tensor.trt.name for tensor in region.inputs],
                "outputs": [tensor.trt.name for tensor in region.outputs],
                "attributes": region.attributes,
            }
            if region.first is None:  # its outputs came from elsewhere
                continue
            metadata = json.loads(region.first.metadata)  # of a plugin layer: which plugin
            region.first.metadata = json.dumps(metadata | head, sort_keys=True)
        return self

    # -- layers ----------------------------------------------------------------------------

    def add(self, layer: Any, kind: str, outputs: int = 1) -> Any:
        """Name a fresh layer and read its shapes. Returns a Tensor, or a tuple of them."""
        label = f"{self.where}/{kind}"
        self._counts[label] += 1
        name = f"{label}.{self._counts[label]}"
        if layer is None:
            raise NetworkError(f"{name}: {self.backend.take_errors() or 'TensorRT refused the layer'}")
        layer.name = name
        if self._region is not None:
            region = self._regions[self._region - 1]
            region.first = region.first or layer
            layer.metadata = json.dumps({"region": self._region})
        tensors = tuple(Tensor(self, layer.get_output(index)) for index in range(outputs))
        for index, tensor in enumerate(tensors):
            tensor.trt.name = name if outputs == 1 else f"{name}:{index}"
        self._check(name, tensors)
        return tensors[0] if outputs == 1 else tensors

    def _check(self, name: str, tensors: tuple[Tensor, ...]) -> None:
        try:
            for tensor in tensors:
                tensor.trt.shape  # noqa: B018  (reading it makes TensorRT infer, and complain)
        except RuntimeError as error:
            raise NetworkError(f"{name}: {self.backend.take_errors() or error}") from None
        complaint = self.backend.take_errors()
        if complaint:
            raise NetworkError(f"{name}: {complaint}")

    def constant(self, value: Any, dtype: str, rank: int = 0) -> Tensor:
        """A small constant; a scalar becomes an all-ones shape of `rank`. Equal constants are shared."""
        array = np.array(value, dtype={"bfloat16": np.float32}.get(dtype, dtype), order="C")
        if array.ndim == 0:
            array = array.reshape((1,) * rank)
        key = (array.tobytes(), array.shape, dtype)
        if key not in self._constants:
            self._constants[key] = self._new_constant(array, dtype)
        return self._constants[key]

    def _new_constant(self, array: np.ndarray, dtype: str) -> Tensor:
        """A constant layer. It belongs to no module and no region: others will use it too."""
        region, self._region = self._region, None
        self._arrays.append(array)
        with self.scope(self.name):
            constant = self.add(self.definition.add_constant(array.shape, self.api.Weights(array)), "constant")
            if dtype == "bfloat16":  # NumPy has no bfloat16: a float32 constant, cast once
                constant = self.add(self.definition.add_cast(constant.trt, self.backend.dtype(dtype)), "cast")
        self._region = region
        return constant

    def elementwise(self, left: Tensor | float, right: Tensor | float, kind: str) -> Tensor:
        """A binary operation. Plain numbers become constants; ranks are made equal by leading ones."""
        rank = max(side.rank for side in (left, right) if isinstance(side, Tensor))
        dtype = next(side.dtype for side in (left, right) if isinstance(side, Tensor))
        sides = [self._operand(side, dtype, rank) for side in (left, right)]
        operation = getattr(self.api.ElementWiseOperation, kind)
        return self.add(self.definition.add_elementwise(sides[0].trt, sides[1].trt, operation), kind.lower())

    def _operand(self, side: Tensor | float, dtype: str, rank: int) -> Tensor:
        if not isinstance(side, Tensor):
            return self.constant(side, dtype, rank)
        if side.rank == rank:
            return side
        lead = rank - side.rank
        dynamic = [size for size in side.shape if size < 0]
        if len(dynamic) > 1:
            raise NetworkError(f"{side.trt.name}: cannot broadcast rank {side.rank} with two run-time sizes to {rank}")
        layer = self.definition.add_shuffle(side.trt)
        layer.reshape_dims = (1,) * lead + side.shape
        return self.add(layer, "reshape")
