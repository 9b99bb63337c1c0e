"""An INetworkDefinition read back as plain data: layers, attributes, regions, and a content hash.

This is the only file that knows how each TensorRT layer is read. A layer type it does not know is an
error that names the layer.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from glmspec.core.errors import NetworkError
from glmspec.network.trt import Backend


@dataclass(frozen=True)
class Value:
    """A tensor of the network. shape: -1 where known only at run time."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """A layer. kind: TensorRT's LayerType name, such as "SHUFFLE"; inputs hold None where one is left out."""

    name: str
    kind: str
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, Any]
    region: dict[str, Any] | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        """The inputs of a layer that leaves none out. Raises `NetworkError`."""
        operands = tuple(value for value in self.inputs if value is not None)
        if len(operands) < len(self.inputs):
            raise NetworkError(f"{self.name}: found an input that is left out, expected all {len(self.inputs)}")
        return operands

    @property
    def output(self) -> Value:
        """The only output of most layers."""
        return self.outputs[0]


@dataclass(frozen=True)
class Graph:
    """A whole network, layers in the order they were added (which is a legal order to run them in)."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]

    def content_hash(self) -> str:
        """SHA-256 over everything that decides what the network computes and how it is bound."""
        digest = hashlib.sha256()
        for value in (*self.inputs, *self.outputs):
            digest.update(f"{value}\n".encode())
        for node in self.nodes:
            plain = {
                key: hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else value
                for key, value in node.attributes.items()
            }
            digest.update(f"{node.name} {node.kind} {node.inputs} {node.outputs} ".encode())
            digest.update(json.dumps([plain, node.region], sort_keys=True).encode())
        return digest.hexdigest()


def read(definition: Any, backend: Backend) -> Graph:
    """Read a network. Raises `NetworkError` naming a layer whose type is not known here."""

    seen: dict[str, Value] = {}  # names are unique, and reading one is dear: most tensors are read several times

    def value(tensor: Any) -> Value:
        name = tensor.name
        if name not in seen:
            seen[name] = Value(name, backend.dtype_name(tensor.dtype), tuple(tensor.shape))
        return seen[name]

    def node(layer: Any) -> Node:
        return _node(layer, backend, value)

    return Graph(
        name=definition.name,
        inputs=tuple(value(definition.get_input(index)) for index in range(definition.num_inputs)),
        outputs=tuple(value(definition.get_output(index)) for index in range(definition.num_outputs)),
        nodes=tuple(node(definition.get_layer(index)) for index in range(definition.num_layers)),
    )


def _node(layer: Any, backend: Backend, value: Callable[[Any], Value]) -> Node:
    kind = str(layer.type).rpartition(".")[2]
    if kind not in _READERS:
        raise NetworkError(f"{layer.name}: layer type {kind} is not one glmspec can read. Known: {', '.join(_READERS)}")
    class_name, attributes = _READERS[kind]
    layer.__class__ = getattr(backend.api, class_name)
    inputs = [layer.get_input(index) for index in range(layer.num_inputs)]
    metadata = _metadata(layer.metadata)
    return Node(
        name=layer.name,
        kind=kind,
        inputs=tuple(None if tensor is None else value(tensor) for tensor in inputs),
        outputs=tuple(value(layer.get_output(index)) for index in range(layer.num_outputs)),
        attributes=attributes(layer, backend),
        region=metadata if "region" in metadata else None,
    )


@functools.lru_cache(maxsize=1024)  # the layers of a region have the same
def _metadata(text: str) -> dict[str, Any]:
    """The object that glmspec wrote into a layer's metadata; empty where it wrote nothing."""
    return json.loads(text) if text.startswith("{") else {}


def _authored(layer: Any, key: str, lost: str) -> Any:
    """A value of a layer's metadata, because TensorRT does not let it be read back."""
    metadata = _metadata(layer.metadata)
    if key not in metadata:
        raise NetworkError(f"{layer.name}: a {key} that glmspec did not author: its {lost} cannot be read back")
    return metadata[key]


# Reads the attributes of a layer that decide what it computes.
Reader = Callable[[Any, Backend], dict[str, Any]]


def _plain(value: Any, backend: Backend) -> Any:
    """A layer's attribute as JSON has it: a dtype's or an enum's name, dimensions as a list."""
    if isinstance(value, backend.api.DataType):
        return backend.dtype_name(value)
    if hasattr(value, "__len__"):  # TensorRT's Dims
        return list(value)
    return value if type(value) in (bool, int, float, type(None)) else _enum(value)


def _attributes(**names: str) -> Reader:
    """A reader of attributes: ours, and TensorRT's names of them."""
    return lambda layer, backend: {key: _plain(getattr(layer, name), backend) for key, name in names.items()}


def _enum(value: Any) -> str:
    return str(value).rpartition(".")[2]


def _axes(mask: int) -> list[int]:
    """The axes of a bitmask."""
    return [axis for axis in range(mask.bit_length()) if mask >> axis & 1]


def _shuffle(layer: Any, backend: Backend) -> dict[str, Any]:
    rank = len(layer.get_input(0).shape)
    second = list(layer.second_transpose)
    if second != list(range(len(second))):
        raise NetworkError(f"{layer.name}: a second transpose is not something glmspec authors")
    first = list(layer.first_transpose)[:rank]
    return {
        "transpose": None if first == list(range(rank)) else first,
        "reshape": _plain(layer.reshape_dims, backend),
        "zero_copies": layer.zero_is_placeholder,
    }


def _scaled(layer: Any, backend: Backend) -> dict[str, Any]:
    try:
        block = _plain(layer.block_shape, backend)
    except RuntimeError:  # how TensorRT says that it was not set
        block = None
    return {"to": backend.dtype_name(layer.to_type), "block": block, "axis": layer.axis}


# LayerType -> (class to read it through, reader of its attributes).
_READERS: dict[str, tuple[str, Reader]] = {
    "ACTIVATION": ("IActivationLayer", lambda layer, _: {"op": _enum(layer.__class__.type.fget(layer))}),
    "CAST": ("ICastLayer", _attributes(to="to_type")),
    "CONCATENATION": ("IConcatenationLayer", _attributes(axis="axis")),
    "CONSTANT": (
        "IConstantLayer",
        lambda layer, _: {"value": np.array(layer.weights, copy=True).reshape(tuple(layer.shape))},
    ),
    "CUMULATIVE": ("ICumulativeLayer", _attributes(op="op", exclusive="exclusive", reverse="reverse")),
    "DEQUANTIZE": ("IDequantizeLayer", _scaled),
    "DIST_COLLECTIVE": (
        "IDistCollectiveLayer",
        lambda layer, _: {"op": _authored(layer, "collective", "operation"), "ranks": layer.num_ranks},
    ),
    "DYNAMIC_QUANTIZE": (
        "IDynamicQuantizeLayer",
        _attributes(axis="axis", group="block_size", to="to_type", scale="scale_type"),
    ),
    "ELEMENTWISE": ("IElementWiseLayer", _attributes(op="op")),
    "FILL": ("IFillLayer", _attributes(op="operation", to="to_type")),
    "GATHER": ("IGatherLayer", _attributes(axis="axis", mode="mode", elementwise="num_elementwise_dims")),
    "IDENTITY": ("IIdentityLayer", _attributes()),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", _attributes(mode="cache_mode", form="update_form")),
    "MATRIX_MULTIPLY": (
        "IMatrixMultiplyLayer",
        lambda layer, _: {"transpose": [_enum(side) == "TRANSPOSE" for side in (layer.op0, layer.op1)]},
    ),
    "NORMALIZATION": (
        "INormalizationLayer",
        lambda layer, _: {"axes": _axes(layer.axes), "epsilon": layer.epsilon, "groups": layer.num_groups},
    ),
    "PLUGIN_V3": ("IPluginV3Layer", lambda layer, _: _authored(layer, "plugin", "attributes")),
    "QUANTIZE": ("IQuantizeLayer", _scaled),
    "REDUCE": (
        "IReduceLayer",
        lambda layer, _: {"op": _enum(layer.op), "axes": _axes(layer.axes), "keep": layer.keep_dims},
    ),
    "ROTARY_EMBEDDING": (
        "IRotaryEmbeddingLayer",
        _attributes(interleaved="interleaved", columns="rotary_embedding_dim"),
    ),
    "SCATTER": ("IScatterLayer", _attributes(mode="mode", axis="axis")),
    "SELECT": ("ISelectLayer", _attributes()),
    "SHAPE": ("IShapeLayer", _attributes()),
    "SHUFFLE": ("IShuffleLayer", _shuffle),
    "SLICE": ("ISliceLayer", _attributes(axes="axes", start="start", size="shape", stride="stride", mode="mode")),
    "SOFTMAX": ("ISoftMaxLayer", lambda layer, _: {"axes": _axes(layer.axes)}),
    "TOPK": ("ITopKLayer", lambda layer, _: {"op": _enum(layer.op), "k": layer.k, "axes": _axes(layer.axes)}),
    "UNARY": ("IUnaryLayer", _attributes(op="op")),
}
