"""DSpark's left-to-right walk: each draft's logits are biased by the drafts before it.

z_j = logits_j + W2 f_j, x_j = argmax z_j (lowest id wins) or drawn from softmax(z_j / T). f_j is made of
e_j = W1[x_{j-1}], x_{-1} = the anchor:

    vanilla   f_j = e_j
    gated     f_j = sigmoid(row_j + G e_j) * e_j
    rnn       [g, c, o] = row_j + G [s_{j-1}; e_j],  s_j = sigmoid(g) s_{j-1} + (1 - sigmoid(g)) tanh(c),  f_j = tanh(o)

row_j is what the block's hidden states add, bias included; s starts as zeros. An anchor's row that drafts nothing still
moves s, with the anchor as its predecessor: heads are trained over all rows of a block.

Legend: B blocks, J drafts, R rows of a block (at least J: the last ones draft), V draft vocabulary, C target
vocabulary, A rank of the Markov head, F columns of row (A, or 3 A of an rnn), H columns of G (A, or 2 A of an rnn),
E rows of f a block (J, or the one of the step), S splits of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import argmax, draft_probs, draw, margin
from glmspec.plugins.spec import Compute, Int32, Op, Plugin, Runs, Use, cdiv, pow2


def reference(
    logits_BJV: Compute,
    anchor_B: Int32,
    w1_CA: Compute,
    w2_VA: Compute,
    *others: torch.Tensor,
    head: str,
    given: tuple[str, ...] = (),
    margins: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Drafts int32 [B, J] as target ids, the best of their biased logits [B, J], W1 of each one's predecessor
    [B, J, A]; if asked for, how far the best logit is ahead, float32 [B, J]; if drawn, the laws, float32 [B, J, V].

    head: "vanilla", "gated" or "rnn". given: names of the others. "rows" [B, R, F] and "recurrent" [F, H] of a gated
    or rnn head, "offset" int32 [V]: `d2t` of a reduced draft vocabulary, "temperature" [B] and "uniform" [B, J],
    float32: draw the drafts.
    """
    other = dict(zip(given, others, strict=True))
    drafts = logits_BJV.shape[1]
    idle = other["rows"].shape[1] - drafts if "rows" in other else 0
    previous_B, state_BA = anchor_B, None
    ids, scores, embeddings, ahead, probs = [], [], [], [], []
    for row in range(idle + drafts):
        embedding_BA = torch.nn.functional.embedding(previous_B, w1_CA)
        feature_BA = embedding_BA
        if head != "vanilla":
            row_BF = other["rows"][:, row]
            feature_BA, state_BA = _feature(head, embedding_BA, row_BF, other["recurrent"], state_BA)
        if row < idle:
            continue
        z_BV = torch.addmm(logits_BJV[:, row - idle], feature_BA, w2_VA.t())
        best = z_BV.max(-1)
        previous_B = best.indices
        if "uniform" in other:
            probs.append(draft_probs.reference(z_BV, previous_B, other["temperature"]))
            previous_B = draw.reference(probs[-1], other["uniform"][:, row - idle])
        if margins:
            ahead.append(margin.reference(z_BV))
        if "offset" in other:
            previous_B = previous_B + other["offset"][previous_B]
        ids.append(previous_B)
        scores.append(best.values)
        embeddings.append(embedding_BA)
    extra = tuple(torch.stack(columns, 1) for columns in (ahead, probs) if columns)
    return torch.stack(ids, 1).to(torch.int32), torch.stack(scores, 1), torch.stack(embeddings, 1), *extra


def _feature(
    head: str,
    embedding_BA: torch.Tensor,
    row_BF: torch.Tensor,
    recurrent_FH: torch.Tensor,
    state_BA: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """f of a row and the state after it, of a gated or rnn head."""
    if head == "gated":
        return torch.sigmoid(torch.addmm(row_BF, embedding_BA, recurrent_FH.t())) * embedding_BA, None
    state_BA = torch.zeros_like(embedding_BA) if state_BA is None else state_BA
    joint_BF = torch.addmm(row_BF, torch.cat([state_BA, embedding_BA], 1), recurrent_FH.t())
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
    probs_BJV: Tensor | None


def native(
    logits_BJV: Tensor,
    anchor_B: Tensor,
    w1_CA: Tensor,
    w2_VA: Tensor,
    *,
    head: str,
    margins: bool = False,
    **others: Tensor | None,
) -> Walk:
    """The walk of `reference`. others: its `given` tensors, by name."""
    other = {name: tensor for name, tensor in others.items() if tensor is not None}
    net, drafts, rank = logits_BJV.net, logits_BJV.shape[1], w1_CA.shape[1]
    idle = other["rows"].shape[1] - drafts if "rows" in other else 0
    inputs = [logits_BJV, anchor_B, w1_CA, w2_VA, *other.values()]
    with net.region("markov_walk", inputs, {"head": head, "given": list(other), "margins": margins}) as outputs:
        if not outputs:
            previous_B, state_BA = anchor_B, None
            ids, scores, embeddings, ahead, probs = [], [], [], [], []
            for row in range(idle + drafts):
                embedding_BA = ops.gather(w1_CA, previous_B)
                feature_BA = embedding_BA
                if head != "vanilla":
                    row_BF = _row(other["rows"], row)
                    feature_BA, state_BA = _native_feature(head, embedding_BA, row_BF, other["recurrent"], state_BA)
                if row < idle:
                    continue
                z_BV = _row(logits_BJV, row - idle) + ops.matmul(feature_BA, w2_VA, transpose_b=True)
                previous_B = argmax.native(z_BV)
                if "uniform" in other:
                    probs_BV = draft_probs.native(z_BV, previous_B, other["temperature"])
                    previous_B = draw.native(probs_BV, ops.column(other["uniform"], row - idle))
                    probs.append(ops.reshape(probs_BV, (0, 1, z_BV.shape[1])))
                if margins:
                    ahead.append(ops.reshape(margin.native(z_BV), (0, 1)))
                if "offset" in other:
                    previous_B = previous_B + ops.gather(other["offset"], previous_B)
                ids.append(ops.reshape(previous_B, (0, 1)))
                scores.append(ops.reduce(z_BV, "MAX", 1))
                embeddings.append(ops.reshape(embedding_BA, (0, 1, rank)))
            outputs += [ops.concat(parts, 1) for parts in (ids, scores, embeddings, ahead, probs) if parts]
    extra = iter(outputs[3:])
    ids_BJ, scores_BJ, embeddings_BJA = outputs[:3]
    return Walk(
        ids_BJ, scores_BJ, embeddings_BJA, next(extra) if margins else None, next(extra) if "uniform" in other else None
    )


def _row(x_BRF: Tensor, row: int) -> Tensor:
    return ops.reshape(ops.narrow(x_BRF, 1, row, 1), (-1, x_BRF.shape[2]))


def _native_feature(
    head: str, embedding_BA: Tensor, row_BF: Tensor, recurrent_FH: Tensor, state_BA: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """f of a row and the state after it, of a gated or rnn head."""
    if head == "gated":
        gate_BA = ops.sigmoid(row_BF + ops.matmul(embedding_BA, recurrent_FH, transpose_b=True))
        return gate_BA * embedding_BA, None
    rank = embedding_BA.shape[1]
    state_BA = embedding_BA * 0.0 if state_BA is None else state_BA
    joint_BF = row_BF + ops.matmul(ops.concat([state_BA, embedding_BA], 1), recurrent_FH, transpose_b=True)
    gate_BA, candidate_BA, output_BA = (ops.narrow(joint_BF, 1, part * rank, rank) for part in range(3))
    gate_BA = ops.sigmoid(gate_BA)
    return ops.tanh(output_BA), gate_BA * state_BA + (1.0 - gate_BA) * ops.tanh(candidate_BA)


def plugged(
    run: Runs, logits_BJV, anchor_B, w1_CA, w2_VA, *others, head: str, given: Sequence[str] = (), margins: bool = False
) -> tuple:
    """A launch, then two or (unless the head is vanilla) three a draft, and one more where drafts are drawn: see
    `reference`. Where they are drawn the logits are overwritten."""
    other = dict(zip(given, others, strict=True))
    drafts, vocab = run.shape(logits_BJV)[1:]
    idle = run.shape(other["rows"])[1] - drafts if "rows" in other else 0
    drawn, z_BJV = "uniform" in other, logits_BJV
    embeddings_BJA, state_BA, *drafts_so_far, bests_BJ, totals_BJ = run(BEGIN, anchor_B, w1_CA, drafts=drafts)
    drafts_so_far += [bests_BJ, totals_BJ] if drawn else []
    for row in range(idle + drafts):
        step = max(row - idle, 0)
        feature_BEA, at, state_BA = _plugged_feature(run, head, embeddings_BJA, state_BA, other, row, step)
        if row < idle:
            continue
        temperature = [other["temperature"]] if drawn else []
        splits = run(STEPS[drawn], z_BJV, feature_BEA, w2_VA, *temperature, step=step, at=at)
        sums = []
        if drawn:
            *splits, sum_BS, z_BJV = splits
            sums = [sum_BS, z_BJV, *temperature, other["uniform"]]
        finish = FINISHES["offset" in other, drawn]
        offset = [other["offset"]] if "offset" in other else []
        before = (*splits, w1_CA, embeddings_BJA, *drafts_so_far[:3], *offset, *sums, *drafts_so_far[3:])
        embeddings_BJA, *drafts_so_far = run(finish, *before, step=step, vocab=vocab)
    ids_BJ, scores_BJ, margins_BJ, *sure = drafts_so_far
    probs = run(LAW, z_BJV, scores_BJ, *sure, other["temperature"]) if drawn else ()
    return ids_BJ, scores_BJ, embeddings_BJA, *([margins_BJ] if margins else []), *probs


def _plugged_feature(run: Runs, head: str, embeddings_BJA, state_BA, other: Mapping[str, Any], row: int, step: int):
    """f of a row as [B, E, A], the place in E where it is, and the state after the row."""
    if head == "vanilla":
        return embeddings_BJA, step, state_BA
    inputs = (other["rows"], other["recurrent"])
    if head == "gated":
        (feature_BA,) = run(GATED, embeddings_BJA, *inputs, row=row, step=step)
    else:
        feature_BA, state_BA = run(RNN, embeddings_BJA, state_BA, *inputs, row=row, step=step)
    return run.reshape(feature_BA, (-1, 1, run.shape(embeddings_BJA)[2])), 0, state_BA


BEGIN = Plugin(
    name="markov_begin",
    op="markov_walk",
    function="markov_begin_kernel",
    inputs={"anchor_B": "int32", "w1_CA": "T"},
    outputs={
        "embeddings_BJA": "T",
        "state_BA": "T",
        "ids_BJ": "int32",
        "scores_BJ": "T",
        "margins_BJ": "float32",
        "bests_BJ": "int32",
        "totals_BJ": "float32",
    },
    attributes={"drafts": int},
    sizes={"J": "drafts", "AP": lambda A: pow2(A)},
    grid=("B",),
    tiles={"": {"WARPS": 1}},
)
TILE = {"AC": 32, "BLOCKS": 16, "COLUMNS": 32, "WARPS": 4, "STAGES": 1}
GATED = Plugin(
    name="markov_gated",
    op="markov_walk",
    function="markov_gated_kernel",
    inputs={"embeddings_BJA": "T", "rows_BRA": "T", "recurrent_AA": "T"},
    outputs={"feature_BA": "T"},
    attributes={"row": int, "step": int},
    scalars=("B", "row", "step"),
    grid=(lambda B, BLOCKS: cdiv(B, BLOCKS), lambda A, COLUMNS: cdiv(A, COLUMNS)),
    tiles={"": TILE},
)
RNN = Plugin(
    name="markov_rnn",
    op="markov_walk",
    function="markov_rnn_kernel",
    inputs={"embeddings_BJA": "T", "state_BA": "T", "rows_BRF": "T", "recurrent_FH": "T"},
    outputs={"feature_BA": "T", "after_BA": "T"},
    attributes={"row": int, "step": int},
    scalars=("B", "row", "step"),
    grid=(lambda B, BLOCKS: cdiv(B, BLOCKS), lambda A, COLUMNS: cdiv(A, COLUMNS)),
    tiles={"": TILE},
)


def _step(drawn: bool) -> Plugin:
    """A pass over W2."""
    noise, more = {"temperature_B": "float32"}, {"sum_BS": "float32", "z_BJV": "T"}
    inputs = {"logits_BJV": "T", "feature_BEA": "T", "w2_VA": "T"}
    outputs = {"best_BS": "float32", "index_BS": "int32", "second_BS": "float32"}
    return Plugin(
        name="markov_step" + "_drawn" * drawn,
        op="markov_walk",
        function="markov_step_kernel",
        inputs=inputs | (noise if drawn else {}),
        outputs=outputs | (more if drawn else {}),
        attributes={"step": int, "at": int},
        sizes={"S": lambda V, TOKENS, TILES: cdiv(V, TOKENS * TILES), "CHUNKS": lambda A, AC: cdiv(A, AC)},
        scalars=("B", "step", "at"),
        absent=() if drawn else (*noise, *more),
        aliased={"z_BJV": "logits_BJV"} if drawn else {},
        grid=(lambda B, BLOCKS: cdiv(B, BLOCKS), "S"),
        tiles={"": {"AC": 32, "BLOCKS": 32, "TOKENS": 64, "TILES": 4, "WARPS": 4, "STAGES": 4}},
    )


def _finish(offset: bool, drawn: bool) -> Plugin:
    """The end of a draft."""
    reduced = {"offset_V": "int32"}
    noise = {"sum_BS": "float32", "z_BJV": "T", "temperature_B": "float32", "uniform_BJ": "float32"}
    sure = {"bests_BJ": "int32", "totals_BJ": "float32"}
    kept = {"ids_BJ": "int32", "scores_BJ": "T", "margins_BJ": "float32"}
    old = {f"old_{name}": dtype for name, dtype in {"embeddings_BJA": "T", **kept}.items()}
    old_sure = {f"old_{name}": dtype for name, dtype in sure.items()}
    inputs = {"best_BS": "float32", "index_BS": "int32", "second_BS": "float32", "w1_CA": "T", **old}
    inputs |= (reduced if offset else {}) | (noise | old_sure if drawn else {})
    return Plugin(
        name="markov_finish" + "_reduced" * offset + "_drawn" * drawn,
        op="markov_walk",
        function="markov_finish_kernel",
        inputs=inputs,
        outputs={"embeddings_BJA": "T", **kept} | (sure if drawn else {}),
        attributes={"step": int, "vocab": int},
        sizes={
            "JP": lambda J: pow2(J),
            "AP": lambda A: pow2(A),
            "SP": lambda S: pow2(S),
            "SPLIT": lambda TOKENS, TILES: TOKENS * TILES,
        },
        scalars=("step",),
        absent=(*(() if offset else reduced), *(() if drawn else (*noise, *old_sure, *sure))),
        grid=("B",),
        tiles={"": {"TOKENS": 64, "TILES": 4, "WARPS": 4}},
    )


STEPS = {drawn: _step(drawn) for drawn in (False, True)}
FINISHES = {(offset, drawn): _finish(offset, drawn) for offset in (False, True) for drawn in (False, True)}
LAW = Plugin(
    name="markov_law",
    op="markov_walk",
    function="markov_law_kernel",
    inputs={
        "z_BJV": "T",
        "scores_BJ": "T",
        "bests_BJ": "int32",
        "totals_BJ": "float32",
        "temperature_B": "float32",
    },
    outputs={"probs_BJV": "float32"},
    grid=(lambda B, J: B * J, lambda V, COLUMNS: cdiv(V, COLUMNS)),
    tiles={"": {"COLUMNS": 2048, "WARPS": 4}},
)
PARTS, NOISE = ("rows_BRF", "recurrent_FH"), ("temperature_B", "uniform_BJ")


def _use(head: str, *, offset: bool = False, drawn: bool = False) -> Use:
    """A head; drafts of a reduced vocabulary; drawn ones."""
    names = (PARTS if head != "vanilla" else ()) + ("offset_V",) * offset + (NOISE if drawn else ())
    given = [name.rpartition("_")[0] for name in names]
    sizes = {"vanilla": {}, "gated": {"F": "A", "H": "A"}, "rnn": {"F": lambda A: 3 * A, "H": lambda A: 2 * A}}[head]
    sizes |= {"V": 32_000} if offset else {}
    return Use({"head": head, "given": given, "margins": True}, names, sizes)


OP = Op(
    name="markov_walk",
    outputs={
        "ids_BJ": "int32",
        "scores_BJ": "T",
        "embeddings_BJA": "T",
        "margins_BJ": "float32",
        "probs_BJV": "float32",
    },
    others={
        "rows_BRF": "T",
        "recurrent_FH": "T",
        "offset_V": "int32",
        "temperature_B": "float32",
        "uniform_BJ": "float32",
    },
    reference=reference,
    plugged=plugged,
    plugins=(BEGIN, GATED, RNN, *STEPS.values(), *FINISHES.values(), LAW),
    # A margin is what two scores leave of each other, and no closer than they are.
    tolerance={"float32": 4e-6, "bfloat16": 1.6e-2, "float16": 2e-3},
    real={"B": "batch", "J": 8, "R": "J", "V": 154_880, "C": 154_880, "A": 256},
    uses={
        "": _use("vanilla"),
        "drawn": _use("vanilla", drawn=True),
        "reduced": _use("vanilla", offset=True),
        "reduced, drawn": _use("vanilla", offset=True, drawn=True),
        "gated": _use("gated"),
        "rnn": _use("rnn"),
    },
    run_time="B",
)
