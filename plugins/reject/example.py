"""Inputs of `reject` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.sample.example import settings
from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Blocks of Q - 1 drafts and of fewer, drawn from laws near the target's; every other one is verified as a block.
    R is B x Q at least; of every four blocks one is greedy and two are narrowed."""
    blocks, most, rows, columns = sizes["B"], sizes["Q"], sizes["R"], sizes["K"]
    logits_RV = 3 * torch.randn(rows, sizes["V"], generator=g)
    column_Q = torch.arange(most)
    count_B = (most - 1 - torch.arange(blocks) // 4).clamp(min=0)
    row_BQ = torch.arange(blocks).unsqueeze(1) * most + torch.minimum(column_Q, count_B.unsqueeze(1))
    q_row_R, row_Z = torch.arange(rows) % sizes["Z"], torch.arange(sizes["Z"]) % rows
    near_ZV = logits_RV[row_Z] + 0.5 * torch.randn(sizes["Z"], sizes["V"], generator=g)
    ids = []
    if use.optional:
        near_ZV, ids_ZK = near_ZV.topk(columns, dim=1)
        ids = [ids_ZK.to(torch.int32)]
    q_ZK = near_ZV.softmax(-1)
    draft_R = torch.multinomial(q_ZK, 1, generator=g).squeeze(1)[q_row_R]
    if ids:
        draft_R = ids[0][q_row_R, draft_R]
    probs_B = settings(blocks)
    probs_R = [x[(torch.arange(rows) // most).clamp(max=blocks - 1)] for x in probs_B]
    whole = [x.to(torch.int32) for x in (draft_R, q_row_R, row_BQ, count_B)]
    uniform_R, last_B = torch.rand(rows, generator=g), torch.rand(blocks, generator=g)
    block_B = (torch.arange(blocks) % 2).to(torch.int32)
    return [logits_RV.to(compute), *probs_R, *whole, uniform_R, last_B, block_B, q_ZK, *ids]
