"""One line of Python for every TensorRT layer that the reference executor knows.

An emitter takes a node, the program's `Variables` and the names of the variables that hold the node's inputs, and
returns an expression. A layer type that is not in the table is an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glmspec.core.dtypes import FP4
from glmspec.core.errors import NetworkError
from glmspec.network.formats import GROUP
from glmspec.network.reader import Node, Value
from glmspec.runtime.executor.variables import Variables

_BINARY = {
    "SUM": "{} + {}",
    "SUB": "{} - {}",
    "PROD": "{} * {}",
    "FLOOR_DIV": "{} // {}",
    "AND": "{} & {}",
    "OR": "{} | {}",
    "EQUAL": "{} == {}",
    "GREATER": "{} > {}",
    "LESS": "{} < {}",
    "MAX": "torch.maximum({}, {})",
    "MIN": "torch.minimum({}, {})",
}
_UNARY = {
    "SQRT": "{}.sqrt()",
    "NOT": "~{}",
    "EXP": "{}.exp()",
    "LOG": "{}.log()",
    "ABS": "{}.abs()",
}
_ACTIVATION = {"SIGMOID": "{}.sigmoid()", "RELU": "{}.relu()", "TANH": "{}.tanh()"}
_REDUCE = {"MAX": "amax", "MIN": "amin", "AVG": "mean"}


def emit(node: Node, variables: Variables) -> str:
    """A Python expression for the node's output (a tuple of them for several)."""
    emitter = _EMITTERS.get(node.kind)
    if emitter is None:
        raise _unknown(node, f"layer type {node.kind}")
    return emitter(node, variables, *map(variables.var, node.operands))


def _unknown(node: Node, feature: str) -> NetworkError:
    return NetworkError(f"{node.name}: the reference executor does not know {feature} ({node.kind} {node.attributes})")


def _pick(table: dict[str, str], node: Node) -> str:
    if node.attributes["op"] not in table:
        raise _unknown(node, f"the operation {node.attributes['op']}")
    return table[node.attributes["op"]]


def _elementwise(node: Node, variables: Variables, a: str, b: str) -> str:
    left, right = node.operands
    # A one-element constant is cheaper as a number, as long as the other side has the output's shape.
    if node.attributes["op"] not in ("MAX", "MIN"):
        if (literal := variables.scalar(right)) is not None:
            b = literal
        elif (literal := variables.scalar(left)) is not None:
            a = literal
    if node.attributes["op"] == "DIV":
        whole = left.dtype.startswith("int")
        return f"torch.div({a}, {b}, rounding_mode='trunc')" if whole else f"{a} / {b}"
    return _pick(_BINARY, node).format(a, b)


def _reduce(node: Node, _: Variables, x: str) -> str:
    where = f"{tuple(node.attributes['axes'])}, keepdim={node.attributes['keep']}"
    if node.attributes["op"] == "SUM":
        return f"{x}.sum({where}, dtype=torch.{node.output.dtype})"
    return f"{x}.{_pick(_REDUCE, node)}({where})"


def _topk(node: Node, variables: Variables, x: str, *_: str) -> str:
    (axis,) = node.attributes["axes"]
    largest = node.attributes["op"] == "MAX"
    return f"fn.topk({x}, {node.attributes['k']}, {axis}, {largest}, {variables.lowest_wins})"


def _cumulative(node: Node, variables: Variables, x: str, _: str) -> str:
    if node.attributes != {"op": "SUM", "exclusive": False, "reverse": False}:
        raise _unknown(node, "this cumulative operation")
    return f"{x}.cumsum({int(variables.constant(node.operands[1]))}, dtype=torch.{node.output.dtype})"


def _select(node: Node, variables: Variables, condition: str, then: str, otherwise: str) -> str:
    _, left, right = node.operands
    literal = variables.scalar(right)
    if literal is None:  # two numbers would take torch's default dtype
        then = variables.scalar(left) or then
    return f"torch.where({condition}, {then}, {literal or otherwise})"


def _gather(node: Node, _: Variables, x: str, indices: str) -> str:
    axis, mode = node.attributes["axis"], node.attributes["mode"]
    if node.attributes["elementwise"]:
        raise _unknown(node, "elementwise dimensions of a gather")
    if mode == "ND":
        return f"fn.gather_nd({x}, {indices})"
    if mode == "ELEMENT":
        return f"{x}.gather({axis}, {indices}.long())"
    if len(node.operands[1].shape) == 1:
        return f"{x}.index_select({axis}, {indices})"
    if axis == 0 and len(node.operands[0].shape) == 2:
        return f"F.embedding({indices}, {x})"
    return f"{x}[{':, ' * axis}{indices}]"


def _scatter(node: Node, _: Variables, x: str, indices: str, updates: str) -> str:
    if node.attributes["mode"] == "ND":
        return f"fn.scatter_nd({x}, {indices}, {updates})"
    if node.attributes["mode"] != "ELEMENT":
        raise _unknown(node, "this mode of a scatter")
    return f"{x}.scatter({node.attributes['axis']}, {indices}.long(), {updates})"


def _slice(node: Node, _: Variables, x: str, *run_time: str) -> str:
    axes, starts, sizes, stride, mode = (node.attributes[key] for key in ("axes", "start", "size", "stride", "mode"))
    if run_time or sizes is None or any(step != 1 for step in stride):
        raise _unknown(node, "a strided or run-time slice")
    axes = axes or list(range(len(node.operands[0].shape)))
    if mode == "FILL" and len(axes) == 1:
        return f"fn.window({x}, {axes[0]}, {starts[0]}, {sizes[0]})"
    if mode != "STRICT_BOUNDS":
        raise _unknown(node, f"slice mode {mode}")
    return x + "".join(
        f".narrow({axis}, {start}, {size})" for axis, start, size in zip(axes, starts, sizes, strict=True)
    )


def _shuffle(node: Node, _: Variables, x: str, *run_time: str) -> str:
    if run_time:
        raise _unknown(node, "a reshape by a run-time shape")
    order, dims = node.attributes["transpose"], node.attributes["reshape"]
    turned = f"{x}.permute({', '.join(map(str, order))})" if order else x
    return turned if dims is None else f"{turned}.reshape([{', '.join(_reshaped(node, x))}])"


def _reshaped(node: Node, x: str) -> list[str]:
    """The output's dims as source text: known sizes as numbers, one run-time size as -1, others read from x."""
    order, known = node.attributes["transpose"], node.output.shape
    if known.count(-1) <= 1:
        return [str(size) for size in known]
    return [
        str(size) if size != -1 or dim == -1 else f"{x}.shape[{order[axis] if order else axis}]"
        for axis, (dim, size) in enumerate(zip(node.attributes["reshape"], known, strict=True))
    ]


def _matmul(node: Node, variables: Variables, *names: str) -> str:
    sides = list(names)
    for side, (value, flip) in enumerate(zip(node.operands, node.attributes["transpose"], strict=True)):
        if flip:  # of a weight once, at bind time; of a step's value only where it is used, so that it can be freed
            sides[side] += ".mT"
            if variables.is_static(value):
                sides[side] = variables.shared(sides[side], value)
    ranks = {len(value.shape) for value in node.operands}
    return f"torch.{'mm' if ranks == {2} else 'matmul'}({sides[0]}, {sides[1]})"


def _rope(node: Node, variables: Variables, x: str, cos: str, sin: str, *position_ids: str) -> str:
    if position_ids:
        raise _unknown(node, "rotary embedding by position ids")
    if not node.attributes["interleaved"]:
        return f"fn.rope_half_split({x}, {cos}, {sin})"
    columns = node.operands[0].shape[-1]
    rotation = variables.shared(f"fn.rotation({cos}, {sin}, {columns})", *node.operands[1:])
    if columns % 2:  # the last column has no partner
        return f"torch.cat([fn.rope_interleaved({x}[..., :-1].contiguous(), {rotation}), {x}[..., -1:]], -1)"
    return f"fn.rope_interleaved({x}, {rotation})"


def _normalization(node: Node, _: Variables, x: str, weight: str, bias: str) -> str:
    shape, eps = node.operands[0].shape, node.attributes["epsilon"]
    if node.attributes["axes"] != [len(shape) - 1] or node.attributes["groups"] != 1:
        raise _unknown(node, "a normalization that is not over the last axis")
    return f"F.layer_norm({x}, ({shape[-1]},), {weight}.view(-1), {bias}.view(-1), {eps!r})"


def _kv_update(node: Node, variables: Variables, cache: str, rows: str, *plan: str) -> str:
    if node.attributes != {"mode": "LINEAR", "form": "PACKED_NHD"}:
        raise _unknown(node, "this form of KV cache update")
    return f"fn.kv_update({cache}, {rows}, {_slots(*node.operands[2:], variables=variables)})"


def _slots(offset: Value, cumulative: Value, variables: Variables) -> str:
    """The variable of the slots that rows go to: every cache of a kind has one write plan, so it is computed once a
    step."""
    call = f"fn.write_slots({variables.var(offset)}, {variables.var(cumulative)})"
    return variables.shared(call, offset, cumulative)


def emit_op(op: str, inputs: Sequence[Value], attributes: Mapping[str, Any], variables: Variables) -> str:
    """A Python expression for an op's outputs: its reference's."""
    arguments = [variables.var(value) for value in inputs]
    if op == "kv_append":
        cache, rows, order, _, _ = arguments
        return f"fn.kv_append({cache}, {rows}, {order}, {_slots(inputs[3], inputs[4], variables)})"
    arguments += [f"{key}={value!r}" for key, value in sorted(attributes.items())]
    return f"OPS[{op!r}].reference({', '.join(arguments)})"


def _fill(node: Node, variables: Variables, size: str, *_: str) -> str:
    start, step = (variables.constant(value) for value in node.operands[1:])
    if node.attributes["op"] != "LINSPACE" or (int(start), step.tolist()) != (0, [1]):
        raise _unknown(node, "a fill that is not 0, 1, 2, ...")
    return f"torch.arange(int({size}), dtype=torch.{node.attributes['to']})"


def _quantize(node: Node, _: Variables, x: str, scale: str) -> str:
    if node.attributes["to"] != "float8_e4m3fn":
        raise _unknown(node, f"quantization to {node.attributes['to']}")
    return f"fn.quantize({x}, {scale}, {node.attributes['block']}, {node.attributes['axis']})"


def _dequantize(node: Node, _: Variables, q: str, scale: str) -> str:
    block, axis, to = (node.attributes[key] for key in ("block", "axis", "to"))
    return f"fn.dequantize({q}, {scale}, {block}, {axis}, torch.{to})"


def _dynamic_quantize(node: Node, _: Variables, x: str, scale: str) -> str:
    last = len(node.operands[0].shape) - 1
    if node.attributes != {"axis": last, "group": GROUP, "to": FP4, "scale": "float8_e4m3fn"}:
        raise _unknown(node, "dynamic quantization to anything but NVFP4 along the last axis")
    return f"fn.dynamic_quantize({x}, {scale})"


def _collective(node: Node, _: Variables, x: str) -> str:
    operation = node.attributes["op"]
    if operation not in ("ALL_REDUCE", "ALL_GATHER"):
        raise _unknown(node, f"the collective {operation}")
    return f"ranks.{operation.lower()}({node.name!r}, {x})"


_EMITTERS: dict[str, Callable[..., str]] = {
    "ACTIVATION": lambda node, _, x: _pick(_ACTIVATION, node).format(x),
    "CAST": lambda node, _, x: f"{x}.to(torch.{node.attributes['to']})",
    "CONCATENATION": lambda node, _, *parts: f"torch.cat([{', '.join(parts)}], {node.attributes['axis']})",
    "CUMULATIVE": _cumulative,
    "DEQUANTIZE": _dequantize,
    "DIST_COLLECTIVE": _collective,
    "DYNAMIC_QUANTIZE": _dynamic_quantize,
    "ELEMENTWISE": _elementwise,
    "FILL": _fill,
    "GATHER": _gather,
    "IDENTITY": lambda node, _, x: x,
    "KV_CACHE_UPDATE": _kv_update,
    "MATRIX_MULTIPLY": _matmul,
    "NORMALIZATION": _normalization,
    "QUANTIZE": _quantize,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rope,
    "SCATTER": _scatter,
    "SELECT": _select,
    "SHAPE": lambda node, _, x: f"torch.tensor({x}.shape)",
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": lambda node, _, x: f"{x}.softmax({node.attributes['axes'][0]})",
    "TOPK": _topk,
    "UNARY": lambda node, _, x: _pick(_UNARY, node).format(x),
}
