"""DSA index scores and top-k: which context rows each token attends to.

score(token, row) = sum over heads of weight[head] * relu(query[head] . key[row]), over the rows
of the token's own sequence up to its own position. The `k` best win, the lowest row first among
equals: scores are ReLU sums with many exact zeros, and an unstable choice would make greedy
output depend on how tokens are packed.

Legend: N tokens, H index heads, D index head size, X pages, P rows a page, G segments, S rows a
segment, M pages of a table, L = M * P context rows, K rows kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import lowest_topk
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, NoPlugin, Op, Plugin, Runs, Use, cdiv, inputs_of, pow2


def reference(
    q_NHD: Compute,
    weight_NH: Float32,
    keys_X1PD: Compute,
    page_table_GM: Int32,
    segment_rows_GS: Int32,
    row_slot_N2: Int32,
    positions_N: Int32,
    *,
    k: int,
    at_once: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache rows int32 [N, K] in context order, and int32 [N, K]: 0 where the context is shorter, else 1. (No bool:
    TensorRT does not promise it of a plugin's outputs.)

    at_once: heads that the native form scores at once; no result depends on it.
    """
    page_size = keys_X1PD.shape[2]
    segment_N = row_slot_N2[:, 0].long()
    position_N1 = positions_N.long().unsqueeze(1)
    longest = int(positions_N.max()) + 1
    if longest <= k:  # everything visible is kept
        column_NK = torch.arange(k).expand(len(q_NHD), k)
    else:
        column_NK = _best_columns(
            q_NHD, weight_NH, keys_X1PD, page_table_GM, segment_rows_GS, segment_N, row_slot_N2, position_N1, longest, k
        )
    page_NK = column_NK // page_size
    first_row_NK = page_table_GM.long()[segment_N.unsqueeze(1), page_NK] * page_size
    rows_NK = first_row_NK + column_NK - page_NK * page_size
    return rows_NK.to(torch.int32), (column_NK <= position_N1).to(torch.int32)


def _best_columns(
    q_NHD, weight_NH, keys_X1PD, page_table_GM, segment_rows_GS, segment_N, row_slot_N2, position_N1, longest, k
):
    """Columns int64 [N, K] in rising order: best score first decides who is in, lowest column breaks ties."""
    page_size = keys_X1PD.shape[2]
    pages = -(-max(longest, k) // page_size)
    length = pages * page_size
    rows = segment_rows_GS.long()
    keys_GLD = keys_X1PD.squeeze(1)[page_table_GM[:, :pages].long()].reshape(len(rows), length, -1)
    q_GSHD = q_NHD[rows]
    # All rows and heads of a segment side by side: a product that broadcast the keys would copy them for every row.
    per_head = torch.matmul(q_GSHD.float().flatten(1, 2), keys_GLD.float().transpose(1, 2)).relu_()
    per_head_GSHL = per_head.unflatten(1, q_GSHD.shape[1:3])
    score_GSL = torch.matmul(weight_NH[rows].unsqueeze(2), per_head_GSHL).squeeze(2)
    score_NL = score_GSL[segment_N, row_slot_N2[:, 1].long()]
    column_L = torch.arange(length)
    score_NL = torch.where(column_L <= position_N1, score_NL, -torch.inf)
    return lowest_topk.reference(score_NL, k=k).long()


@lowers("index_topk")
def native(
    q_NHD: Tensor,
    weight_NH: Tensor,
    keys_X1PD: Tensor,
    page_table_GM: Tensor,
    segment_rows_GS: Tensor,
    row_slot_N2: Tensor,
    positions_N: Tensor,
    *,
    k: int,
    at_once: int,
) -> tuple[Tensor, Tensor]:
    """Cache rows int32 [N, K] in context order, and int32 [N, K]: 0 where the context is shorter, else 1.

    Keys are gathered once a segment. Needs L >= K: the host pads page tables with the null page. at_once: heads scored
    at once, which bounds the largest tensor, float32 [G, S, at_once, L].
    """
    score_NL = _scores(q_NHD, weight_NH, keys_X1PD, page_table_GM, segment_rows_GS, row_slot_N2, at_once)
    column_1L = ops.reshape(ops.arange_like(score_NL, 1), (1, -1))
    position_N1 = ops.reshape(positions_N, (0, 1))
    score_NL = ops.select(column_1L > position_N1, float("-inf"), score_NL)
    column_NK = lowest_topk.native(score_NL, k=k)
    rows_NK = _cache_rows(column_NK, page_table_GM, row_slot_N2, keys_X1PD.shape[2])
    return rows_NK, ops.cast(ops.unary(column_NK > position_N1, "NOT"), "int32")


def _scores(q_NHD, weight_NH, keys_X1PD, page_table_GM, segment_rows_GS, row_slot_N2, at_once) -> Tensor:
    """float32 [N, L]."""
    heads, dim = q_NHD.shape[1:]
    keys_GMPD = ops.gather(keys_X1PD, page_table_GM)
    keys_G1LD = ops.cast(ops.reshape(ops.reshape(keys_GMPD, (0, -1, dim)), (0, 1, -1, dim)), "float32")
    q_GSHD = ops.cast(ops.gather(q_NHD, segment_rows_GS), "float32")
    weight_GSH = ops.gather(weight_NH, segment_rows_GS)
    score_GS1L: Any = None  # a Tensor from the first heads on
    for head in range(0, heads, at_once):
        count = min(at_once, heads - head)
        some_GSHD, weight_GS1H = q_GSHD, weight_GSH
        if count < heads:
            some_GSHD, weight_GS1H = ops.narrow(q_GSHD, 2, head, count), ops.narrow(weight_GSH, 2, head, count)
        per_head_GSHL = ops.relu(ops.matmul(some_GSHD, keys_G1LD, transpose_b=True))
        part_GS1L = ops.matmul(ops.reshape(weight_GS1H, (0, 0, 1, count)), per_head_GSHL)
        score_GS1L = part_GS1L if score_GS1L is None else score_GS1L + part_GS1L
    return ops.reshape(ops.gather_nd(score_GS1L, row_slot_N2), (0, -1))


def _cache_rows(column_NK, page_table_GM, row_slot_N2, page_size) -> Tensor:
    """int32 [N, K]: page * P + offset, the page looked up in the token's own table."""
    segment_N = ops.reshape(ops.narrow(row_slot_N2, 1, 0, 1), (-1,))
    ordinal_NK = column_NK // page_size
    page_NK = ops.gather_elements(ops.gather(page_table_GM, segment_N), ordinal_NK, 1)
    return page_NK * page_size + (column_NK - ordinal_NK * page_size)


def plugged(
    run: Runs,
    q_NHD,
    weight_NH,
    keys_X1PD,
    page_table_GM,
    segment_rows_GS,
    row_slot_N2,
    positions_N,
    *,
    k,
    at_once,
) -> tuple:
    """Four launches: scores, the best of each split of the context, of groups of splits, of all. See `reference`."""
    page_size = run.shape(keys_X1PD)[2]
    lowest_topk.check(k)
    if page_size < 1 or lowest_topk.TILE % page_size:
        raise NoPlugin(f"plugin {INDEX_SPLIT.id}: page size: found {page_size}, expected a power of two")
    (score_NMP,) = run(
        INDEX_SCORES, q_NHD, weight_NH, keys_X1PD, page_table_GM, segment_rows_GS, row_slot_N2, positions_N
    )
    lists = run(INDEX_SPLIT, score_NMP, positions_N, k=k)
    lists = run(lowest_topk.TOPK_MERGE, *lists, k=k)
    return run(INDEX_ROWS, *lists, page_table_GM, row_slot_N2, k=k, page_size=page_size)


INDEX_SCORES = Plugin(
    name="index_scores",
    op="index_topk",
    function="scores_kernel",
    inputs=inputs_of(reference),
    outputs={"score_NMP": "float32"},
    sizes={"HP": lambda H: max(8, pow2(H)), "DP": lambda D: max(16, pow2(D))},
    scalars=("S", "M"),
    grid=(lambda M, P, TILE: cdiv(M * P, TILE), "G"),
    # SM100's products want eight more bytes of shared memory than two slots leave.
    tiles={
        "": {"TILE": 128, "SLOTS": 1, "CHUNK": 16, "WARPS": 8, "STAGES": 1},
        "SM90": {"SLOTS": 2},
    },
)
INDEX_SPLIT = replace(
    lowest_topk.TOPK_SPLIT,
    name="index_split",
    inputs={"score_NMP": "float32", "position_N": "int32"},
    absent=(),
)
INDEX_ROWS = Plugin(
    name="index_rows",
    op="index_topk",
    function="rows_kernel",
    inputs=lowest_topk.LISTS | inputs_of(reference, "page_table_GM", "row_slot_N2"),
    outputs={"rows_NK": "int32", "visible_NK": "int32"},
    attributes={"k": int, "page_size": int},
    sizes={"KP": lambda K: pow2(K), "P": "page_size"},
    scalars=("Y", "M"),
    grid=("N",),
    tiles={"": {"WARPS": 8}},
)
OP = Op(
    name="index_topk",
    outputs=INDEX_ROWS.outputs,
    reference=reference,
    plugged=plugged,
    plugins=(INDEX_SCORES, INDEX_SPLIT, lowest_topk.TOPK_MERGE, INDEX_ROWS),
    real={
        "N": lambda batch: 9 * batch,
        "H": 32,
        "D": 128,
        "G": "batch",
        "S": 9,
        "M": 2048,
        "X": lambda batch, M: batch * M + 1,
        "P": 64,
        "K": 2048,
    },
    uses={
        "": Use({"k": 2048, "at_once": 32}),
        "a million tokens": Use({"k": 2048, "at_once": 32}, sizes={"M": 16384}),
    },
    run_time="NXGSM",
)
