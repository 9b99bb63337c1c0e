"""The k largest of each row, where the lowest index wins a tie.

TensorRT's TopK leaves ties undefined. Here the k-th value is a threshold: everything above it is in, and of the
columns equal to it as many of the lowest as there is room for.

Legend: N rows, L columns, K kept.
"""

from __future__ import annotations

import torch

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.plugins.spec import Op


def reference(score_NL: torch.Tensor, *, k: int) -> torch.Tensor:
    """float32 [N, L] -> columns int32 [N, K] in rising order."""
    length = score_NL.shape[1]
    column_L = torch.arange(length)
    # One integer that sorts by score, then by lowest column: a float's bits, made monotonic, above the column.
    bits_NL = (score_NL + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits_NL = torch.where(bits_NL < 0, bits_NL ^ 0x7FFFFFFF, bits_NL).long()
    order_NK = torch.topk((bits_NL << 32) + (length - 1 - column_L), k, sorted=False).values
    return (length - 1 - (order_NK & 0xFFFFFFFF)).sort(-1).values.to(torch.int32)


def native(score_NL: Tensor, *, k: int) -> Tensor:
    """float32 [N, L] -> columns int32 [N, K] in rising order. Needs L >= K."""
    with score_NL.net.region("lowest_topk", [score_NL], {"k": k}) as outputs:
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
        outputs.append(column_NK)
    return outputs[0]


OP = Op(
    name="lowest_topk",
    inputs={"score_NL": "float32"},
    outputs={"column_NK": "int32"},
    attributes={"k": int},
    reference=reference,
    native="part of index_topk and of the selector",
)
