"""Absorbed MLA over each token's selected cache rows.

Queries are already in the latent space: out = softmax(q . rows * scale) rows[:, value_start:].

Legend: N tokens, H heads, D latent row [rotary key | compressed K/V], V = D - value_start
compressed columns, K rows.
"""

from __future__ import annotations

import torch

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.plugins.spec import Op


def reference(
    q_NHD: torch.Tensor,
    cache_X1PD: torch.Tensor,
    rows_NK: torch.Tensor,
    visible_NK: torch.Tensor,
    *,
    scale: float,
    value_start: int,
) -> torch.Tensor:
    """[N, H, V] in q's dtype; softmax in float32."""
    size = cache_X1PD.shape[-1]
    rows_NKD = torch.nn.functional.embedding(rows_NK, cache_X1PD.view(-1, size))
    score_NHK = torch.matmul(q_NHD, rows_NKD.transpose(1, 2)).float() * scale
    score_NHK.masked_fill_(~visible_NK.unsqueeze(1), -torch.inf)
    p_NHK = torch.softmax(score_NHK, -1).to(q_NHD.dtype)
    return torch.matmul(p_NHK, rows_NKD)[..., value_start:]


def native(
    q_NHD: Tensor, cache_X1PD: Tensor, rows_NK: Tensor, visible_NK: Tensor, *, scale: float, value_start: int
) -> Tensor:
    """[N, H, V] in q's dtype; softmax in float32."""
    inputs = [q_NHD, cache_X1PD, rows_NK, visible_NK]
    with q_NHD.net.region("sparse_mla", inputs, {"scale": scale, "value_start": value_start}) as outputs:
        size, keep = cache_X1PD.shape[-1], rows_NK.shape[-1]
        rows_NKD = ops.gather(ops.reshape(cache_X1PD, (-1, size)), rows_NK)
        score_NHK = ops.cast(ops.matmul(q_NHD, rows_NKD, transpose_b=True), "float32") * scale
        score_NHK = ops.select(ops.reshape(visible_NK, (0, 1, keep)), score_NHK, float("-inf"))
        p_NHK = ops.cast(ops.softmax(score_NHK, 2), q_NHD.dtype)
        # The whole row is multiplied and sliced after: slicing first would copy every gathered row.
        outputs.append(ops.narrow(ops.matmul(p_NHK, rows_NKD), 2, value_start, size - value_start))
    return outputs[0]


OP = Op(
    name="sparse_mla",
    inputs={"q_NHD": "T", "cache_X1PD": "T", "rows_NK": "int32", "visible_NK": "bool"},
    outputs={"out_NHV": "T"},
    attributes={"scale": float, "value_start": int},
    reference=reference,
    native="to come",
)
