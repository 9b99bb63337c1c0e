"""Stage "limits": every layer against what TensorRT takes (`configs/tensorrt.py`), sizes at their greatest."""

from __future__ import annotations

import math
from collections.abc import Iterator

from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.report import Fault
from glmspec.core.dtypes import FP4
from glmspec.network.contract import CACHE, TABLE, WEIGHT
from glmspec.network.formats import GROUP
from glmspec.network.limits import EngineLimits
from glmspec.network.reader import Graph, Node, Value
from glmspec.network.trt_limits import KV_CACHE_DTYPES, MAX_AXES, MAX_ELEMENTS, MAX_TOPK


def check(case: Case, _) -> StageResult:
    """The networks as authored, and the greatest step's volumes."""
    faults: list[Fault] = []
    bound: set[str] = set()
    for _, _, authored in case.networks():
        faults += layer_faults(authored.graph)
        bound |= {spec.name for spec in authored.contract.inputs if spec.role in (CACHE, TABLE, WEIGHT)}
    largest = 0
    for graph in case.greatest:
        volumes = step_volumes(graph, bound)
        faults += volume_faults(volumes, case.deployment.limits)
        largest = max(largest, *(math.prod(value.shape) for _, value in volumes))
    facts = [f"TopK up to {MAX_TOPK}, tensors up to {MAX_ELEMENTS:,} elements (largest found {largest:,})"]
    numbers = {"most_topk": MAX_TOPK, "most_elements": MAX_ELEMENTS, "largest_elements": largest}
    return StageResult(tuple(facts), tuple(faults), numbers)


def layer_faults(graph: Graph) -> Iterator[Fault]:
    """What TensorRT would refuse of single layers."""
    for node in graph.nodes:
        if node.kind == "TOPK" and node.attributes["k"] > MAX_TOPK:
            advice = "Choose a smaller k in the model's config."
            yield Fault(node.name, f"K: found {node.attributes['k']}, expected at most {MAX_TOPK}.", advice)
        if node.kind == "KV_CACHE_UPDATE" and node.operands[0].dtype not in KV_CACHE_DTYPES:
            legal = ", ".join(KV_CACHE_DTYPES)
            yield Fault(node.name, f"cache: found {node.operands[0].dtype}, expected {legal}.", "Choose another dtype.")
        yield from _shape_faults(node)


def _shape_faults(node: Node) -> Iterator[Fault]:
    for value in node.outputs:
        if len(value.shape) > MAX_AXES:
            yield Fault(node.name, f"{len(value.shape)} axes, expected at most {MAX_AXES}.", "Reshape it.")
        if value.dtype == FP4 and value.shape[-1] % GROUP:
            advice = f"NVFP4 wants a multiple of {GROUP}: choose another format for this weight."
            yield Fault(node.name, f"{value.shape[-1]} columns of NVFP4.", advice)


def step_volumes(graph: Graph, bound: set[str]) -> list[tuple[str, Value]]:
    """The tensors of a step, each with the layer that makes it. bound: inputs that are no tensors of a step; a cache
    that was updated, or seen as rows, is none either."""
    caches: set[str] = set()
    volumes = [(value.name, value) for value in graph.inputs if value.name not in bound]
    for node in graph.nodes:
        view = node.kind == "SHUFFLE" and node.operands[0].name in caches
        if view or node.kind == "KV_CACHE_UPDATE":
            caches |= {value.name for value in node.outputs}
        else:
            volumes += [(node.name, value) for value in node.outputs]
    return volumes


def volume_faults(volumes: list[tuple[str, Value]], limits: EngineLimits) -> Iterator[Fault]:
    """Those with more elements than are counted."""
    for name, value in volumes:
        volume = math.prod(value.shape)
        if volume > MAX_ELEMENTS:
            why = f"{volume:,} elements {list(value.shape)} in the greatest step, expected at most {MAX_ELEMENTS:,}."
            yield Fault(name, why, _legal(value.shape[0], volume, limits))


def _legal(rows: int, volume: int, limits: EngineLimits) -> str:
    """What to lower so that a tensor of so many rows fits, and to what where its rows say so."""
    blocks = limits.max_num_seqs * limits.block_rows
    most = MAX_ELEMENTS * rows // volume
    seqs, lower = most // limits.block_rows, []
    if seqs and rows == limits.max_num_batched_tokens:
        lower.append(f"--max-num-batched-tokens to {most:,} or less")
    if seqs and rows in (blocks, limits.max_num_batched_tokens) and most < blocks:
        lower.append(f"--max-num-seqs to {seqs:,} or less")
    return f"Lower {' and '.join(lower) or '--max-num-batched-tokens, --max-num-seqs or --max-model-len'}."
