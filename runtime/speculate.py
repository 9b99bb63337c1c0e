"""The speculative loop: draft, choose, verify, accept, append.

One step serves any mix of sequences. The drafter proposes a block for each that decodes; how many of its drafts are
worth verifying may be chosen; the verifier runs anchors, drafts and prompt chunks as one packed batch; the acceptance
networks say which drafts stand and what comes after them, so that the answer is one the verifier alone could have
given, by the same law; and the features of the rows that were kept wait to be appended to the drafter's context by its
next run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from glmspec.network.limits import EngineLimits
from glmspec.runtime.accept import Acceptance, Ballot, Verdict
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.propose import Drafter, Drafts, Kept
from glmspec.runtime.request import Delta
from glmspec.runtime.scheduler import Turn

if TYPE_CHECKING:
    from glmspec.runtime.adaptive import AdaptiveVerification

_NOTHING = Drafts([], {}, (0, 0), torch.empty(0))


class SpeculativeLoop:
    """Runs steps on a verifier and, if there is one, a drafter. Owns no sequences. adaptive: chooses how many drafts
    are verified; None verifies them all."""

    def __init__(
        self,
        verifier: Model,
        drafter: Drafter | None,
        acceptance: Acceptance,
        limits: EngineLimits,
        adaptive: AdaptiveVerification | None = None,
    ) -> None:
        self.verifier, self.drafter, self.acceptance = verifier, drafter, acceptance
        self.limits, self.adaptive = limits, adaptive
        self._least_pages = limits.least_pages(verifier.config.index_topk)
        self._features: dict[str, torch.Tensor] = {}
        self._kept: list[Kept] = []

    def step(self, turns: list[Turn]) -> list[Delta | None]:
        """One step: what each turn's answer gains (None while its prompt goes on)."""
        drafting = [turn for turn in turns if turn.drafts]
        drafts = self._draft(drafting)
        ballots = self._choose(drafting, drafts)

        rows = [_rows(turn, ballots.get(turn)) for turn in turns]
        out = self.verifier.run(pack_rows(rows, self.limits, self._least_pages))

        voting = [turn for turn in turns if turn.completes]
        cast = [ballots.get(turn, Ballot(turn.sequence, ())) for turn in voting]
        verdicts = dict(zip(voting, self.acceptance.judge(out, cast, drafts.probs), strict=True))
        if self.adaptive and ballots:
            self.adaptive.learn(list(ballots.values()), [verdicts[turn] for turn in ballots], drafts)
        return self._append(turns, rows, ballots, verdicts, out)

    def _draft(self, turns: list[Turn]) -> Drafts:
        """Append the kept rows to the drafter's context, and draft for the turns."""
        kept = [one for one in self._kept if not one.sequence.finished]  # one may have been aborted since
        if self.drafter is None or not kept:
            return _NOTHING
        return self.drafter.propose(self._features, kept, [turn.sequence for turn in turns])

    def _choose(self, turns: list[Turn], drafts: Drafts) -> dict[Turn, Ballot]:
        """The drafts of each turn that the verifier shall see."""
        if not drafts.ids:
            return {}
        counts = most = [turn.drafts for turn in turns]
        if self.adaptive:
            counts = self.adaptive.choose(most, drafts, [turn.sequence.ending_tokens for turn in turns])
        made = {}
        for at, (turn, count) in enumerate(zip(turns, counts, strict=True)):
            q_rows = drafts.q_rows(at, count) if drafts.probs else ()
            made[turn] = Ballot(turn.sequence, drafts.ids[at][:count], q_rows)
        return made

    def _append(
        self,
        turns: list[Turn],
        rows: list[Rows],
        ballots: dict[Turn, Ballot],
        verdicts: dict[Turn, Verdict],
        out: dict[str, torch.Tensor],
    ) -> list[Delta | None]:
        """Make the verdicts part of the sequences, and remember which rows were kept, and their features."""
        deltas, self._kept, first_row = [], [], 0
        for turn, run in zip(turns, rows, strict=True):
            sequence, start = turn.sequence, turn.sequence.cached
            drafts = ballots[turn].drafts if turn in ballots else ()
            deltas.append(sequence.advance(turn.tokens, drafts, verdicts.get(turn)))
            if not sequence.finished and sequence.may_draft:
                self._kept.append(Kept(sequence, first_row, start, sequence.cached - start))
            first_row += run.span.count
        if self.drafter:
            self._features = {name: out[name] for name in self.drafter.features}
        return deltas


def _rows(turn: Turn, ballot: Ballot | None) -> Rows:
    """The verifier's rows of a turn: pending tokens, then drafts."""
    sequence, drafts = turn.sequence, list(ballot.drafts) if ballot else []
    tokens = sequence.tokens[sequence.cached : sequence.cached + turn.tokens] + drafts
    return Rows(Span(sequence.pages, sequence.cached, len(tokens)), tokens, 1 + len(drafts) if turn.completes else 0)
