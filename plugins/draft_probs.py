"""The probs q that a draft is drawn from: softmax(score / T); at temperature 0 the best draft with certainty.

Legend: N rows, V scores (of a vocabulary, or of candidates).
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import argmax
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, Op


def reference(score_NV: Compute, best_N: Int32, temperature_N: Float32) -> torch.Tensor:
    """Probabilities float32 [N, V]. best: int32, the column of the greedy draft. temperature: float32, 0 is greedy."""
    greedy_N1 = (temperature_N == 0).unsqueeze(1)
    temperature_N1 = torch.where(greedy_N1, 1.0, temperature_N.unsqueeze(1))
    score_NV = score_NV.float()
    drawn_NV = ((score_NV - score_NV.amax(-1, keepdim=True)) / temperature_N1).softmax(-1)
    certain_NV = torch.zeros_like(drawn_NV).scatter_(1, best_N.long().unsqueeze(1), 1.0)
    return torch.where(greedy_N1, certain_NV, drawn_NV)


@lowers("draft_law")
def native(score_NV: Tensor, best_N: Tensor, temperature_N: Tensor) -> Tensor:
    """Probabilities float32 [N, V]: see `reference`."""
    score_NV = ops.cast(score_NV, "float32")
    temperature_N1 = ops.reshape(temperature_N, (0, 1))
    greedy_N1 = temperature_N1.equals(0.0)
    # The largest first: a low temperature would overflow what is then subtracted again.
    below_NV = score_NV - ops.reduce(score_NV, "MAX", 1)
    drawn_NV = ops.softmax(below_NV / ops.select(greedy_N1, 1.0, temperature_N1), 1)
    return ops.select(greedy_N1, argmax.one_hot(best_N, score_NV.shape[1]), drawn_NV)


OP = Op(
    name="draft_law",
    outputs={"probs_NV": "float32"},
    reference=reference,
    native="the walks' kernels make their own; a plain DFlash block's is one softmax, which TensorRT has a layer for",
)
