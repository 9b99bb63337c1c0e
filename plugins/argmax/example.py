"""Inputs of `argmax` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Scores with ties at the top."""
    return [torch.randn(sizes["N"], sizes["V"], generator=g).clamp(max=3).to(compute)]
