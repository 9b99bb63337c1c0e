"""Inputs of `markov_walk` at any size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glmspec.plugins.spec import Use


def example(sizes: Mapping[str, int], use: Use, compute: torch.dtype, g: torch.Generator) -> list[torch.Tensor]:
    """Logits, anchors, tables; temperatures of 0 (every third), cold and hot."""
    blocks, drafts, vocab, rank, targets = (sizes[name] for name in "BJVAC")
    randn = lambda *dims: torch.randn(*dims, generator=g).to(compute)  # noqa: E731
    made = [
        randn(blocks, drafts, vocab),
        torch.randint(0, targets, (blocks,), generator=g, dtype=torch.int32),
        randn(targets, rank),
        (randn(vocab, rank) / rank**0.5).to(compute),
    ]
    gaps = torch.randperm(targets, generator=g)[:vocab].sort().values if vocab <= targets else torch.arange(vocab)
    optional = {
        "rows_BRF": lambda: randn(blocks, sizes["R"], sizes["F"]),
        "recurrent_FH": lambda: (randn(sizes["F"], sizes["H"]) / sizes["H"] ** 0.5).to(compute),
        "offset_V": lambda: (gaps - torch.arange(vocab)).to(torch.int32),
        "temperature_B": lambda: torch.tensor([0.0, 0.3, 2.0]).repeat(blocks)[:blocks],
        "uniform_BJ": lambda: torch.rand(blocks, drafts, generator=g),
    }
    return made + [optional[name]() for name in use.optional]
