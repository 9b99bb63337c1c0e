"""Inputs of `sample` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Rows of which every fourth is greedy, narrowed by top-p, or by all at once; the others are as they are."""
    rows, vocabulary = sizes["R"], sizes["V"]
    logits_RV = (3 * torch.randn(rows, vocabulary, generator=g)).to(compute)
    return [logits_RV, *settings(rows), torch.rand(rows, generator=g)]


def settings(rows: int) -> list[torch.Tensor]:
    """Temperature, top-k, top-p and min-p of so many rows."""
    kind_R = torch.arange(rows) % 4
    temperature_R = torch.where(kind_R == 1, 0.0, 0.8)
    top_k_R = torch.where(kind_R == 3, 50, 0).to(torch.int32)
    top_p_R = torch.where(kind_R >= 2, 0.95, 1.0)
    return [temperature_R, top_k_R, top_p_R, torch.where(kind_R == 3, 0.02, 0.0)]
