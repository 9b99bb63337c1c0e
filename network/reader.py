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
    return Node(
        name=layer.name,
        kind=kind,
        inputs=tuple(None if tensor is None else value(tensor) for tensor in inputs),
        outputs=tuple(value(layer.get_output(index)) for index in range(layer.num_outputs)),
        attributes=attributes(layer, backend),
        region=_region(layer.metadata),
    )


@functools.lru_cache(maxsize=1024)  # the layers of a region say the same
def _region(metadata: str) -> dict[str, Any] | None:
    """The region a layer belongs to, if its metadata is ours."""
    if not metadata.startswith("{"):
        return None
    value = json.loads(metadata)
    return value if "region" in value else None


def _enum(value: Any) -> str:
    return str(value).rpartition(".")[2]


def _axes(mask: int) -> list[int]:
    """The axes of a bitmask."""
    return [axis for axis in range(mask.bit_length()) if mask >> axis & 1]


def _dims(value: Any) -> list[int] | None:
    return None if value is None else list(value)


def _shuffle(layer: Any, _: Backend) -> dict[str, Any]:
    rank = len(layer.get_input(0).shape)
    second = _dims(layer.second_transpose)
    if second != list(range(len(second))):
        raise NetworkError(f"{layer.name}: a second transpose is not something glmspec authors")
    first = _dims(layer.first_transpose)[:rank]
    return {
        "transpose": None if first == list(range(rank)) else first,
        "reshape": _dims(layer.reshape_dims),
        "zero_copies": layer.zero_is_placeholder,
    }


def _slice(layer: Any, _: Backend) -> dict[str, Any]:
    return {
        "axes": _dims(layer.axes),
        "start": _dims(layer.start),
        "size": _dims(layer.shape),
        "stride": _dims(layer.stride),
        "mode": _enum(layer.mode),
    }


def _constant(layer: Any, _: Backend) -> dict[str, Any]:
    return {"value": np.array(layer.weights, copy=True).reshape(tuple(layer.shape))}


def _normalization(layer: Any, _: Backend) -> dict[str, Any]:
    return {"axes": _axes(layer.axes), "epsilon": layer.epsilon, "groups": layer.num_groups}


def _scaled(layer: Any, backend: Backend) -> dict[str, Any]:
    try:
        block = _dims(layer.block_shape)
    except RuntimeError:  # how TensorRT says that it was not set
        block = None
    return {"to": backend.dtype_name(layer.to_type), "block": block, "axis": layer.axis}


def _collective(layer: Any, _: Backend) -> dict[str, Any]:
    said = json.loads(layer.metadata) if layer.metadata.startswith("{") else {}
    if "collective" not in said:
        raise NetworkError(f"{layer.name}: a collective that glmspec did not author: its operation cannot be read back")
    return {"op": said["collective"], "ranks": layer.num_ranks}


def _plugin(layer: Any, _: Backend) -> dict[str, Any]:
    said = json.loads(layer.metadata) if layer.metadata.startswith("{") else {}
    if "plugin" not in said:
        raise NetworkError(f"{layer.name}: a plugin that glmspec did not author: its attributes cannot be read back")
    return said["plugin"]


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


# LayerType -> (class to read it through, attributes that matter).
_READERS: dict[str, tuple[str, Callable[[Any, Backend], dict[str, Any]]]] = {
    "ACTIVATION": ("IActivationLayer", lambda layer, _: {"op": _enum(layer.__class__.type.fget(layer))}),
    "CAST": ("ICastLayer", lambda layer, backend: {"to": backend.dtype_name(layer.to_type)}),
    "CONCATENATION": ("IConcatenationLayer", lambda layer, _: {"axis": layer.axis}),
    "CONSTANT": ("IConstantLayer", _constant),
    "CUMULATIVE": (
        "ICumulativeLayer",
        lambda layer, _: {"op": _enum(layer.op), "exclusive": layer.exclusive, "reverse": layer.reverse},
    ),
    "DEQUANTIZE": ("IDequantizeLayer", lambda layer, backend: _scaled(layer, backend)),
    "DIST_COLLECTIVE": ("IDistCollectiveLayer", _collective),
    "DYNAMIC_QUANTIZE": (
        "IDynamicQuantizeLayer",
        lambda layer, backend: {
            "axis": layer.axis,
            "group": layer.block_size,
            "to": backend.dtype_name(layer.to_type),
            "scale": backend.dtype_name(layer.scale_type),
        },
    ),
    "ELEMENTWISE": ("IElementWiseLayer", lambda layer, _: {"op": _enum(layer.op)}),
    "FILL": (
        "IFillLayer",
        lambda layer, backend: {"op": _enum(layer.operation), "to": backend.dtype_name(layer.to_type)},
    ),
    "GATHER": (
        "IGatherLayer",
        lambda layer, _: {"axis": layer.axis, "mode": _enum(layer.mode), "elementwise": layer.num_elementwise_dims},
    ),
    "IDENTITY": ("IIdentityLayer", _nothing),
    "KV_CACHE_UPDATE": (
        "IKVCacheUpdateLayer",
        lambda layer, _: {"mode": _enum(layer.cache_mode), "form": _enum(layer.update_form)},
    ),
    "MATRIX_MULTIPLY": (
        "IMatrixMultiplyLayer",
        lambda layer, _: {"transpose": [_enum(side) == "TRANSPOSE" for side in (layer.op0, layer.op1)]},
    ),
    "MOE": ("IMoELayer", lambda layer, _: {"activation": _enum(layer.activation_type)}),
    "NORMALIZATION": ("INormalizationLayer", _normalization),
    "PLUGIN_V3": ("IPluginV3Layer", _plugin),
    "QUANTIZE": ("IQuantizeLayer", lambda layer, backend: _scaled(layer, backend)),
    "REDUCE": (
        "IReduceLayer",
        lambda layer, _: {"op": _enum(layer.op), "axes": _axes(layer.axes), "keep": layer.keep_dims},
    ),
    "ROTARY_EMBEDDING": (
        "IRotaryEmbeddingLayer",
        lambda layer, _: {"interleaved": layer.interleaved, "columns": layer.rotary_embedding_dim},
    ),
    "SCATTER": ("IScatterLayer", lambda layer, _: {"mode": _enum(layer.mode), "axis": layer.axis}),
    "SELECT": ("ISelectLayer", _nothing),
    "SHAPE": ("IShapeLayer", _nothing),
    "SHUFFLE": ("IShuffleLayer", _shuffle),
    "SLICE": ("ISliceLayer", _slice),
    "SOFTMAX": ("ISoftMaxLayer", lambda layer, _: {"axes": _axes(layer.axes)}),
    "TOPK": ("ITopKLayer", lambda layer, _: {"op": _enum(layer.op), "k": layer.k, "axes": _axes(layer.axes)}),
    "UNARY": ("IUnaryLayer", lambda layer, _: {"op": _enum(layer.op)}),
}
