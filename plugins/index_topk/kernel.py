"""DSA index scores and the cache rows of the best (`glmspec.plugins.index_topk`).

Scores: one program a tile of a segment's context, whose keys it reads once for all rows of the segment. Scores beyond a
row's position are not written, and `lowest_topk.split_kernel` does not look at them.

Legend: N tokens, H index heads, HP padded, D index head size, DP padded, X pages, P rows a page, G segments, S rows a
segment, M pages of a table, K rows kept, Y lists of a row; l columns of a tile, s some slots (rows of a segment), r
their heads, one slot's after the other's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.lowest_topk.kernel import best_of_lists, kept, listed, places


@triton.jit
def tokens(segment_rows_GS, row_slot_N2, positions_N, segment, slot_s, S):
    """The tokens in some slots of a segment, int64, and their positions: -1 where a slot holds none."""
    row_s = tl.load(segment_rows_GS + segment * S + slot_s, mask=slot_s < S, other=0).to(tl.int64)
    # What fills a segment up is a token of another slot.
    own_s = (tl.load(row_slot_N2 + row_s * 2) == segment) & (tl.load(row_slot_N2 + row_s * 2 + 1) == slot_s)
    position_s = tl.load(positions_N + row_s)
    return row_s, tl.where(own_s & (slot_s < S), position_s, -1)


@triton.jit
def scores_kernel(
    q_NHD, weight_NH, keys_X1PD, page_table_GM, segment_rows_GS, row_slot_N2, positions_N,
    S, M,
    score_NMP,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """float32 [N, M, P]: sum over heads of weight * relu(q . key), where a column is not beyond the position."""
    first, segment = tl.program_id(0) * TILE, tl.program_id(1)
    furthest = tl.full([16], -1, tl.int32)
    for at in range(0, S, 16):
        _, position_s = tokens(segment_rows_GS, row_slot_N2, positions_N, segment, at + tl.arange(0, 16), S)
        furthest = tl.maximum(furthest, position_s)
    if tl.max(furthest, 0) >= first:
        whole: tl.constexpr = q_NHD.dtype.element_ty.primitive_bitwidth <= 16
        column_l, d = first + tl.arange(0, TILE), tl.arange(0, DP)
        page_l = tl.load(page_table_GM + segment * M + column_l // P, mask=column_l < M * P, other=0).to(tl.int64)
        key_l = keys_X1PD + (page_l * P + column_l % P) * D
        if whole:
            key_ld = tl.load(key_l[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
        r = tl.arange(0, SLOTS * HP)
        real_r = r % HP < H
        row_r, _ = tokens(segment_rows_GS, row_slot_N2, positions_N, segment, r // HP, S)
        q_r = q_NHD + (row_r * H + r % HP) * D
        if whole:
            q_rd = tl.load(q_r[:, None] + d[None, :], mask=real_r[:, None] & (d[None, :] < D), other=0.0)
        for at in range(0, S, SLOTS):
            weight_r = tl.load(weight_NH + row_r * H + r % HP, mask=real_r, other=0.0)
            # The next queries are on their way while these are multiplied.
            row_r, _ = tokens(segment_rows_GS, row_slot_N2, positions_N, segment, at + SLOTS + r // HP, S)
            next_r = q_NHD + (row_r * H + r % HP) * D
            if whole:
                next_rd = tl.load(next_r[:, None] + d[None, :], mask=real_r[:, None] & (d[None, :] < D), other=0.0)
                each_lr = tl.dot(key_ld, tl.trans(q_rd))
                q_rd = next_rd
            else:  # float32 has no room for a whole tile of keys
                each_lr = chunked(key_l, q_r, real_r, D, DP, CHUNK)
            q_r = next_r
            each_lr = tl.maximum(each_lr, 0.0) * weight_r[None, :]
            score_ls = tl.sum(tl.reshape(each_lr, [TILE, SLOTS, HP]), 2)
            slot_s = at + tl.arange(0, SLOTS)
            row_s, position_s = tokens(segment_rows_GS, row_slot_N2, positions_N, segment, slot_s, S)
            at_ls = row_s[None, :] * (M * P) + column_l[:, None]
            tl.store(score_NMP + at_ls, score_ls, mask=column_l[:, None] <= position_s[None, :])


@triton.jit
def chunked(key_l, q_r, real_r, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr):
    """Keys times queries, some of their columns at a time."""
    each_lr = tl.zeros([key_l.shape[0], q_r.shape[0]], tl.float32)
    for first in range(0, DP, CHUNK):
        d = first + tl.arange(0, CHUNK)
        key_ld = tl.load(key_l[:, None] + d[None, :], mask=d[None, :] < D, other=0.0)
        q_rd = tl.load(q_r[:, None] + d[None, :], mask=real_r[:, None] & (d[None, :] < D), other=0.0)
        each_lr = tl.dot(key_ld, tl.trans(q_rd), each_lr, input_precision="ieee")
    return each_lr


@triton.jit
def rows_kernel(
    key_NYK,
    column_NYK,
    count_NY,
    page_table_GM,
    row_slot_N2,
    Y,
    M,
    rows_NK,
    visible_NK,
    K: tl.constexpr,
    KP: tl.constexpr,
    P: tl.constexpr,
):
    """The best of all lists of a token as cache rows, int32 [N, K], in context order. Where they are fewer, the rows
    that follow in the context, of which int32 [N, K] says 0, they are not visible."""
    token = tl.program_id(0).to(tl.int64)
    key_YK, column_YK, count_Y = key_NYK + token * Y * K, column_NYK + token * Y * K, count_NY + token * Y
    table_M = page_table_GM + tl.load(row_slot_N2 + token * 2) * M
    least, room, total = best_of_lists(key_YK, count_Y, Y, K, KP)
    slot_K = tl.arange(0, KP)
    start = token * K
    for at in range(0, Y):
        key_K, here_K = listed(key_YK, at, tl.load(count_Y + at), K, KP)
        keep_K, place_K = places(key_K, here_K, least, room)
        column_K = tl.load(column_YK + at * K + slot_K, mask=keep_K, other=0)
        page_K = tl.load(table_M + column_K // P, mask=keep_K, other=0)
        tl.store(rows_NK + start + place_K, page_K * P + column_K % P, mask=keep_K)
        start, room = start + kept(keep_K), room - kept(keep_K & (key_K == least))
    beyond_K = (slot_K >= total) & (slot_K < K)
    page_K = tl.load(table_M + slot_K // P, mask=beyond_K, other=0)
    tl.store(rows_NK + token * K + slot_K, page_K * P + slot_K % P, mask=beyond_K)
    tl.store(visible_NK + token * K + slot_K, (slot_K < total).to(tl.int32), mask=slot_K < K)
