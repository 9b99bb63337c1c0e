"""The verifier's own MTP module as a drafter: one run a draft, each going on from the one before.

Row i of the module stands at position i of its own caches, embeds the token after it and goes on from the hidden state
at i. The first run appends the rows that were kept, with the verifier's hidden states; the last of them gives a
sequence's first draft. Rows of later runs are provisional: they know drafts and hidden states of the module's own, and
the rows that are kept next are written over them.

Legend: B sequences that draft, J drafts of each.
"""

from __future__ import annotations

from collections import abc

import numpy as np
import torch

from glmspec.models.dflash import TEMPERATURE, UNIFORM
from glmspec.network.limits import EngineLimits
from glmspec.runtime.executor import Tensors
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows, tensors
from glmspec.runtime.pages import Span
from glmspec.runtime.propose import NO_DRAFTS, Drafts, KeptRows, draft_noise
from glmspec.runtime.sequence import Sequence

_HIDDEN = "hidden"


class MtpDrafter:
    """A chain of runs of the module. num_drafts: runs in a step, at least 1."""

    ring_pages = 0
    features: tuple[str, ...] = (_HIDDEN,)
    confident = False

    def __init__(self, model: Model, limits: EngineLimits, num_drafts: int) -> None:
        self.model, self.limits, self.num_drafts = model, limits, num_drafts
        self.max_positions = model.config.max_position_embeddings
        self._least_pages = limits.least_pages(model.config.index_topk)
        self._sampled = "q" in {spec.name for spec in model.contract.outputs}

    def propose(self, features: Tensors, kept: abc.Sequence[KeptRows], drafting: abc.Sequence[Sequence]) -> Drafts:
        """See `Drafter`. Every sequence that drafts is among the kept."""
        noise = draft_noise(drafting, self.num_drafts) if self._sampled else {}
        inputs, out = self._append(features[_HIDDEN], kept, drafting, noise)
        if not drafting:
            return NO_DRAFTS
        runs = [out]
        for draft in range(1, self.num_drafts):
            inputs, out = self._go_on(inputs, out, drafting, draft, noise)
            runs.append(out)
        ids_BJ, margin_BJ = (torch.stack([run[name] for run in runs], 1) for name in ("draft_ids", "margin"))
        probs = {"q": torch.cat([run["q"] for run in runs])} if self._sampled else {}
        return Drafts(ids_BJ.tolist(), probs, (1, len(drafting)), margin_BJ)

    def _append(
        self, hidden: torch.Tensor, kept: abc.Sequence[KeptRows], drafting: abc.Sequence[Sequence], noise: Tensors
    ) -> tuple[Tensors, Tensors]:
        """The first run appends all kept rows. Sequences that draft come first, in their order, which is then that of
        the drafts. Returns the run's inputs and outputs."""
        places = {sequence: place for place, sequence in enumerate(drafting)}
        ordered = sorted(kept, key=lambda run: places.get(run.sequence, len(places)))
        rows = [
            Rows(run.span, run.sequence.tokens[run.start + 1 :][: run.count], int(run.sequence in places))
            for run in ordered
        ]
        hidden_rows = np.concatenate([run.rows for run in ordered])
        inputs = pack_rows(rows, self.limits, self._least_pages) | tensors({"hidden_rows": hidden_rows})
        return self._run(inputs | {_HIDDEN: hidden}, noise, 0)

    def _go_on(
        self, before: Tensors, out: Tensors, drafting: abc.Sequence[Sequence], draft: int, noise: Tensors
    ) -> tuple[Tensors, Tensors]:
        """A later run has one row a sequence, on the draft and the hidden state of the run before. Returns its inputs
        and outputs."""
        rows = []
        for sequence in drafting:
            # The last kept row stands before the anchor. Drafts that no answer can hold any more stay in its pages.
            room = len(sequence.pages) * self.limits.page_size
            position = min(len(sequence.tokens) - 2 + draft, room - 1)
            rows.append(Rows(Span(sequence.pages, position, 1), [0], 1))
        inputs = pack_rows(rows, self.limits, self._least_pages)
        # As tensors, from output to input: nothing waits for the host.
        inputs |= {"token_ids": out["draft_ids"], _HIDDEN: out["draft_hidden"], "hidden_rows": before["logit_rows"]}
        return self._run(inputs, noise, draft)

    def _run(self, inputs: Tensors, noise: Tensors, draft: int) -> tuple[Tensors, Tensors]:
        if noise:
            inputs |= {TEMPERATURE: noise[TEMPERATURE], UNIFORM: noise[UNIFORM][:, draft].contiguous()}
        return inputs, self.model.run(inputs)
