"""Products with weights in a number format: the one place where a layer multiplies by such a weight.

Where a checkpoint has a scale of activations too, the product is *folded*: TensorRT multiplies in FP8 or FP4 only where
the scalar scales of its quantize and dequantize layers are build-time constants, so they are 1 there, x is divided by
its scale before, and the product is multiplied by both scales after, in float32. Engines stay valid for every
checkpoint of their shape, and no rounding is added. `validate` proves the operands' types of every such product from a
compiled plan. Blocks of 128 x 128 are `block_product`'s. Other weights without a scale of activations are dequantized:
their products are the compute dtype's.

Legend: N tokens, C columns of an activation and of a weight, R rows of a weight.
"""

from __future__ import annotations

from glmspec.core.errors import NetworkError
from glmspec.network import ops
from glmspec.network.formats import GROUP
from glmspec.network.graph import Network, Tensor
from glmspec.network.limits import CONTEXT
from glmspec.network.module import Weight
from glmspec.plugins import block_product, quantize_blocks, rounding


def product(x_NC: Tensor, weight: Weight) -> Tensor:
    """x W^T, [N, R], in the compute dtype; in the weight's own dtype where that is plain."""
    if weight.format is None:
        return ops.matmul(ops.cast(x_NC, weight.tensor.dtype), weight.tensor, transpose_b=True)
    fields, x_NC = weight.fields, ops.cast(x_NC, x_NC.net.compute)
    if "input_scale" in fields:
        return _folded(x_NC, fields, weight.format)
    if weight.format == "fp8_block":
        return block_product.native(x_NC, *_blocks(x_NC), fields[""], fields["scale_inv"], prompts=_prompts(x_NC.net))
    return ops.matmul(x_NC, _dequantized(weight), transpose_b=True)


def _folded(x_NC: Tensor, fields: dict[str, Tensor], format: str) -> Tensor:
    """x scaled and rounded, times the codes' values, times the two scales."""
    codes_RC, input_scale = fields[""], fields["input_scale"]
    scale = fields["scale_2" if format == "nvfp4" else "scale"]
    values_RC = rounding.unscaled(codes_RC, fields["scale"] if format == "nvfp4" else None)
    product_NR = ops.matmul(rounding.native(x_NC, input_scale, format=format), values_RC, transpose_b=True)
    return ops.cast(product_NR * input_scale * scale, x_NC.dtype)


def _blocks(x_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and steps of x in blocks of 1 x 128, once for all products of it."""
    shared, key = x_NC.net.shared, ("blocks", x_NC.trt.name)
    if key not in shared:
        shared[key] = quantize_blocks.native(x_NC)
    return shared[key]


def _prompts(net: Network) -> int:
    """1 in networks of steps that may hold chunks of prompts."""
    return int(net.config.profile == CONTEXT)


def _dequantized(weight: Weight) -> Tensor:
    """A weight [R, C] whose activations stay as they are, in the compute dtype."""
    fields, compute = weight.fields, weight.fields[""].net.compute
    if weight.format == "fp8":
        return ops.dequantize(fields[""], fields["scale"], compute)
    if weight.format == "nvfp4":
        scale = ops.dequantize(fields["scale"], fields["scale_2"], compute)
        return ops.dequantize(fields[""], scale, compute, (1, GROUP))
    raise NetworkError(f"{weight.name}: found format {weight.format}, expected fp8_block, fp8 or nvfp4")
