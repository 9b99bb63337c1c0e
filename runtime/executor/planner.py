"""From a network's graph to the source of one Python function.

Planned once: layers that depend on weights alone move to bind time, expressions that several layers
need are computed once a step, regions become calls of their op's reference, and a variable's name is
reused when its value is dead (so its memory goes too).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from glmspec.core.errors import NetworkError
from glmspec.network.reader import Graph, Node, Value
from glmspec.runtime.executor.emit import Scope, emit, emit_op


@dataclass(frozen=True)
class Line:
    """One statement. target: the variable(s) assigned. layer: the TensorRT layer it runs, for errors."""

    target: str
    expression: str
    layer: str


@dataclass
class Program:
    """Source in two parts, and what they need. constants: arrays by variable name."""

    bind_lines: list[Line] = field(default_factory=list)
    step_lines: list[Line] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    bound_inputs: dict[str, str] = field(default_factory=dict)  # network input -> variable
    step_inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    layers: int = 0  # TensorRT layers that a step stands for, those of replaced regions among them


@dataclass(frozen=True)
class _Unit:
    """A layer, or a region taken as one."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    op: str | None = None  # a region's op
    attributes: dict | None = None


class Planner(Scope):
    """Plans one graph. weights: inputs that never change; caches: inputs bound once and changed in place."""

    def __init__(
        self,
        graph: Graph,
        weights: Collection[str],
        caches: Collection[str],
        *,
        regions: bool,
        lowest_wins: bool,
        probes: Iterable[str],
    ) -> None:
        self.graph = graph
        self.lowest_wins = lowest_wins
        self.program = Program()
        self._weights, self._caches = set(weights), set(caches)
        self._probes = tuple(probes)
        self._static: set[str] = set(weights)  # values known at bind time
        self._names: dict[str, str] = {}
        self._arrays = {n.output.name: n.attributes["value"] for n in graph.nodes if n.kind == "CONSTANT"}
        self._shared: dict[str, str] = {}
        self._free: list[str] = []
        self._count = 0
        self._layer = ""
        self._units = list(_units(graph, regions))

    # -- Scope -----------------------------------------------------------------------------

    def var(self, value: Value) -> str:
        """See `Scope`; a constant gets its variable on first use."""
        if value.name in self._arrays and value.name not in self._names:
            name = self._names[value.name] = self._fresh("c")
            self.program.constants[name] = self._arrays[value.name]
        return self._names[value.name]

    def scalar(self, value: Value) -> str | None:
        """See `Scope`."""
        array = self._arrays.get(value.name)
        if array is None or array.size != 1:
            return None
        number = array.reshape(-1)[0].item()
        return repr(number) if np.isfinite(number) else f"float('{number}')"

    def constant(self, value: Value) -> np.ndarray:
        """See `Scope`."""
        if value.name not in self._arrays:
            raise NetworkError(f"{self._layer}: the reference executor needs {value.name} to be a constant")
        return self._arrays[value.name]

    def is_static(self, value: Value) -> bool:
        """See `Scope`: weights, constants, and what depends on them alone."""
        return value.name in self._static or value.name in self._arrays

    def shared(self, expression: str, uses: list[Value]) -> str:
        """See `Scope`; at bind time when it depends on weights alone."""
        if expression not in self._shared:
            static = all(self.is_static(value) for value in uses)
            name = self._shared[expression] = self._fresh("w" if static else "s")
            lines = self.program.bind_lines if static else self.program.step_lines
            lines.append(Line(name, expression, self._layer))
            if not static:  # its inputs' names must stay theirs
                self._pinned |= {value.name for value in uses}
        return self._shared[expression]

    # -- planning --------------------------------------------------------------------------

    def plan(self) -> Program:
        """The program of the whole graph."""
        self._pinned = {value.name for value in (*self.graph.inputs, *self.graph.outputs)} | set(self._probes)
        for value in self.graph.inputs:
            bound = value.name in self._weights or value.name in self._caches
            self._names[value.name] = self._fresh("w" if bound else "i")
            (self.program.bound_inputs if bound else self.program.step_inputs)[value.name] = self._names[value.name]
        last_use = {value.name: at for at, unit in enumerate(self._units) for value in unit.inputs}
        for at, unit in enumerate(self._units):
            self._plan_unit(at, unit, last_use)
        wanted = [value.name for value in self.graph.outputs] + list(self._probes)
        for name in wanted:
            if name not in self._names:
                raise NetworkError(f"{self.graph.name}: no tensor {name!r} to return (is it inside a region?)")
            self.program.outputs[name] = self._names[name]
        return self.program

    def _plan_unit(self, at: int, unit: _Unit, last_use: dict[str, int]) -> None:
        self._layer = unit.name
        static = all(self.is_static(value) for value in unit.inputs)
        expression = self._expression(unit)
        if static:
            self._static |= {value.name for value in unit.outputs}
        else:
            self.program.layers += sum(node.kind != "CONSTANT" for node in unit.nodes)
            self._release(at, unit, last_use)
        for value in unit.outputs:
            self._names[value.name] = self._fresh("w") if static else self._slot(value)
        target = ", ".join(self._names[value.name] for value in unit.outputs)
        (self.program.bind_lines if static else self.program.step_lines).append(Line(target, expression, unit.name))

    def _expression(self, unit: _Unit) -> str:
        if unit.op is None:
            return emit(unit.nodes[0], self)
        return emit_op(unit.op, unit.inputs, unit.attributes, self)

    def _release(self, at: int, unit: _Unit, last_use: dict[str, int]) -> None:
        """Give back the names of values this unit is the last to read."""
        for value in set(unit.inputs):
            name = self._names.get(value.name, "")
            if name.startswith("v") and last_use[value.name] == at and value.name not in self._pinned:
                self._free.append(name)

    def _slot(self, value: Value) -> str:
        if self._free and value.name not in self._pinned:
            return self._free.pop()
        return self._fresh("v")

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"


def _units(graph: Graph, regions: bool) -> Iterable[_Unit]:
    """Layers in order; constants left out; each region as one unit at its first layer's place."""
    members: dict[int, list[Node]] = {}
    values = {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        values |= {value.name: value for value in node.outputs}
        if regions and node.region:
            members.setdefault(node.region["region"], []).append(node)
    for node in graph.nodes:
        if regions and node.region:
            head = node.region
            if "op" in head:
                yield _Unit(
                    name=node.name,
                    inputs=tuple(values[name] for name in head["inputs"]),
                    outputs=tuple(values[name] for name in head["outputs"]),
                    nodes=tuple(members[head["region"]]),
                    op=head["op"],
                    attributes=head["attributes"],
                )
        elif node.kind != "CONSTANT":
            inputs = tuple(value for value in node.inputs if value is not None)
            yield _Unit(node.name, inputs, node.outputs, (node,))
