"""What an op is, and what a plugin of it is: names, shapes, dtypes, attributes, launch rule, cost.

An op is what a network sees: one region. It has up to three faces, each in the op's folder:

    reference   torch, the oracle
    native      TensorRT layers
    plugged     a chain of plugins, each one launch of one Triton kernel (TensorRT's ahead-of-time plugins have no more)

A tensor's name ends in its shape, a character a dimension: `row_BQ` is [B, Q], `cache_X1PD` is [X, 1, P, D]. So names
bind symbols to sizes, and everything else is written with symbols: sizes of outputs, grids. A `Rule` is a number, the
name of a symbol, or a function of the symbols, attributes and tile sizes that its parameters name. Sizes that are known
at run time only are TensorRT's expressions there, which take + - * // and `cdiv`, the symbol first, and no more;
`pow2`, `min`, `max` and conditions are for numbers known at build time. `batch` in `Op.real` is the number of
sequences.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

import torch

from glmspec.core.dtypes import DTYPES
from glmspec.core.errors import NetworkError

Rule = int | str | Callable[..., Any]
COMPUTE = "T"  # stands for the network's compute dtype
# Tensors of an op, by which its reference declares them.
Compute = Annotated[torch.Tensor, COMPUTE]
Float32 = Annotated[torch.Tensor, "float32"]
Int32 = Annotated[torch.Tensor, "int32"]
ITEM_BYTES = {name: dtype.bytes for name, dtype in DTYPES.items()}
ANY_SM = ""


class NoPlugin(Exception):
    """An op's plugins do not take these sizes or dtypes; the text says why."""


class Runs(Protocol):
    """Whoever runs plugins: on torch tensors, in a network, or only noting what would be compiled."""

    def __call__(self, plugin: Plugin, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        """One launch; the plugin's outputs."""
        ...

    def reshape(self, x: Any, dims: Sequence[int]) -> Any:
        """x with new dims (0 copies, -1 infers), without a copy."""
        ...

    def shape(self, x: Any) -> tuple[int, ...]:
        """Sizes; -1 where known only at run time."""
        ...

    def dtype(self, x: Any) -> str:
        """Torch-style name."""
        ...


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
    """

    name: str
    op: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    grid: tuple[Rule, ...]
    tiles: Mapping[str, Mapping[str, int]]
    version: int = 1
    function: str = ""
    attributes: Mapping[str, type] = field(default_factory=dict)
    sizes: Mapping[str, Rule] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    aliased: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {dim for name in self.inputs for dim in dims(name)} | self.attributes.keys() | self.tiles[ANY_SM].keys()
        for name, rule in [*self.sizes.items(), *zip("xyz", self.grid, strict=False)]:
            needed = {rule} if isinstance(rule, str) else set(_parameters(rule)) if callable(rule) else set()
            if unknown := sorted(needed - known):
                raise NetworkError(f"plugin {self.name}: rule of {name}: found {unknown[0]}, which is no symbol yet")
            known.add(name)

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
        return [compute if dtype == COMPUTE else dtype for dtype in (*self.inputs.values(), *self.outputs.values())]

    def compute(self, dtypes: Sequence[str]) -> str:
        """The compute dtype, from the inputs' dtypes. Raises `NoPlugin` when they are not the plugin's."""
        of_compute = {have for want, have in zip(self.inputs.values(), dtypes, strict=True) if want == COMPUTE}
        compute = of_compute.pop() if len(of_compute) == 1 else "float32"
        if of_compute or list(dtypes) != self.dtypes(compute)[: len(self.inputs)]:
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
    sizes: Mapping[str, Rule] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """One op.

    name: of the region, and of the folder or file.
    outputs: dtypes by shape-suffixed name, in order ("T": the compute dtype).
    reference: inputs in order, attributes by name -> the output or a tuple of them, torch tensors. Its positional
    parameters declare the op's inputs: name and dtype, optional where it has a default; keyword-only ones attributes.
    others: inputs of which the attribute `given` names those that are there, behind the rest.
    plugged: `Runs`, inputs in order, attributes by name -> a tuple of the outputs. None: `native` says why.
    plugins: those that `plugged` may use.
    native: why TensorRT's layers are enough.
    tolerance: of floating outputs, relative to the largest, by compute dtype; whole numbers must be equal.
    real: sizes of the full model, by symbol. uses: how it uses the op.
    run_time: symbols that engines know at run time only.
    """

    name: str
    outputs: Mapping[str, str]
    reference: Callable[..., Any]
    others: Mapping[str, str] = field(default_factory=dict)
    plugged: Callable[..., tuple[Any, ...]] | None = None
    plugins: tuple[Plugin, ...] = ()
    native: str = ""
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"float32": 2e-6, "bfloat16": 1.6e-2})
    real: Mapping[str, Rule] = field(default_factory=dict)
    uses: Mapping[str, Use] = field(default_factory=lambda: {"": Use()})
    run_time: str = "BN"

    @functools.cached_property
    def inputs(self) -> dict[str, str]:
        """Dtypes of the inputs that are always there, by name."""
        return inputs_of(self.reference)

    @functools.cached_property
    def optional(self) -> dict[str, str]:
        """Dtypes of the inputs that may be left out, by name."""
        declared = _declared(self.reference)
        return {name: declared[name] for name in declared if name not in self.inputs} | dict(self.others)

    def sizes(self, batch: int, use: Use) -> dict[str, int]:
        """The full model's sizes for so many sequences."""
        symbols: dict[str, int] = {"batch": batch}
        for name, rule in {**self.real, **use.sizes}.items():
            symbols[name] = value(rule, symbols)
        return symbols

    def given(self, use: Use) -> dict[str, str]:
        """The inputs of a use, with their dtypes."""
        return {**self.inputs, **{name: self.optional[name] for name in use.optional}, **use.dtypes}


def inputs_of(reference: Callable[..., Any], *names: str) -> dict[str, str]:
    """Dtypes by name of inputs that a reference declares: of those named, or of all that are always there. For an op,
    and for plugins that take an op's inputs. Raises `KeyError` for a name that is not declared."""
    declared = _declared(reference)
    parameters = inspect.signature(reference).parameters
    always = [name for name in declared if parameters[name].default is inspect.Parameter.empty]
    return {name: declared[name] for name in names or always}


def attributes_of(reference: Callable[..., Any]) -> dict[str, type]:
    """Types by name of the attributes that a reference declares: its keyword-only parameters."""
    parameters, hints = inspect.signature(reference).parameters, get_type_hints(reference)
    return {name: hints[name] for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def _declared(reference: Callable[..., Any]) -> dict[str, str]:
    """Dtypes of all inputs that a reference names, optional ones too."""
    parameters, hints = inspect.signature(reference).parameters, get_type_hints(reference, include_extras=True)
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    # An optional input is `Float32 | None`, others are `Float32`: torch.Tensor annotated with a dtype.
    tensors = {
        name: hints[name] if get_origin(hints[name]) is Annotated else get_args(hints[name])[0] for name in names
    }
    return {name: get_args(tensor)[1] for name, tensor in tensors.items()}


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


def value(rule: Rule, symbols: Mapping[str, Any]) -> Any:
    """What a rule comes to. Numbers give a number; TensorRT's expressions give one, by their own operators."""
    if callable(rule):
        return rule(*(symbols[name] for name in _parameters(rule)))
    return symbols[rule] if isinstance(rule, str) else rule


def text(rule: Rule) -> str:
    """A rule as it is written, for manifests and pages."""
    if not isinstance(rule, FunctionType):
        return str(rule)
    file, line = rule.__code__.co_filename, rule.__code__.co_firstlineno
    places = [(first, last, start, end) for first, last, start, end in rule.__code__.co_positions() if end]
    if any((first, last) != (line, line) for first, last, _, _ in places):
        raise NetworkError(f"{file}:{line}: found a rule of several lines, expected one")
    start, end = min(start or 0 for _, _, start, _ in places), max(end or 0 for *_, end in places)
    return linecache.getline(file, line).encode()[start:end].decode()


def cdiv(a: Any, b: Any) -> Any:
    """Divide, and round up."""
    return (a + (b - 1)) // b


def pow2(x: int) -> int:
    """The next power of two, x itself if it is one."""
    return 1 << max(0, x - 1).bit_length()


@functools.cache
def _parameters(rule: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


class Unknown:
    """A size that is known at run time only: whatever is made of it is one too."""

    def _same(self, *_: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __floordiv__ = _same


UNKNOWN = Unknown()
