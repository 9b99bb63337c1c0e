"""DSpark's left-to-right greedy walk: each draft's logits are biased by the drafts before it.

z_j = logits_j + W2 f_j, x_j = argmax z_j (lowest id wins). f_j is made of e_j = W1[x_{j-1}], x_{-1} = the anchor:

    vanilla   f_j = e_j
    gated     f_j = sigmoid(row_j + G e_j) * e_j
    rnn       [g, c, o] = row_j + G [s_{j-1}; e_j],  s_j = sigmoid(g) s_{j-1} + (1 - sigmoid(g)) tanh(c),  f_j = tanh(o)

row_j is what the block's hidden states add, bias included; s starts as zeros. An anchor's row that drafts nothing still
moves s, with the anchor as its predecessor: heads are trained over all rows of a block.

Legend: B blocks, J drafts, R rows of a block (at least J: the last ones draft), V draft vocabulary, T target
vocabulary, A rank of the Markov head, F columns of row (A, or 3 A of an rnn), I columns of G (A, or 2 A of an rnn).
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
    *others: torch.Tensor,
    head: str,
    given: tuple[str, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts int32 [B, J] as target ids, their biased logits [B, J], and W1 of each one's predecessor [B, J, A].

    head: "vanilla", "gated" or "rnn". given: names of the others. "rows" [B, R, F] and "recurrent" [F, I] of a gated
    or rnn head, "offset" int32 [V]: `d2t` of a reduced draft vocabulary.
    """
    other = dict(zip(given, others, strict=True))
    drafts = logits_BJV.shape[1]
    idle = other["rows"].shape[1] - drafts if "rows" in other else 0
    previous_B, state_BA = anchor_B, None
    ids, scores, embeddings = [], [], []
    for row in range(idle + drafts):
        embedding_BA = torch.nn.functional.embedding(previous_B, w1_TA)
        row_BF = other["rows"][:, row] if "rows" in other else None
        feature_BA, state_BA = _feature(head, embedding_BA, row_BF, other.get("recurrent"), state_BA)
        if row < idle:
            continue
        best = torch.addmm(logits_BJV[:, row - idle], feature_BA, w2_VA.t()).max(-1)
        previous_B = best.indices
        if "offset" in other:
            previous_B = previous_B + other["offset"][previous_B]
        ids.append(previous_B)
        scores.append(best.values)
        embeddings.append(embedding_BA)
    return torch.stack(ids, 1).to(torch.int32), torch.stack(scores, 1), torch.stack(embeddings, 1)


def _feature(
    head: str,
    embedding_BA: torch.Tensor,
    row_BF: torch.Tensor | None,
    recurrent_FI: torch.Tensor | None,
    state_BA: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """f of a row and the state after it."""
    if head == "vanilla":
        return embedding_BA, None
    if head == "gated":
        return torch.sigmoid(torch.addmm(row_BF, embedding_BA, recurrent_FI.t())) * embedding_BA, None
    state_BA = torch.zeros_like(embedding_BA) if state_BA is None else state_BA
    joint_BF = torch.addmm(row_BF, torch.cat([state_BA, embedding_BA], 1), recurrent_FI.t())
    gate_BA, candidate_BA, output_BA = joint_BF.chunk(3, 1)
    gate_BA = torch.sigmoid(gate_BA)
    return torch.tanh(output_BA), gate_BA * state_BA + (1 - gate_BA) * torch.tanh(candidate_BA)


def native(
    logits_BJV: Tensor, anchor_B: Tensor, w1_TA: Tensor, w2_VA: Tensor, *, head: str, **others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts int32 [B, J] as target ids, their biased logits [B, J], and W1 of each one's predecessor [B, J, A].

    others: "rows", "recurrent" and "offset", where there are such (see `reference`).
    """
    other = {name: tensor for name, tensor in others.items() if tensor is not None}
    net, drafts, rank = logits_BJV.net, logits_BJV.shape[1], w1_TA.shape[1]
    idle = other["rows"].shape[1] - drafts if "rows" in other else 0
    inputs, attributes = [logits_BJV, anchor_B, w1_TA, w2_VA, *other.values()], {"head": head, "given": list(other)}
    with net.region("markov_walk", inputs, attributes) as outputs:
        previous_B, state_BA = anchor_B, None
        ids, scores, embeddings = [], [], []
        for row in range(idle + drafts):
            embedding_BA = ops.gather(w1_TA, previous_B)
            row_BF = _row(other["rows"], row) if "rows" in other else None
            feature_BA, state_BA = _native_feature(head, embedding_BA, row_BF, other.get("recurrent"), state_BA)
            if row < idle:
                continue
            z_BV = _row(logits_BJV, row - idle) + ops.matmul(feature_BA, w2_VA, transpose_b=True)
            previous_B = argmax.native(z_BV)
            if "offset" in other:
                previous_B = previous_B + ops.gather(other["offset"], previous_B)
            ids.append(ops.reshape(previous_B, (0, 1)))
            scores.append(ops.reduce(z_BV, "MAX", 1))
            embeddings.append(ops.reshape(embedding_BA, (0, 1, rank)))
        outputs += [ops.concat(ids, 1), ops.concat(scores, 1), ops.concat(embeddings, 1)]
    return outputs[0], outputs[1], outputs[2]


def _row(x_BRF: Tensor, row: int) -> Tensor:
    return ops.reshape(ops.narrow(x_BRF, 1, row, 1), (-1, x_BRF.shape[2]))


def _native_feature(
    head: str, embedding_BA: Tensor, row_BF: Tensor | None, recurrent_FI: Tensor | None, state_BA: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """f of a row and the state after it."""
    if head == "vanilla":
        return embedding_BA, None
    if head == "gated":
        gate_BA = ops.sigmoid(row_BF + ops.matmul(embedding_BA, recurrent_FI, transpose_b=True))
        return gate_BA * embedding_BA, None
    rank = embedding_BA.shape[1]
    state_BA = embedding_BA * 0.0 if state_BA is None else state_BA
    joint_BF = row_BF + ops.matmul(ops.concat([state_BA, embedding_BA], 1), recurrent_FI, transpose_b=True)
    gate_BA, candidate_BA, output_BA = (ops.narrow(joint_BF, 1, part * rank, rank) for part in range(3))
    gate_BA = ops.sigmoid(gate_BA)
    return ops.tanh(output_BA), gate_BA * state_BA + (1.0 - gate_BA) * ops.tanh(candidate_BA)
