"""The ops a model file may use, each one TensorRT layer (or none, when there is nothing to do).

Axes are non-negative. In `reshape`, 0 copies the input's dimension at that position and
-1 is inferred, as in TensorRT.

Legend: N rows or tokens, D columns, C columns of a matrix, H heads (of a cache: key/value heads), F columns of a head,
E half of the rotary columns, X pages, P rows a page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from glmspec.network.graph import Tensor


def cast(x: Tensor, dtype: str) -> Tensor:
    """x in another dtype; x itself when it has it already."""
    if x.dtype == dtype:
        return x
    return x.net.add(x.net.definition.add_cast(x.trt, x.net.backend.dtype(dtype)), "cast")


def identity(x: Tensor) -> Tensor:
    """x under another name: a tensor that is two outputs needs two."""
    return x.net.add(x.net.definition.add_identity(x.trt), "identity")


def reshape(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x with new dims (0 copies, -1 infers)."""
    layer = x.net.definition.add_shuffle(x.trt)
    layer.reshape_dims = tuple(dims)
    return x.net.add(layer, "reshape")


def transpose(x: Tensor, axes: Sequence[int]) -> Tensor:
    """x with its axes permuted."""
    layer = x.net.definition.add_shuffle(x.trt)
    layer.first_transpose = tuple(axes)
    return x.net.add(layer, "transpose")


def matmul(a: Tensor, b: Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Batched matrix product over the last two axes; leading axes broadcast."""
    op = a.net.api.MatrixOperation
    sides = [op.TRANSPOSE if flip else op.NONE for flip in (transpose_a, transpose_b)]
    return a.net.add(a.net.definition.add_matrix_multiply(a.trt, sides[0], b.trt, sides[1]), "matmul")


def maximum(a: Tensor, b: Tensor | float) -> Tensor:
    """The larger of two, element by element."""
    return a.net.elementwise(a, b, "MAX")


def minimum(a: Tensor, b: Tensor | float) -> Tensor:
    """The smaller of two, element by element."""
    return a.net.elementwise(a, b, "MIN")


def unary(x: Tensor, kind: str) -> Tensor:
    """One of TensorRT's UnaryOperation names, such as "SQRT" or "NOT"."""
    return x.net.add(x.net.definition.add_unary(x.trt, getattr(x.net.api.UnaryOperation, kind)), kind.lower())


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return x.net.add(x.net.definition.add_activation(x.trt, x.net.api.ActivationType.SIGMOID), "sigmoid")


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return x.net.add(x.net.definition.add_activation(x.trt, x.net.api.ActivationType.TANH), "tanh")


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return x.net.add(x.net.definition.add_activation(x.trt, x.net.api.ActivationType.RELU), "relu")


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: Tensor, axis: int) -> Tensor:
    """Softmax over one axis."""
    layer = x.net.definition.add_softmax(x.trt)
    layer.axes = 1 << axis
    return x.net.add(layer, "softmax")


def reduce(x: Tensor, kind: str, axis: int, keep: bool = True) -> Tensor:
    """SUM, AVG, MAX or MIN over one axis."""
    layer = x.net.definition.add_reduce(x.trt, getattr(x.net.api.ReduceOperation, kind), 1 << axis, keep)
    return x.net.add(layer, f"reduce_{kind.lower()}")


def topk(x: Tensor, k: int, axis: int) -> tuple[Tensor, Tensor]:
    """The k largest along an axis, largest first, and their int32 indices. Which of equal values wins is undefined."""
    layer = x.net.definition.add_topk(x.trt, x.net.api.TopKOperation.MAX, k, 1 << axis)
    return x.net.add(layer, "topk", outputs=2)


def cumsum(x: Tensor, axis: int) -> Tensor:
    """Inclusive running sum along an axis."""
    net = x.net
    at = net.constant(axis, "int32")
    layer = net.definition.add_cumulative(x.trt, at.trt, net.api.CumulativeOperation.SUM, False, False)
    return net.add(layer, "cumsum")


def select(condition: Tensor, then: Tensor | float, otherwise: Tensor | float) -> Tensor:
    """then where condition holds, otherwise elsewhere; numbers take the other side's dtype."""
    net = condition.net
    dtype = next(side.dtype for side in (then, otherwise) if isinstance(side, Tensor))
    sides = [s if isinstance(s, Tensor) else net.constant(s, dtype, condition.rank) for s in (then, otherwise)]
    return net.add(net.definition.add_select(condition.trt, sides[0].trt, sides[1].trt), "select")


def gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """x taken at int32 indices along an axis; the indices' shape replaces that axis."""
    return x.net.add(x.net.definition.add_gather(x.trt, indices.trt, axis), "gather")


def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """out[..., j, ...] = x[..., indices[..., j, ...], ...] along an axis."""
    layer = x.net.definition.add_gather_v2(x.trt, indices.trt, x.net.api.GatherMode.ELEMENT)
    layer.axis = axis
    return x.net.add(layer, "gather_elements")


def gather_nd(x: Tensor, indices: Tensor) -> Tensor:
    """x at full coordinates over its leading axes: indices [..., d] -> [..., the rest of x's axes]."""
    return x.net.add(x.net.definition.add_gather_v2(x.trt, indices.trt, x.net.api.GatherMode.ND), "gather_nd")


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """x with `updates` at full coordinates over its leading axes: indices [N, d], each place once."""
    mode = x.net.api.ScatterMode.ND
    return x.net.add(x.net.definition.add_scatter(x.trt, indices.trt, updates.trt, mode), "scatter_nd")


def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """x with out[..., indices[..., j, ...], ...] = updates[..., j, ...] along an axis, each place once."""
    layer = x.net.definition.add_scatter(x.trt, indices.trt, updates.trt, x.net.api.ScatterMode.ELEMENT)
    layer.axis = axis
    return x.net.add(layer, "scatter_elements")


def narrow(x: Tensor, axis: int, start: int, size: int) -> Tensor:
    """size columns of one axis from start on."""
    layer = x.net.definition.add_slice(x.trt, (start,), (size,), (1,))
    layer.axes = (axis,)
    return x.net.add(layer, "slice")


def column(x_NC: Tensor, at: int) -> Tensor:
    """One column of a matrix, [N]."""
    return reshape(narrow(x_NC, 1, at, 1), (-1,))


def concat(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The parts side by side along an axis; the part itself when there is only one."""
    if len(parts) == 1:
        return parts[0]
    net = parts[0].net
    layer = net.definition.add_concatenation([part.trt for part in parts])
    layer.axis = axis
    return net.add(layer, "concat")


def arange_like(x: Tensor, axis: int, tiles: int = 1) -> Tensor:
    """int32 [size of x's axis]: 0, 1, 2, ... tiles: of as many as one of so many equal tiles has, rounded up."""
    net = x.net
    size = narrow(net.add(net.definition.add_shape(x.trt), "shape"), 0, axis, 1)
    if tiles > 1:
        size = (size + (tiles - 1)) // tiles
    given = (size, net.constant(0, "int32"), net.constant([1], "int32"))  # size, start, step
    layer = net.definition.add_fill((1,), net.api.FillOperation.LINSPACE, net.api.DataType.INT32)
    for index, value in enumerate(given):
        layer.set_input(index, value.trt)
    return net.add(layer, "arange")


def rope(x_NHF: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary embedding of the first 2 E columns of [N, heads, F]; the others pass."""
    net = x_NHF.net
    heads, size = x_NHF.shape[1:]
    x_NH1F = reshape(x_NHF, (0, heads, 1, size))
    columns = 2 * cos_N1E.shape[2]
    layer = net.definition.add_rotary_embedding(x_NH1F.trt, cos_N1E.trt, sin_N1E.trt, interleaved, columns)
    return reshape(net.add(layer, "rope"), (0, heads, size))


def layer_norm(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Mean-centred normalization over the last of two axes."""
    size = x_ND.shape[-1]
    weight, bias = (reshape(part, (1, size)) for part in (weight_D, bias_D))
    layer = x_ND.net.definition.add_normalization_v2(x_ND.trt, weight.trt, bias.trt, 1 << 1)
    layer.epsilon = eps
    return x_ND.net.add(layer, "layer_norm")


def pad(x: Tensor, axis: int, size: int) -> Tensor:
    """x with zeros after its last column of an axis, up to `size` of them; x itself when it has as many."""
    return x if x.shape[axis] == size else _window(x, axis, 0, size, "pad")


def shift(x: Tensor, axis: int, by: int) -> Tensor:
    """x moved towards higher indices along an axis of known size, zeros coming in; x itself for 0."""
    return x if by == 0 else _window(x, axis, -by, x.shape[axis], "shift")


def _window(x: Tensor, axis: int, start: int, size: int, kind: str) -> Tensor:
    """size columns of one axis from start on, zeros where x has none."""
    layer = x.net.definition.add_slice(x.trt, (start,), (size,), (1,))
    layer.axes = (axis,)
    layer.mode = x.net.api.SampleMode.FILL
    return x.net.add(layer, kind)


def quantize(x: Tensor, scale: Tensor, block: Sequence[int] = (), axis: int | None = None) -> Tensor:
    """x / scale rounded to float8_e4m3fn, saturating. scale, float32: one number, one a `block` (a size for each axis),
    or one for each place along `axis`."""
    scale, block = _blocks(scale, block)
    layer = x.net.definition.add_quantize(x.trt, scale.trt, x.net.backend.dtype("float8_e4m3fn"))
    return _scaled(layer, x.net, "quantize", block, axis)


def dequantize(q: Tensor, scale: Tensor, dtype: str, block: Sequence[int] = (), axis: int | None = None) -> Tensor:
    """q * scale in dtype. scale: as for `quantize`."""
    scale, block = _blocks(scale, block)
    layer = q.net.definition.add_dequantize(q.trt, scale.trt, q.net.backend.dtype(dtype))
    return _scaled(layer, q.net, "dequantize", block, axis)


def _blocks(scale: Tensor, block: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
    """One block is not a block to TensorRT ("ScaleMode is illegal"): its scale is a plain number then."""
    return (reshape(scale, ()), ()) if block and set(scale.shape) == {1} else (scale, block)


def _scaled(layer, net, kind: str, block: Sequence[int], axis: int | None) -> Tensor:
    if layer is not None and block:
        layer.block_shape = tuple(block)
    if layer is not None and axis is not None:
        layer.axis = axis
    return net.add(layer, kind)


def dynamic_quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """NVFP4 codes of x and a float8 scale, amax / 6, for every `group` values of its last axis. TensorRT takes a global
    scale only as a build-time constant, so it is 1 here: divide x by it before."""
    net, axis = x.net, x.rank - 1
    fp4, fp8 = (net.backend.dtype(name) for name in ("float4_e2m1fn", "float8_e4m3fn"))
    layer = net.definition.add_dynamic_quantize(x.trt, axis, group, fp4, fp8)
    if layer is not None:
        layer.set_input(1, net.constant(np.float32(1.0), "float32").trt)
    return net.add(layer, "dynamic_quantize", outputs=2)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over all ranks; x itself on one rank."""
    return _collective(x, "ALL_REDUCE", "SUM") if x.net.config.mapping.tp > 1 else x


def all_gather(x: Tensor) -> Tensor:
    """Every rank's x [A, ...], one after the other: [ranks * A, ...]; x itself on one rank."""
    return _collective(x, "ALL_GATHER", "NONE") if x.net.config.mapping.tp > 1 else x


def _collective(x: Tensor, operation: str, reduction: str) -> Tensor:
    net, api = x.net, x.net.api
    kind = getattr(api.CollectiveOperation, operation)
    layer = net.definition.add_dist_collective(x.trt, kind, getattr(api.ReduceOperation, reduction), -1, None)
    if layer is not None:
        layer.num_ranks = net.config.mapping.tp
        layer.metadata = json.dumps({"collective": operation})  # TensorRT does not let it be read back
    return net.add(layer, operation.lower())


def kv_update(cache_XHPD: Tensor, rows_NHD: Tensor, offset_X: Tensor, cumulative_X1: Tensor) -> Tensor:
    """The cache with packed rows written in place: rows cumulative[x] up to cumulative[x+1] go to
    page x, from slot offset[x] on. Rows must come sorted by page."""
    net = cache_XHPD.net
    layer = net.definition.add_kv_cache_update(cache_XHPD.trt, rows_NHD.trt, offset_X.trt, net.api.KVCacheMode.LINEAR)
    if layer is not None:
        layer.update_form = net.api.AttentionIOForm.PACKED_NHD
        layer.update_lengths = cumulative_X1.trt
    return net.add(layer, "kv_update")
