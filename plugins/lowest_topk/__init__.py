"""The k largest of each row, where the lowest index wins a tie.

TensorRT's TopK leaves ties undefined. Here the k-th value is a threshold: everything above it is in, and of the
columns equal to it as many of the lowest as there is room for.

Legend: N rows, L columns, K kept, M x P the columns of a long row (P divides them, so that loads are wide), Z splits, Y
groups of splits.
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Float32, NoPlugin, Op, Plugin, Runs, Use, cdiv, inputs_of, pow2


def reference(score_NL: Float32, *, k: int) -> torch.Tensor:
    """float32 [N, L] -> columns int32 [N, K] in rising order."""
    length = score_NL.shape[1]
    column_L = torch.arange(length)
    # One integer that sorts by score, then by lowest column: a float's bits, made monotonic, above the column.
    bits_NL = (score_NL + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits_NL = torch.where(bits_NL < 0, bits_NL ^ 0x7FFFFFFF, bits_NL).long()
    order_NK = torch.topk((bits_NL << 32) + (length - 1 - column_L), k, sorted=False).values
    return (length - 1 - (order_NK & 0xFFFFFFFF)).sort(-1).values.to(torch.int32)


@lowers("lowest_topk")
def native(score_NL: Tensor, *, k: int) -> Tensor:
    """float32 [N, L] -> columns int32 [N, K] in rising order. Needs L >= K."""
    best_NK, _ = ops.topk(score_NL, k, 1)
    threshold_N1 = ops.narrow(best_NK, 1, k - 1, 1)
    above_NL = score_NL > threshold_N1
    tie_NL = score_NL.equals(threshold_N1)
    taken_N1 = ops.reduce(ops.cast(above_NL, "int32"), "SUM", 1)
    tie_rank_NL = ops.cumsum(ops.cast(tie_NL, "int32"), 1)
    fits_NL = ops.unary(tie_rank_NL > (k - taken_N1), "NOT")
    keep_NL = above_NL | (tie_NL & fits_NL)
    # Columns are distinct, so this second TopK has no ties; float32 holds every column below 2^24.
    falling_1L = ops.cast(ops.reshape(ops.arange_like(score_NL, 1), (1, -1)), "float32") * -1.0
    _, column_NK = ops.topk(ops.select(keep_NL, falling_1L, float("-inf")), k, 1)
    return column_NK


def plugged(run: Runs, score_NL, *, k) -> tuple:
    """One launch for short rows, three for long ones: see `reference`."""
    length = run.shape(score_NL)[1]
    if 0 < length <= SHORT:
        return run(TOPK_SHORT, score_NL, k=k)
    check(k)
    wide = next(by for by in (16, 8, 4, 2, 1) if length % by == 0) if length > 0 else 1
    lists = run(TOPK_SPLIT, run.reshape(score_NL, (0, -1, wide)), k=k)
    return run(TOPK_LAST, *run(TOPK_MERGE, *lists, k=k), k=k)


def check(k: int) -> None:
    """Raises `NoPlugin` when two lists do not fit into a tile."""
    if k > TILE // 2:
        raise NoPlugin(f"plugin {TOPK_SPLIT.id}: k: found {k}, expected at most {TILE // 2}")


SHORT = 1024  # columns of a row that one warp holds
TILE = 16384  # columns that one program holds, 32 a thread
_LISTS = {"key_NZK": "int32", "column_NZK": "int32", "count_NZ": "int32"}
LISTS = {"key_NYK": "int32", "column_NYK": "int32", "count_NY": "int32"}
TOPK_SHORT = Plugin(
    name="topk_short",
    op="lowest_topk",
    function="short_kernel",
    inputs=inputs_of(reference),
    outputs={"column_NK": "int32"},
    attributes={"k": int},
    sizes={"K": "k", "T": lambda L: pow2(L)},
    grid=("N",),
    tiles={"": {"WARPS": 1}},
)
TOPK_SPLIT = Plugin(
    name="topk_split",
    op="lowest_topk",
    function="split_kernel",
    inputs={"score_NMP": "float32"},
    absent=("position_N",),
    outputs=_LISTS,
    attributes={"k": int},
    sizes={"K": "k", "Z": lambda M, P, TILE: cdiv(M * P, TILE)},
    scalars=("M",),
    grid=("N", "Z"),
    tiles={"": {"TILE": TILE, "PART": 2048, "WARPS": 16}},
)
TOPK_MERGE = Plugin(
    name="topk_merge",
    op="lowest_topk",
    function="merge_kernel",
    inputs=_LISTS,
    outputs=LISTS,
    attributes={"k": int},
    sizes={"KP": lambda K: pow2(K), "FAN": lambda TILE, KP: TILE // KP, "Y": lambda Z, FAN: cdiv(Z, FAN)},
    scalars=("Z",),
    grid=("N", "Y"),
    tiles={"": {"TILE": TILE, "WARPS": 16}},
)
TOPK_LAST = Plugin(
    name="topk_last",
    op="lowest_topk",
    function="last_kernel",
    inputs=LISTS,
    outputs={"column_NK": "int32"},
    attributes={"k": int},
    sizes={"KP": lambda K: pow2(K)},
    scalars=("Y",),
    grid=("N",),
    tiles={"": {"WARPS": 8}},
)
OP = Op(
    name="lowest_topk",
    outputs={"column_NK": "int32"},
    reference=reference,
    plugged=plugged,
    plugins=(TOPK_SHORT, TOPK_SPLIT, TOPK_MERGE, TOPK_LAST),
    real={"N": lambda batch: 9 * batch, "L": 256, "K": 8},  # the router's experts
    uses={
        "": Use({"k": 8}),
        "context": Use({"k": 2048}, sizes={"L": 131_072, "K": 2048}),  # as `index_topk` does after its scores
    },
)
