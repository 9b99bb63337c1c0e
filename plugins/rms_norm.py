"""RMSNorm over the last axis: y = weight * x / sqrt(mean(x^2) + eps), in float32 inside.

TensorRT's normalization layer is mean-centred, so this is a composition.

Legend: N rows, D columns.
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Op


def reference(x_ND: Compute, weight_D: Compute, *, eps: float) -> torch.Tensor:
    """x_ND [..., D], weight_D [D] -> [..., D] in x_ND's dtype."""
    if x_ND.dtype == torch.float32:
        return torch.rms_norm(x_ND, weight_D.shape, weight_D, eps)
    return weight_D * torch.rms_norm(x_ND.float(), weight_D.shape, None, eps).to(x_ND.dtype)


@lowers("rms_norm")
def native(x_ND: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """x [..., D], weight [D] -> [..., D] in x's dtype."""
    wide = ops.cast(x_ND, "float32")
    mean = ops.reduce(wide * wide, "AVG", x_ND.rank - 1)
    normed = ops.cast(wide / ops.unary(mean + eps, "SQRT"), x_ND.dtype)
    return normed * weight_D


OP = Op(
    name="rms_norm",
    outputs={"normed_ND": "T"},
    reference=reference,
    native="9 rows of 6,144 are 110 KB in and 110 KB out, 0.05 us of an H200's bandwidth: a launch costs more than the "
    "memory. TensorRT fuses this reduction with its neighbours (residual add, quantize), and around a plugin it cannot",
)
