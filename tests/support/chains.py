"""A target and a drafter that are Markov chains over a few tokens: what they emit has a law that is known exactly."""

from __future__ import annotations

import itertools

import torch

from glmspec.plugins import target_probs

V = 6
# Temperature, top-k, top-p, min-p of the target.
LAWS = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cold": (0.7, 0, 1.0, 0.0),
    "top-k": (1.0, 3, 1.0, 0.0),
    "top-p": (0.9, 0, 0.8, 0.0),
    "all": (1.2, 5, 0.9, 0.05),
}


def target(probs: str) -> torch.Tensor:
    """[V, V]: the next token's law after each token."""
    t, k, p, m = LAWS[probs]
    z = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) * 1.2
    full = torch.full((V,), 1.0)
    return target_probs.reference(z, full * t, (full * k).to(torch.int32), full * p, full * m)


def drafter(kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chances after each token, and whose they are (None: all tokens in order)."""
    g = torch.Generator().manual_seed(2)
    z = torch.randn(V, V, generator=torch.Generator().manual_seed(1)) + torch.randn(V, V, generator=g)
    if kind == "whole":
        return z.softmax(-1), None
    best = z.topk(3 if kind == "candidates" else 1)
    return best.values.softmax(-1), best.indices


def distance(tokens_N4: torch.Tensor, p_VV: torch.Tensor) -> float:
    """Chi-square of the joint counts of an anchor and the three tokens after it, given how often each anchor stands
    there, in standard deviations of its own law."""
    cells = torch.tensor(list(itertools.product(range(V), repeat=4)))
    anchors = torch.bincount(tokens_N4[:, 0], minlength=V).double()
    expected = anchors[cells[:, 0]]
    for before, after in itertools.pairwise(range(4)):
        expected = expected * p_VV[cells[:, before], cells[:, after]]
    counts = torch.bincount((tokens_N4 * torch.tensor([V**3, V * V, V, 1])).sum(1), minlength=V**4).double()
    assert counts[expected == 0].sum() == 0
    some = expected > 5
    rest = torch.tensor([expected[~some].sum(), counts[~some].sum()]).double()
    chi = ((counts[some] - expected[some]) ** 2 / expected[some]).sum()
    freedom = int(some.sum()) - int((anchors > 0).sum())
    if rest[0] > 5:
        chi, freedom = chi + (rest[1] - rest[0]) ** 2 / rest[0], freedom + 1
    return float((chi - freedom) / (2 * freedom) ** 0.5)
