"""Inputs of `accept` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Blocks of 0 to Q - 1 drafts, of which about two thirds are what was said."""
    blocks, rows, most = sizes["B"], sizes["R"], sizes["Q"]
    said_R = torch.randint(0, 1000, (rows,), generator=g, dtype=torch.int32)
    draft_R = torch.where(torch.rand(rows, generator=g) < 0.67, said_R, said_R + 1)
    row_BQ = torch.randperm(rows, generator=g)[: blocks * most].to(torch.int32).view(blocks, most)
    count_B = torch.randint(0, most, (blocks,), generator=g, dtype=torch.int32)
    return [said_R, draft_R, row_BQ, count_B]
