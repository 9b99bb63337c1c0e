"""From a block's hidden states to draft tokens: DSpark's Markov walk and DFlash2's selector walk (greedy)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .drafter import Drafter
from .tokenizer import REAL_VOCAB


@dataclass
class Draft:
    """Greedy drafts of one block and what led to them."""

    tokens: list[int]
    confidence: list[float]
    scores: Tensor  # DSpark: biased logits [N, V]; DFlash2: candidate scores [N, C]
    candidates: Tensor | None = None  # DFlash2: candidate ids [N, C]


def first_best(scores: Tensor) -> int:
    """Index of the largest score; the lowest index wins a tie."""
    return int((scores == scores.max()).nonzero()[0])


def markov_walk(drafter: Drafter, logits_RV: Tensor, hidden_RH: Tensor, anchor: int, real_vocab: int) -> Draft:
    """Strictly left to right: row logits plus the bias of the token before; the anchor comes first."""
    previous, tokens, confidence, scores = anchor, [], [], []
    for row in range(drafter.config.first_row, drafter.config.rows):
        before = torch.tensor(previous)
        confidence.append(drafter.confidence(hidden_RH[row], before).sigmoid().item())
        scores.append(logits_RV[row] + drafter.markov_head.bias(before))
        previous = first_best(scores[-1][:real_vocab])
        tokens.append(previous)
    return Draft(tokens, confidence, torch.stack(scores))


def selector_walk(drafter: Drafter, logits_RV: Tensor, hidden_RH: Tensor, anchor: int, real_vocab: int) -> Draft:
    """Pick among the row's best candidates, rescored by the token before; the anchor comes first."""
    selector, count = drafter.candidate_selector, drafter.config.selector_top_k
    previous, tokens, all_scores, all_candidates = anchor, [], [], []
    for row in range(drafter.config.first_row, drafter.config.rows):
        ranked = logits_RV[row, :real_vocab].sort(descending=True, stable=True)
        candidates = ranked.indices[:count]
        state = selector.state(torch.tensor(previous), hidden_RH[row])
        scores = ranked.values[:count] + selector.successor_codebook[candidates] @ state
        best = scores == scores.max()
        previous = int(candidates[best].min())
        tokens.append(previous)
        all_scores.append(scores)
        all_candidates.append(candidates)
    return Draft(tokens, [], torch.stack(all_scores), torch.stack(all_candidates))


def draft_block(
    drafter: Drafter, logits_RV: Tensor, hidden_RH: Tensor, anchor: int, real_vocab: int = REAL_VOCAB
) -> Draft:
    """Greedy draft tokens of one block."""
    walk = markov_walk if drafter.config.algorithm == "dspark" else selector_walk
    return walk(drafter, logits_RV, hidden_RH, anchor, real_vocab)
