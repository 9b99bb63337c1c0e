"""From a network's graph to the source of one Python function.

The executor runs the very network that is compiled elsewhere. It is planned once: layers that depend on weights alone
move to bind time, expressions that several layers need are computed once a step, regions become calls of their op's
reference, and a variable's name is reused when its value is dead (so its memory goes too).

`torch.fx.Graph` could do naming, freeing and code: with it a step of the tiny verifier took 1 to 5% longer (of
DFlash2 4 to 5%), planning two to three times as long (25 for 8.4 ms), for some 40 lines less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from glmspec.core.errors import NetworkError
from glmspec.network.reader import Graph, Node, Value
from glmspec.runtime.executor.emit import emit, emit_op
from glmspec.runtime.executor.variables import Program, Statement, Variables


@dataclass(frozen=True)
class Operation:
    """A layer, or a region taken as one. region: its head, None for a layer."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    region: dict | None = None


def plan(
    graph: Graph,
    weights: Collection[str],
    caches: Collection[str],
    *,
    regions: bool,
    lowest_wins: bool,
    probes: Iterable[str],
) -> Program:
    """The program of a whole graph. weights: inputs that never change; caches: inputs bound once and changed in place.
    Raises `NetworkError` for a layer that is not known, and for a probe that is no tensor of the program."""
    returned = [*(value.name for value in graph.outputs), *probes]
    variables = Variables(graph, weights, {*(value.name for value in graph.inputs), *returned}, lowest_wins)
    for value in graph.inputs:
        variables.assign_input(value, bound=value.name in weights or value.name in caches)
    operations = list(_operations(graph, regions))
    last_use = {value.name: index for index, operation in enumerate(operations) for value in operation.inputs}
    for index, operation in enumerate(operations):
        _plan_operation(operation, variables, [v for v in dict.fromkeys(operation.inputs) if last_use[v.name] == index])
    for name in returned:
        if name not in variables.names:
            raise NetworkError(f"{graph.name}: no tensor {name!r} to return (is it inside a region?)")
        variables.program.outputs[name] = variables.names[name]
    return variables.program


def _plan_operation(operation: Operation, variables: Variables, dying: list[Value]) -> None:
    """Adds a statement. dying: values that no later operation reads."""
    variables.layer = operation.name
    static = variables.is_static(*operation.inputs)
    if operation.region is None:
        expression = emit(operation.nodes[0], variables)
    else:
        expression = emit_op(operation.region["op"], operation.inputs, operation.region["attributes"], variables)
    if not static:
        variables.program.layers += sum(node.kind != "CONSTANT" for node in operation.nodes)
        for value in dying:
            variables.release(value)
    target = ", ".join(variables.assign(value, static=static) for value in operation.outputs)
    variables.program.add(Statement(target, expression, operation.name), static=static)


def _operations(graph: Graph, regions: bool) -> Iterator[Operation]:
    """Layers in order; constants left out; each region as one operation at its first layer's place."""
    members: dict[int, list[Node]] = {}
    values = {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        values |= {value.name: value for value in node.outputs}
        if regions and node.region:
            members.setdefault(node.region["region"], []).append(node)
    for node in graph.nodes:
        if regions and node.region:
            if "op" in node.region:
                inputs, outputs = (tuple(values[name] for name in node.region[side]) for side in ("inputs", "outputs"))
                yield Operation(node.name, inputs, outputs, tuple(members[node.region["region"]]), node.region)
        elif node.kind != "CONSTANT":
            yield Operation(node.name, tuple(v for v in node.inputs if v is not None), node.outputs, (node,))
