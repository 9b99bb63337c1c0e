"""DFlash2's candidate selector: a left-to-right walk over each row's best logits.

score(c) = unary[c] + <pred[previous] * (W_h h_row), succ[c]> over the row's top-k candidates c;
previous is the anchor first, then the chosen token. The lowest id wins a tie, of logits and of scores.

Legend: B blocks, J drafts, V draft vocabulary, K candidates, A rank of the selector.
"""

from __future__ import annotations

import torch

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.plugins import lowest_topk

_NO_ID = 2**31 - 1


def reference(
    logits_BJV: torch.Tensor,
    projected_BJA: torch.Tensor,
    anchor_B: torch.Tensor,
    pred_TA: torch.Tensor,
    succ_VA: torch.Tensor,
    target_offset_V: torch.Tensor | None = None,
    *,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts int32 [B, J] as target ids, and their scores [B, J].

    pred has target-vocabulary rows, succ draft-vocabulary rows; target_offset is `d2t` of a reduced vocabulary.
    """
    blocks, steps, vocab = logits_BJV.shape
    candidate_BJK = lowest_topk.reference(logits_BJV.reshape(-1, vocab).float(), k=k).view(blocks, steps, k).long()
    unary_BJK = logits_BJV.gather(2, candidate_BJK)
    succ_BJKA = torch.nn.functional.embedding(candidate_BJK, succ_VA)
    if target_offset_V is not None:
        candidate_BJK = candidate_BJK + target_offset_V[candidate_BJK]
    previous_B = anchor_B
    drafts, scores = [], []
    for step in range(steps):
        query_BA1 = (torch.nn.functional.embedding(previous_B, pred_TA) * projected_BJA[:, step]).unsqueeze(2)
        score_BK = unary_BJK[:, step] + torch.bmm(succ_BJKA[:, step], query_BA1).squeeze(2)
        best_B1 = score_BK.amax(-1, keepdim=True)
        previous_B = torch.where(score_BK == best_B1, candidate_BJK[:, step], _NO_ID).amin(-1)
        drafts.append(previous_B)
        scores.append(best_B1)
    return torch.stack(drafts, 1).to(torch.int32), torch.cat(scores, 1)


def native(
    logits_BJV: Tensor,
    projected_BJA: Tensor,
    anchor_B: Tensor,
    pred_TA: Tensor,
    succ_VA: Tensor,
    target_offset_V: Tensor | None = None,
    *,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Drafts int32 [B, J] as target ids, and their scores [B, J]."""
    net, (steps, vocab), rank = logits_BJV.net, logits_BJV.shape[1:], pred_TA.shape[1]
    inputs = [logits_BJV, projected_BJA, anchor_B, pred_TA, succ_VA]
    inputs += [target_offset_V] if target_offset_V is not None else []
    with net.region("selector_walk", inputs, {"k": k}) as outputs:
        rows_ZV = ops.cast(ops.reshape(logits_BJV, (-1, vocab)), "float32")
        candidate_BJK = ops.reshape(lowest_topk.native(rows_ZV, k=k), (-1, steps, k))
        unary_BJK = ops.gather_elements(logits_BJV, candidate_BJK, 2)
        succ_BJKA = ops.gather(succ_VA, candidate_BJK)
        if target_offset_V is not None:
            candidate_BJK = candidate_BJK + ops.gather(target_offset_V, candidate_BJK)
        previous_B = anchor_B
        drafts, scores = [], []
        for step in range(steps):
            projected_BA = ops.reshape(ops.narrow(projected_BJA, 1, step, 1), (-1, rank))
            query_B1A = ops.reshape(ops.gather(pred_TA, previous_B) * projected_BA, (0, 1, rank))
            succ_BKA = ops.reshape(ops.narrow(succ_BJKA, 1, step, 1), (-1, k, rank))
            edge_BK = ops.reshape(ops.matmul(query_B1A, succ_BKA, transpose_b=True), (-1, k))
            score_BK = ops.reshape(ops.narrow(unary_BJK, 1, step, 1), (-1, k)) + edge_BK
            best_B1 = ops.reduce(score_BK, "MAX", 1)
            id_BK = ops.reshape(ops.narrow(candidate_BJK, 1, step, 1), (-1, k))
            previous_B = ops.reduce(ops.select(score_BK.equals(best_B1), id_BK, _NO_ID), "MIN", 1, keep=False)
            drafts.append(ops.reshape(previous_B, (0, 1)))
            scores.append(best_B1)
        outputs += [ops.concat(drafts, 1), ops.concat(scores, 1)]
    return outputs[0], outputs[1]
