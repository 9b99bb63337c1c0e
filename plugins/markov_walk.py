"""DSpark's left-to-right walk: each draft's logits are biased by the drafts before it.

z_j = logits_j + W2 f_j, x_j = argmax z_j (lowest id wins) or drawn from softmax(z_j / T). f_j is made of
e_j = W1[x_{j-1}], x_{-1} = the anchor:

    vanilla   f_j = e_j
    gated     f_j = sigmoid(row_j + G e_j) * e_j
    rnn       [g, c, o] = row_j + G [s_{j-1}; e_j],  s_j = sigmoid(g) s_{j-1} + (1 - sigmoid(g)) tanh(c),  f_j = tanh(o)

row_j is what the block's hidden states add, bias included; s starts as zeros. An anchor's row that drafts nothing still
moves s, with the anchor as its predecessor: heads are trained over all rows of a block.

Legend: B blocks, J drafts, R rows of a block (at least J: the last ones draft), V draft vocabulary, T target
vocabulary, A rank of the Markov head, F columns of row (A, or 3 A of an rnn), I columns of G (A, or 2 A of an rnn).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.plugins import argmax, draft_law, draw, margin
from glmspec.plugins.spec import Op


def reference(
    logits_BJV: torch.Tensor,
    anchor_B: torch.Tensor,
    w1_TA: torch.Tensor,
    w2_VA: torch.Tensor,
    *others: torch.Tensor,
    head: str,
    given: tuple[str, ...] = (),
    margins: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Drafts int32 [B, J] as target ids, the best of their biased logits [B, J], W1 of each one's predecessor
    [B, J, A]; if asked for, how far the best logit is ahead, float32 [B, J]; if drawn, the laws, float32 [B, J, V].

    head: "vanilla", "gated" or "rnn". given: names of the others. "rows" [B, R, F] and "recurrent" [F, I] of a gated
    or rnn head, "offset" int32 [V]: `d2t` of a reduced draft vocabulary, "temperature" [B] and "uniform" [B, J],
    float32: draw the drafts.
    """
    other = dict(zip(given, others, strict=True))
    drafts = logits_BJV.shape[1]
    idle = other["rows"].shape[1] - drafts if "rows" in other else 0
    previous_B, state_BA = anchor_B, None
    ids, scores, embeddings, ahead, laws = [], [], [], [], []
    for row in range(idle + drafts):
        embedding_BA = torch.nn.functional.embedding(previous_B, w1_TA)
        row_BF = other["rows"][:, row] if "rows" in other else None
        feature_BA, state_BA = _feature(head, embedding_BA, row_BF, other.get("recurrent"), state_BA)
        if row < idle:
            continue
        z_BV = torch.addmm(logits_BJV[:, row - idle], feature_BA, w2_VA.t())
        best = z_BV.max(-1)
        previous_B = best.indices
        if "uniform" in other:
            laws.append(draft_law.reference(z_BV, previous_B, other["temperature"]))
            previous_B = draw.reference(laws[-1], other["uniform"][:, row - idle])
        if margins:
            ahead.append(margin.reference(z_BV))
        if "offset" in other:
            previous_B = previous_B + other["offset"][previous_B]
        ids.append(previous_B)
        scores.append(best.values)
        embeddings.append(embedding_BA)
    extra = tuple(torch.stack(columns, 1) for columns in (ahead, laws) if columns)
    return torch.stack(ids, 1).to(torch.int32), torch.stack(scores, 1), torch.stack(embeddings, 1), *extra


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


@dataclass(frozen=True)
class Walk:
    """What a walk gives: see `reference`."""

    ids_BJ: Tensor
    scores_BJ: Tensor
    embeddings_BJA: Tensor
    margins_BJ: Tensor | None
    laws_BJV: Tensor | None


def native(
    logits_BJV: Tensor,
    anchor_B: Tensor,
    w1_TA: Tensor,
    w2_VA: Tensor,
    *,
    head: str,
    margins: bool = False,
    **others: Tensor | None,
) -> Walk:
    """The walk of `reference`. others: its `given` tensors, by name."""
    other = {name: tensor for name, tensor in others.items() if tensor is not None}
    net, drafts, rank = logits_BJV.net, logits_BJV.shape[1], w1_TA.shape[1]
    idle = other["rows"].shape[1] - drafts if "rows" in other else 0
    inputs = [logits_BJV, anchor_B, w1_TA, w2_VA, *other.values()]
    with net.region("markov_walk", inputs, {"head": head, "given": list(other), "margins": margins}) as outputs:
        previous_B, state_BA = anchor_B, None
        ids, scores, embeddings, ahead, laws = [], [], [], [], []
        for row in range(idle + drafts):
            embedding_BA = ops.gather(w1_TA, previous_B)
            row_BF = _row(other["rows"], row) if "rows" in other else None
            feature_BA, state_BA = _native_feature(head, embedding_BA, row_BF, other.get("recurrent"), state_BA)
            if row < idle:
                continue
            z_BV = _row(logits_BJV, row - idle) + ops.matmul(feature_BA, w2_VA, transpose_b=True)
            previous_B = argmax.native(z_BV)
            if "uniform" in other:
                law_BV = draft_law.native(z_BV, previous_B, other["temperature"])
                previous_B = draw.native(law_BV, ops.column(other["uniform"], row - idle))
                laws.append(ops.reshape(law_BV, (0, 1, z_BV.shape[1])))
            if margins:
                ahead.append(ops.reshape(margin.native(z_BV), (0, 1)))
            if "offset" in other:
                previous_B = previous_B + ops.gather(other["offset"], previous_B)
            ids.append(ops.reshape(previous_B, (0, 1)))
            scores.append(ops.reduce(z_BV, "MAX", 1))
            embeddings.append(ops.reshape(embedding_BA, (0, 1, rank)))
        outputs += [ops.concat(parts, 1) for parts in (ids, scores, embeddings, ahead, laws) if parts]
    extra = iter(outputs[3:])
    return Walk(*outputs[:3], next(extra) if margins else None, next(extra) if laws else None)


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


OP = Op(
    name="markov_walk",
    inputs={"logits_BJV": "T", "anchor_B": "int32", "w1_CA": "T", "w2_VA": "T"},
    outputs={"ids_BJ": "int32", "scores_BJ": "T", "embeddings_BJA": "T"},
    optional={
        "rows_BRF": "T",
        "recurrent_FI": "T",
        "offset_V": "int32",
        "temperature_B": "float32",
        "uniform_BJ": "float32",
    },
    attributes={"head": str, "given": list, "margins": bool},
    reference=reference,
    native="to come",
)
