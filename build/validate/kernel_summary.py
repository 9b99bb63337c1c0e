"""What the kernels of a compiled network multiply, read and write, in short: kept in the records of stage "build"."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from glmspec.build.kernel_list import Kernel, Operand
from glmspec.build.validate.cut import Launched
from glmspec.core.dtypes import FP4, FP8
from glmspec.network.reader import Graph, Value

_CODES = {FP4: "fp4", FP8: "fp8"}
_LAYER = re.compile(r"(.*?layers\.\d+)\b")
BESIDE = "beside layers"


def products_of(graph: Graph, weights: Collection[str]) -> dict[str, str]:
    """The matrix products of quantized weights: layer -> the weight. weights: names of the network's weight inputs."""
    origin = {value.name: value.name for value in graph.inputs if value.dtype in _CODES and value.name in weights}
    products = {}
    for node in graph.nodes:
        sources = [origin[value.name] for value in node.inputs if value is not None and value.name in origin]
        if not sources:
            continue
        if node.kind == "MATRIX_MULTIPLY":
            products[node.name] = _codes_of(sources)
        else:  # on its way to a product
            origin |= {value.name: _codes_of(sources) for value in node.outputs}
    return products


def _codes_of(sources: list[str]) -> str:
    """Of a weight's fields the codes: its scales' names begin with theirs."""
    return min(sources, key=len)


def summary(
    graph: Graph, weights: Collection[str], caches: Collection[str], kernels: list[Kernel], launches: Iterable[Launched]
) -> dict[str, Any]:
    """What is kept of a compiled network. products: layer -> [weight, operand types]; whole: kernels that read a weight
    and write as much, [kernel, weight, bytes]; layers: kernels and bytes of each decoder layer."""
    products, sizes = products_of(graph, weights), {value.name: value for value in graph.inputs}
    in_place = {node.name for node in graph.nodes if node.kind == "KV_CACHE_UPDATE"}
    layers: dict[str, Counter[str]] = defaultdict(Counter)
    whole = []
    for kernel in kernels:
        outputs = [out for out in kernel.outputs if not (kernel.layers & in_place and _is_cache(out, sizes, caches))]
        # Plugins that were cut out no longer order the layers, and TensorRT fuses what is alike in several.
        own = _decoder_layers(kernel.layers)
        for layer in own:
            layers[layer].update(kernels=1, read=_bytes(kernel.inputs) // len(own), written=_bytes(outputs) // len(own))
        for weight in {operand.name for operand in kernel.inputs} & set(products.values()):
            most = max((out.elements for out in outputs), default=0)
            if most >= math.prod(sizes[weight].shape) / 2:
                whole.append([kernel.name, weight, _bytes(outputs)])
    for launch in launches:
        (layer,) = _decoder_layers([launch.where])
        layers[layer].update(kernels=1, plugins=1, written=launch.written)
    return {
        "products": {layer: [weight, _operands(layer, weight, kernels)] for layer, weight in products.items()},
        "whole": whole,
        "layers": {layer: dict(counted) for layer, counted in layers.items()},
    }


def _operands(layer: str, weight: str, kernels: list[Kernel]) -> str:
    """The types that a product multiplies, such as "fp4 x fp4"; of what the kernels do not tell, "?"."""
    for kernel in kernels:
        if layer in kernel.layers and any(operand.name == weight for operand in kernel.inputs):
            of_weight = next(operand for operand in kernel.inputs if operand.name == weight)
            others = [one.dtype for one in kernel.inputs if not one.name.startswith(weight)]
            # Beside the other operand there are scales and what is fused behind.
            same = of_weight.dtype if of_weight.dtype in others else next(iter(others), "?")
            if others:
                return f"{same} x {of_weight.dtype}"
    wide = [kernel for kernel in kernels if layer in kernel.layers and len(kernel.inputs) > 1]
    return " x ".join(operand.dtype for operand in wide[-1].inputs[:2]) if wide else "? x ?"


def _is_cache(out: Operand, sizes: Mapping[str, Value], caches: Collection[str]) -> bool:
    return any(out.elements == math.prod(sizes[name].shape) for name in caches if name in sizes)


def _bytes(operands: Iterable[Operand]) -> int:
    return sum(operand.bytes for operand in operands)


def _decoder_layers(names: Iterable[str]) -> set[str]:
    """Those that a kernel's layers belong to."""
    return {match[1] for name in names if (match := _LAYER.match(name))} or {BESIDE}
