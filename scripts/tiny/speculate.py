"""Greedy generation with a cache: plain, batched, and speculative with a block drafter or the MTP module.

The speculative loop is the plain textbook one: draft, verify the block in one forward, keep the agreeing prefix
and the verifier's next token. Counters are cut where the text is cut (end token or length).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .attention import Cache
from .drafter import Context, Drafter
from .drafting import draft_block, first_best
from .tokenizer import EOS_IDS, REAL_VOCAB
from .verifier import Verifier


@dataclass
class Counters:
    """Pooled speculation counters; `at_depth[k]` counts steps that accepted at least k + 1 drafts."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    at_depth: list[int] = field(default_factory=lambda: [0] * 8)
    confidence: list[tuple[float, bool]] = field(default_factory=list)

    def add(self, other: Counters) -> None:
        """Pool the other counters into these."""
        self.steps += other.steps
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.emitted += other.emitted
        self.at_depth = [a + b for a, b in zip(self.at_depth, other.at_depth, strict=True)]
        self.confidence += other.confidence

    @property
    def length(self) -> float:
        """Mean acceptance length: one more than the accepted drafts per step."""
        return 1 + self.accepted / max(1, self.steps)

    def summary(self) -> dict[str, object]:
        """The counters as the numbers people report."""
        return {
            "mean_acceptance_length": round(self.length, 3),
            "tokens_per_step": round(self.emitted / max(1, self.steps), 3),
            "draft_acceptance_rate": round(self.accepted / max(1, self.proposed), 4),
            "steps": self.steps,
            "per_position": [round(count / max(1, self.steps), 4) for count in self.at_depth],
        }


class Proposer(Protocol):
    """Something that drafts tokens after an anchor, fed with the verifier's outputs on kept tokens."""

    def observe(self, ids: list[int], position: int, streams: list[Tensor], following: list[int]) -> None:
        """Kept tokens from `position` on, their residual streams, and the token that follows each."""
        ...

    def propose(self, anchor: int, position: int) -> tuple[list[int], list[float]]:
        """(draft tokens, confidences or nothing) after the anchor at `position`."""
        ...


class BlockProposer:
    """Drafts with a block drafter; its context grows by the kept tokens' rows only."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.drafter, self.verifier = drafter, verifier
        self.context: Context | None = None

    def observe(self, ids: list[int], position: int, streams: list[Tensor], following: list[int]) -> None:
        """Append the kept tokens to the context."""
        features_BSF = torch.cat([streams[index] for index in self.drafter.config.aux_layer_ids], dim=-1)[:, : len(ids)]
        rows = self.drafter.context(features_BSF, position + torch.arange(len(ids))[None])
        self.context = rows if self.context is None else self.context.extended(rows)

    def propose(self, anchor: int, position: int) -> tuple[list[int], list[float]]:
        """Draft one block. Raises `ValueError` before anything was observed."""
        if self.context is None:
            raise ValueError("propose before observe")
        places = torch.tensor([[position]])
        hidden = self.drafter.block(torch.tensor([[anchor]]), places, self.context, self.verifier.embed_tokens.weight)
        logits_RV = self.verifier.lm_head(hidden[0, 0])
        draft = draft_block(self.drafter, logits_RV, hidden[0, 0], anchor)
        return draft.tokens, draft.confidence


class MtpProposer:
    """Drafts by running the verifier's MTP module several times, each time on its own output."""

    def __init__(self, verifier: Verifier, drafts: int = 3) -> None:
        self.verifier, self.drafts = verifier, drafts
        self.cache = Cache.empty(verifier.config, 1, verifier.config.max_position_embeddings)
        self.last: tuple[Tensor, int] | None = None

    def run(self, following: list[int], hidden_BSH: Tensor, position: int) -> Tensor:
        """One pass of the module over tokens whose hidden states stand at `position` on."""
        positions_BS = position + torch.arange(len(following))[None]
        embedded_BSH = self.verifier.embed_tokens(torch.tensor([following]))
        step = self.verifier.step(positions_BS, cache=self.cache)
        return self.verifier.mtp.predict(embedded_BSH, hidden_BSH, step)

    def observe(self, ids: list[int], position: int, streams: list[Tensor], following: list[int]) -> None:
        """Run the module over the kept tokens."""
        hidden_BSH = self.verifier.norm(streams[-1])[:, : len(ids)]
        self.last = self.run(following, hidden_BSH, position)[:, -1:], position + len(ids)

    def propose(self, anchor: int, position: int) -> tuple[list[int], list[float]]:
        """Chain the module on its own output. Raises `ValueError` before anything was observed."""
        if self.last is None:
            raise ValueError("propose before observe")
        hidden_BSH, place = self.last
        tokens: list[int] = []
        while True:
            tokens.append(first_best(self.verifier.lm_head(hidden_BSH)[0, -1, :REAL_VOCAB]))
            if len(tokens) == self.drafts:
                return tokens, []
            hidden_BSH = self.run(tokens[-1:], hidden_BSH, place)
            place += 1


def feed(verifier: Verifier, cache: Cache, ids: list[int], position: int) -> tuple[list[int], list[Tensor]]:
    """(greedy token after each row, residual streams) of tokens at `position` on."""
    step = verifier.step(position + torch.arange(len(ids))[None], cache=cache)
    logits_BSV, streams = verifier.logits(torch.tensor([ids]), step)
    return logits_BSV[0, :, :REAL_VOCAB].argmax(-1).tolist(), streams


def cut(tokens: list[int], room: int) -> list[int]:
    """Tokens up to and including the first end token, and at most `room` of them."""
    for index, token in enumerate(tokens[:room]):
        if token in EOS_IDS:
            return tokens[: index + 1]
    return tokens[:room]


@torch.no_grad()
def generate(
    verifier: Verifier, prompt: list[int], max_new: int, proposer: Proposer | None = None
) -> tuple[list[int], Counters]:
    """Greedy continuation of one prompt; with a proposer the same text in fewer verifier steps."""
    cache = Cache.empty(verifier.config, 1, len(prompt) + max_new + 16)
    following, streams = feed(verifier, cache, prompt, 0)
    text = [*prompt, following[-1]]
    if proposer is not None:
        proposer.observe(prompt, 0, streams, [*prompt[1:], text[-1]])
    counters = Counters()
    while text[-1] not in EOS_IDS and len(text) < len(prompt) + max_new:
        position, anchor = len(text) - 1, text[-1]
        drafts, confidence = proposer.propose(anchor, position) if proposer else ([], [])
        following, streams = feed(verifier, cache, [anchor, *drafts], position)
        right = 0
        while right < len(drafts) and drafts[right] == following[right]:
            right += 1
        new = cut(following[: right + 1], len(prompt) + max_new - len(text))
        text += new
        accepted = min(right, len(new))
        counters.add(Counters(1, len(drafts), accepted, len(new), [int(accepted > k) for k in range(8)]))
        counters.confidence += [(value, k < right) for k, value in enumerate(confidence[: right + 1])]
        if proposer is not None:
            kept = [anchor, *drafts[:right]]
            proposer.observe(kept, position, streams, following[: right + 1])
    return text[len(prompt) :], counters


@torch.no_grad()
def greedy_texts(verifier: Verifier, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """Prompts with their greedy continuations, generated as one batch (end token included)."""
    batch, longest = len(prompts), max(map(len, prompts))
    cache = Cache.empty(verifier.config, batch, longest + max_new)
    ids_BS = torch.zeros(batch, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BS[row, : len(prompt)] = torch.tensor(prompt)
    # Padding rows write to positions that are overwritten before any query may see them.
    step = verifier.step(torch.arange(longest).expand(batch, -1), cache=cache)
    logits_BSV, _ = verifier.logits(ids_BS, step)
    place_B = torch.tensor([len(prompt) for prompt in prompts])
    next_B = logits_BSV[torch.arange(batch), place_B - 1, :REAL_VOCAB].argmax(-1)
    texts, running = [list(prompt) for prompt in prompts], [True] * batch
    for _ in range(max_new):
        for row in range(batch):
            if running[row]:
                texts[row].append(int(next_B[row]))
                running[row] = texts[row][-1] not in EOS_IDS
        if not any(running):
            break
        step = verifier.step(place_B[:, None], cache=cache)
        logits_BSV, _ = verifier.logits(next_B[:, None], step)
        next_B = logits_BSV[:, 0, :REAL_VOCAB].argmax(-1)
        place_B = (place_B + 1).clamp(max=longest + max_new - 1)
    return texts
