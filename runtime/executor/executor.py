"""`ReferenceExecutor`: binds weights and caches to a network and runs steps of it on the CPU."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.nn import functional

from glmspec.core.dtypes import FP4
from glmspec.core.errors import NetworkError
from glmspec.network.reader import Graph, Value
from glmspec.plugins import OPS
from glmspec.runtime.executor import functions
from glmspec.runtime.executor.planner import plan
from glmspec.runtime.executor.variables import Program, Statement

Tensors = dict[str, torch.Tensor]  # by name


class ReferenceExecutor:
    """A network that runs in PyTorch.

    graph: the network, read back. weights: every input that never changes. caches: inputs changed in
    place by the network. regions: run each op's reference in place of its layers (False runs every
    single layer). lowest_wins: how TopK, which TensorRT leaves open, treats ties. probes: inner
    tensors to return as well. ranks: carries out collectives (see `lockstep.py`). Raises `NetworkError`
    for a layer that is not known, naming it.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Tensors,
        caches: Tensors,
        *,
        regions: bool = True,
        lowest_wins: bool = True,
        probes: tuple[str, ...] = (),
        ranks: Any = None,
    ) -> None:
        bound = {**weights, **caches}
        _check_bound(graph, bound)
        self.program = plan(graph, weights, caches, regions=regions, lowest_wins=lowest_wins, probes=probes)
        self.graph = graph
        self._step_values = {value.name: value for value in graph.inputs if value.name in self.program.step_inputs}
        namespace: dict[str, Any] = {"torch": torch, "F": functional, "fn": functions, "OPS": OPS, "ranks": ranks}
        for name, array in self.program.constants.items():
            namespace[name] = torch.from_numpy(array.copy())
        for name, variable in self.program.bound_inputs.items():
            namespace[variable] = bound[name]
        with torch.inference_mode():
            for statement in self.program.bind_statements:
                exec(f"{statement.target} = {statement.expression}", namespace)  # our own source
        self._layers, source = _source(self.program)
        exec(compile(source, f"<{graph.name}>", "exec"), namespace)  # our own source
        self._step = namespace["step"]

    def run(self, inputs: Tensors) -> Tensors:
        """One step. Raises `NetworkError` for an input that does not fit, or a layer that fails, by name."""
        self._check_step(inputs)
        try:
            with torch.inference_mode():
                return self._step(inputs)
        except Exception as error:
            raise NetworkError(f"{self._failing_layer(error)}: {error}") from error

    def _check_step(self, inputs: Tensors) -> None:
        for name, value in self._step_values.items():
            if name not in inputs:
                raise NetworkError(f"{self.graph.name}: input {name}: missing, expected {_described(value)}")
            _check_input(self.graph, value, inputs[name])

    def _failing_layer(self, error: Exception) -> str:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == f"<{self.graph.name}>"]
        return self._layers.get(lines[-1], self.graph.name) if lines else self.graph.name


def _source(program: Program) -> tuple[dict[int, str], str]:
    """The step function's source, and which layer each of its lines runs."""
    inputs = [Statement(variable, f"inputs[{name!r}]", name) for name, variable in program.step_inputs.items()]
    statements = inputs + program.step_statements
    text = ["def step(inputs):", *(f"    {statement.target} = {statement.expression}" for statement in statements)]
    returned = ", ".join(f"{name!r}: {variable}" for name, variable in program.outputs.items())
    text.append(f"    return {{{returned}}}")
    return {number: statement.layer for number, statement in enumerate(statements, 2)}, "\n".join(text) + "\n"


def _check_bound(graph: Graph, bound: Tensors) -> None:
    values = {value.name: value for value in graph.inputs}
    for name, tensor in bound.items():
        if name not in values:
            raise NetworkError(f"{graph.name}: {name}: the network has no such input")
        _check_input(graph, values[name], tensor)


def _check_input(graph: Graph, value: Value, tensor: torch.Tensor) -> None:
    shape, dtype = value.shape, value.dtype
    if dtype == FP4:  # two codes a byte
        shape, dtype = (*shape[:-1], shape[-1] // 2), "uint8"
    sizes = zip(shape, tensor.shape, strict=False)
    fits = len(value.shape) == tensor.dim() and all(want in (-1, have) for want, have in sizes)
    if not fits or str(tensor.dtype) != f"torch.{dtype}":
        given = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        raise NetworkError(f"{graph.name}: input {value.name}: found {given}, expected {_described(value)}")


def _described(value: Value) -> str:
    return f"{value.dtype}[{', '.join('any' if size < 0 else str(size) for size in value.shape)}]"
