"""Plugins as TensorRT knows them: `tensorrt.plugin` described, tuned and implemented ahead of time from one `Plugin`.

TensorRT is told everything by functions whose signatures it reads, so the signatures are made here from a plugin's
names. Sizes that the engine knows at run time only are symbolic expressions there, and the launch is written with them.
An engine keeps the kernel's PTX and its launch rule; it needs neither Python nor a plugin library to run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from glmspec.core.dtypes import DTYPES
from glmspec.core.errors import MissingCapability
from glmspec.network.graph import Network, Tensor
from glmspec.network.trt import DATA_TYPES
from glmspec.plugins import OPS
from glmspec.plugins.compiler import Compiled, Variant, compile_variant, triton, variant_of
from glmspec.plugins.spec import UNKNOWN, NoPlugin, Plugin, dims, value

NAMESPACE = "glmspec"
_SM = "sm"  # an attribute of every plugin: the GPU it is compiled for, like "SM100"
_TACTIC = [1]  # one a plugin, named: then TensorRT sets it before it asks for the kernel
_NAMES = {name: dtype.plugin for name, dtype in DTYPES.items() if dtype.plugin}


def author(net: Network, op: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> list[Tensor]:
    """An op's outputs by plugin layers; none where its plugins do not take these sizes, or where it has none."""
    plugged = OPS[op].plugged
    if plugged is None:
        return []
    try:
        return list(plugged(Authored(net, net.config.plugins), *inputs, **attributes))
    except NoPlugin:
        return []


class Authored:
    """`Runs` in a network: every launch is a plugin layer. sm: the GPU that the network is for."""

    def __init__(self, net: Network, sm: str) -> None:
        self.net = net
        self.sm = sm

    def __call__(self, plugin: Plugin, *inputs: Tensor, **attributes: Any) -> tuple[Tensor, ...]:
        """One plugin layer. Raises `NoPlugin` for other dtypes than the plugin's."""
        compute = plugin.compute([x.dtype for x in inputs])
        given = {name: of(attributes[name]) for name, of in plugin.attributes.items()}
        shapes = [tuple(UNKNOWN if size == -1 else size for size in x.shape) for x in inputs]
        self.net.kernels[variant_of(plugin, self.sm, compute, plugin.bind(shapes, given, self.sm))] = None
        known = {**given, _SM: self.sm}
        call = getattr(getattr(register(plugin, self.net.backend.package).op, NAMESPACE), plugin.id)
        layer = self.net.definition.add_plugin(call(*(x.trt for x in inputs), **known), aot=True)
        outputs = self.net.add(layer, plugin.name, len(plugin.outputs))
        metadata = {**json.loads(layer.metadata or "{}"), "plugin": {"id": plugin.id, **known}}
        layer.metadata = json.dumps(metadata, sort_keys=True)  # a reader of the network can't ask the layer
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """A shuffle layer."""
        from glmspec.network import ops

        return ops.reshape(x, dims)

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Sizes; -1 where known only at run time."""
        return x.shape

    def dtype(self, x: Tensor) -> str:
        """Torch-style name."""
        return x.dtype


@functools.cache
def register(plugin: Plugin, package: str) -> Any:
    """Make a plugin known to a TensorRT package, once a process; returns its `plugin` module. Raises
    `MissingCapability` where the package has none, or no Triton is here to compile with."""
    triton()
    importlib.import_module("numpy.typing")  # tensorrt.plugin uses it and, with numpy 1, would not find it
    try:
        trt, trtp = importlib.import_module(package), importlib.import_module(f"{package}.plugin")
    except ImportError as error:
        raise MissingCapability(
            f"plugin {plugin.id}: {package} has no Python plugins ({error}). Use --plugins off."
        ) from None
    description = _Description(plugin, trt, trtp)
    name = f"{NAMESPACE}::{plugin.id}"
    trtp.register(name, lazy_register=True)(description.register())
    trtp.autotune(name)(description.autotune())
    trtp.aot_impl(name)(description.aot_impl())
    return trtp


@functools.cache
def compiled(variant: Variant) -> Compiled:
    """A variant, compiled once a process: TensorRT asks for it whenever it looks at the layer."""
    return compile_variant(variant)


def compile_kernels(variants: Iterable[Variant], done: Callable[[str], None]) -> None:
    """Compile what TensorRT will ask for. done: called after each, with its name. Raises as `compile_variant`."""
    for variant in variants:
        compiled(variant)
        done(variant.name)


class _Description:
    """The functions that TensorRT wants of one plugin."""

    def __init__(self, plugin: Plugin, trt: Any, trtp: Any) -> None:
        self.plugin, self.trt, self.trtp = plugin, trt, trtp
        self.attributes = {**plugin.attributes, _SM: str}

    def register(self) -> Callable[..., Any]:
        """What the outputs are."""
        count = len(self.plugin.inputs)

        def describe(*inputs: Any, **attributes: Any) -> Any:
            return tuple(self._outputs(inputs[:count], attributes))

        results = tuple[(self.trtp.TensorDesc,) * len(self.plugin.outputs)]
        return self._signed(describe, (), results)

    def autotune(self) -> Callable[..., Any]:
        """Which dtypes it takes: those of the network, which is strongly typed."""
        count = len(self.plugin.inputs)

        def tune(*given: Any) -> Any:
            dtypes = [_NAMES[dtype] for dtype in self.plugin.dtypes(self._compute(given[:count]))]
            return [self.trtp.AutoTuneCombination(", ".join(dtypes), "LINEAR", _TACTIC)]

        return self._signed(tune, ("outputs",), list[self.trtp.AutoTuneCombination])

    def aot_impl(self) -> Callable[..., Any]:
        """The kernel, its launch and its scalars."""
        count = len(self.plugin.inputs)

        def implement(*given: Any) -> Any:
            values = given[count : count + len(self.attributes)]
            return self._launch(given[:count], dict(zip(self.attributes, values, strict=True)))

        trtp = self.trtp
        results = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
        return self._signed(implement, ("outputs", "tactic"), results)

    def _signed(self, function: Callable[..., Any], behind: Sequence[str], results: Any) -> Callable[..., Any]:
        """The function with a signature of inputs, attributes and what TensorRT puts behind them."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind, annotation=self.trtp.TensorDesc) for name in self.plugin.inputs]
        parameters += [inspect.Parameter(name, kind, annotation=of) for name, of in self.attributes.items()]
        parameters += [inspect.Parameter(name, kind) for name in behind]
        function.__signature__ = inspect.Signature(parameters, return_annotation=results)
        return function

    def _compute(self, inputs: Sequence[Any]) -> str:
        names = {getattr(self.trt.DataType, DATA_TYPES[dtype]): dtype for dtype in _NAMES}
        return self.plugin.compute([names[x.dtype] for x in inputs])

    def _symbols(self, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
        shapes = [[_size(self.trtp, size) for size in x.shape_expr] for x in inputs]
        others = {name: of for name, of in attributes.items() if name != _SM}
        return self.plugin.bind(shapes, others, attributes[_SM])

    def _outputs(self, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
        plugin = self.plugin
        by_name = dict(zip(plugin.inputs, inputs, strict=True))
        dtypes = plugin.dtypes(self._compute(inputs))[len(inputs) :]
        fake = any(size.is_fake for x in inputs for size in x.shape_expr)
        shapes = [] if fake else plugin.output_shapes(self._symbols(inputs, attributes))
        outputs = []
        for at, (name, dtype) in enumerate(zip(plugin.outputs, dtypes, strict=True)):
            if name in plugin.aliased:
                outputs.append(by_name[plugin.aliased[name]].aliased())
                continue
            if fake:  # TensorRT asks for dtypes and ranks first, and has no sizes then
                sizes = self.trtp.ShapeExprs(len(dims(name)), _is_dummy=True)
            else:
                sizes = tuple(_expression(size) for size in shapes[at])
            outputs.append(self.trtp.from_shape_expr(sizes, getattr(self.trt.DataType, DATA_TYPES[dtype])))
        return outputs

    def _launch(self, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[str, str, Any, Any]:
        plugin, trtp = self.plugin, self.trtp
        symbols = self._symbols(inputs, attributes)
        kernel = compiled(variant_of(plugin, attributes[_SM], self._compute(inputs), symbols))
        launch = trtp.KernelLaunchParams()
        for axis, rule in zip("xyz", plugin.grid, strict=False):
            setattr(launch, f"grid_{axis}", _expression(value(rule, symbols)))
        launch.block_x = 32 * kernel.warps
        launch.shared_mem = kernel.shared_memory
        scalars = trtp.SymIntExprs(len(plugin.scalars))
        for at, name in enumerate(plugin.scalars):
            scalars[at] = trtp.SymInt32(_expression(symbols[name]))
        return kernel.entry, kernel.ptx, launch, scalars


class _Size:
    """A run-time size: TensorRT's expression, with the operators that rules use on either side."""

    def __init__(self, trtp: Any, expression: Any) -> None:
        self.trtp, self.expression = trtp, expression

    def _of(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> _Size:
        sides = [
            side if isinstance(side, _Size) else _Size(self.trtp, self.trtp.ShapeExpr(side)) for side in (left, right)
        ]
        return _Size(self.trtp, operation(*(side.expression for side in sides)))

    # fmt: off
    def __add__(self, other): return self._of(lambda a, b: a + b, self, other)
    def __radd__(self, other): return self._of(lambda a, b: a + b, other, self)
    def __sub__(self, other): return self._of(lambda a, b: a - b, self, other)
    def __mul__(self, other): return self._of(lambda a, b: a * b, self, other)
    def __rmul__(self, other): return self._of(lambda a, b: a * b, other, self)
    def __floordiv__(self, other): return self._of(lambda a, b: a // b, self, other)
    # fmt: on


def _size(trtp: Any, expression: Any) -> Any:
    """A plain number where TensorRT knows it at build time."""
    return expression.constant_value() if expression.is_constant else _Size(trtp, expression)


def _expression(size: Any) -> Any:
    """What TensorRT takes for a size."""
    return size.expression if isinstance(size, _Size) else int(size)
