"""Inputs of `index_topk` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use

INT = torch.int32


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Sequences near the end of their tables, a segment each, of which the last may hold fewer rows than there is room
    for. Small whole numbers, whose sums are exact in any order."""
    tokens, segments, slots = sizes["N"], sizes["G"], sizes["S"]
    pages, table, length = sizes["X"], sizes["M"], sizes["M"] * sizes["P"]
    whole = lambda *dims: torch.randint(-2, 3, dims, generator=g, dtype=torch.int8).to(compute)  # noqa: E731
    token_N = torch.arange(tokens, dtype=INT)
    row_slot_N2 = torch.stack([token_N // slots, token_N % slots], 1)
    segment_rows_GS = torch.zeros(segments * slots, dtype=INT)
    segment_rows_GS[:tokens] = token_N
    page_GM = torch.arange(segments * table) % (pages - 1) + 1  # page 0 is nobody's
    page_GM = page_GM[torch.randperm(segments * table, generator=g)].to(INT)
    return [
        whole(tokens, sizes["H"], sizes["D"]),
        torch.randint(-3, 9, (tokens, sizes["H"]), generator=g).float() / 8,
        whole(pages, 1, sizes["P"], sizes["D"]),
        page_GM.view(segments, table),
        segment_rows_GS.view(segments, slots),
        row_slot_N2,
        (length - slots + token_N % slots).to(INT),
    ]
