"""DSpark's left-to-right greedy walk: each draft's logits are biased by the draft before it.

z_j = logits_j + W2 W1[x_{j-1}], x_{-1} = the anchor, x_j = argmax z_j (lowest id wins).

Legend: B blocks, J drafts, V draft vocabulary, A rank of the Markov head.
"""

from __future__ import annotations

import torch

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.plugins import argmax


def reference(
    logits_BJV: torch.Tensor,
    anchor_B: torch.Tensor,
    w1_TA: torch.Tensor,
    w2_VA: torch.Tensor,
    target_offset_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts int32 [B, J] as target ids, their biased logits [B, J], and W1 of each one's predecessor [B, J, A].

    w1 has target-vocabulary rows; target_offset is `d2t` of a reduced draft vocabulary.
    """
    previous_B = anchor_B
    drafts, scores, features = [], [], []
    for step in range(logits_BJV.shape[1]):
        feature_BA = torch.nn.functional.embedding(previous_B, w1_TA)
        best = torch.addmm(logits_BJV[:, step], feature_BA, w2_VA.t()).max(-1)
        previous_B = best.indices
        if target_offset_V is not None:
            previous_B = previous_B + target_offset_V[previous_B]
        drafts.append(previous_B)
        scores.append(best.values)
        features.append(feature_BA)
    return torch.stack(drafts, 1).to(torch.int32), torch.stack(scores, 1), torch.stack(features, 1)


def native(
    logits_BJV: Tensor, anchor_B: Tensor, w1_TA: Tensor, w2_VA: Tensor, target_offset_V: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts int32 [B, J] as target ids, their biased logits [B, J], and W1 of each one's predecessor [B, J, A]."""
    net, (steps, vocab), rank = logits_BJV.net, logits_BJV.shape[1:], w1_TA.shape[1]
    inputs = [logits_BJV, anchor_B, w1_TA, w2_VA] + ([target_offset_V] if target_offset_V is not None else [])
    with net.region("markov_walk", inputs, {}) as outputs:
        previous_B = anchor_B
        drafts, scores, features = [], [], []
        for step in range(steps):
            feature_BA = ops.gather(w1_TA, previous_B)
            row_BV = ops.reshape(ops.narrow(logits_BJV, 1, step, 1), (-1, vocab))
            z_BV = row_BV + ops.matmul(feature_BA, w2_VA, transpose_b=True)
            previous_B = argmax.native(z_BV)
            if target_offset_V is not None:
                previous_B = previous_B + ops.gather(target_offset_V, previous_B)
            drafts.append(ops.reshape(previous_B, (0, 1)))
            scores.append(ops.reduce(z_BV, "MAX", 1))
            features.append(ops.reshape(feature_BA, (0, 1, rank)))
        outputs += [ops.concat(drafts, 1), ops.concat(scores, 1), ops.concat(features, 1)]
    return outputs[0], outputs[1], outputs[2]
