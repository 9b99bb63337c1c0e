"""Names in the generated step: a variable for every tensor, and for expressions that several layers need."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from glmspec.core.errors import NetworkError
from glmspec.network.reader import Graph, Value


@dataclass(frozen=True)
class Statement:
    """One assignment. target: the variable(s). layer: the TensorRT layer that it runs, for errors."""

    target: str
    expression: str
    layer: str


@dataclass
class Program:
    """Source in two parts, run when weights are bound and every step. constants: arrays by variable name."""

    bind_statements: list[Statement] = field(default_factory=list)
    step_statements: list[Statement] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    bound_inputs: dict[str, str] = field(default_factory=dict)  # network input -> variable
    step_inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    layers: int = 0  # TensorRT layers that a step stands for, those of replaced regions among them

    def add(self, statement: Statement, *, static: bool) -> None:
        """Append a statement to the part that it belongs to."""
        (self.bind_statements if static else self.step_statements).append(statement)


class Variables:
    """The variables of one program. static: inputs that never change. pinned: tensors whose variable stays theirs.
    lowest_wins: how TopK treats ties."""

    def __init__(self, graph: Graph, static: Collection[str], pinned: Iterable[str], lowest_wins: bool) -> None:
        self.program = Program()
        self.lowest_wins = lowest_wins
        self.layer = ""  # that is being emitted
        self.names: dict[str, str] = {}  # by tensor
        self._static = set(static)
        self._pinned = set(pinned)
        self._arrays = {n.output.name: n.attributes["value"] for n in graph.nodes if n.kind == "CONSTANT"}
        self._shared: dict[str, str] = {}
        self._free: list[str] = []
        self._count = 0

    def var(self, value: Value) -> str:
        """The variable that holds a tensor; a constant gets one on first use."""
        if value.name in self._arrays and value.name not in self.names:
            name = self.names[value.name] = self._fresh("c")
            self.program.constants[name] = self._arrays[value.name]
        return self.names[value.name]

    def scalar(self, value: Value) -> str | None:
        """A literal, when the tensor is a constant with one element."""
        array = self._arrays.get(value.name)
        if array is None or array.size != 1:
            return None
        number = array.reshape(-1)[0].item()
        return repr(number) if np.isfinite(number) else f"float('{number}')"

    def constant(self, value: Value) -> np.ndarray:
        """The array of a constant. Raises `NetworkError` when the tensor is computed at run time."""
        if value.name not in self._arrays:
            raise NetworkError(f"{self.layer}: the reference executor needs {value.name} to be a constant")
        return self._arrays[value.name]

    def is_static(self, *values: Value) -> bool:
        """True when all are known at bind time: weights, constants, and tensors that depend on them alone."""
        return all(value.name in self._static or value.name in self._arrays for value in values)

    def shared(self, expression: str, *operands: Value) -> str:
        """The variable of an expression that several layers need: computed once a step, or at bind time when it depends
        on weights alone."""
        if expression not in self._shared:
            static = self.is_static(*operands)
            name = self._shared[expression] = self._fresh("w" if static else "s")
            self.program.add(Statement(name, expression, self.layer), static=static)
            if not static:  # the operands' variables must stay theirs
                self._pinned |= {value.name for value in operands}
        return self._shared[expression]

    def assign_input(self, value: Value, *, bound: bool) -> None:
        """Give a network input its variable."""
        name = self.names[value.name] = self._fresh("w" if bound else "i")
        (self.program.bound_inputs if bound else self.program.step_inputs)[value.name] = name

    def assign(self, value: Value, *, static: bool) -> str:
        """Give a layer's output its variable: a free one where the value may lose it again."""
        if static:
            self._static.add(value.name)
        if static or not self._free or value.name in self._pinned:
            name = self._fresh("w" if static else "v")
        else:
            name = self._free.pop()
        self.names[value.name] = name
        return name

    def release(self, value: Value) -> None:
        """Free the variable of a value that nothing reads any more, and so its memory."""
        name = self.names.get(value.name, "")
        if name.startswith("v") and value.name not in self._pinned:
            self._free.append(name)

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"
