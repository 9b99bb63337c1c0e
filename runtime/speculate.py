"""The speculative loop: draft, choose, verify, accept, append.

One step serves any mix of sequences. The drafter proposes a block for each that decodes; how many of its drafts are
worth verifying may be chosen; the verifier runs anchors, drafts and prompt chunks as one packed batch; the acceptance
networks say which drafts are accepted and which token follows, so that the verifier alone could have given the same
answer, with the same probability; and the features of the rows that were kept wait for the drafter's next run, which
appends them to its context.
"""

from __future__ import annotations

from glmspec.network.limits import EngineLimits
from glmspec.runtime.accept import Acceptance, DraftBlock
from glmspec.runtime.adaptive import AdaptiveVerification
from glmspec.runtime.executor import Tensors
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.propose import NO_DRAFTS, Drafter, Drafts, KeptRows
from glmspec.runtime.request import Delta
from glmspec.runtime.scheduler import Share
from glmspec.runtime.sequence import Accepted


class SpeculativeLoop:
    """Runs steps on a verifier and, if there is one, a drafter. Owns no sequences; from one step to the next it keeps
    the verifier's features, and which of their rows the drafter shall append. adaptive: chooses how many drafts are
    verified; None verifies them all."""

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
        self._last_features: Tensors = {}
        self._last_kept: list[KeptRows] = []

    def step(self, shares: list[Share]) -> list[Delta | None]:
        """Run one step. Returns what the answer of each share gains, None while its prompt goes on."""
        drafting = [share for share in shares if share.num_drafts]
        drafts = self._draft(drafting)
        blocks = self._choose(drafting, drafts)

        rows = [_rows(share, blocks.get(share)) for share in shares]
        out = self.verifier.run(pack_rows(rows, self.limits, self._least_pages))

        completing = [share for share in shares if share.completes]
        verified = [blocks.get(share, DraftBlock(share.sequence, ())) for share in completing]
        accepted = dict(zip(completing, self.acceptance.accept(out, verified, drafts.probs), strict=True))
        if self.adaptive and blocks:
            self.adaptive.learn(list(blocks.values()), [accepted[share] for share in blocks], drafts)
        return self._append(shares, rows, blocks, accepted, out)

    def _draft(self, shares: list[Share]) -> Drafts:
        """Append the kept rows to the drafter's context, and draft for the shares."""
        kept = [run for run in self._last_kept if not run.sequence.finished]  # it may have been aborted since
        if self.drafter is None or not kept:
            return NO_DRAFTS
        return self.drafter.propose(self._last_features, kept, [share.sequence for share in shares])

    def _choose(self, shares: list[Share], drafts: Drafts) -> dict[Share, DraftBlock]:
        """The drafts of each share that the verifier is shown."""
        if not drafts.ids:
            return {}
        counts = [share.num_drafts for share in shares]
        if self.adaptive:
            counts = self.adaptive.choose(counts, drafts, [share.sequence.ending_tokens for share in shares])
        blocks = {}
        for at, (share, count) in enumerate(zip(shares, counts, strict=True)):
            q_rows = drafts.q_rows(at, count) if drafts.probs else ()
            blocks[share] = DraftBlock(share.sequence, drafts.ids[at][:count], q_rows)
        return blocks

    def _append(
        self,
        shares: list[Share],
        rows: list[Rows],
        blocks: dict[Share, DraftBlock],
        accepted: dict[Share, Accepted],
        out: Tensors,
    ) -> list[Delta | None]:
        """Append what was accepted to the sequences; remember which rows were kept, and their features."""
        deltas, self._last_kept, first_row = [], [], 0
        for share, run in zip(shares, rows, strict=True):
            sequence, start = share.sequence, share.sequence.cached
            drafts = blocks[share].drafts if share in blocks else ()
            deltas.append(sequence.advance(share.num_tokens, drafts, accepted.get(share)))
            if not sequence.finished and sequence.may_draft:
                self._last_kept.append(KeptRows(sequence, first_row, start, sequence.cached - start))
            first_row += run.span.count
        if self.drafter:
            self._last_features = {name: out[name] for name in self.drafter.features}
        return deltas


def _rows(share: Share, block: DraftBlock | None) -> Rows:
    """The verifier's rows of a share: pending tokens, then drafts."""
    sequence, drafts = share.sequence, list(block.drafts) if block else []
    tokens = sequence.tokens[sequence.cached : sequence.cached + share.num_tokens] + drafts
    return Rows(Span(sequence.pages, sequence.cached, len(tokens)), tokens, 1 + len(drafts) if share.completes else 0)
