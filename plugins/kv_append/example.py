"""Inputs of `kv_append` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Rows that go to pages chosen at random, up to nine a page, in any order of the step."""
    rows, order, pages, page_size = (sizes[name] for name in "NLXP")
    shape = (pages, sizes["J"], page_size, sizes["D"])
    cache_XJPD = torch.randn(shape, generator=g).to(compute)
    rows_NJD = torch.randn(rows, sizes["J"], sizes["D"], generator=g).to(compute)
    order_L = torch.randperm(rows, generator=g)[:order].to(torch.int32)
    most = min(9, page_size)
    written = torch.randperm(pages, generator=g)[: -(-order // most)]
    counts_X = torch.zeros(pages, dtype=torch.int32)
    counts_X[written] = most
    counts_X[written[-1]] -= len(written) * most - order
    offset_X = (torch.rand(pages, generator=g) * (page_size + 1 - counts_X)).to(torch.int32)
    cumulative_Y = torch.cat([torch.zeros(1), counts_X.cumsum(0)]).to(torch.int32)
    plan = [order_L, offset_X, cumulative_Y]
    if "scale_1" not in use.optional:
        return [cache_XJPD, rows_NJD, *plan]
    return [cache_XJPD.to(torch.float8_e4m3fn), rows_NJD, *plan, torch.tensor([0.025])]
