"""The kernels of a compiled network, as TensorRT lists them while it builds (no GPU is needed to read the list).

TensorRT prints a line a kernel, "Name: ..., LayerType: ..., Inputs: [...], Outputs: [...], ..., Metadata: ...", to a
logger that takes verbose lines. A layer's metadata comes along with it into the kernel that it was fused into, so the
layers' names are written there before (`name_layers`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from glmspec.core.errors import NetworkError
from glmspec.network.graph import Network

_LINE = re.compile(
    r"Name: (.*?), LayerType: (\w+), Inputs: \[(.*?)\], Constants: \[.*?\], Outputs: \[(.*?)\], TacticName: "
)
_TENSOR = re.compile(r"Name: (\S*), Dimensions: \[([\d,]*)\].*?Datatype: (\w+)")
_LAYER = re.compile(r'"layer": "([^"]*)"')
_EVENTS = ("signal", "wait")  # between streams: no kernels
# Bits of TensorRT's names of data types, and our names of those that operands have.
_BITS = {"Float": 32, "Half": 16, "BFloat16": 16, "FP8": 8, "FP4E2M1": 4, "E8M0": 8, "Int32": 32, "Int64": 64}
_BITS |= {"Int8": 8, "UInt8": 8, "Bool": 8}
_NAMES = {"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "FP8": "fp8", "FP4E2M1": "fp4"}


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes. dtype: such as "fp8" or "bfloat16"."""

    name: str
    dtype: str
    elements: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """One kernel. layers: names of the network's layers that are fused into it."""

    name: str
    layers: frozenset[str]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


def name_layers(net: Network) -> None:
    """Write every layer's name into its metadata, beside what is there."""
    for index in range(net.definition.num_layers):
        layer = net.definition.get_layer(index)
        metadata: dict[str, Any] = json.loads(layer.metadata) if layer.metadata else {}
        layer.metadata = json.dumps({**metadata, "layer": layer.name}, sort_keys=True)


def kernels_of(lines: Iterable[str]) -> list[Kernel]:
    """The kernels of TensorRT's list. Raises `NetworkError` for a line that is none, or a list without any."""
    kernels = []
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            raise NetworkError(f"TensorRT's list of kernels: found {line[:200]!r}, which glmspec cannot read")
        name, kind, inputs, outputs = found.groups()
        if kind not in _EVENTS:
            layers = frozenset(_LAYER.findall(line, found.end()))
            kernels.append(Kernel(name, layers, tuple(_operands(inputs)), tuple(_operands(outputs))))
    if not kernels:
        raise NetworkError("TensorRT's list of kernels: found none. Is this a TensorRT that glmspec knows?")
    return kernels


def _operands(text: str) -> Iterator[Operand]:
    for name, dims, dtype in _TENSOR.findall(text):
        if dtype not in _BITS:
            raise NetworkError(
                f"TensorRT's list of kernels: {name}: found data type {dtype}, expected {', '.join(_BITS)}"
            )
        elements = math.prod(int(size) for size in dims.split(",") if size)
        yield Operand(name, _NAMES.get(dtype) or dtype.lower(), elements, elements * _BITS[dtype] // 8)
