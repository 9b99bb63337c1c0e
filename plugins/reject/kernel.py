"""Rejection sampling (`glmspec.plugins.reject`), after the least logits and the statistics of `sample`.

One program a block judges its drafts and draws its last token. For that it needs p and q at few places: of drafts, and
of candidates, since the sum of max(c p - q, 0) over the vocabulary is c less the sum of min(c p, q) over candidates.
Where q is the whole vocabulary that sum takes a pass over both, by all programs there may be, in between.

Legend: R rows, V vocabulary, B blocks, Q most rows of a block, S splits of a row, Z rows of q, K candidates; q, s and k
are Q, S and K, padded; c columns of a split, x any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.sample.kernel import passing, row_probs, weight, within

_TINY = tl.constexpr(2.0**-126)  # the least normal float32: Triton takes a lesser number for a float64
_NOTHING = tl.constexpr(1e-6)  # a mass of less may be rounding


@triton.jit
def chances_kernel(
    logits_RV, temperature_R, bound_R, largest_RS, sum_RS, first_RS, draft_R, q_row_R, row_BQ, count_B, accept_R,
    block_B, q_ZK, weight_BQ, largest_BQ, total_BQ, first_BQ, V: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    Q: tl.constexpr, QP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """For `masses`: w of every column of a block whose sum of max(w p - q, 0) is needed (else 0), and p's law there."""
    block = tl.program_id(0)
    column_q, here_q, row_q, drafted_q, q_row_q = _block(row_BQ, count_B, q_row_R, block, Q, QP)
    probs = _probs(temperature_R, bound_R, largest_RS, sum_RS, first_RS, row_q, here_q, V, S, SP)
    draft_q = tl.load(draft_R + row_q, mask=drafted_q, other=0)
    chosen_q = tl.load(q_ZK + q_row_q.to(tl.int64) * K + draft_q, mask=drafted_q, other=0.0)
    ratio_q = _ratio(logits_RV, probs, row_q, draft_q, drafted_q, chosen_q, V)
    if tl.load(block_B + block) > 0:
        weight_q = _block_chances(ratio_q, column_q, Q)
    else:
        stands_q = tl.load(accept_R + row_q, mask=drafted_q, other=1.0) < ratio_q
        weight_q = tl.where(column_q == _leading(stands_q & drafted_q, column_q, QP), 1.0, 0.0)
    at_q = block * Q + column_q
    _, _, largest_q, total_q, first_q = probs
    tl.store(weight_BQ + at_q, tl.where(drafted_q, weight_q, 0.0), mask=here_q)
    tl.store(largest_BQ + at_q, largest_q, mask=here_q)
    tl.store(total_BQ + at_q, total_q, mask=here_q)
    tl.store(first_BQ + at_q, first_q, mask=here_q)


@triton.jit
def masses_kernel(
    logits_RV, temperature_R, bound_R, q_row_R, row_BQ, q_ZK, weight_BQ, largest_BQ, total_BQ, first_BQ, mass_BQS,
    V: tl.constexpr, S: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The sum of max(w p - q, 0) over one split of one column of a block; 0 where w is."""
    split, at = tl.program_id(0), tl.program_id(2).to(tl.int64) * Q + tl.program_id(1)
    factor, mass = tl.load(weight_BQ + at), 0.0
    if factor > 0:
        row = tl.load(row_BQ + at).to(tl.int64)
        column_c = split * SPLIT + tl.arange(0, SPLIT)
        there_c = column_c < V
        logit_c = tl.load(logits_RV + row * V + column_c, mask=there_c, other=float("-inf")).to(tl.float32)
        q_row = tl.load(q_row_R + row).to(tl.int64)
        q_c = tl.load(q_ZK + q_row * K + column_c, mask=there_c, other=0.0)
        rate, bound = _rate(tl.load(temperature_R + row)), tl.load(bound_R + row)
        probs = rate, bound, tl.load(largest_BQ + at), tl.load(total_BQ + at), tl.load(first_BQ + at)
        mass = tl.sum(tl.maximum(factor * _chance(probs, logit_c, column_c, V) - q_c, 0.0), 0)
    tl.store(mass_BQS + at * S + split, mass)


@triton.jit
def resample_kernel(
    logits_RV, temperature_R, bound_R, largest_RS, sum_RS, first_RS, draft_R, q_row_R, row_BQ, count_B, accept_R,
    last_B, block_B, q_ZK, q_ids_ZK, mass_BQS, accepted_B, tokens_BQ, V: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, Q: tl.constexpr, QP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A block's verdict and tokens. q_ids: of candidates. mass: of a q that is the whole vocabulary."""
    block = tl.program_id(0)
    count = tl.load(count_B + block)
    column_q, here_q, row_q, drafted_q, q_row_q = _block(row_BQ, count_B, q_row_R, block, Q, QP)
    probs = _probs(temperature_R, bound_R, largest_RS, sum_RS, first_RS, row_q, here_q, V, S, SP)
    draft_q = tl.load(draft_R + row_q, mask=here_q, other=0)
    if q_ids_ZK is None:
        chosen_q = tl.load(q_ZK + q_row_q.to(tl.int64) * K + draft_q, mask=drafted_q, other=0.0)
    else:
        k_1k = tl.arange(0, KP)[None, :]
        at_qk, there_qk = q_row_q[:, None].to(tl.int64) * K + k_1k, drafted_q[:, None] & (k_1k < K)
        q_qk = tl.load(q_ZK + at_qk, mask=there_qk, other=0.0)
        id_qk = tl.load(q_ids_ZK + at_qk, mask=there_qk, other=0)
        chosen_q = tl.sum(tl.where(there_qk & (id_qk == draft_q[:, None]), q_qk, 0.0), 1)
    ratio_q = _ratio(logits_RV, probs, row_q, draft_q, drafted_q, chosen_q, V)
    stands_q = tl.load(accept_R + row_q, mask=drafted_q, other=1.0) < ratio_q
    accepted, factor = _leading(stands_q & drafted_q, column_q, QP), 1.0
    if tl.load(block_B + block) > 0:
        chance_q = _block_chances(ratio_q, column_q, Q)
        if q_ids_ZK is None:
            mass_q = _masses(mass_BQS, block * Q + column_q, here_q, S, SP)
        else:
            at_qk = row_q[:, None].to(tl.int64) * V + id_qk
            logit_qk = tl.load(logits_RV + at_qk, mask=there_qk, other=float("-inf")).to(tl.float32)
            p_qk = _chance(_by_candidate(probs), logit_qk, id_qk, V)
            mass_q = tl.maximum(chance_q - tl.sum(tl.minimum(chance_q[:, None] * p_qk, q_qk), 1), 0.0)
        # A column tells whether the draft of the one before it stands.
        row_before_q = tl.load(row_BQ + block * Q + column_q - 1, mask=here_q & (column_q > 0), other=0)
        u_q = tl.load(accept_R + row_before_q, mask=here_q & (column_q > 0), other=1.0)
        accepted = _block_accepted(chance_q, mass_q, u_q, column_q, count)
        factor = tl.sum(tl.where(column_q == accepted, chance_q, 0.0), 0)
    token = _last(
        logits_RV, temperature_R, bound_R, largest_RS, sum_RS, first_RS, q_row_R, row_BQ, q_ZK, q_ids_ZK, mass_BQS,
        block * Q + accepted, accepted < count, factor, tl.load(last_B + block), V, S, SP, K, KP, SPLIT,
    )  # fmt: skip
    tl.store(accepted_B + block, accepted)
    tl.store(tokens_BQ + block * Q + column_q, tl.where(column_q == accepted, token, draft_q), mask=here_q)


@triton.jit
def _block(row_BQ, count_B, q_row_R, block, Q: tl.constexpr, QP: tl.constexpr):
    """A block's columns: which are there, their rows, which have a draft, and the rows of its q."""
    column_q = tl.arange(0, QP)
    here_q = column_q < Q
    row_q = tl.load(row_BQ + block * Q + column_q, mask=here_q, other=0)
    drafted_q = here_q & (column_q < tl.load(count_B + block))
    return column_q, here_q, row_q, drafted_q, tl.load(q_row_R + row_q, mask=drafted_q, other=0)


@triton.jit
def _probs(
    temperature_R, bound_R, largest_RS, sum_RS, first_RS, row_q, here_q, V: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    """The laws of some rows: rate, least logit that stays, largest logit, sum of weights, the lowest argmax of a
    greedy row (else V)."""
    split_1s = tl.arange(0, SP)[None, :]
    at_qs, there_qs = row_q[:, None].to(tl.int64) * S + split_1s, here_q[:, None] & (split_1s < S)
    largest_qs = tl.load(largest_RS + at_qs, mask=there_qs, other=-1e38)
    first_qs = tl.load(first_RS + at_qs, mask=there_qs, other=V)
    rate_q = _rate(tl.load(temperature_R + row_q, mask=here_q, other=1.0))
    largest_q = tl.max(largest_qs, 1)
    first_q = tl.min(tl.where(largest_qs == largest_q[:, None], first_qs, V), 1)
    sum_qs = tl.load(sum_RS + at_qs, mask=there_qs, other=0.0)
    total_q = tl.sum(sum_qs * tl.exp2((largest_qs - largest_q[:, None]) * rate_q[:, None]), 1)
    total_q = tl.where(total_q > 0, total_q, 1.0)  # greedy rows and those beyond the block have none
    return rate_q, tl.load(bound_R + row_q, mask=here_q, other=0.0), largest_q, total_q, first_q


@triton.jit
def _rate(temperature_x):
    return tl.div_rn(1.4426950408889634, tl.where(temperature_x > 0, temperature_x, 1.0))


@triton.jit
def _chance(probs, logit_x, token_x, V: tl.constexpr):
    """p of tokens."""
    rate_x, bound_x, largest_x, total_x, first_x = probs
    p_x = weight(logit_x, rate_x, bound_x, largest_x) / total_x
    return tl.where(first_x < V, tl.where(token_x == first_x, 1.0, 0.0), p_x)


@triton.jit
def _ratio(logits_RV, probs, row_q, draft_q, drafted_q, chosen_q, V: tl.constexpr):
    """p / q of drafts. chosen: their q."""
    at_q = row_q.to(tl.int64) * V + draft_q
    logit_q = tl.load(logits_RV + at_q, mask=drafted_q, other=float("-inf")).to(tl.float32)
    return _chance(probs, logit_q, draft_q, V) / tl.maximum(chosen_q, _TINY)


@triton.jit
def _leading(stands_q, column_q, QP: tl.constexpr):
    """How many stand before the first that does not; the last column has no draft, so there is one."""
    return tl.min(tl.where(stands_q, QP, column_q), 0)


@triton.jit
def _block_chances(ratio_q, column_q, Q: tl.constexpr):
    """c of block verification: 1, then min(c ratio, 1) with the c and the ratio of the column before."""
    chance_q, chance = tl.where(column_q == 0, 1.0, 0.0), 1.0
    for column in range(1, Q):
        chance = tl.minimum(chance * tl.sum(tl.where(column_q == column - 1, ratio_q, 0.0), 0), 1.0)
        chance_q = tl.where(column_q == column, chance, chance_q)
    return chance_q


@triton.jit
def _block_accepted(chance_q, mass_q, u_q, column_q, count):
    """How many drafts stand by block verification."""
    share_q = mass_q / tl.maximum(mass_q + 1.0 - chance_q, _TINY)
    taken_q = (column_q <= count) & (u_q < tl.where(column_q == count, chance_q, share_q))
    return tl.max(tl.where(taken_q, column_q, 0), 0)


@triton.jit
def _by_candidate(probs_q):
    """[q] -> [q, 1]."""
    rate_q, bound_q, largest_q, total_q, first_q = probs_q
    return rate_q[:, None], bound_q[:, None], largest_q[:, None], total_q[:, None], first_q[:, None]


@triton.jit
def _masses(mass_BQS, at_q, here_q, S: tl.constexpr, SP: tl.constexpr):
    split_1s = tl.arange(0, SP)[None, :]
    at_qs, there_qs = at_q[:, None].to(tl.int64) * S + split_1s, here_q[:, None] & (split_1s < S)
    return tl.sum(tl.load(mass_BQS + at_qs, mask=there_qs, other=0.0), 1)


@triton.jit
def _last(
    logits_RV, temperature_R, bound_R, largest_RS, sum_RS, first_RS, q_row_R, row_BQ, q_ZK, q_ids_ZK, mass_BQS, at,
    drafted, factor, u, V: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The token drawn at one place of a block: from max(factor p - q, 0) after a draft that fell, or else from p."""
    row = tl.load(row_BQ + at).to(tl.int64)
    q_row = tl.load(q_row_R + row).to(tl.int64)
    split_s = tl.arange(0, SP)
    rate, largest, first, part_s = row_probs(temperature_R, largest_RS, sum_RS, first_RS, row, split_s, V, S)
    part_s = tl.where(first < V, tl.where(split_s == first // SPLIT, 1.0, 0.0), part_s)
    total = tl.sum(part_s, 0)
    probs = rate, tl.load(bound_R + row), largest, total, first
    if q_ids_ZK is None:
        rest_s = tl.load(mass_BQS + at.to(tl.int64) * S + split_s, mask=split_s < tl.where(drafted, S, 0), other=0.0)
    else:
        k_k = tl.arange(0, KP)
        there_k = k_k < tl.where(drafted, K, 0)
        id_k = tl.load(q_ids_ZK + q_row * K + k_k, mask=there_k, other=0)
        q_k = tl.load(q_ZK + q_row * K + k_k, mask=there_k, other=0.0)
        logit_k = tl.load(logits_RV + row * V + id_k, mask=there_k, other=float("-inf")).to(tl.float32)
        shared_k = tl.minimum(factor * _chance(probs, logit_k, id_k, V), q_k)
        shared_sk = tl.where((id_k // SPLIT)[None, :] == split_s[:, None], shared_k[None, :], 0.0)
        rest_s = tl.maximum(factor / total * part_s - tl.sum(shared_sk, 1), 0.0)
    from_rest = drafted & (tl.sum(rest_s, 0) > _NOTHING)
    factor = tl.where(from_rest, factor, 1.0)
    split, left = passing(tl.where(from_rest, rest_s, part_s / total), split_s, u)
    column_c = tl.arange(0, SPLIT)
    token, tries = -1, 0
    while (token < 0) & (tries < S):  # more than one where rounding left a split that has nothing
        here_c = split * SPLIT + column_c
        logit_c = tl.load(logits_RV + row * V + here_c, mask=here_c < V, other=float("-inf")).to(tl.float32)
        rest_c = factor * _chance(probs, logit_c, here_c, V)
        if q_ids_ZK is None:
            rest_c -= tl.load(q_ZK + q_row * K + here_c, mask=here_c < tl.where(from_rest, V, 0), other=0.0)
        else:
            for k in range(K):
                q = tl.load(q_ZK + q_row * K + k, mask=from_rest, other=0.0)  # where no draft is it may be NaN
                rest_c -= tl.where(here_c == tl.load(q_ids_ZK + q_row * K + k), q, 0.0)
        token = within(tl.maximum(rest_c, 0.0), here_c, left, V)
        split, left, tries = (split + 1) % S, 0.0, tries + 1
    return tl.maximum(token, 0)  # a token, also of a row that has none
