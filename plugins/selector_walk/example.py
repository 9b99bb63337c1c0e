"""Inputs of `selector_walk` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Logits of which a walk chooses, anchors, codebooks; temperatures of 0 (every third), cold and hot."""
    blocks, drafts, vocab, rank, targets = (sizes[name] for name in "BJVAC")
    made = [
        torch.randn(blocks, drafts, vocab, generator=g).to(compute),
        torch.randn(blocks, drafts, rank, generator=g).to(compute),
        torch.randint(0, targets, (blocks,), generator=g, dtype=torch.int32),
        torch.randn(targets, rank, generator=g).to(compute),
        (torch.randn(vocab, rank, generator=g) / rank**0.5).to(compute),
    ]
    gaps = torch.randperm(targets, generator=g)[:vocab].sort().values if vocab <= targets else torch.arange(vocab)
    optional = {
        "offset_V": (gaps - torch.arange(vocab)).to(torch.int32),
        "temperature_B": torch.tensor([0.0, 0.3, 2.0]).repeat(blocks)[:blocks],
        "uniform_BJ": torch.rand(blocks, drafts, generator=g),
    }
    return made + [optional[name] for name in use.optional]
