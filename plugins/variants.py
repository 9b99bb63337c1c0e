"""Which kernels are to be compiled: those of the full model's sizes, or those that networks use.

Legend: shapes hold -1 where a size is known at run time only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glmspec.core.dtypes import FP4
from glmspec.network.reader import Graph
from glmspec.plugins import OPS
from glmspec.plugins.compiler import Variant, variant_of
from glmspec.plugins.spec import UNKNOWN, NoPlugin, Op, Plugin, Use, dims


@dataclass(frozen=True)
class Shaped:
    """A tensor without values."""

    shape: tuple[int, ...]
    dtype: str


def as_read(shape: Sequence[int], dtype: str) -> Shaped:
    """A tensor of layers as plugins read it: NVFP4 codes lie two a byte."""
    return Shaped((*shape[:-1], shape[-1] // 2), "int8") if dtype == FP4 else Shaped(tuple(shape), dtype)


@dataclass(frozen=True)
class Launch:
    """One launch that was noted. symbols: every size, attribute and tile size."""

    plugin: Plugin
    inputs: tuple[Shaped, ...]
    attributes: Mapping[str, Any]
    symbols: Mapping[str, Any]
    compute: str


class Recorder:
    """`Runs` that only notes what would be launched, and the variants of that, in order, each once."""

    def __init__(self, sm: str) -> None:
        self.sm = sm
        self.launches: list[Launch] = []
        self.variants: dict[Variant, None] = {}

    def __call__(self, plugin: Plugin, *inputs: Shaped, **attributes: Any) -> tuple[Shaped, ...]:
        """One launch."""
        compute = plugin.compute([x.dtype for x in inputs])
        shapes = [tuple(UNKNOWN if size == -1 else size for size in x.shape) for x in inputs]
        symbols = plugin.bind(shapes, attributes, self.sm)
        self.launches.append(Launch(plugin, inputs, attributes, symbols, compute))
        self.variants[variant_of(plugin, self.sm, compute, symbols)] = None
        outputs = zip(plugin.output_shapes(symbols), plugin.dtypes(compute)[len(inputs) :], strict=True)
        return tuple(
            Shaped(tuple(-1 if size is UNKNOWN else size for size in shape), dtype) for shape, dtype in outputs
        )

    def reshape(self, x: Shaped, dims: Sequence[int]) -> Shaped:
        """Its new shape; an inferred size is known when all others are."""
        shape = [x.shape[at] if dim == 0 else dim for at, dim in enumerate(dims)]
        if -1 in dims and -1 not in x.shape:
            whole, known = 1, 1
            for size in x.shape:
                whole *= size
            for size in shape:
                known *= size if size != -1 else 1
            shape[list(dims).index(-1)] = whole // known
        return Shaped(tuple(shape), x.dtype)

    def shape(self, x: Shaped) -> tuple[int, ...]:
        """Sizes."""
        return x.shape

    def dtype(self, x: Shaped) -> str:
        """Torch-style name."""
        return x.dtype


def shaped(op: Op, use: Use, sizes: Mapping[str, int], compute: str, run_time: str = "") -> list[Shaped]:
    """The inputs of a use, without values. run_time: symbols whose sizes are not told."""
    known = {name: -1 if name in run_time else size for name, size in sizes.items()}
    return [
        Shaped(tuple(int(dim) if dim.isdigit() else known[dim] for dim in dims(name)), compute if kind == "T" else kind)
        for name, kind in op.given(use).items()
    ]


def real_variants(op: Op, sm: str, compute: str = "bfloat16") -> list[Variant]:
    """What the full model's uses of an op compile to."""
    recorder = Recorder(sm)
    if op.plugged:
        for use in op.uses.values():
            inputs = shaped(op, use, op.sizes(1, use), compute, op.run_time)
            op.plugged(recorder, *inputs, **use.attributes)
    return list(recorder.variants)


def network_variants(
    regions: Iterable[tuple[Op, Sequence[Shaped], Mapping[str, Any]]], sm: str
) -> tuple[list[Variant], list[str]]:
    """What regions compile to, and why those that keep TensorRT's layers do."""
    recorder, kept = Recorder(sm), {}
    for op, inputs, attributes in regions:
        if op.plugged is None:
            continue
        try:
            op.plugged(recorder, *inputs, **attributes)
        except NoPlugin as reason:
            kept[str(reason)] = None
    return list(recorder.variants), list(kept)


def regions_of(graph: Graph) -> Iterator[tuple[Op, list[Shaped], dict[str, Any]]]:
    """The ops of a network that was read back."""
    values = {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        values |= {value.name: value for value in node.outputs}
    for node in graph.nodes:
        if node.region and "op" in node.region:
            head = node.region
            inputs = [as_read(values[name].shape, values[name].dtype) for name in head["inputs"]]
            yield OPS[head["op"]], inputs, head["attributes"]
