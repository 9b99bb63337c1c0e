"""Choosing how much of a block is verified changes no law: 200,000 blocks through the real choice and the real
rejection, their tokens against the target's law, which is known exactly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.chains import V, distance, drafter, target

from glmspec.plugins import draw, reject
from glmspec.runtime.accept import Accepted, DraftBlock
from glmspec.runtime.adaptive import AdaptiveVerification, fair_prices, survivals
from glmspec.runtime.cost_table import CostCurve, CostTable
from glmspec.runtime.estimates import Confidence, Margins

DRAFTS, DRAWS = 2, 200_000
INT = torch.int32
# A row costs what makes the choice hard: some blocks are verified whole, some in part, some not at all.
COSTS = CostTable(CostCurve((1, 1001), (0.1, 100.1)), CostCurve((1, 1001), (0.1, 100.1)))
CONFIDENT, MARGINS, PEEKING = "confident", "margins", "peeking"
END = 2  # ends an answer; the law of what would follow is the target's all the same


class Toy:
    """Blocks after anchors of every kind, all drafted at once; verified in steps of some of them."""

    def __init__(self, draws: int) -> None:
        self.p_VV, (self.q_VV, _) = target("plain"), drafter("whole")
        self.generator = torch.Generator().manual_seed(3)
        path = [torch.arange(draws) % V]
        for _ in range(DRAFTS):
            path.append(draw.reference(self.q_VV[path[-1]], self.uniform(draws)).long())
        self.path_BQ = torch.stack(path, 1)
        self.accept_BQ, self.last_B = self.uniform(draws, DRAFTS + 1), self.uniform(draws)

    def uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(*size, generator=self.generator)

    def signals(self, kind: str) -> torch.Tensor:
        """[draws, DRAFTS]. The chance that a draft after this token stands: of all drafts; or, peeking, of this one."""
        before_BJ, draft_BJ = self.path_BQ[:, :-1], self.path_BQ[:, 1:]
        if kind == PEEKING:
            return (self.p_VV / self.q_VV)[before_BJ, draft_BJ].clamp(max=1)
        chance_V = torch.minimum(self.p_VV, self.q_VV).sum(1)
        return chance_V[before_BJ] if kind == CONFIDENT else 3 * torch.logit(chance_V[before_BJ]) + 2

    def verify(self, blocks: slice, counts: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted drafts, and three tokens after each anchor: the target goes on where the block ended."""
        path_BQ, size = self.path_BQ[blocks], len(counts)
        before_R = path_BQ.flatten()
        draft_R = torch.cat([path_BQ[:, 1:], path_BQ[:, :1]], 1).flatten().to(INT)
        row_BQ = torch.arange(size * (DRAFTS + 1)).view(size, -1).to(INT)
        accepted_B, tokens_BQ = reject.accepted(
            self.p_VV[before_R], draft_R, before_R.to(INT), row_BQ, counts.to(INT), self.accept_BQ[blocks].flatten(),
            self.last_B[blocks], torch.full((size,), int(method == "block"), dtype=INT), self.q_VV,
        )  # fmt: skip
        tokens_BQ = tokens_BQ.long()
        for place in range(1, DRAFTS + 1):
            drawn_B = draw.reference(self.p_VV[tokens_BQ[:, place - 1]], self.uniform(size)).long()
            tokens_BQ[:, place] = torch.where(accepted_B < place, drawn_B, tokens_BQ[:, place])
        return accepted_B, tokens_BQ


def run(
    kind: str, method: str, sequences: int, adaptive: AdaptiveVerification | None = None, draws: int = DRAWS
) -> tuple[float, torch.Tensor]:
    """Distance of what is emitted from the target's law, and how many drafts of each block were verified."""
    toy = Toy(draws)
    signal_BJ, learns = toy.signals(kind), kind == MARGINS
    adaptive = adaptive or AdaptiveVerification(Margins(DRAFTS) if learns else Confidence(), COSTS)
    counts, emitted = [], []
    for first in range(0, draws, sequences):
        blocks = slice(first, first + sequences)
        drafts = SimpleNamespace(signal=signal_BJ[blocks], ids=toy.path_BQ[blocks, 1:].tolist())
        counts.append(torch.tensor(adaptive.choose([DRAFTS] * sequences, drafts, [{END}] * sequences)))
        if learns:
            accepted, tokens = toy.verify(blocks, counts[-1], method)
            blocks = [DraftBlock(None, [0] * count) for count in counts[-1].tolist()]
            adaptive.learn(blocks, [Accepted(one, []) for one in accepted.tolist()], drafts)
            emitted.append(tokens)
    count_B = torch.cat(counts)
    tokens_BQ = torch.cat(emitted) if learns else toy.verify(slice(0, draws), count_B, method)[1]
    return distance(torch.cat([toy.path_BQ[:, :1], tokens_BQ], 1), toy.p_VV), count_B


@pytest.mark.parametrize(
    ("kind", "method", "sequences"),
    [(CONFIDENT, "standard", 25), (CONFIDENT, "block", 25), (MARGINS, "block", 500)],
)
def test_emitted_tokens_follow_the_target(kind, method, sequences):
    found, count_B = run(kind, method, sequences)
    assert found < 4.5
    shares = torch.bincount(count_B, minlength=3) / DRAWS
    assert shares.min() > 0.02, shares  # the choice is a choice


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_test_sees_an_estimate_that_peeks_at_the_draft(method):
    assert run(PEEKING, method, 25)[0] > 50


class PeekingAtEnds(AdaptiveVerification):
    """Does not verify a drafted end either."""

    def choose(self, most, drafts, endings) -> list[int]:
        later = SimpleNamespace(signal=drafts.signal, ids=[[*block[1:], block[0]] for block in drafts.ids])
        return super().choose(most, later, endings)


def test_the_test_sees_ends_that_are_looked_for_too_early():
    free = CostTable(CostCurve((1,), (1.0,)), CostCurve((1,), (1.0,)))
    early, real = (
        run(CONFIDENT, "standard", 25, way(Confidence(), free), 10_000) for way in (PeekingAtEnds, AdaptiveVerification)
    )
    assert early[0] > 10 and real[0] < 4.5
    assert 0.02 < (real[1] < DRAFTS).double().mean() < 0.5  # ends are drafted


class Hasty(AdaptiveVerification):
    """Keeps to the price of this very step."""

    def choose(self, most, drafts, endings) -> list[int]:
        survival_BJ = survivals(self.estimates.chances(drafts.signal.double().numpy()), drafts.ids, endings)
        return (survival_BJ > fair_prices(survival_BJ.ravel(), len(most), self.costs)[0]).sum(1).tolist()


def test_the_test_sees_a_price_of_the_same_step():
    """Where two drafts cost what one costs, a second one that is worth it, which the first one made so, would get the
    first one verified."""
    costs = CostTable(COSTS.draft_ms, CostCurve((1, 3), (0.1, 0.34), 3))
    hasty, real = (
        run(CONFIDENT, "block", 1, way(Confidence(), costs), 10_000)[0] for way in (Hasty, AdaptiveVerification)
    )
    assert hasty > 6 and real < 4.5
