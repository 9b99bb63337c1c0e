"""Where drafts come from: one class a family of drafters, all asked the same way."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from glmspec.models.dflash import TEMPERATURE, UNIFORM
from glmspec.network.limits import EngineLimits
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Anchor, pack_blocks
from glmspec.runtime.pages import Span
from glmspec.runtime.sequence import Sequence

Features = abc.Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class KeptRows:
    """Rows of the last verifier step that a sequence kept. first_row: the first one's number in that step. start: its
    position."""

    sequence: Sequence
    first_row: int
    start: int
    count: int


@dataclass(frozen=True)
class Drafts:
    """Blocks proposed for some sequences, in their order.

    ids: token ids, a list a sequence. law: the tensors `q` and, for candidates, `q_ids`, that the drafts were drawn
    from; empty when they are the drafter's best. strides: q's row of draft j of sequence i is i * strides[0] + j *
    strides[1]. signal: what tells how good each draft is, float32 [B, J]: the drafter's confidence, or the margin
    between its best two scores; no signal of a draft depends on that draft or on a later one."""

    ids: list[list[int]]
    probs: Features
    strides: tuple[int, int]
    signal: torch.Tensor

    def q_rows(self, sequence: int, count: int) -> list[int]:
        """Rows of q of a sequence's first drafts."""
        return [sequence * self.strides[0] + draft * self.strides[1] for draft in range(count)]


class Drafter(Protocol):
    """Proposes blocks. num_drafts: of a block. reach: positions it was made for. ring_pages: what a sequence must own
    for its sliding layers. features: the verifier's outputs that it goes on from. confident: its signal is a chance of
    acceptance (else a margin)."""

    num_drafts: int
    reach: int
    ring_pages: int
    features: tuple[str, ...]
    confident: bool

    def propose(self, features: Features, kept: abc.Sequence[KeptRows], wanted: abc.Sequence[Sequence]) -> Drafts:
        """Append the kept rows to the drafter's own context, then draft for the sequences that want it."""
        ...


class BlockDrafter:
    """DFlash, DFlash2, DSpark: one run appends the context and drafts whole blocks."""

    def __init__(self, model: Model, limits: EngineLimits) -> None:
        self.model, self.limits = model, limits
        self.num_drafts, self.reach = model.config.num_drafts, model.config.max_position_embeddings
        self.ring_pages, self.features = model.ring_pages, tuple(model.tap_names)
        outputs = {spec.name for spec in model.contract.outputs}
        self.confident = "confidence" in outputs
        self._sampled = "q" in outputs

    def propose(self, features: Features, kept: abc.Sequence[KeptRows], wanted: abc.Sequence[Sequence]) -> Drafts:
        """See `Drafter`."""
        rows = [row for one in kept for row in range(one.first_row, one.first_row + one.count)]
        spans = [Span(one.sequence.pages, one.start, one.count, one.sequence.ring) for one in kept]
        blocks = [Anchor(one.pages, one.tokens[-1], len(one.tokens) - 1, one.ring) for one in wanted]
        inputs = pack_blocks(rows, spans, blocks, self.limits)
        inputs |= {name: features[name] for name in self.features}
        if self._sampled:
            inputs |= draft_noise(wanted, self.num_drafts)
        out = self.model.run(inputs)
        probs = {name: out[name].flatten(0, 1) for name in ("q", "q_ids") if name in out}
        signal = out["confidence" if self.confident else "margin"]
        return Drafts(out["draft_ids"].tolist()[: len(wanted)], probs, (self.num_drafts, 1), signal[: len(wanted)])


def draft_noise(wanted: abc.Sequence[Sequence], drafts: int) -> dict[str, torch.Tensor]:
    """What draws the drafts: of an idle block when nobody wants any."""
    temperature = np.zeros(max(1, len(wanted)), dtype=np.float32)
    uniform = np.zeros((max(1, len(wanted)), drafts), dtype=np.float32)
    for at, sequence in enumerate(wanted):
        temperature[at] = sequence.request.sampling.temperature
        if temperature[at]:
            uniform[at] = sequence.noise.block(len(sequence.tokens) - 1, drafts)[0]
    return {TEMPERATURE: torch.from_numpy(temperature), UNIFORM: torch.from_numpy(uniform)}
