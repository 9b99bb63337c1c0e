"""The real `tensorrt.plugin` (pure Python, from the bindings' wheel) over a stand-in for its C extension.

The stand-in does what TensorRT does with a plugin when it builds: asks for output dtypes, then shapes, then
combinations and tactics, then the kernel and its launch. Sizes are expressions that can be worked out afterwards.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Expr:
    """`trt.IDimensionExpr`: a number, an input's size, or an operation on two."""

    def __init__(self, op: str, *sides: Any) -> None:
        self.op, self.sides = op, sides

    def is_constant(self) -> bool:
        return self.op == "number" or (self.op != "size" and all(side.is_constant() for side in self.sides))

    def get_constant_value(self) -> int:
        return self.at({})

    def at(self, sizes: Mapping[str, int]) -> int:
        """Its value, with the inputs' sizes known."""
        if self.op == "number":
            return self.sides[0]
        if self.op == "size":
            return sizes[self.sides[0]]
        a, b = (side.at(sizes) for side in self.sides)
        return {
            "SUM": lambda: a + b,
            "SUB": lambda: a - b,
            "PROD": lambda: a * b,
            "FLOOR_DIV": lambda: a // b,
            "CEIL_DIV": lambda: -(-a // b),
            "MIN": lambda: min(a, b),
            "MAX": lambda: max(a, b),
        }[self.op]()


class Builder:
    """`trt.IExprBuilder`."""

    def constant(self, number: int) -> Expr:
        return Expr("number", number)

    def operation(self, op: Any, a: Expr, b: Expr) -> Expr:
        return Expr(op.name, a, b)


class Desc:
    """`trt.PluginTensorDesc`."""

    def __init__(self) -> None:
        self.dims, self.type, self.format, self.scale = (), None, None, 1.0


class DynamicDesc:
    """`trt.DynamicPluginTensorDesc`."""

    def __init__(self, desc: Desc) -> None:
        self.desc, self.min, self.opt, self.max = desc, desc.dims, desc.dims, desc.dims


class Field:
    """`trt.PluginField`."""

    def __init__(self, name: str, data: Any, kind: Any) -> None:
        import numpy as np

        self.name = name
        self.data = np.frombuffer(data, dtype=np.int8) if isinstance(data, bytes) else data
        self.type = kind


class DimsExprs(list):
    """`trt.DimsExprs`."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Dims(tuple):
    """`trt.Dims`."""

    MAX_DIMS = 8


@dataclass
class Tensor:
    """`trt.ITensor`, outside a network: a dtype and sizes, a number or the name of a run-time one."""

    dtype: Any
    shape: tuple[int | str, ...]
    name: str = ""


@dataclass
class Layer:
    """What the build of one plugin layer came to."""

    plugin: Any
    inputs: list[Any]
    dtypes: list[Any]
    shapes: list[list[Expr]]
    combinations: list[tuple[Any, Any]]
    aliases: list[int]
    kernel: tuple[str, bytes] | None = None
    grid: list[Expr] = field(default_factory=list)
    block: list[Expr] = field(default_factory=list)
    shared_memory: Expr | None = None
    scalars: list[Any] = field(default_factory=list)


def extension(api: Any) -> ModuleType:
    """The module `tensorrt`: what `api` (tensorrt_rtx) has, and what plugins need besides."""
    module = ModuleType("tensorrt")
    module.__dict__.update({name: value for name, value in vars(api).items() if not name.startswith("__")})
    registry = SimpleNamespace(creators={})

    def register_creator(creator: Any, namespace: str) -> None:
        registry.creators[creator.name, creator.plugin_version, namespace] = creator

    registry.register_creator = register_creator
    registry.get_creator = lambda name, version, namespace: registry.creators[name, version, namespace]
    bases = ("IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickRuntime")
    for name in (*bases, "IPluginV3QuickAOTBuild", "IPluginCreatorV3Quick", "ISymExpr"):
        setattr(module, name, type(name, (), {}))
    operations = "SUM SUB PROD FLOOR_DIV CEIL_DIV MIN MAX EQUAL LESS"
    fields = "INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 CHAR UNKNOWN"
    module.__dict__.update(
        DimensionOperation=enum.Enum("DimensionOperation", operations),
        PluginFieldType=enum.Enum("PluginFieldType", fields),
        PluginArgType=enum.Enum("PluginArgType", "INT"),
        PluginArgDataType=enum.Enum("PluginArgDataType", "INT8 INT16 INT32"),
        QuickPluginCreationRequest=enum.Enum("Request", "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT"),
        TensorRTPhase=enum.Enum("TensorRTPhase", "BUILD RUNTIME"),
        TensorFormat=enum.Enum("TensorFormat", "LINEAR HWC"),
        IDimensionExpr=Expr,
        DimsExprs=DimsExprs,
        Dims=Dims,
        PluginTensorDesc=Desc,
        DynamicPluginTensorDesc=DynamicDesc,
        PluginField=Field,
        PluginFieldCollection=list,
        get_plugin_registry=lambda: registry,
        Logger=type("Logger", (), {"WARNING": 0, "log": lambda *_: None}),
    )
    return module


@pytest.fixture
def tensorrt(monkeypatch) -> Iterator[ModuleType]:
    """`tensorrt` and `tensorrt.plugin` can be imported: the real plugin package, the stand-in below it. Tensors are
    `Tensor`s."""
    import tensorrt_rtx

    yield from installed(monkeypatch, extension(tensorrt_rtx), Tensor)


def installed(monkeypatch: Any, module: ModuleType, tensor: type) -> Iterator[ModuleType]:
    """Put a stand-in in the place of `tensorrt`. tensor: its ITensor."""
    from glmspec.plugins import registration

    module.ITensor = tensor
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    wheel = importlib.metadata.distribution("tensorrt-cu13-bindings")
    home = wheel.locate_file("tensorrt_bindings/plugin")
    spec = importlib.util.spec_from_file_location(
        "tensorrt.plugin", home / "__init__.py", submodule_search_locations=[str(home)]
    )
    before = set(sys.modules)
    module.plugin = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", module.plugin)
    spec.loader.exec_module(module.plugin)
    registration.register.cache_clear()
    yield module
    registration.register.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("tensorrt."):
            del sys.modules[name]


def build(trt: ModuleType, call: Any, sizes: list[tuple[int | str, ...]], *, launch: bool = True) -> Layer:
    """What TensorRT does with `trtp.op.NAMESPACE.NAME(...)` from the network to the kernel. sizes: of the inputs."""
    tensors, _, plugin = call(trt.QuickPluginCreationRequest.STRICT_AOT)
    builder, count = Builder(), len(tensors)
    dtypes = plugin.get_output_data_types([one.dtype for one in tensors], [len(shape) for shape in sizes])
    exprs = [[Expr("number" if isinstance(size, int) else "size", size) for size in shape] for shape in sizes]
    shapes = [list(one) for one in plugin.get_output_shapes(exprs, [], builder)]
    described = [_described(trt, one.dtype, shape) for one, shape in zip(tensors, sizes, strict=True)]
    described += [
        _described(trt, dtype, [one.get_constant_value() if one.is_constant() else -1 for one in shape])
        for dtype, shape in zip(dtypes, shapes, strict=True)
    ]
    found = plugin.get_supported_format_combinations(described, count)
    aliases = [plugin.get_aliased_input(at) for at in range(len(dtypes))]
    made = Layer(plugin, tensors, dtypes, shapes, [(one.type, one.format) for one in found], aliases)
    if launch:
        _launch(trt, made, exprs, described, builder)
    return made


def _described(trt: ModuleType, dtype: Any, shape: Any) -> DynamicDesc:
    desc = Desc()
    desc.dims = tuple(size if isinstance(size, int) else -1 for size in shape)
    desc.type, desc.format = dtype, trt.TensorFormat.LINEAR
    return DynamicDesc(desc)


def _launch(trt: ModuleType, made: Layer, exprs: list, described: list[DynamicDesc], builder: Builder) -> None:
    """The second half: a combination and a tactic are chosen, the kernel asked for."""
    plugin, count = made.plugin, len(made.inputs)
    plugin.configure_plugin(described[:count], described[count:])
    (tactic,) = plugin.get_valid_tactics()
    plugin.set_tactic(tactic)
    launch, setter = SimpleNamespace(), {}
    symbols = type("Setter", (), {"__setitem__": lambda _, at, one: setter.__setitem__(at, one)})()
    plugin.get_launch_params(exprs, described, count, launch, symbols, builder)
    descs = [one.desc for one in described]
    made.kernel = plugin.get_kernel(descs[:count], descs[count:])
    made.grid = [getattr(launch, f"grid_{axis}").expr for axis in "xyz"]
    made.block = [getattr(launch, f"block_{axis}").expr for axis in "xyz"]
    made.shared_memory = launch.shared_mem.expr
    made.scalars = [setter[at] for at in range(symbols.nbSymExprs)]


class PluginLayer:
    """`trt.IPluginV3Layer`."""

    type = "LayerType.PLUGIN_V3"

    def __init__(self, made: Layer, outputs: list[Any]) -> None:
        self.made, self._outputs = made, outputs
        self.name, self.metadata = "", ""
        self.num_inputs, self.num_outputs = len(made.inputs), len(outputs)

    def get_input(self, at: int) -> Any:
        return self.made.inputs[at]

    def get_output(self, at: int) -> Any:
        return self._outputs[at]


class PluggedNetwork:
    """A real network of tensorrt_rtx with plugin layers, which it has none of: an output is an input that nobody sees
    behind an identity layer that is shown as the plugin's. So what is around a plugin is checked by TensorRT itself."""

    def __init__(self, real: Any, trt: ModuleType, launch: bool) -> None:
        self.__dict__.update(_real=real, _trt=trt, _launch=launch, _plugins={}, _inputs=set())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def add_plugin(self, call: Any, aot: bool) -> PluginLayer:
        """A plugin layer. aot: ours have no other implementation."""
        assert aot
        tensors, _, _ = call(self._trt.QuickPluginCreationRequest.STRICT_AOT)
        sizes = [
            tuple(f"{one.name}{axis}" if size < 0 else size for axis, size in enumerate(one.shape)) for one in tensors
        ]
        made = build(self._trt, call, sizes, launch=self._launch)
        first, outputs = self._real.num_layers, []
        for dtype, shape in zip(made.dtypes, made.shapes, strict=True):
            dims = tuple(one.get_constant_value() if one.is_constant() else -1 for one in shape)
            self._inputs.add(self._real.num_inputs)
            self._plugins[self._real.num_layers] = None
            hidden = self._real.add_input(f"plugin{self._real.num_inputs}", dtype, dims)
            outputs.append(self._real.add_identity(hidden).get_output(0))
        self._plugins[first] = PluginLayer(made, outputs)
        return self._plugins[first]

    @property
    def num_layers(self) -> int:
        return self._real.num_layers - sum(one is None for one in self._plugins.values())

    def get_layer(self, at: int) -> Any:
        for place in sorted(place for place, one in self._plugins.items() if one is None):
            at += place <= at
        return self._plugins.get(at) or self._real.get_layer(at)

    @property
    def num_inputs(self) -> int:
        return self._real.num_inputs - len(self._inputs)

    def get_input(self, at: int) -> Any:
        for place in sorted(self._inputs):
            at += place <= at
        return self._real.get_input(at)


def networks_with_plugins(monkeypatch: Any, *, launch: bool = False) -> Iterator[ModuleType]:
    """`tensorrt` whose builders make networks that take plugins. launch: kernels are compiled, as a build would."""
    import tensorrt_rtx

    module = extension(tensorrt_rtx)
    module.__version__ = "11.4.0"
    module.IPluginV3Layer = PluginLayer

    class Plugging:
        """`trt.Builder`."""

        def __init__(self, logger: Any) -> None:
            self._real = tensorrt_rtx.Builder(logger)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def create_network(self, flags: int) -> PluggedNetwork:
            return PluggedNetwork(self._real.create_network(flags), module, launch)

    module.Builder = Plugging
    yield from installed(monkeypatch, module, tensorrt_rtx.ITensor)
