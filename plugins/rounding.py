"""Activations as a quantized matrix product sees them: rounded to a number format, and back.

A network with FP8 or NVFP4 weights multiplies activations that were quantized on the way. Written as a quantize and a
dequantize layer before the product, which is the pattern TensorRT turns into a low-precision product.

| format | what is rounded | scale |
|---|---|---|
| fp8_block | 1 x 128 blocks of a row to e4m3 | the block's amax / 448, computed in the step |
| fp8 | everything to e4m3 | of the checkpoint (`input_scale`) |
| nvfp4 | groups of 16 in a row to e2m1 | e4m3(amax / (6 s)) s, s of the checkpoint (`input_scale`) |

Legend: N rows, D columns.
"""

from __future__ import annotations

import torch

from glmspec.core.errors import NetworkError
from glmspec.network import ops
from glmspec.network.formats import BLOCK, FP4_MAX, GROUP
from glmspec.network.graph import Tensor
from glmspec.plugins import quantize_blocks
from glmspec.plugins.lowering import lowers
from glmspec.plugins.quantize_blocks import to_e4m3
from glmspec.plugins.spec import Compute, Float32, Op

_FP4_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of 0, .5, 1, 1.5, 2, 3, 4, 6
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def reference(x_ND: Compute, scale_1: Float32 | None = None, *, format: str) -> torch.Tensor:
    """x [..., D] rounded to `format` and back, in its own dtype. scale: float32; [], [E] for x [E, N, D], or any shape
    that broadcasts to x's with a last axis of one; None for fp8_block."""
    wide = x_ND.float()
    if scale_1 is not None and scale_1.dim() == 1:
        scale_1 = scale_1.view(-1, 1, 1)
    if format == "fp8_block":
        codes, step = quantize_blocks.reference(x_ND)
        return (codes.float() * step.repeat_interleave(BLOCK, -1)[..., : x_ND.shape[-1]]).to(x_ND.dtype)
    if scale_1 is None:
        raise NetworkError(f"rounding: found no scale_1, expected one for {format}")
    if format == "fp8":
        return (to_e4m3(wide / scale_1).float() * scale_1).to(x_ND.dtype)
    groups = (wide / scale_1).to(x_ND.dtype).float().unflatten(-1, (-1, GROUP))
    step = to_e4m3(groups.abs().amax(-1, keepdim=True) * (1 / FP4_MAX)).float()
    codes = to_e2m1(groups / torch.where(step == 0, 1.0, step))
    return (codes * (step * scale_1.unsqueeze(-1))).flatten(-2).to(x_ND.dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 to the nearest of e2m1's values, still float32; ties to the even code, saturating."""
    edges, values = x.new_tensor(_FP4_STEPS), x.new_tensor(_FP4_VALUES)
    size = x.abs()
    # Below an edge counts down, at an edge up: so an edge whose lower neighbour has the even code is excluded.
    place = torch.bucketize(size, edges, right=True)
    tied = (size == edges[(place - 1).clamp(min=0)]) & (place % 2 == 1)
    return torch.copysign(values[place - tied.long()], x)


def native(x: Tensor, scale: Tensor | None = None, *, format: str) -> Tensor:
    """x [N, D] or [E, N, D] rounded to `format` and back. scale: float32, [] or, for three axes, [E]; None for
    fp8_block."""
    if scale is None:
        codes, step = quantize_blocks.native(x)
        return ops.dequantize(codes, step, x.dtype, (1,) * (x.rank - 1) + (BLOCK,))
    return _scaled(x, scale, format=format)


@lowers("rounding")
def _scaled(x_ND: Tensor, scale_1: Tensor, *, format: str) -> Tensor:
    return {"fp8": _whole, "nvfp4": _groups}[format](x_ND, scale_1)


def _whole(x: Tensor, scale: Tensor) -> Tensor:
    axis = 0 if scale.rank else None
    return ops.dequantize(ops.quantize(x, scale, axis=axis), scale, x.dtype, axis=axis)


def _groups(x: Tensor, scale: Tensor) -> Tensor:
    spread = ops.reshape(scale, (-1, 1, 1) if scale.rank else (1,) * x.rank)
    codes, step = ops.dynamic_quantize(ops.cast(ops.cast(x, "float32") / spread, x.dtype), GROUP)
    wide_step = ops.dequantize(step, scale, x.dtype, axis=0 if scale.rank else None)
    return ops.dequantize(codes, wide_step, x.dtype, (1,) * (x.rank - 1) + (GROUP,))


OP = Op(
    name="rounding",
    outputs={"rounded_ND": "T"},
    reference=reference,
    # Blocks are an op of their own, `quantize_blocks`.
    native="each form is one layer that moves the least already: FP8's quantize reads 2 bytes of a value and writes 1, "
    "NVFP4's dynamic quantize reads 2 and writes 0.56 (a code, and a scale for 16); the division before the latter is "
    "pointwise, and TensorRT fuses the dequantize layers behind both into the product",
)
