"""Tokens that rejection sampling emits follow the target's law, whatever the drafts' law: 200,000 blocks each.

The kernels' law is measured with numbers of an even grid instead: 40 steps a draft, as an interpreter is slow.

The target and the drafter are Markov chains over six tokens. A block's tokens, continued by the target where it ended
early, are three tokens whose joint law is known exactly.
"""

from __future__ import annotations

import pytest
import torch
from support.chains import LAWS, V, distance, drafter, target
from support.faces import PROGRAMS, Case, interpret

from glmspec.plugins import draw, reject

DRAFTS, DRAWS = 2, 200_000
INT = torch.int32
Q_KINDS = ("whole", "candidates", "one-hot")


def blocks(probs: str, kind: str, verify_blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts [DRAWS], and three tokens each [DRAWS, 3]."""
    g = torch.Generator().manual_seed(3)
    p_VV, (q_VK, ids_VK) = target(probs), drafter(kind)
    path = [torch.zeros(DRAWS, dtype=torch.long)]  # the anchor is token 0
    for _ in range(DRAFTS):
        column = draw.reference(q_VK[path[-1]], torch.rand(DRAWS, generator=g)).long()
        path.append(column if ids_VK is None else ids_VK[path[-1], column])
    before_BQ = torch.stack(path, 1)
    draft_BQ = torch.cat([before_BQ[:, 1:], before_BQ[:, :1]], 1)
    rows = DRAWS * (DRAFTS + 1)
    accepted, tokens = reject.accepted(
        p_VV[before_BQ.flatten()], draft_BQ.flatten().to(INT), before_BQ.flatten().to(INT),
        torch.arange(rows).view(DRAWS, -1).to(INT), torch.full((DRAWS,), DRAFTS, dtype=INT),
        torch.rand(rows, generator=g), torch.rand(DRAWS, generator=g),
        torch.full((DRAWS,), int(verify_blocks), dtype=INT), q_VK, None if ids_VK is None else ids_VK.to(INT),
    )  # fmt: skip
    tokens = tokens.long()
    for place in range(1, DRAFTS + 1):  # what the block did not say
        drawn = draw.reference(p_VV[tokens[:, place - 1]], torch.rand(DRAWS, generator=g)).long()
        tokens[:, place] = torch.where(accepted < place, drawn, tokens[:, place])
    return accepted, tokens


@pytest.mark.parametrize("probs", LAWS)
@pytest.mark.parametrize("kind", Q_KINDS)
@pytest.mark.parametrize("verify_blocks", [False, True], ids=["standard", "block"])
def test_emitted_tokens_follow_the_target(probs, kind, verify_blocks):
    accepted, tokens = blocks(probs, kind, verify_blocks)
    assert distance(torch.cat([torch.zeros(DRAWS, 1).long(), tokens], 1), target(probs)) < 4.5
    assert 0 < accepted.double().mean() < DRAFTS


def test_block_verification_accepts_more():
    means = [blocks("plain", "whole", way)[0].double().mean() for way in (False, True)]
    assert means[1] > means[0] + 0.01


def test_the_test_sees_a_wrong_q():
    """Drafts scored with another law than they were drawn from: the classic fault (public case 25)."""
    p_VV = target("plain")
    g = torch.Generator().manual_seed(3)
    z = torch.randn(V, V, generator=torch.Generator().manual_seed(1))
    best = z.argmax(-1)  # drafted greedily, scored as if drawn from the softmax
    rows = torch.arange(DRAWS * 2).view(DRAWS, 2).to(INT)
    before = torch.stack([torch.zeros(DRAWS, dtype=torch.long), best[0].expand(DRAWS)], 1).flatten()
    _, tokens = reject.accepted(
        p_VV[before], best[before].to(INT), before.to(INT), rows, torch.ones(DRAWS, dtype=INT),
        torch.rand(DRAWS * 2, generator=g), torch.rand(DRAWS, generator=g), torch.zeros(DRAWS, dtype=INT),
        z.softmax(-1),
    )  # fmt: skip
    counts = torch.bincount(tokens[:, 0].long(), minlength=V).double()
    chi = ((counts - p_VV[0] * DRAWS) ** 2 / (p_VV[0] * DRAWS)).sum()
    assert (chi - V) / (2 * V) ** 0.5 > 50


# -- the kernels --------------------------------------------------------------------------------------

STEPS, GENERATOR = 40, 17  # of a lattice: i / 40 accepts, (17 i mod 40) / 40 draws the last token
P = torch.tensor([0.4, 0.05, 0.25, 0.1, 0.2])
Q = torch.tensor([0.1, 0.6, 0.3])
IDS = torch.tensor([[4, 0, 2]], dtype=INT)


def lattice(verify: int) -> Case:
    """Blocks of one draft: every candidate with every point of the lattice. The rows after a draft are one row."""
    count = len(Q) * STEPS
    step = torch.arange(count) % STEPS
    one = torch.ones(count + 1)
    rows = torch.stack([torch.arange(count), torch.full((count,), count)], 1).to(INT)
    draft = torch.cat([IDS[0].repeat_interleave(STEPS), IDS[0, :1]])
    inputs = [P.log().expand(count + 1, -1).contiguous(), one, (0 * one).to(INT), one, 0 * one, draft]
    inputs += [(0 * one).to(INT), rows, torch.ones(count, dtype=INT), torch.cat([(step + 0.5) / STEPS, one[:1] * 0])]
    inputs += [(GENERATOR * step % STEPS + 0.5) / STEPS, torch.full((count,), verify, dtype=INT)]
    return Case("reject", [*inputs, Q.unsqueeze(0), IDS])


def test_tokens_from_the_kernels_follow_the_target():
    """A draft that falls leaves the last token to a stretch of the lattice, whose shares are right to two steps."""
    found = interpret({"block": lattice(1)})["block"]
    assert found.programs < PROGRAMS
    probs_KV = torch.stack(
        [torch.bincount(of.long(), minlength=5) / STEPS for of in found.outputs[1][:, 0].split(STEPS)]
    )
    torch.testing.assert_close(Q @ probs_KV, P, atol=2 / STEPS, rtol=0)
    accepted_K = torch.stack([of.float().mean() for of in found.outputs[0].split(STEPS)])
    torch.testing.assert_close(accepted_K, (P[IDS[0].long()] / Q).clamp(max=1), atol=1 / STEPS, rtol=0)
