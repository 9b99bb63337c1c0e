"""How a network is authored: its compute dtype, the number format of every weight, the division among ranks.

The converter and the networks share `NetworkConfig`: one function (`tensors_of`) decides what tensors a rank's files
hold of a weight (the converter writes them, `Checkpoint` checks them) and what inputs a network declares for it. Those
inputs are the same on every rank, so ranks share one network and one plan. Quantized weights are inputs as they lie in
the checkpoint, which keeps engines small and valid for every checkpoint of their shape.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field, replace

from glmspec.core.dtypes import FP4, HEADERS
from glmspec.network.contract import WEIGHT, TensorSpec
from glmspec.network.formats import FORMATS, QUANTIZED, whole_tiles
from glmspec.network.limits import CONTEXT
from glmspec.network.shards import Layout, Mapping, layout_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RankTensor:
    """One tensor of one rank's files, as in its header. dtype: safetensors' name."""

    name: str
    dtype: str
    shape: Shape

    @property
    def size(self) -> int:
        """Bytes."""
        return HEADERS[self.dtype].bytes * math.prod(self.shape)


def field_name(name: str, suffix: str) -> str:
    """`X.weight` has `X.weight_scale` and `X.input_scale`, `X` without `.weight` has `X_scale`, `X_input_scale`."""
    if suffix == "input_scale" and name.endswith(".weight"):
        return name.removesuffix("weight") + suffix
    return f"{name}_{suffix}" if suffix else name


def tensors_of(name: str, dims: Shape, format: str, layout: Layout, scaled: bool, rank: int) -> dict[str, RankTensor]:
    """The tensors a rank holds of a weight, by field. dims: of the whole weight. scaled: it has an activation scale."""
    units, rows, columns = layout.box(rank)
    tensors = {}
    for suffix, part in FORMATS[format].items():
        size = part.size(len(rows), len(columns))
        shape = _shape(dims, layout, len(units), size, bool(part.rows))
        tensors[suffix] = RankTensor(field_name(name, suffix), part.dtype, shape)
    if scaled:
        shape = _shape(dims, layout, len(units), (1, 1), False)
        tensors["input_scale"] = RankTensor(field_name(name, "input_scale"), "F32", shape)
    return tensors


def _shape(dims: Shape, layout: Layout, units: int, size: tuple[int, int], matrix: bool) -> Shape:
    """A field's shape: the weight's own with its last two dimensions replaced, or one number a unit."""
    if layout.units == 1:
        if not matrix:
            return ()
        return size if len(dims) == 2 else (*dims[:-1], size[1]) if len(dims) > 1 else dims
    stacked = dims[1] // layout.rows  # units in a slice of the first dimension: gate and up are two
    lead = (units // stacked,)
    if not matrix:
        return lead if stacked == 1 else (*lead, stacked)
    return (*lead, stacked * size[0], size[1])


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """compute: "float32" or "bfloat16". formats: of the weights that are quantized, by name. scaled: names of those
    whose activations are quantized too, by a scale of the checkpoint. profile: the steps it is for (see
    `EngineLimits.profiles`). sizes: contract symbols that are fixed, for a network of one static bucket. plugins: the
    GPU, like "SM100", whose plugins stand in for layers; empty: layers only."""

    compute: str
    mapping: Mapping = field(default_factory=Mapping)
    formats: abc.Mapping[str, str] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()
    profile: str = CONTEXT
    sizes: abc.Mapping[str, int] = field(default_factory=dict)
    plugins: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The number formats among the weights, sorted; none when all are plain."""
        return tuple(sorted(set(self.formats.values())))

    def format(self, name: str) -> str | None:
        """The number format of a quantized weight, None for a plain one."""
        return self.formats.get(name)

    def fixed(self, spec: TensorSpec) -> TensorSpec:
        """An input or output with the symbols that are fixed replaced by their sizes."""
        return replace(spec, dims=tuple(self.sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims))

    def specs(self, whole: TensorSpec, drafter: bool = False) -> dict[str, TensorSpec]:
        """The network inputs that a weight is, by field. whole: the weight before division, in its plain dtype."""
        dims, format, layout = whole.sizes, self.format(whole.name), layout_of(whole, self.mapping, drafter)
        if format is None:
            plain = tensors_of(whole.name, dims, "float32", layout, False, 0)[""].shape
            return {"": TensorSpec(whole.name, whole.dtype, plain, WEIGHT)}
        tensors = tensors_of(whole.name, dims, format, layout, whole.name in self.scaled, 0)
        packed = bool(self.plugins) and layout.split.experts and _whole_tiles(whole.name, tensors[""].shape)
        return {suffix: _spec(tensor, packed) for suffix, tensor in tensors.items()}


def quantized_formats(formats: abc.Mapping[str, str]) -> dict[str, str]:
    """Of a checkpoint's formats, those a network must know: the quantized ones."""
    return {name: format for name, format in formats.items() if format in QUANTIZED}


def _whole_tiles(name: str, stored: Shape) -> bool:
    """Whether plugins take experts whose NVFP4 codes have this shape, two a byte."""
    rows, columns = stored[1], 2 * stored[2]
    gate_up = name.endswith(".gate_up_proj")
    return whole_tiles(columns, rows // 2) if gate_up else whole_tiles(rows, columns)


def _spec(tensor: RankTensor, packed: bool) -> TensorSpec:
    """NVFP4 codes lie two a byte: layers see them one by one. packed: as bytes, for plugins, which know no FP4."""
    if tensor.dtype == "U8" and packed:
        return TensorSpec(tensor.name, "int8", tensor.shape, WEIGHT)
    if tensor.dtype == "U8":
        return TensorSpec(tensor.name, FP4, (*tensor.shape[:-1], 2 * tensor.shape[-1]), WEIGHT)
    return TensorSpec(tensor.name, HEADERS[tensor.dtype].name, tensor.shape, WEIGHT)
