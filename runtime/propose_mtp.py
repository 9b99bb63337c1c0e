"""The verifier's own MTP module as a drafter: one run a draft, each going on from the one before.

Row i of the module stands at position i of its own caches, embeds the token after it and goes on from the hidden state
at i. The first run appends the rows that were kept, with the verifier's hidden states; the last of them gives a
sequence's first draft. Rows of later runs are provisional: they know drafts and hidden states of the module's own, and
the rows that are kept next are written over them.

Legend: B sequences that want drafts, J drafts of each.
"""

from __future__ import annotations

from collections import abc

import numpy as np
import torch

from glmspec.models.dflash import TEMPERATURE, UNIFORM
from glmspec.network.limits import EngineLimits
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Inputs, Rows, pack_rows, tensors
from glmspec.runtime.pages import Span
from glmspec.runtime.propose import Drafts, Features, KeptRows, draft_noise
from glmspec.runtime.sequence import Sequence

_HIDDEN = "hidden"


class MtpDrafter:
    """A chain of runs of the module. num_drafts: runs in a step, at least 1."""

    ring_pages = 0
    features: tuple[str, ...] = (_HIDDEN,)
    confident = False

    def __init__(self, model: Model, limits: EngineLimits, num_drafts: int) -> None:
        self.model, self.limits, self.num_drafts = model, limits, num_drafts
        self.reach = model.config.max_position_embeddings
        self._least_pages = limits.least_pages(model.config.index_topk)
        self._sampled = "q" in {spec.name for spec in model.contract.outputs}

    def propose(self, features: Features, kept: abc.Sequence[KeptRows], wanted: abc.Sequence[Sequence]) -> Drafts:
        """See `Drafter`. Every sequence that wants drafts is among the kept."""
        noise = draft_noise(wanted, self.num_drafts) if self._sampled else {}
        inputs, out = self._append(features[_HIDDEN], kept, wanted, noise)
        if not wanted:
            return Drafts([], {}, (1, 0), torch.empty(0))
        runs = [out]
        for draft in range(1, self.num_drafts):
            inputs, out = self._go_on(inputs, out, wanted, draft, noise)
            runs.append(out)
        ids_BJ = torch.stack([one["draft_ids"] for one in runs], 1)
        probs = {"q": torch.cat([one["q"] for one in runs])} if self._sampled else {}
        return Drafts(ids_BJ.tolist(), probs, (1, len(wanted)), torch.stack([one["margin"] for one in runs], 1))

    def _append(
        self, hidden: torch.Tensor, kept: abc.Sequence[KeptRows], wanted: abc.Sequence[Sequence], noise: Inputs
    ) -> tuple[Inputs, dict[str, torch.Tensor]]:
        """Run 1: all kept rows. The wanted sequences come first, in their order, which is then that of the drafts."""
        places = {sequence: place for place, sequence in enumerate(wanted)}
        ordered = sorted(kept, key=lambda one: places.get(one.sequence, len(places)))
        rows = [
            Rows(
                Span(one.sequence.pages, one.start, one.count),
                one.sequence.tokens[one.start + 1 : one.start + one.count + 1],
                int(one.sequence in places),
            )
            for one in ordered
        ]
        taken = np.concatenate([np.arange(one.first_row, one.first_row + one.count) for one in ordered])
        inputs = pack_rows(rows, self.limits, self._least_pages) | tensors({"hidden_rows": taken})
        return self._run(inputs | {_HIDDEN: hidden}, noise, 0)

    def _go_on(
        self, before: Inputs, out: dict[str, torch.Tensor], wanted: abc.Sequence[Sequence], draft: int, noise: Inputs
    ) -> tuple[Inputs, dict[str, torch.Tensor]]:
        """A later run: one row a sequence, on the draft and the hidden state of the run before."""
        rows = []
        for sequence in wanted:
            # The last kept row stands before the anchor. Drafts that no answer can hold any more stay in its pages.
            room = len(sequence.pages) * self.limits.page_size
            position = min(len(sequence.tokens) - 2 + draft, room - 1)
            rows.append(Rows(Span(sequence.pages, position, 1), [0], 1))
        inputs = pack_rows(rows, self.limits, self._least_pages)
        # As tensors, from output to input: nothing waits for the host.
        inputs |= {"token_ids": out["draft_ids"], _HIDDEN: out["draft_hidden"], "hidden_rows": before["logit_rows"]}
        return self._run(inputs, noise, draft)

    def _run(self, inputs: Inputs, noise: Inputs, draft: int) -> tuple[Inputs, dict[str, torch.Tensor]]:
        if noise:
            inputs |= {TEMPERATURE: noise[TEMPERATURE], UNIFORM: noise[UNIFORM][:, draft].contiguous()}
        return inputs, self.model.run(inputs)
