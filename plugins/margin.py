"""How far the best score is ahead of the second best: what tells how sure a drafter is of its choice.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import torch

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor


def reference(score_NV: torch.Tensor) -> torch.Tensor:
    """Scores [N, V], V at least 2 -> float32 [N], 0 where the best two are equal."""
    best_N2 = score_NV.float().topk(2, -1).values
    return best_N2[:, 0] - best_N2[:, 1]


def native(score_NV: Tensor) -> Tensor:
    """Scores [N, V], V at least 2 -> float32 [N], 0 where the best two are equal."""
    with score_NV.net.region("margin", [score_NV], {}) as outputs:
        best_N2, _ = ops.topk(ops.cast(score_NV, "float32"), 2, 1)  # whichever ids TopK takes among equals
        gap_N1 = ops.narrow(best_N2, 1, 0, 1) - ops.narrow(best_N2, 1, 1, 1)
        outputs.append(ops.reshape(gap_N1, (-1,)))
    return outputs[0]
