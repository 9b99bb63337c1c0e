"""The tiny verifier and its MTP module in plain PyTorch, as they were trained: what the networks must equal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.models import ASSETS

Outputs = dict[str, torch.Tensor]


def load_oracle():
    """The trained verifier of scripts/tiny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        from tiny.export import load_verifier

        return load_verifier(ASSETS / "tiny-verifier")


@torch.no_grad()
def hiddens(oracle, ids: list[int]) -> torch.Tensor:
    """The verifier's hidden states after its final norm, [N, D]."""
    positions = torch.arange(len(ids))[None]
    return oracle.norm(oracle.hiddens(torch.tensor([ids]), oracle.step(positions))[-1])[0]


class OracleChain:
    """The trained module with its cache."""

    def __init__(self, oracle) -> None:
        cache = sys.modules[type(oracle).__module__].Cache  # as the oracle imported it
        self.oracle, self.cache = oracle, cache.empty(oracle.config, 1, 256)

    @torch.no_grad()
    def run(self, start: int, following: list[int], hidden_ND: torch.Tensor) -> Outputs:
        positions = start + torch.arange(len(following))[None]
        step = self.oracle.step(positions, cache=self.cache)
        embedded = self.oracle.embed_tokens(torch.tensor([following]))
        hidden = self.oracle.mtp.predict(embedded, hidden_ND[None], step)[0]
        logits = self.oracle.lm_head(hidden)
        best = logits.topk(2).values
        return {
            "draft_hidden": hidden,
            "logits": logits,
            "draft_ids": logits.argmax(-1).int(),
            "margin": best[:, 0] - best[:, 1],
        }
