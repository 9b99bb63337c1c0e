"""Inputs of `grouped_conv` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Random rows and kernels."""
    blocks, rows, taps, columns, groups = (sizes[name] for name in "BRTDU")
    shapes = [(blocks, rows, columns), (2, taps, columns), (blocks, rows, 2, taps, groups)]
    shapes += [(blocks, rows, columns)] * len(use.optional)
    return [torch.randn(shape, generator=g).to(compute) for shape in shapes]
