"""Weights in a number format, as layers use them: dequantized before the product, activations rounded to match.

That is the pattern which TensorRT turns into a low-precision product. NVFP4's global activation scale must be a
build-time constant to TensorRT, so activations are divided by it before, and it is 1 there: engines stay valid for
every checkpoint of their shape.

Legend: N tokens, D columns of an activation, U units of a weight (experts, their gate and up halves), R rows and C
columns of a unit.
"""

from __future__ import annotations

from glmspec.core.errors import NetworkError
from glmspec.network import ops
from glmspec.network.formats import BLOCK, GROUP
from glmspec.network.graph import Tensor
from glmspec.network.module import Weight
from glmspec.plugins import rounding


def dequantized(weight: Weight) -> Tensor:
    """The weight in the compute dtype, [R, C] or [experts, rows, C]; a plain weight as it is."""
    if weight.format is None:
        return weight.tensor
    lower = {"fp8_block": _fp8_block, "fp8": _fp8, "nvfp4": _nvfp4}.get(weight.format)
    if lower is None:
        raise NetworkError(f"{weight.name}: found format {weight.format}, expected fp8_block, fp8 or nvfp4")
    return lower(weight.fields)


def activation_format(weight: Weight) -> str | None:
    """The format to which the weight's input is rounded: FP8 blocks need no scale of the checkpoint, others do."""
    return weight.format if weight.format == "fp8_block" or "input_scale" in weight.fields else None


def rounded(x_ND: Tensor, weight: Weight) -> Tensor:
    """The input of a product with the weight, [N, C], rounded as the weight's format wants it. Experts and their halves
    share one scale, the largest."""
    format = activation_format(weight)
    if format is None:
        return x_ND
    scale = weight.fields.get("input_scale")
    if scale is None:  # then it is the same for all products of x
        key = ("rounded", x_ND.trt.name, format)
        if key not in x_ND.net.shared:
            x_ND.net.shared[key] = rounding.native(x_ND, format=format)
        return x_ND.net.shared[key]
    if scale.rank:
        scale = ops.reduce(ops.reshape(scale, (-1,)), "MAX", 0, keep=False)
    return rounding.native(x_ND, scale, format=format)


def _fp8_block(fields: dict[str, Tensor]) -> Tensor:
    codes, scale = fields[""], fields["scale_inv"]
    if codes.rank == 2:
        return ops.dequantize(codes, scale, codes.net.compute, (BLOCK, BLOCK))
    rows = codes.shape[1]
    if scale.shape[1] == -(-rows // BLOCK):
        return ops.dequantize(codes, scale, codes.net.compute, (1, BLOCK, BLOCK))
    # Gate and up each end in a partial block: take them apart first.
    codes_URC = ops.reshape(codes, (-1, rows // 2, codes.shape[2]))
    scale_U = ops.reshape(scale, (-1, scale.shape[1] // 2, scale.shape[2]))
    plain_URC = ops.dequantize(codes_URC, scale_U, codes.net.compute, (1, BLOCK, BLOCK))
    return ops.reshape(plain_URC, codes.shape)


def _fp8(fields: dict[str, Tensor]) -> Tensor:
    codes = fields[""]
    scale, block = _unit_scale(fields["scale"], codes.shape)
    return ops.dequantize(codes, scale, codes.net.compute, block)


def _nvfp4(fields: dict[str, Tensor]) -> Tensor:
    codes, compute = fields[""], fields[""].net.compute
    scale_2, block = _unit_scale(fields["scale_2"], fields["scale"].shape)
    scale = ops.dequantize(fields["scale"], scale_2, compute, block)
    return ops.dequantize(codes, scale, compute, (1,) * (codes.rank - 1) + (GROUP,))


def _unit_scale(scale: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """A scale of shape [], [experts] or [experts, 2] as one for each block of a tensor, and the block."""
    if not scale.rank:
        return scale, ()
    halves = scale.shape[1] if scale.rank == 2 else 1
    return ops.reshape(scale, (dims[0], halves, 1)), (1, dims[1] // halves, dims[2])
