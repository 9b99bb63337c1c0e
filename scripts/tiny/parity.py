"""Compares the exported verifier with transformers' GlmMoeDsaForCausalLM, and its own decoding path with itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .attention import Cache
from .speculate import feed
from .tokenizer import REAL_VOCAB, encode
from .verifier import Verifier


@contextlib.contextmanager
def stable_topk() -> Iterator[None]:
    """Make top-k choose the lowest index among equal values (the indexer's ReLU makes many exact zeros)."""
    function, method = torch.topk, torch.Tensor.topk

    def topk(values: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True):
        ranked = values.sort(dim=dim, descending=largest, stable=True)
        return torch.return_types.topk((ranked.values.narrow(dim, 0, k), ranked.indices.narrow(dim, 0, k)))

    torch.topk, torch.Tensor.topk = topk, topk  # pyright: ignore[reportAttributeAccessIssue]  (ours takes fewer types)
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = function, method


@torch.no_grad()
def compare_with_transformers(verifier: Verifier, folder: Path, prompts: list[str]) -> dict[str, float]:
    """Largest relative logit and hidden-state differences, and how often the argmax agrees."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reference = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    worst_logit, worst_hidden, same, total = 0.0, 0.0, 0, 0
    for prompt in prompts:
        ids_BS = torch.tensor([encode(prompt)])
        with stable_topk():
            expected = reference(ids_BS, output_hidden_states=True)
        logits_BSV, streams = verifier.logits(ids_BS, verifier.step(torch.arange(ids_BS.shape[1])[None]))
        worst_logit = max(worst_logit, relative(logits_BSV, expected.logits))
        # transformers' last entry is after the final norm, so the un-normed streams are compared up to L - 1.
        for stream, hidden in zip(streams[:-1], expected.hidden_states[:-1], strict=True):
            worst_hidden = max(worst_hidden, relative(stream, hidden))
        same += int((logits_BSV.argmax(-1) == expected.logits.argmax(-1)).sum())
        total += ids_BS.shape[1]
    return {
        "relative_logit_difference": worst_logit,
        "relative_hidden_difference": worst_hidden,
        "argmax_agreement": same / total,
        "tokens": total,
    }


@torch.no_grad()
def compare_decoding(verifier: Verifier, prompt: str) -> float:
    """Largest relative logit difference between one forward and a prefill followed by blocks of nine rows."""
    ids = encode(prompt)
    whole, _ = verifier.logits(torch.tensor([ids]), verifier.step(torch.arange(len(ids))[None]))
    cache = Cache.empty(verifier.config, 1, len(ids) + 8)
    start, pieces = len(ids) // 2, []
    feed(verifier, cache, ids[:start], 0)
    for position in range(start, len(ids), 9):
        rows = torch.tensor([ids[position : position + 9]])
        step = verifier.step(position + torch.arange(rows.shape[1])[None], cache=cache)
        pieces.append(verifier.logits(rows, step)[0])
    return relative(torch.cat(pieces, dim=1), whole[:, start:])


@torch.no_grad()
def padding_margin(verifier: Verifier, prompts: list[str]) -> float:
    """Smallest gap between the best real logit and the best padding logit; must be positive everywhere."""
    smallest = float("inf")
    for prompt in prompts:
        ids_BS = torch.tensor([encode(prompt)])
        logits_BSV, _ = verifier.logits(ids_BS, verifier.step(torch.arange(ids_BS.shape[1])[None]))
        gap_BS = logits_BSV[..., :REAL_VOCAB].amax(-1) - logits_BSV[..., REAL_VOCAB:].amax(-1)
        smallest = min(smallest, gap_BS.min().item())
    return smallest


def relative(value: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value."""
    return ((value - expected).abs().max() / expected.abs().max()).item()
