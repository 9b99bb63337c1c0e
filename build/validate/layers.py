"""Stage "layers": every layer's dtype and shape, as TensorRT infers them, and the rules they must keep.

TensorRT refuses a layer whose operands don't fit as soon as it is authored. The rules here are what it would accept and
the model would not: sums in the wrong precision, weights nobody reads, caches that are not written.
"""

from __future__ import annotations

from collections.abc import Iterator

from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.report import Fault
from glmspec.core.dtypes import FP4, FP8
from glmspec.network.contract import CACHE, Contract
from glmspec.network.reader import Graph, Node
from glmspec.network.trt_limits import QUANTIZED_READERS

_REPORT = "This is a fault of the network's definition, not of your checkpoint: report it."
_QUANTIZED = (FP8, FP4)
_DTYPES = ("float32", "bfloat16", "int32", "int64", "bool", *_QUANTIZED)
# What must be computed in float32: probabilities, means of squares, what is chosen by score.
_FLOAT32 = {"SOFTMAX": "probabilities", "TOPK": "scores", "REDUCE AVG": "a mean of squares"}


def check(case: Case, _) -> StageResult:
    """Author every network; TensorRT's complaints come as `NetworkError` and name the layer."""
    facts, faults, layers = [], [], 0
    for member, profile, authored in case.networks():
        layers += len(authored.graph.nodes)
        graph, label = authored.graph, f"{member.name}, {profile}"
        faults += layer_faults(graph, authored.contract)
        facts.append(f"{label}: {len(graph.nodes):,} layers authored in {authored.seconds:.1f} s")
    return StageResult(tuple(facts), tuple(faults), {"networks": len(facts), "layers": layers})


def layer_faults(graph: Graph, contract: Contract) -> Iterator[Fault]:
    """What is wrong with a network's layers."""
    read = {value.name for node in graph.nodes for value in node.inputs if value is not None}
    for value in graph.inputs:
        if value.name not in read:
            yield Fault(value.name, "an input that no layer reads.", _REPORT)
    for node in graph.nodes:
        yield from _dtype_faults(node)
    yield from _cache_faults(graph, contract)


def _dtype_faults(node: Node) -> Iterator[Fault]:
    for value in node.outputs:
        if value.dtype not in _DTYPES:
            yield Fault(node.name, f"gives {value.dtype}, expected one of {', '.join(_DTYPES)}.", _REPORT)
        if any(size == 0 or size < -1 for size in value.shape):
            yield Fault(node.name, f"gives an empty tensor {list(value.shape)}.", _REPORT)
    kind = f"{node.kind} {node.attributes['op']}" if node.kind == "REDUCE" else node.kind
    if kind in _FLOAT32 and node.operands[0].dtype != "float32":
        yield Fault(node.name, f"{_FLOAT32[kind]} in {node.operands[0].dtype}, expected float32.", _REPORT)
    if node.kind not in QUANTIZED_READERS:
        for value in node.inputs:
            if value is not None and value.dtype in _QUANTIZED:
                yield Fault(node.name, f"reads {value.name} in {value.dtype}: it must be dequantized first.", _REPORT)
    if node.kind == "MATRIX_MULTIPLY" and len({value.dtype for value in node.operands}) > 1:
        yield Fault(node.name, f"multiplies {' and '.join(value.dtype for value in node.operands)}.", _REPORT)


def _cache_faults(graph: Graph, contract: Contract) -> Iterator[Fault]:
    """Every cache is updated in place, once, into the output of its name."""
    updates: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.kind == "KV_CACHE_UPDATE":
            updates.setdefault(node.operands[0].name, []).append(node)
    outputs = {value.name: value for value in graph.outputs}
    for spec in contract.of_role(CACHE):
        writers = updates.get(spec.name, [])
        if len(writers) != 1:
            yield Fault(spec.name, f"a cache that {len(writers)} layers update, expected one.", _REPORT)
        elif writers[0].output.name != f"{spec.name}.updated" or f"{spec.name}.updated" not in outputs:
            yield Fault(writers[0].name, f"updates {spec.name} without giving it as {spec.name}.updated.", _REPORT)
