"""Inputs of `block_attention` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Blocks whose context fills their table but for a few rows; a ring begins somewhere in the sequence."""
    blocks, rows, heads, kv_heads, dim = (sizes[name] for name in "BRHJD")
    pages, page_size, columns = (sizes[name] for name in "XPM")

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(compute)

    own = [rand(blocks, rows, heads, dim), rand(blocks, rows, kv_heads, dim), rand(blocks, rows, kv_heads, dim)]
    caches = [rand(pages, kv_heads, page_size, dim) for _ in range(2)]
    table_BM = (torch.randperm(pages - 1, generator=g)[: blocks * columns] + 1).to(torch.int32).view(blocks, columns)
    fill_B = torch.randint((columns - 1) * page_size + 1, columns * page_size + 1, (blocks,), generator=g)
    ring = "start_B" in use.optional
    start_B = torch.randint(0, 1000, (blocks,), generator=g) * page_size if ring else torch.zeros(blocks)
    anchor_B = (start_B + fill_B).to(torch.int32)
    return [*own, *caches, table_BM, anchor_B, *([start_B.to(torch.int32)] if ring else [])]
