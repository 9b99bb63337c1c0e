"""Inputs of `sparse_mla` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Rows from anywhere in the cache, in order; each token sees its first and about nine of ten of the others."""
    tokens, heads, width, keep = (sizes[name] for name in "NHDK")
    q_NHD = torch.randn(tokens, heads, width, generator=g).to(compute)
    cache_X1PD = torch.randn(sizes["X"], 1, sizes["P"], width, generator=g)
    rows_NK = torch.randint(sizes["X"] * sizes["P"], (tokens, keep), generator=g).sort(1).values.to(torch.int32)
    seen_NK = (torch.rand(tokens, keep, generator=g) < 0.9) | (torch.arange(keep) == 0)
    visible_NK = seen_NK.to(torch.int32)
    if "scale_1" not in use.optional:
        return [q_NHD, cache_X1PD.to(compute), rows_NK, visible_NK]
    return [q_NHD, (cache_X1PD * 40).to(torch.float8_e4m3fn), rows_NK, visible_NK, torch.tensor([0.025])]
