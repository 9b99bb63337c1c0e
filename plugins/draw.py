"""A token drawn from weights by one uniform number: the first whose running sum passes u times the whole.

Drawing by the inverse of the running sum needs one number a draw, so noise can be keyed by request and position, made
on the host, and be the same whatever else runs. Weights need not sum to 1.

Legend: N rows, V vocabulary (or candidates).
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Float32, Op


def reference(p_NV: Float32, u_N: Float32) -> torch.Tensor:
    """Weights float32 [N, V] >= 0 and uniforms float32 [N] in [0, 1) -> int32 [N]. A row of zeros gives the last."""
    sum_NV = p_NV.double().cumsum(-1)
    passed_NV = sum_NV <= u_N.double().unsqueeze(1) * sum_NV[:, -1:]
    return passed_NV.sum(-1).clamp_(max=p_NV.shape[1] - 1).to(torch.int32)


@lowers("draw")
def native(p_NV: Tensor, u_N: Tensor) -> Tensor:
    """Weights float32 [N, V] >= 0 and uniforms float32 [N] in [0, 1) -> int32 [N]. A row of zeros gives the last."""
    size = p_NV.shape[1]
    sum_NV = ops.cumsum(p_NV, 1)
    whole_N1 = ops.narrow(sum_NV, 1, size - 1, 1)
    above_NV = sum_NV > whole_N1 * ops.reshape(u_N, (0, 1))
    passed_NV = ops.cast(ops.unary(above_NV, "NOT"), "int32")
    return ops.minimum(ops.reduce(passed_NV, "SUM", 1, keep=False), size - 1)


OP = Op(
    name="draw",
    outputs={"index_N": "int32"},
    reference=reference,
    native="part of the walks and of sampling",
)
