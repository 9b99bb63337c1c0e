"""Drafters: one class a family, all asked the same way (`propose`). `propose_mtp.py` has the MTP module's.

Legend: B sequences that draft, J drafts of a block.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from glmspec.models.dflash import TEMPERATURE, UNIFORM
from glmspec.network.limits import EngineLimits
from glmspec.runtime.executor import Tensors
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Anchor, pack_blocks
from glmspec.runtime.pages import Span
from glmspec.runtime.sequence import Sequence


@dataclass(frozen=True)
class KeptRows:
    """Rows of the last verifier step that a sequence kept. first_row: the number of the first in that step. start: its
    position."""

    sequence: Sequence
    first_row: int
    start: int
    count: int

    @property
    def rows(self) -> range:
        """Their numbers in the step."""
        return range(self.first_row, self.first_row + self.count)

    @property
    def span(self) -> Span:
        """Their positions, and the pages that a drafter appends them to."""
        return Span(self.sequence.pages, self.start, self.count, self.sequence.ring)


@dataclass(frozen=True)
class Drafts:
    """Blocks proposed for some sequences, in their order.

    ids: token ids, a list a sequence. probs: the tensors `q` and, for candidates, `q_ids`, that the drafts were drawn
    from; empty when they are the drafter's best. strides: q's row of draft j of sequence i is i * strides[0] + j *
    strides[1]. signal: how good each draft seems, float32 [B, J]: the drafter's confidence, or the margin between its
    best two scores; no signal of a draft depends on that draft or on a later one."""

    ids: list[list[int]]
    probs: Tensors
    strides: tuple[int, int]
    signal: torch.Tensor

    def q_rows(self, sequence: int, count: int) -> list[int]:
        """Rows of q of a sequence's first drafts."""
        return [sequence * self.strides[0] + draft * self.strides[1] for draft in range(count)]


NO_DRAFTS = Drafts([], {}, (0, 0), torch.empty(0))


class Drafter(Protocol):
    """Proposes blocks. num_drafts: of a block. max_positions: that it was made for. ring_pages: pages that a sequence
    must own for its sliding layers. features: the verifier's outputs that it goes on from. confident: its signal is a
    chance of acceptance (else a margin)."""

    num_drafts: int
    max_positions: int
    ring_pages: int
    features: tuple[str, ...]
    confident: bool

    def propose(self, features: Tensors, kept: abc.Sequence[KeptRows], drafting: abc.Sequence[Sequence]) -> Drafts:
        """Append the kept rows to the drafter's own context, then draft a block for each of `drafting`."""
        ...


class BlockDrafter:
    """DFlash, DFlash2, DSpark: one run appends the context and drafts whole blocks."""

    def __init__(self, model: Model, limits: EngineLimits) -> None:
        self.model, self.limits = model, limits
        self.num_drafts, self.max_positions = model.config.num_drafts, model.config.max_position_embeddings
        self.ring_pages, self.features = model.ring_pages, tuple(model.tap_names)
        outputs = {spec.name for spec in model.contract.outputs}
        self.confident = "confidence" in outputs
        self._sampled = "q" in outputs

    def propose(self, features: Tensors, kept: abc.Sequence[KeptRows], drafting: abc.Sequence[Sequence]) -> Drafts:
        """See `Drafter`."""
        rows = [row for run in kept for row in run.rows]
        anchors = [Anchor(own.pages, own.tokens[-1], len(own.tokens) - 1, own.ring) for own in drafting]
        inputs = pack_blocks(rows, [run.span for run in kept], anchors, self.limits)
        inputs |= {name: features[name] for name in self.features}
        if self._sampled:
            inputs |= draft_noise(drafting, self.num_drafts)
        out = self.model.run(inputs)
        probs = {name: out[name].flatten(0, 1) for name in ("q", "q_ids") if name in out}
        signal = out["confidence" if self.confident else "margin"]
        count = len(drafting)  # the network drafts an idle block when there is none
        return Drafts(out["draft_ids"].tolist()[:count], probs, (self.num_drafts, 1), signal[:count])


def draft_noise(drafting: abc.Sequence[Sequence], num_drafts: int) -> Tensors:
    """Temperatures and uniform numbers that draw the drafts; those of an idle block when no sequence drafts."""
    temperature_B = np.zeros(max(1, len(drafting)), dtype=np.float32)
    uniform_BJ = np.zeros((max(1, len(drafting)), num_drafts), dtype=np.float32)
    for at, sequence in enumerate(drafting):
        temperature_B[at] = sequence.request.sampling.temperature
        if temperature_B[at]:
            uniform_BJ[at] = sequence.noise.block(len(sequence.tokens) - 1, num_drafts)[0]
    return {TEMPERATURE: torch.from_numpy(temperature_B), UNIFORM: torch.from_numpy(uniform_BJ)}
