"""One line of Python for every TensorRT layer: the table of what the reference executor knows.

An emitter takes a node and a `Scope` (which names values) and returns an expression. A layer type
that is not in the table is an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glmspec.core.dtypes import FP4
from glmspec.core.errors import NetworkError
from glmspec.network.formats import GROUP
from glmspec.network.reader import Node, Value


class Scope:
    """How an emitter refers to things. Implemented by the planner."""

    lowest_wins = True

    def var(self, value: Value) -> str:
        """The Python name that holds a tensor."""
        raise NotImplementedError

    def scalar(self, value: Value) -> str | None:
        """A literal, when the tensor is a constant with one element."""
        raise NotImplementedError

    def constant(self, value: Value) -> Any:
        """The NumPy array of a constant. Raises `NetworkError` when it is computed at run time."""
        raise NotImplementedError

    def is_static(self, value: Value) -> bool:
        """True when the value is known at bind time."""
        raise NotImplementedError

    def shared(self, expression: str, uses: list[Value]) -> str:
        """The name of an expression that several layers need: computed once a step."""
        raise NotImplementedError


_BINARY = {
    "SUM": "{} + {}",
    "SUB": "{} - {}",
    "PROD": "{} * {}",
    "FLOOR_DIV": "{} // {}",
    "AND": "{} & {}",
    "OR": "{} | {}",
    "XOR": "{} ^ {}",
    "EQUAL": "{} == {}",
    "GREATER": "{} > {}",
    "LESS": "{} < {}",
    "MAX": "torch.maximum({}, {})",
    "MIN": "torch.minimum({}, {})",
    "POW": "torch.pow({}, {})",
}
_UNARY = {
    "SQRT": "{}.sqrt()",
    "NOT": "~{}",
    "NEG": "-{}",
    "EXP": "{}.exp()",
    "LOG": "{}.log()",
    "ABS": "{}.abs()",
    "RECIP": "{}.reciprocal()",
}
_ACTIVATION = {"SIGMOID": "{}.sigmoid()", "RELU": "{}.relu()", "TANH": "{}.tanh()"}
_REDUCE = {"MAX": "amax", "MIN": "amin", "AVG": "mean"}


def emit(node: Node, scope: Scope) -> str:
    """A Python expression for the node's output (a tuple of them for several)."""
    emitter = _EMITTERS.get(node.kind)
    if emitter is None:
        raise _unknown(node, f"layer type {node.kind}")
    return emitter(node, scope)


def _unknown(node: Node, what: str) -> NetworkError:
    return NetworkError(f"{node.name}: the reference executor does not know {what} ({node.kind} {node.attributes})")


def _pick(table: dict[str, str], node: Node) -> str:
    if node.attributes["op"] not in table:
        raise _unknown(node, f"the operation {node.attributes['op']}")
    return table[node.attributes["op"]]


def _elementwise(node: Node, scope: Scope) -> str:
    left, right = node.inputs
    a, b = scope.var(left), scope.var(right)
    # A one-element constant is cheaper as a number, as long as the other side has the output's shape.
    if node.attributes["op"] not in ("MAX", "MIN", "POW"):
        if (literal := scope.scalar(right)) is not None:
            b = literal
        elif (literal := scope.scalar(left)) is not None:
            a = literal
    if node.attributes["op"] == "DIV":
        whole = left.dtype.startswith("int")
        return f"torch.div({a}, {b}, rounding_mode='trunc')" if whole else f"{a} / {b}"
    return _pick(_BINARY, node).format(a, b)


def _reduce(node: Node, scope: Scope) -> str:
    x, op = scope.var(node.inputs[0]), node.attributes["op"]
    where = f"{tuple(node.attributes['axes'])}, keepdim={node.attributes['keep']}"
    if op == "SUM":
        return f"{x}.sum({where}, dtype=torch.{node.output.dtype})"
    return f"{x}.{_pick(_REDUCE, node)}({where})"


def _topk(node: Node, scope: Scope) -> str:
    (axis,) = node.attributes["axes"]
    largest = node.attributes["op"] == "MAX"
    return f"k.topk({scope.var(node.inputs[0])}, {node.attributes['k']}, {axis}, {largest}, {scope.lowest_wins})"


def _cumulative(node: Node, scope: Scope) -> str:
    if node.attributes != {"op": "SUM", "exclusive": False, "reverse": False}:
        raise _unknown(node, "this cumulative operation")
    axis = int(scope.constant(node.inputs[1]))
    return f"{scope.var(node.inputs[0])}.cumsum({axis}, dtype=torch.{node.output.dtype})"


def _select(node: Node, scope: Scope) -> str:
    condition, then, otherwise = node.inputs
    literals = [scope.scalar(side) for side in (then, otherwise)]
    if None not in literals:  # two numbers would take torch's default dtype
        literals[0] = None
    sides = [literal or scope.var(side) for literal, side in zip(literals, (then, otherwise), strict=True)]
    return f"torch.where({scope.var(condition)}, {', '.join(sides)})"


def _gather(node: Node, scope: Scope) -> str:
    data, indices = node.inputs
    x, at = scope.var(data), scope.var(indices)
    axis, mode = node.attributes["axis"], node.attributes["mode"]
    if node.attributes["elementwise"]:
        raise _unknown(node, "elementwise dimensions of a gather")
    if mode == "ND":
        return f"k.gather_nd({x}, {at})"
    if mode == "ELEMENT":
        return f"{x}.gather({axis}, {at}.long())"
    if len(indices.shape) == 1:
        return f"{x}.index_select({axis}, {at})"
    if axis == 0 and len(data.shape) == 2:
        return f"F.embedding({at}, {x})"
    return f"{x}[{':, ' * axis}{at}]"


def _scatter(node: Node, scope: Scope) -> str:
    x, at, updates = (scope.var(value) for value in node.inputs)
    if node.attributes["mode"] == "ND":
        return f"k.scatter_nd({x}, {at}, {updates})"
    if node.attributes["mode"] != "ELEMENT":
        raise _unknown(node, "this mode of a scatter")
    return f"{x}.scatter({node.attributes['axis']}, {at}.long(), {updates})"


def _slice(node: Node, scope: Scope) -> str:
    x, rank = scope.var(node.inputs[0]), len(node.inputs[0].shape)
    attributes = node.attributes
    if len(node.inputs) > 1 or attributes["size"] is None or any(step != 1 for step in attributes["stride"]):
        raise _unknown(node, "a strided or run-time slice")
    axes = attributes["axes"] or list(range(rank))
    if attributes["mode"] == "FILL" and len(axes) == 1:
        return f"k.window({x}, {axes[0]}, {attributes['start'][0]}, {attributes['size'][0]})"
    if attributes["mode"] != "STRICT_BOUNDS":
        raise _unknown(node, f"slice mode {attributes['mode']}")
    for axis, start, size in zip(axes, attributes["start"], attributes["size"], strict=True):
        x = f"{x}.narrow({axis}, {start}, {size})"
    return x


def _shuffle(node: Node, scope: Scope) -> str:
    x, source = scope.var(node.inputs[0]), node.inputs[0]
    order = node.attributes["transpose"]
    if order:
        x = f"{x}.permute({', '.join(map(str, order))})"
    dims = node.attributes["reshape"]
    if len(node.inputs) > 1:
        raise _unknown(node, "a reshape by a run-time shape")
    if dims is None:
        return x
    before = [source.shape[axis] for axis in order] if order else list(source.shape)
    return f"{x}.reshape([{', '.join(_reshaped(node, dims, before, scope.var(source), order))}])"


def _reshaped(node: Node, dims: list[int], before: list[int], x: str, order: list[int] | None) -> list[str]:
    """The output's dims as source text: known sizes as numbers, one run-time size as -1, others read from x."""
    known = list(node.output.shape)
    if known.count(-1) <= 1:
        return [str(size) for size in known]
    text = []
    for axis, (dim, size) in enumerate(zip(dims, known, strict=True)):
        if size != -1 or dim == -1:
            text.append(str(size))
        else:  # a copied run-time size
            text.append(f"{x}.shape[{order[axis] if order else axis}]")
    return text


def _matmul(node: Node, scope: Scope) -> str:
    sides = []
    for value, flip in zip(node.inputs, node.attributes["transpose"], strict=True):
        name = scope.var(value)
        if flip:  # of a weight once, at bind time; of a step's value only where it is used, so that it can be freed
            name = scope.shared(f"{name}.mT", [value]) if scope.is_static(value) else f"{name}.mT"
        sides.append(name)
    ranks = {len(value.shape) for value in node.inputs}
    return f"torch.mm({sides[0]}, {sides[1]})" if ranks == {2} else f"torch.matmul({sides[0]}, {sides[1]})"


def _rope(node: Node, scope: Scope) -> str:
    if len(node.inputs) != 3:
        raise _unknown(node, "rotary embedding by position ids")
    x, cos, sin = node.inputs
    if not node.attributes["interleaved"]:
        return f"k.rope_half_split({scope.var(x)}, {scope.var(cos)}, {scope.var(sin)})"
    turn, rows = (
        scope.shared(f"k.rotation({scope.var(cos)}, {scope.var(sin)}, {x.shape[-1]})", [cos, sin]),
        scope.var(x),
    )
    if x.shape[-1] % 2:  # the last column has no partner
        return f"torch.cat([k.rope_interleaved({rows}[..., :-1].contiguous(), {turn}), {rows}[..., -1:]], -1)"
    return f"k.rope_interleaved({rows}, {turn})"


def _normalization(node: Node, scope: Scope) -> str:
    x, weight, bias = node.inputs
    if node.attributes["axes"] != [len(x.shape) - 1] or node.attributes["groups"] != 1:
        raise _unknown(node, "a normalization that is not over the last axis")
    size, eps = x.shape[-1], node.attributes["epsilon"]
    return f"F.layer_norm({scope.var(x)}, ({size},), {scope.var(weight)}.view(-1), {scope.var(bias)}.view(-1), {eps!r})"


def _kv_update(node: Node, scope: Scope) -> str:
    if node.attributes != {"mode": "LINEAR", "form": "PACKED_NHD"}:
        raise _unknown(node, "this form of KV cache update")
    cache, rows, offset, cumulative = node.inputs
    return f"k.kv_update({scope.var(cache)}, {scope.var(rows)}, {_slots(offset, cumulative, scope)})"


def _slots(offset: Value, cumulative: Value, scope: Scope) -> str:
    """Where rows go: every cache of a kind has one write plan, so it is worked out once a step."""
    return scope.shared(f"k.write_slots({scope.var(offset)}, {scope.var(cumulative)})", [offset, cumulative])


def emit_op(op: str, inputs: Sequence[Value], attributes: Mapping[str, Any], scope: Scope) -> str:
    """A Python expression for an op's outputs: its reference's."""
    arguments = [scope.var(value) for value in inputs]
    if op == "kv_append":
        arguments[3:5] = [_slots(*inputs[3:5], scope)]
        return f"k.kv_append({', '.join(arguments)})"
    arguments += [f"{key}={value!r}" for key, value in sorted(attributes.items())]
    return f"OPS[{op!r}].reference({', '.join(arguments)})"


def _fill(node: Node, scope: Scope) -> str:
    size, start, step = node.inputs
    if node.attributes["op"] != "LINSPACE" or (int(scope.constant(start)), scope.constant(step).tolist()) != (0, [1]):
        raise _unknown(node, "a fill that is not 0, 1, 2, ...")
    return f"torch.arange(int({scope.var(size)}), dtype=torch.{node.attributes['to']})"


def _quantize(node: Node, scope: Scope) -> str:
    if node.attributes["to"] != "float8_e4m3fn":
        raise _unknown(node, f"quantization to {node.attributes['to']}")
    x, scale = (scope.var(value) for value in node.inputs)
    return f"k.quantize({x}, {scale}, {node.attributes['block']}, {node.attributes['axis']})"


def _dequantize(node: Node, scope: Scope) -> str:
    q, scale = (scope.var(value) for value in node.inputs)
    block, axis, to = (node.attributes[key] for key in ("block", "axis", "to"))
    return f"k.dequantize({q}, {scale}, {block}, {axis}, torch.{to})"


def _dynamic_quantize(node: Node, scope: Scope) -> str:
    x, scale = node.inputs
    last = len(x.shape) - 1
    if node.attributes != {"axis": last, "group": GROUP, "to": FP4, "scale": "float8_e4m3fn"}:
        raise _unknown(node, "dynamic quantization to anything but NVFP4 along the last axis")
    return f"k.dynamic_quantize({scope.var(x)}, {scope.var(scale)})"


def _collective(node: Node, scope: Scope) -> str:
    x = scope.var(node.inputs[0])
    if node.attributes["op"] == "ALL_REDUCE":
        return f"ranks.all_reduce({node.name!r}, {x})"
    if node.attributes["op"] == "ALL_GATHER":
        return f"ranks.all_gather({node.name!r}, {x})"
    raise _unknown(node, f"the collective {node.attributes['op']}")


def _moe(node: Node, scope: Scope) -> str:
    if node.attributes["activation"] != "SILU" or len(node.inputs) != 6:
        raise _unknown(node, "a mixture of experts that is not SiLU-gated, or has biases or scales")
    return f"k.moe({', '.join(scope.var(value) for value in node.inputs)})"


_EMITTERS: dict[str, Callable[[Node, Scope], str]] = {
    "ACTIVATION": lambda node, scope: _pick(_ACTIVATION, node).format(scope.var(node.inputs[0])),
    "CAST": lambda node, scope: f"{scope.var(node.inputs[0])}.to(torch.{node.attributes['to']})",
    "CONCATENATION": lambda node, scope: (
        f"torch.cat([{', '.join(scope.var(value) for value in node.inputs)}], {node.attributes['axis']})"
    ),
    "CUMULATIVE": _cumulative,
    "DEQUANTIZE": _dequantize,
    "DIST_COLLECTIVE": _collective,
    "DYNAMIC_QUANTIZE": _dynamic_quantize,
    "ELEMENTWISE": _elementwise,
    "FILL": _fill,
    "GATHER": _gather,
    "IDENTITY": lambda node, scope: scope.var(node.inputs[0]),
    "KV_CACHE_UPDATE": _kv_update,
    "MATRIX_MULTIPLY": _matmul,
    "MOE": _moe,
    "NORMALIZATION": _normalization,
    "QUANTIZE": _quantize,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rope,
    "SCATTER": _scatter,
    "SELECT": _select,
    "SHAPE": lambda node, scope: f"torch.tensor({scope.var(node.inputs[0])}.shape)",
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": lambda node, scope: f"{scope.var(node.inputs[0])}.softmax({node.attributes['axes'][0]})",
    "TOPK": _topk,
    "UNARY": lambda node, scope: _pick(_UNARY, node).format(scope.var(node.inputs[0])),
}
