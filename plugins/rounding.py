"""Activations as a quantized matrix product sees them: divided by a scale and rounded to a number format.

A network with FP8 or NVFP4 weights multiplies activations that were quantized on the way. TensorRT multiplies in those
formats only where the scalar scales of its quantize and dequantize layers are the constant 1 (a scale that is an input
makes it a BF16 product of a weight that is written out whole each step), so what comes out here is x / scale rounded,
and the product is multiplied by the scale after (`models/layers/quantized.py`, `moe.py`).

| format | what is rounded | scale |
|---|---|---|
| fp8 | x / s to e4m3 | s, of the checkpoint (`input_scale`) |
| nvfp4 | x / s in groups of 16 in a row: g e2m1(x / s / g), g = e4m3(amax / 6) | s, of the checkpoint (`input_scale`) |
| fp8_block (`blocks`) | 1 x 128 blocks of a row, and multiplied back | the block's amax / 448, computed in the step |

Legend: N rows, D columns.
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.formats import BLOCK, FP4_MAX, GROUP
from glmspec.network.graph import Tensor
from glmspec.plugins import quantize_blocks
from glmspec.plugins.lowering import lowers
from glmspec.plugins.quantize_blocks import to_e4m3
from glmspec.plugins.spec import Compute, Float32, Op

_FP4_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of 0, .5, 1, 1.5, 2, 3, 4, 6
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by code


def reference(x_ND: Compute, scale_1: Float32, *, format: str) -> torch.Tensor:
    """x [..., D] / scale rounded to `format`, "fp8" or "nvfp4", float32. scale: [], [E] for x [E, N, D], or any shape
    that broadcasts to x's with a last axis of one."""
    if scale_1.dim() == 1:
        scale_1 = scale_1.view(-1, 1, 1)
    scaled = x_ND.float() / scale_1
    if format == "fp8":
        return to_e4m3(scaled).float()
    groups = scaled.to(x_ND.dtype).float().unflatten(-1, (-1, GROUP))
    step = to_e4m3(groups.abs().amax(-1, keepdim=True) * (1 / FP4_MAX)).float()
    return (to_e2m1(groups / torch.where(step == 0, 1.0, step)) * step).flatten(-2)


def blocks_reference(x_ND: torch.Tensor) -> torch.Tensor:
    """x [..., D] rounded in blocks of 1 x 128 and back, in its own dtype."""
    codes, step = quantize_blocks.reference(x_ND)
    return (codes.float() * step.repeat_interleave(BLOCK, -1)[..., : x_ND.shape[-1]]).to(x_ND.dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """float32 to the nearest of e2m1's values, still float32; ties to the even code, saturating."""
    edges, values = x.new_tensor(_FP4_STEPS), x.new_tensor(FP4_VALUES[:8])
    size = x.abs()
    # Below an edge counts down, at an edge up: so an edge whose lower neighbour has the even code is excluded.
    place = torch.bucketize(size, edges, right=True)
    tied = (size == edges[(place - 1).clamp(min=0)]) & (place % 2 == 1)
    return torch.copysign(values[place - tied.long()], x)


def values_of(codes: torch.Tensor, step: torch.Tensor | None = None) -> torch.Tensor:
    """What codes stand for, float32: e4m3 [..., D], or e2m1 two a byte (uint8 or int8) [..., D / 2] with an e4m3 step
    for every 16 columns."""
    if step is None:
        return codes.float()
    values = unpack(codes.view(torch.uint8))
    return (values.unflatten(-1, (-1, GROUP)) * step.float().unsqueeze(-1)).flatten(-2)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes two a byte, uint8 [..., D / 2], the even column's low -> float32 [..., D]."""
    return torch.tensor(FP4_VALUES)[torch.stack([codes & 15, codes >> 4], -1).int()].flatten(-2)


def values_of_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What e4m3 codes [..., rows, columns] stand for under a scale for every 128 x 128, float32."""
    rows, columns = codes.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
    return codes.float() * wide


@lowers("rounding")
def native(x_ND: Tensor, scale_1: Tensor, *, format: str) -> Tensor:
    """x [N, D] or [E, N, D]: see `reference`. scale: float32, [] or, for three axes, [E]."""
    spread = ops.reshape(scale_1, (-1, 1, 1) if scale_1.rank else (1,) * x_ND.rank)
    scaled, one = ops.cast(x_ND, "float32") / spread, x_ND.net.constant(1.0, "float32")
    if format == "fp8":
        return unscaled(ops.quantize(scaled, one))
    return unscaled(*ops.dynamic_quantize(ops.cast(scaled, x_ND.dtype), GROUP))


def unscaled(codes: Tensor, step: Tensor | None = None) -> Tensor:
    """What codes stand for, float32, as layers that TensorRT takes into a product: e4m3, or e2m1 with an e4m3 step for
    every 16 columns of its last axis."""
    one = codes.net.constant(1.0, "float32")
    if step is None:
        return ops.dequantize(codes, one, "float32")
    return ops.dequantize(codes, ops.dequantize(step, one, "float32"), "float32", axis=codes.rank - 1)


def blocks(x_ND: Tensor) -> Tensor:
    """x [N, D] or [E, N, D] rounded in blocks of 1 x 128 and back, in its own dtype."""
    codes, step = quantize_blocks.native(x_ND)
    return ops.dequantize(codes, step, x_ND.dtype, (1,) * (x_ND.rank - 1) + (BLOCK,))


OP = Op(
    name="rounding",
    outputs={"rounded_ND": "float32"},
    reference=reference,
    native="each form is one layer that moves the least already: FP8's quantize reads 2 bytes of a value and writes 1, "
    "NVFP4's dynamic quantize reads 2 and writes 0.56 (a code, and a step for 16); the division before is pointwise, "
    "and TensorRT takes the dequantize layers behind both into the product",
)
