"""The speculative loop: draft, verify, accept, append.

One step serves any mix of sequences. The drafter proposes a block for each that decodes; the verifier runs
anchors, drafts and prompt chunks as one packed batch; greedy drafts are accepted while they equal what the
verifier would have said, so the answer is the verifier's own, token for token; and the features of the
rows that were kept wait to be appended to the drafter's context by its next run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glmspec.build.configs.limits import EngineLimits
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Block, Rows, pack_blocks, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.request import Delta
from glmspec.runtime.scheduler import Turn
from glmspec.runtime.sequence import Sequence


@dataclass(frozen=True)
class Kept:
    """Rows of the last verifier step that a sequence kept. first_row: the first one's number in that step."""

    sequence: Sequence
    first_row: int
    start: int
    count: int


class SpeculativeLoop:
    """Runs steps on a verifier and, if there is one, a drafter. Owns no sequences."""

    def __init__(self, verifier: Model, drafter: Model | None, limits: EngineLimits) -> None:
        self.verifier, self.drafter, self.limits = verifier, drafter, limits
        self._least_pages = -(-limits.index_topk(verifier.config.index_topk) // limits.page_size)
        self._taps: dict[str, torch.Tensor] = {}
        self._kept: list[Kept] = []

    def step(self, turns: list[Turn]) -> list[Delta | None]:
        """One step: what each turn's answer gains (None while its prompt goes on)."""
        drafts = self._draft(turns)
        rows = [self._rows(turn, draft) for turn, draft in zip(turns, drafts, strict=True)]
        out = self.verifier.run(pack_rows(rows, self.limits, self._least_pages))
        verdict = out["greedy_ids"].tolist()

        deltas, kept, row, said = [], [], 0, 0
        for turn, draft, run in zip(turns, drafts, rows, strict=True):
            sequence, start = turn.sequence, turn.sequence.cached
            deltas.append(sequence.advance(turn.tokens, draft, verdict[said : said + run.logits]))
            if not sequence.finished and self._may_draft(sequence):
                kept.append(Kept(sequence, row, start, sequence.cached - start))
            row, said = row + run.span.count, said + run.logits
        self._kept = kept
        self._taps = {name: tensor for name, tensor in out.items() if name.startswith("tap.")}
        return deltas

    def _draft(self, turns: list[Turn]) -> list[list[int]]:
        """Append the kept rows to the drafter's context, then draft for the turns that want it."""
        drafts: list[list[int]] = [[] for _ in turns]
        kept = [one for one in self._kept if not one.sequence.finished]  # one may have been aborted since
        if self.drafter is None or not kept:
            return drafts
        wanted = [index for index, turn in enumerate(turns) if turn.drafts]
        blocks = [_block(turns[index].sequence) for index in wanted]
        rows = [row for one in kept for row in range(one.first_row, one.first_row + one.count)]
        spans = [Span(one.sequence.pages, one.start, one.count, one.sequence.ring) for one in kept]
        inputs = pack_blocks(rows, spans, blocks, self.limits)
        inputs |= {name: self._taps[name] for name in self.drafter.tap_names}
        proposed = self.drafter.run(inputs)["draft_ids"].tolist()
        for index, block in zip(wanted, proposed, strict=False):  # an idle block has no turn
            drafts[index] = block[: turns[index].drafts]
        return drafts

    def _may_draft(self, sequence: Sequence) -> bool:
        """Whether the drafter must know the rows of a sequence."""
        config = self.drafter.config if self.drafter else None
        return config is not None and sequence.may_draft(config.num_drafts, config.max_position_embeddings)

    def _rows(self, turn: Turn, drafts: list[int]) -> Rows:
        sequence = turn.sequence
        tokens = sequence.tokens[sequence.cached : sequence.cached + turn.tokens] + drafts
        span = Span(sequence.pages, sequence.cached, len(tokens))
        return Rows(span, tokens, logits=1 + len(drafts) if turn.completes else 0)


def _block(sequence: Sequence) -> Block:
    return Block(sequence.pages, sequence.tokens[-1], len(sequence.tokens) - 1, sequence.ring)
