"""DFlash2's candidate selector: a left-to-right walk over each row's best logits.

score(c) = unary[c] + <pred[previous] * (W_h h_row), succ[c]> over the row's top-k candidates c; previous is the anchor
first, then the chosen token: the best (the lowest id wins a tie, of logits and of scores), or one drawn from
softmax(score / T).

Legend: B blocks, J drafts, V draft vocabulary, K candidates, A rank of the selector, C tokens of the verifier,
N drafts of all blocks, Z the same, G groups of a row's columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import draft_probs, draw, lowest_topk, margin
from glmspec.plugins.spec import Compute, Int32, NoPlugin, Op, Plugin, Runs, Use, cdiv, inputs_of, pow2

CANDIDATES = 32  # most of a plugin
_NO_ID = 2**31 - 1


def reference(
    logits_BJV: Compute,
    projected_BJA: Compute,
    anchor_B: Int32,
    pred_CA: Compute,
    succ_VA: Compute,
    *others: torch.Tensor,
    k: int,
    given: tuple[str, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Drafts int32 [B, J] as target ids, the best of their candidates' scores [B, J], how far it is ahead, float32
    [B, J]; if drawn, the candidates int32 [B, J, K] as target ids and their probs float32 [B, J, K].

    pred has target-vocabulary rows, succ draft-vocabulary rows. given: names of the others. "offset" int32 [V]: `d2t`
    of a reduced draft vocabulary, "temperature" [B] and "uniform" [B, J], float32: draw the drafts.
    """
    other = dict(zip(given, others, strict=True))
    blocks, steps, vocab = logits_BJV.shape
    candidate_BJK = lowest_topk.reference(logits_BJV.reshape(-1, vocab).float(), k=k).view(blocks, steps, k).long()
    unary_BJK = logits_BJV.gather(2, candidate_BJK)
    succ_BJKA = torch.nn.functional.embedding(candidate_BJK, succ_VA)
    if "offset" in other:
        candidate_BJK = candidate_BJK + other["offset"][candidate_BJK]
    previous_B = anchor_B
    ids, scores, ahead, probs = [], [], [], []
    for step in range(steps):
        query_BA1 = (torch.nn.functional.embedding(previous_B, pred_CA) * projected_BJA[:, step]).unsqueeze(2)
        score_BK = unary_BJK[:, step] + torch.bmm(succ_BJKA[:, step], query_BA1).squeeze(2)
        best_B1, id_BK = score_BK.amax(-1, keepdim=True), candidate_BJK[:, step]
        previous_B = torch.where(score_BK == best_B1, id_BK, _NO_ID).amin(-1)
        if "uniform" in other:
            at_B = (id_BK == previous_B.unsqueeze(1)).int().argmax(-1)
            probs.append(draft_probs.reference(score_BK, at_B, other["temperature"]))
            at_B = draw.reference(probs[-1], other["uniform"][:, step])
            previous_B = id_BK.gather(1, at_B.long().unsqueeze(1)).squeeze(1)
        ids.append(previous_B)
        scores.append(best_B1)
        ahead.append(margin.reference(score_BK))
    extra = (candidate_BJK.to(torch.int32), torch.stack(probs, 1)) if probs else ()
    return torch.stack(ids, 1).to(torch.int32), torch.cat(scores, 1), torch.stack(ahead, 1), *extra


@dataclass(frozen=True)
class Walk:
    """What a walk gives: see `reference`."""

    ids_BJ: Tensor
    scores_BJ: Tensor
    margins_BJ: Tensor
    candidates_BJK: Tensor | None = None
    probs_BJK: Tensor | None = None


def native(
    logits_BJV: Tensor,
    projected_BJA: Tensor,
    anchor_B: Tensor,
    pred_CA: Tensor,
    succ_VA: Tensor,
    *,
    k: int,
    **others: Tensor | None,
) -> Walk:
    """The walk of `reference`. others: its `given` tensors, by name."""
    other = {name: tensor for name, tensor in others.items() if tensor is not None}
    net, (steps, vocab), rank = logits_BJV.net, logits_BJV.shape[1:], pred_CA.shape[1]
    inputs = [logits_BJV, projected_BJA, anchor_B, pred_CA, succ_VA, *other.values()]
    with net.region("selector_walk", inputs, {"k": k, "given": list(other)}) as outputs:
        if not outputs:
            rows_ZV = ops.cast(ops.reshape(logits_BJV, (-1, vocab)), "float32")
            candidate_BJK = ops.reshape(lowest_topk.native(rows_ZV, k=k), (-1, steps, k))
            unary_BJK = ops.gather_elements(logits_BJV, candidate_BJK, 2)
            succ_BJKA = ops.gather(succ_VA, candidate_BJK)
            if "offset" in other:
                candidate_BJK = candidate_BJK + ops.gather(other["offset"], candidate_BJK)
            previous_B = anchor_B
            ids, scores, ahead, probs = [], [], [], []
            for step in range(steps):
                projected_BA = ops.reshape(ops.narrow(projected_BJA, 1, step, 1), (-1, rank))
                query_B1A = ops.reshape(ops.gather(pred_CA, previous_B) * projected_BA, (0, 1, rank))
                succ_BKA = ops.reshape(ops.narrow(succ_BJKA, 1, step, 1), (-1, k, rank))
                edge_BK = ops.reshape(ops.matmul(query_B1A, succ_BKA, transpose_b=True), (-1, k))
                score_BK = ops.reshape(ops.narrow(unary_BJK, 1, step, 1), (-1, k)) + edge_BK
                best_B1 = ops.reduce(score_BK, "MAX", 1)
                id_BK = ops.reshape(ops.narrow(candidate_BJK, 1, step, 1), (-1, k))
                previous_B = ops.reduce(ops.select(score_BK.equals(best_B1), id_BK, _NO_ID), "MIN", 1, keep=False)
                if "uniform" in other:
                    probs_BK = draft_probs.native(score_BK, _place(id_BK, previous_B), other["temperature"])
                    at_B = draw.native(probs_BK, ops.column(other["uniform"], step))
                    previous_B = ops.reshape(ops.gather_elements(id_BK, ops.reshape(at_B, (0, 1)), 1), (-1,))
                    probs.append(ops.reshape(probs_BK, (0, 1, k)))
                ids.append(ops.reshape(previous_B, (0, 1)))
                scores.append(best_B1)
                ahead.append(ops.reshape(margin.native(score_BK), (0, 1)))
            outputs += [ops.concat(parts, 1) for parts in (ids, scores, ahead)]
            outputs += [candidate_BJK, ops.concat(probs, 1)] if probs else []
    return Walk(*outputs)


def _place(id_BK: Tensor, id_B: Tensor) -> Tensor:
    """The column of an id among a row's, int32 [B]."""
    column_1K = id_BK.net.constant(np.arange(id_BK.shape[1])[None], "int32")
    here_BK = id_BK.equals(ops.reshape(id_B, (0, 1)))
    return ops.reduce(ops.select(here_BK, column_1K, 0), "SUM", 1, keep=False)


def plugged(
    run: Runs, logits_BJV, projected_BJA, anchor_B, pred_CA, succ_VA, *others, k: int, given: Sequence[str] = ()
) -> tuple:
    """Three launches: see `reference`."""
    if k > CANDIDATES:
        raise NoPlugin(f"selector_walk: {k} candidates, and the kernels compare at most {CANDIDATES}")
    other = dict(zip(given, others, strict=True))
    drafts, vocab = run.shape(logits_BJV)[1:]
    logits_NV = run.reshape(logits_BJV, (-1, vocab))
    (maximum_NG,) = run(MAXIMA, logits_NV)
    chosen = run(CHOICE, logits_NV, maximum_NG, k=k)
    candidate_BJK, unary_BJK = (run.reshape(x_NK, (-1, drafts, k)) for x_NK in chosen)
    walk = WALKS["offset" in other, "uniform" in other]
    optional = (other[name] for name in ("offset", "temperature", "uniform") if name in other)
    return run(walk, candidate_BJK, unary_BJK, projected_BJA, anchor_B, pred_CA, succ_VA, *optional)


MAXIMA = Plugin(
    name="selector_maxima",
    op="selector_walk",
    function="group_maxima_kernel",
    inputs={"logits_NV": "T"},
    outputs={"maximum_NG": "T"},
    sizes={"G": lambda V, WIDTH: cdiv(V, WIDTH)},
    grid=("N", lambda G, GROUPS: cdiv(G, GROUPS)),
    tiles={"": {"GROUPS": 64, "WIDTH": 128, "WARPS": 4}},
)
CHOICE = Plugin(
    name="selector_candidates",
    op="selector_walk",
    function="candidates_kernel",
    inputs={"logits_NV": "T", "maximum_NG": "T"},
    outputs={"candidate_NK": "int32", "unary_NK": "T"},
    attributes={"k": int},
    sizes={"K": "k", "KP": lambda k: pow2(k), "TOP": lambda KP, G, FAN: max(KP, pow2(cdiv(G, FAN)))},
    grid=("N",),
    tiles={"": {"FAN": 8, "PART": 8, "WIDTH": 128, "WARPS": 16}},
)


def _walk(offset: bool, drawn: bool) -> Plugin:
    """The walk with what a reduced vocabulary or drawing adds."""
    chosen = {"candidate_BJK": "int32", "unary_BJK": "T"}
    inputs = chosen | inputs_of(reference, "projected_BJA", "anchor_B", "pred_CA", "succ_VA")
    noise = {"temperature_B": "float32", "uniform_BJ": "float32"}
    absent = [] if offset else ["offset_V"]
    return Plugin(
        name="selector_walk" + "_reduced" * offset + "_drawn" * drawn,
        op="selector_walk",
        function="selector_walk_kernel",
        inputs=inputs | ({"offset_V": "int32"} if offset else {}) | (noise if drawn else {}),
        outputs=OUTPUTS | (DRAWN_OUTPUTS if drawn else {}),
        sizes={"JP": lambda J: pow2(J), "KP": lambda K: pow2(K), "AP": lambda A: pow2(A)},
        absent=tuple(absent if drawn else [*absent, *noise, *DRAWN_OUTPUTS]),
        grid=("B",),
        tiles={"": {"WARPS": 8, "STAGES": 1}},  # it reads ahead by itself
    )


OUTPUTS = {"ids_BJ": "int32", "scores_BJ": "T", "margins_BJ": "float32"}
DRAWN_OUTPUTS = {"targets_BJK": "int32", "probs_BJK": "float32"}
WALKS = {(offset, drawn): _walk(offset, drawn) for offset in (False, True) for drawn in (False, True)}
NOISE = ("temperature_B", "uniform_BJ")
REDUCED = {"V": 32_000}  # tokens of a reduced draft vocabulary
OP = Op(
    name="selector_walk",
    outputs=OUTPUTS | DRAWN_OUTPUTS,
    others={"offset_V": "int32", "temperature_B": "float32", "uniform_BJ": "float32"},
    reference=reference,
    plugged=plugged,
    plugins=(MAXIMA, CHOICE, *WALKS.values()),
    real={"B": "batch", "J": 8, "V": 154_880, "C": 154_880, "A": 256, "K": 16},
    uses={
        "": Use({"k": 16, "given": []}),
        "drawn": Use({"k": 16, "given": ["temperature", "uniform"]}, NOISE),
        "reduced": Use({"k": 16, "given": ["offset"]}, ("offset_V",), REDUCED),
        "reduced, drawn": Use({"k": 16, "given": ["offset", "temperature", "uniform"]}, ("offset_V", *NOISE), REDUCED),
    },
    run_time="B",
)
