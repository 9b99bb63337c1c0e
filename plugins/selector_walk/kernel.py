"""The selector walk (`glmspec.plugins.selector_walk`): the largest logit of every group of columns, from those each
row's K candidates, and with them the walk.

Why groups: of a row's K best (the lowest column wins a tie) each lies in one of the K groups with the largest maxima
(the lowest group wins a tie), as K groups ahead of its own would hold K better ones. So the logits are read once, and
what follows reads K groups of them.

Legend: N rows, L columns of one, B blocks, J drafts, V draft vocabulary, C target vocabulary, G groups, K candidates, A
rank of the selector; j drafts, k candidates and a columns of a codebook, padded; p parents and n children of
them in the tree of columns, or n groups; w values of one; x any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import as_read, as_stored

NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def group_maxima_kernel(
    logits_NV, maximum_NG, V: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """The largest of each WIDTH columns. One program some groups of one row."""
    row = tl.program_id(0).to(tl.int64)  # rows x columns may pass 2^31
    group_n = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column_nw = group_n[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x_nw = tl.load(logits_NV + row * V + column_nw, mask=column_nw < V, other=float("-inf")).to(tl.float32)
    tl.store(maximum_NG + row * G + group_n, as_stored(tl.max(x_nw, 1), maximum_NG), mask=group_n < G)


@triton.jit
def best_children(
    x_L,
    parent_p,
    L: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PARENTS: tl.constexpr,
    LANES: tl.constexpr,
    CHILDREN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The K best of the first PARENTS parents' children, int32 [KP] in rising order; the lowest wins a tie.

    A parent has CHILDREN children, and a child WIDTH values of x, in order; its own is the largest of them. Parents
    are in rising order, on LANES lanes. Places from L on are -inf, and lie behind all others. NaNs lie behind nothing:
    they are chosen, and of what is chosen the lowest K are kept."""
    child_n = tl.reshape(parent_p[:, None] * CHILDREN + tl.arange(0, CHILDREN)[None, :], [LANES * CHILDREN])
    lane_n = tl.arange(0, LANES * CHILDREN)
    place_nw = child_n[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    there_nw = (place_nw < L) & (lane_n < PARENTS * CHILDREN)[:, None]
    x_n = tl.max(tl.load(x_L + place_nw, mask=there_nw, other=float("-inf")).to(tl.float32), 1)
    lower_nn = (x_n[None, :] == x_n[:, None]) & (lane_n[None, :] < lane_n[:, None])
    ahead_n = tl.sum(((x_n[None, :] > x_n[:, None]) | lower_nn).to(tl.int32), 1)
    count_n = tl.cumsum((ahead_n < K).to(tl.int32), 0)
    # The j-th of the chosen stands behind as many lanes as have counted fewer than j.
    at_k = tl.sum((count_n[:, None] <= tl.arange(0, KP)[None, :]).to(tl.int32), 0)
    return tl.gather(child_n, tl.minimum(at_k, LANES * CHILDREN - 1), 0)


@triton.jit
def candidates_kernel(
    logits_NV,
    maximum_NG,
    candidate_NK,
    unary_NK,
    V: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    TOP: tl.constexpr,
    FAN: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The K best columns of each row in rising order, and their values. One program a row goes down a tree: FAN groups
    a branch (there are at most TOP), groups, parts of PART columns, columns."""
    row = tl.program_id(0).to(tl.int64)
    x_V, maximum_G = logits_NV + row * V, maximum_NG + row * G
    root = tl.zeros([1], tl.int32)
    branch_k = best_children(maximum_G, root, G, K, KP, 1, 1, TOP, FAN)
    group_k = best_children(maximum_G, branch_k, G, K, KP, K, KP, FAN, 1)
    part_k = best_children(x_V, group_k, V, K, KP, K, KP, WIDTH // PART, PART)
    column_k = best_children(x_V, part_k, V, K, KP, K, KP, PART, 1)
    column_k = tl.minimum(column_k, V - 1)  # none is beyond: `best_children` finds K in a row, even of NaNs
    slot_k = tl.arange(0, KP)
    unary_k = tl.load(x_V + column_k)
    tl.store(candidate_NK + row * K + slot_k, column_k, mask=slot_k < K)
    tl.store(unary_NK + row * K + slot_k, unary_k, mask=slot_k < K)


@triton.jit
def codes(table_VA, id_k, there_k, A: tl.constexpr, AP: tl.constexpr):
    """Rows of a codebook."""
    column_a = tl.arange(0, AP)
    at_ka = id_k.to(tl.int64)[:, None] * A + column_a[None, :]
    return tl.load(table_VA + at_ka, mask=there_k[:, None] & (column_a < A)[None, :], other=0.0)


@triton.jit
def scores(unary_k, succ_ka, pred_a, projected_a, there_k, pred_CA):
    """Scores of a row's candidates after their predecessor, every step rounded to the codebook's dtype."""
    query_a = as_read(pred_a * projected_a.to(tl.float32), pred_CA)
    edge_k = as_read(tl.sum(succ_ka.to(tl.float32) * query_a[None, :], 1), pred_CA)
    score_k = as_read(unary_k.to(tl.float32) + edge_k, pred_CA)
    # A NaN is as little as -inf: with nothing else the chosen id would be none, whose row lies nowhere.
    return tl.where(there_k & (score_k == score_k), score_k, float("-inf"))


@triton.jit
def second_best(score_k, best, first_k):
    """The second best score, which is the best one where several candidates have that. first: which have it."""
    second = tl.max(tl.where(first_k, float("-inf"), score_k), 0)
    return tl.where(tl.sum(first_k.to(tl.int32), 0) > 1, best, second)


@triton.jit
def probs(score_k, best, target_k, chosen, there_k, temperature):
    """softmax(score / temperature), 0 beyond K; one-hot at the chosen candidate where the temperature is 0."""
    drawn_k = tl.exp((score_k - best) / tl.where(temperature == 0.0, 1.0, temperature))
    drawn_k = drawn_k / tl.sum(drawn_k, 0)
    return tl.where(temperature == 0.0, ((target_k == chosen) & there_k).to(tl.float32), drawn_k)


@triton.jit
def as_targets(id_x, offset_V, there_x):
    """Target ids of draft ids: the offset leads from a reduced vocabulary to the target's."""
    if offset_V is not None:
        id_x += tl.load(offset_V + id_x, mask=there_x, other=0)
    return id_x


@triton.jit
def draw(probs_k, u, KP: tl.constexpr):
    """The first place whose running sum passes u times the whole."""
    slot_k = tl.arange(0, KP)
    sum_k = tl.cumsum(probs_k, 0)
    weighs_k = probs_k > 0.0  # sums round, and must not lead to what has no weight
    at = tl.min(tl.where(weighs_k & (sum_k > u * tl.max(sum_k, 0)), slot_k, KP), 0)
    return tl.minimum(at, tl.max(tl.where(weighs_k, slot_k, 0), 0))


@triton.jit
def selector_walk_kernel(
    candidate_BJK, unary_BJK, projected_BJA, anchor_B, pred_CA, succ_VA, offset_V, temperature_B, uniform_BJ,
    ids_BJ, scores_BJ, margins_BJ, targets_BJK, probs_BJK,
    J: tl.constexpr, JP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, A: tl.constexpr, AP: tl.constexpr,
):  # fmt: skip
    """The walk over given candidates, one program a block. It stores at its end only, and reads ahead, so that only a
    predecessor's row is waited for."""
    block = tl.program_id(0).to(tl.int64)
    slot_k, column_a, step_j = tl.arange(0, KP), tl.arange(0, AP), tl.arange(0, JP)
    there_k, there_a, there_j = slot_k < K, column_a < A, step_j < J
    there_jk = there_j[:, None] & there_k[None, :]
    candidate_K, unary_K = candidate_BJK + block * J * K, unary_BJK + block * J * K
    projected_A = projected_BJA + block * J * A
    id_k = tl.load(candidate_K + slot_k, mask=there_k, other=0)
    later_k = tl.load(candidate_K + K + slot_k, mask=there_k & (J > 1), other=0)  # of the next row
    unary_k = tl.load(unary_K + slot_k, mask=there_k, other=0.0)
    projected_a = tl.load(projected_A + column_a, mask=there_a, other=0.0)
    succ_ka = codes(succ_VA, id_k, there_k, A, AP)
    ids_j = tl.zeros([JP], tl.int32)
    scores_j = tl.zeros([JP], tl.float32)
    margins_j = tl.zeros([JP], tl.float32)
    probs_jk = tl.zeros([JP, KP], tl.float32)
    previous = tl.load(anchor_B + block).to(tl.int64)
    for step in range(J):
        now_j = step_j == step
        pred_a = tl.load(pred_CA + previous * A + column_a, mask=there_a, other=0.0).to(tl.float32)
        next_ka = codes(succ_VA, later_k, there_k, A, AP)
        ahead_k = (step + 1) * K + slot_k
        next_unary_k = tl.load(unary_K + ahead_k, mask=there_k & (step + 1 < J), other=0.0)
        next_projected_a = tl.load(projected_A + (step + 1) * A + column_a, mask=there_a & (step + 1 < J), other=0.0)
        last_k = tl.load(candidate_K + K + ahead_k, mask=there_k & (step + 2 < J), other=0)
        target_k = as_targets(id_k, offset_V, there_k)
        score_k = scores(unary_k, succ_ka, pred_a, projected_a, there_k, pred_CA)
        best = tl.max(score_k, 0)
        first_k = (score_k == best) & there_k
        chosen = tl.min(tl.where(first_k, target_k, NO_ID), 0)
        if K > 1:
            margins_j = tl.where(now_j, best - second_best(score_k, best, first_k), margins_j)
        if uniform_BJ is not None:
            probs_k = probs(score_k, best, target_k, chosen, there_k, tl.load(temperature_B + block))
            at = draw(probs_k, tl.load(uniform_BJ + block * J + step), KP)
            chosen = tl.sum(tl.where(slot_k == at, target_k, 0), 0)
            probs_jk = tl.where(now_j[:, None], probs_k[None, :], probs_jk)
        ids_j = tl.where(now_j, chosen, ids_j)
        scores_j = tl.where(now_j, best, scores_j)
        previous = chosen.to(tl.int64)
        id_k, later_k, succ_ka, unary_k, projected_a = later_k, last_k, next_ka, next_unary_k, next_projected_a
    tl.store(ids_BJ + block * J + step_j, ids_j, mask=there_j)
    tl.store(scores_BJ + block * J + step_j, as_stored(scores_j, scores_BJ), mask=there_j)
    tl.store(margins_BJ + block * J + step_j, margins_j, mask=there_j)
    if uniform_BJ is not None:
        at_jk = (block * J + step_j)[:, None] * K + slot_k[None, :]
        target_jk = as_targets(tl.load(candidate_BJK + at_jk, mask=there_jk, other=0), offset_V, there_jk)
        tl.store(targets_BJK + at_jk, target_jk, mask=there_jk)
        tl.store(probs_BJK + at_jk, probs_jk, mask=there_jk)
