"""Inputs of `quantize_blocks` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Activations with an outlier here and there."""
    x_ND = torch.randn(sizes["N"], sizes["D"], generator=g)
    return [torch.where(x_ND > 3, 20 * x_ND, x_ND).to(compute)]
