"""What an op is, and what a plugin of it is: names, shapes, dtypes, attributes, launch rule, cost.

An op is what a network sees: one region. It has up to three faces, each in the op's folder:

    reference   torch, the oracle
    native      TensorRT layers
    plugged     a chain of plugins, each one launch of one Triton kernel (TensorRT's ahead-of-time plugins have no more)

A tensor's name ends in its shape, a character a dimension: `row_BQ` is [B, Q], `cache_X1PD` is [X, 1, P, D]. So names
bind symbols to sizes, and everything else is written with symbols: sizes of outputs, grids, costs. Rules are Python
expressions of symbols, of the attributes and of the tile sizes, with `cdiv` (divide, round up) and, of numbers known at
build time, `pow2` (next power of two), `min` and `max`. `batch` in `Op.real` is the number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from glmspec.core.dtypes import DTYPES
from glmspec.core.errors import NetworkError

COMPUTE = "T"  # stands for the network's compute dtype
ITEM_BYTES = {name: one.bytes for name, one in DTYPES.items()}
ANY_SM = ""


class NoPlugin(Exception):
    """An op's plugins do not take these sizes or dtypes; the text says why."""


class Runs(Protocol):
    """Whoever runs plugins: on torch tensors, in a network, or only noting what would be compiled."""

    def __call__(self, plugin: Plugin, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        """One launch; the plugin's outputs."""

    def reshape(self, x: Any, dims: Sequence[int]) -> Any:
        """x with new dims (0 copies, -1 infers), without a copy."""

    def shape(self, x: Any) -> tuple[int, ...]:
        """Sizes; -1 where known only at run time."""

    def dtype(self, x: Any) -> str:
        """Torch-style name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plugin:
    """One kernel launch.

    name: what TensorRT knows it by, with the version behind it.
    version: to be raised when inputs, outputs or meaning change.
    op: the folder that its kernel lies in, under `function`.
    inputs, outputs: dtypes by shape-suffixed name, in the kernel's order. "T" is the compute dtype.
    attributes: names and types.
    sizes: symbols that are derived from others, in order.
    scalars: the kernel's int32 parameters, between inputs and outputs: symbols that may change from step to step.
    tiles: compile-time numbers, WARPS and STAGES among them, for any SM ("") and, over those, for one.
    grid: programs along x, y and z.
    absent: kernel parameters of inputs that this plugin does not have.
    aliased: outputs that are an input's memory.
    bytes, flops: what one launch moves and computes; `t` is the size of a "T".
    """

    name: str
    op: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    grid: tuple[str, ...]
    tiles: Mapping[str, Mapping[str, int]]
    bytes: str
    flops: str = "0"
    version: int = 1
    function: str = ""
    attributes: Mapping[str, type] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    aliased: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Its name with the version."""
        return f"{self.name}_v{self.version}"

    def tile(self, sm: str) -> dict[str, int]:
        """The compile-time numbers for one SM."""
        return {**self.tiles[ANY_SM], **self.tiles.get(sm, {})}

    def bind(self, shapes: Sequence[Sequence[Any]], attributes: Mapping[str, Any], sm: str) -> dict[str, Any]:
        """Every symbol's value, from the inputs' shapes: numbers, or TensorRT's symbolic expressions."""
        symbols = bind(self.name, self.inputs, shapes)
        symbols |= {**attributes, **self.tile(sm)}
        for name, rule in self.sizes.items():
            symbols[name] = value(rule, symbols)
        return symbols

    def output_shapes(self, symbols: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The outputs' shapes."""
        return [tuple(int(dim) if dim.isdigit() else symbols[dim] for dim in dims(name)) for name in self.outputs]

    def dtypes(self, compute: str) -> list[str]:
        """Of inputs, then of outputs."""
        return [compute if one == COMPUTE else one for one in (*self.inputs.values(), *self.outputs.values())]

    def compute(self, dtypes: Sequence[str]) -> str:
        """The compute dtype, from the inputs' dtypes. Raises `NoPlugin` when they are not the plugin's."""
        found = {have for want, have in zip(self.inputs.values(), dtypes, strict=True) if want == COMPUTE}
        compute = found.pop() if len(found) == 1 else "float32"
        if found or list(dtypes) != self.dtypes(compute)[: len(self.inputs)]:
            raise NoPlugin(
                f"plugin {self.id}: inputs of {', '.join(dtypes)}, expected {', '.join(self.inputs.values())}"
            )
        return compute


@dataclass(frozen=True)
class Use:
    """One way in which the full model uses an op.

    attributes: their values. optional: the optional inputs that are given. sizes, dtypes: over the op's.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """One op.

    name: of the region, and of the folder or file.
    inputs, optional, outputs: dtypes by shape-suffixed name, in order ("T": the compute dtype).
    attributes: names and types.
    reference: inputs in order, attributes by name -> the output or a tuple of them, torch tensors.
    plugged: `Runs`, inputs in order, attributes by name -> a tuple of the outputs. None: `native` says why.
    plugins: those that `plugged` may use.
    native: why TensorRT's layers are enough.
    tolerance: of floating outputs, relative to the largest, by compute dtype; whole numbers must be equal.
    real: sizes of the full model, by symbol; small: over those, for Triton's interpreter. uses: how it uses the op.
    run_time: symbols that engines know at run time only.
    bytes, flops: what any implementation must move and compute; `t` is the size of a "T".
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    reference: Callable[..., Any]
    optional: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, type] = field(default_factory=dict)
    plugged: Callable[..., tuple[Any, ...]] | None = None
    plugins: tuple[Plugin, ...] = ()
    native: str = ""
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"float32": 2e-6, "bfloat16": 1.6e-2})
    real: Mapping[str, str] = field(default_factory=dict)
    small: Mapping[str, str] = field(default_factory=dict)
    uses: Mapping[str, Use] = field(default_factory=lambda: {"": Use()})
    run_time: str = "BN"
    bytes: str = "0"
    flops: str = "0"

    def sizes(self, batch: int, use: Use) -> dict[str, int]:
        """The full model's sizes for so many sequences."""
        symbols: dict[str, int] = {"batch": batch}
        for name, rule in {**self.real, **use.sizes}.items():
            symbols[name] = value(rule, symbols)
        return symbols

    def given(self, use: Use) -> dict[str, str]:
        """The inputs of a use, with their dtypes."""
        return {**self.inputs, **{name: self.optional[name] for name in use.optional}, **use.dtypes}

    def cost(self, sizes: Mapping[str, int], compute: str) -> tuple[int, int]:
        """The least bytes and flops for these sizes."""
        symbols = {**sizes, "t": ITEM_BYTES[compute]}
        return value(self.bytes, symbols), value(self.flops, symbols)


def dims(name: str) -> tuple[str, ...]:
    """The dimensions that a name tells: "row_BQ" -> ("B", "Q")."""
    return tuple(name.rpartition("_")[2])


def bind(what: str, inputs: Mapping[str, str], shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The symbols' values, from tensors of these shapes. Raises `NetworkError` where they contradict each other."""
    symbols: dict[str, Any] = {}
    for name, shape in zip(inputs, shapes, strict=True):
        if len(shape) != len(dims(name)):
            raise NetworkError(f"{what}: {name}: found {len(shape)} dimensions, expected {len(dims(name))}")
        for dim, size in zip(dims(name), shape, strict=True):
            known = int(dim) if dim.isdigit() else symbols.setdefault(dim, size)
            if isinstance(known, int) and isinstance(size, int) and known != size:
                raise NetworkError(f"{what}: {name}: found {size} for {dim}, expected {known}")
            if isinstance(size, int) and not dim.isdigit():
                symbols[dim] = size  # a number says more than an expression
    return symbols


def value(rule: str, symbols: Mapping[str, Any]) -> Any:
    """What a rule comes to. Numbers give a number; TensorRT's expressions give one, by their own operators."""
    return eval(rule, {"__builtins__": {}, **_FUNCTIONS}, dict(symbols))


class Unknown:
    """A size that is known at run time only: whatever is made of it is one too."""

    def _same(self, *_: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __floordiv__ = _same


UNKNOWN = Unknown()


def _cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


def _pow2(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


_FUNCTIONS = {"cdiv": _cdiv, "pow2": _pow2, "min": min, "max": max}
