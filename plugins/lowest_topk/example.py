"""Inputs of `lowest_topk` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Scores of which half are zero, as sums of ReLUs are."""
    return [torch.randn(sizes["N"], sizes["L"], generator=g).clamp(min=0)]
