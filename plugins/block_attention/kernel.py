"""Attention of a drafter's block (`glmspec.plugins.block_attention`): the rows that a block sees, those of its context
and then its own, are divided among programs; `attention_merge` makes one result of theirs.

Legend: B blocks, R rows of a block, H heads, J key/value heads, G = H / J, D head size, X pages, P rows a page, M pages
of a table, Q = R * G queries of a key/value head, S splits; of a program: q queries and d columns (padded to powers of
two), b rows at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def context_seen(anchor, start, M, P: tl.constexpr, window: tl.constexpr, relative: tl.constexpr):
    """The oldest column of the context that any row sees, and how many columns the context has."""
    columns = tl.minimum(anchor - start, M * P)
    oldest = 0
    if window:
        oldest = tl.maximum(anchor - window + (1 if relative else 0) - start, 0)
    return oldest, columns


@triton.jit
def seen(row_q, at_b, there_b, causal: tl.constexpr, window: tl.constexpr, relative: tl.constexpr):
    """Which columns each query sees. row, at: rows of the block, below 0 those of the context."""
    back_qb = row_q[:, None] - at_b[None, :]
    seen_qb = there_b[None, :]
    if causal:
        seen_qb = seen_qb & (back_qb >= 0)
    if window and relative:  # else the window is the same for all rows, and columns outside are not there
        seen_qb = seen_qb & (back_qb < window) & (back_qb > -window)
    return seen_qb


@triton.jit
def with_tile(peak_q, mass_q, sum_qd, score_qb, value_bd):
    """The running softmax of each query with one tile more: its largest score, mass and sum of rows."""
    higher_q = tl.maximum(peak_q, tl.max(score_qb, 1))
    zero_q = tl.where(higher_q == float("-inf"), 0.0, higher_q)  # -inf less -inf would be NaN
    p_qb = tl.exp2(score_qb - zero_q[:, None])
    fade_q = tl.exp2(peak_q - zero_q)
    mass_q = mass_q * fade_q + tl.sum(p_qb, 1)
    sum_qd = tl.dot(p_qb.to(value_bd.dtype), value_bd, sum_qd * fade_q[:, None], input_precision="ieee")
    return higher_q, mass_q, sum_qd


@triton.jit
def split_kernel(
    q_BRHD, k_BRJD, v_BRJD, k_cache_XJPD, v_cache_XJPD, page_table_BM, anchor_B, start_B,
    S, M,
    part_BSRHD, peak_BSRH, mass_BSRH,
    R: tl.constexpr, H: tl.constexpr, J: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
    QP: tl.constexpr, DP: tl.constexpr, scale: tl.constexpr, causal: tl.constexpr, window: tl.constexpr,
    relative: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over one split, unnormalized (see `attention_merge`). One pass over the rows that any of the block's rows
    sees: from the tile in which the window begins to the anchor, then the block's own."""
    block, split = tl.program_id(1), tl.program_id(2)
    groups: tl.constexpr = (R * G + QP - 1) // QP
    kv_head = tl.program_id(0) // groups
    query_q = tl.program_id(0) % groups * QP + tl.arange(0, QP)
    row_q, head_q = query_q // G, kv_head * G + query_q % G
    d, b = tl.arange(0, DP), tl.arange(0, BLOCK)
    mask_qd = (query_q < R * G)[:, None] & (d < D)[None, :]
    of_block_q = row_q * H + head_q
    q_qd = tl.load(q_BRHD + (block * R * H + of_block_q)[:, None] * D + d[None, :], mask=mask_qd, other=0.0)

    anchor = tl.load(anchor_B + block)
    start = 0
    if start_B is not None:
        start = tl.load(start_B + block)
    oldest, columns = context_seen(anchor, start, M, P, window, relative)
    first = oldest // BLOCK
    own = tl.maximum((columns + BLOCK - 1) // BLOCK, first)  # the first tile of the block's own rows
    tiles = own - first + (R + BLOCK - 1) // BLOCK

    peak_q = tl.full([QP], float("-inf"), tl.float32)
    mass_q = tl.zeros([QP], tl.float32)
    sum_qd = tl.zeros([QP, DP], tl.float32)
    for tile in range(first + split * tiles // S, first + (split + 1) * tiles // S):
        # A tile lies in one page, or among the block's own rows.
        is_own = tile >= own
        column = (tile - tl.where(is_own, own, 0)) * BLOCK
        column_b = column + b
        # What no row sees is not read: it may hold anything, and zero times NaN is NaN.
        there_b = (column_b >= tl.where(is_own, 0, oldest)) & (column_b < tl.where(is_own, R, columns))
        page = tl.load(page_table_BM + block * M + column // P, mask=tile < own, other=0).to(tl.int64)
        cached = ((page * J + kv_head) * P + column % P) * D
        owned = ((block * R + column) * J + kv_head).to(tl.int64) * D
        at_bd = b[:, None] * tl.where(is_own, J * D, D) + d[None, :]
        mask_bd = there_b[:, None] & (d < D)[None, :]
        key_bd = tl.load(tl.where(is_own, k_BRJD + owned, k_cache_XJPD + cached) + at_bd, mask=mask_bd, other=0.0)
        value_bd = tl.load(tl.where(is_own, v_BRJD + owned, v_cache_XJPD + cached) + at_bd, mask=mask_bd, other=0.0)
        # A column's row as the block counts them: those of the context stand before its first.
        at_b = tl.where(is_own, column_b, start + column_b - anchor)
        seen_qb = seen(row_q, at_b, there_b, causal, window, relative)
        score_qb = tl.dot(q_qd, tl.trans(key_bd), input_precision="ieee") * (scale * LOG2_E)
        score_qb = tl.where(seen_qb, score_qb, float("-inf"))
        peak_q, mass_q, sum_qd = with_tile(peak_q, mass_q, sum_qd, score_qb, value_bd)
    part_q = (block * S + split).to(tl.int64) * R * H + of_block_q
    tl.store(part_BSRHD + part_q[:, None] * D + d[None, :], sum_qd, mask=mask_qd)
    tl.store(peak_BSRH + part_q, peak_q, mask=query_q < R * G)
    tl.store(mass_BSRH + part_q, mass_q, mask=query_q < R * G)
