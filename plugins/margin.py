"""How far ahead a row's best score is of its second best: what tells a sure draft from a guess where no head does.

Legend: N rows, V scores.
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Op


def reference(score_NV: Compute) -> torch.Tensor:
    """[N, V] -> float32 [N]: 0 where two are best, and where there is but one score."""
    if score_NV.shape[1] == 1:
        return torch.zeros(len(score_NV))
    best_N2 = score_NV.float().topk(2, -1).values
    return best_N2[:, 0] - best_N2[:, 1]


@lowers("margin")
def native(score_NV: Tensor) -> Tensor:
    """[N, V] -> float32 [N]: see `reference`."""
    score_NV = ops.cast(score_NV, "float32")
    if score_NV.shape[1] == 1:
        return ops.reshape(score_NV * 0.0, (-1,))
    best_N2, _ = ops.topk(score_NV, 2, 1)
    return ops.reshape(ops.narrow(best_N2, 1, 0, 1) - ops.narrow(best_N2, 1, 1, 1), (-1,))


OP = Op(
    name="margin",
    outputs={"ahead_N": "float32"},
    reference=reference,
    native="the walks' kernels make their own; a plain DFlash block's is a top-2, which a TopK layer reads once",
)
