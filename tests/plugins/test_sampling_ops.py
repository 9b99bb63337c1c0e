"""The ops of sampling and acceptance: reference against layers on adversarial rows, and against their definitions."""

from __future__ import annotations

import pytest
import torch
from support.networks import run

from glmspec.plugins import accept, adjust, draw, reject, target_probs

INT = torch.int32
INF = float("inf")


def both(op, inputs: dict[str, torch.Tensor], **options) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the reference says, and what the layers say."""
    expected = op.reference(*inputs.values())
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    return expected, run(inputs, op.native, regions=False, **options)


def as_logits(p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and settings whose law is p, to its rounding."""
    one = torch.ones(len(p))
    return {"logits": p.log(), "t": one, "k": (0 * one).to(INT), "top_p": one, "m": 0 * one}


def rows(seed: int, count: int, vocab: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * spread


# -- draw ---------------------------------------------------------------------------------------------


def test_draw_walks_the_running_sum():
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25], [0, 0, 1, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    p = p.repeat_interleave(4, 0)
    u = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-23] * 5)
    expected, found = both(draw, {"p": p, "u": u})
    assert torch.equal(expected[0], found[0])
    assert expected[0].view(5, 4).tolist() == [[0, 2, 2, 3], [2] * 4, [0, 0, 1, 1], [3] * 4, [0, 0, 1, 1]]


# -- sampling_law -------------------------------------------------------------------------------------


def by_definition(z: torch.Tensor, temperature: float, k: int, p: float, min_p: float) -> torch.Tensor:
    """One row's law in float64, token by token: who is above me decides whether I stay."""
    z = z.double()
    if temperature == 0:
        return torch.nn.functional.one_hot(z.argmax(), len(z)).double()
    z = (z - z.max()) / temperature
    keep = z.exp() >= min_p
    if k:
        keep &= torch.tensor([(z > one).sum() < k for one in z])
    weight = torch.where(keep, z.exp(), 0.0)
    if p < 1:
        keep &= torch.tensor([weight[z > one].sum() < p * weight.sum() for one in z])
    weight = torch.where(keep, z.exp(), 0.0)
    return weight / weight.sum()


SETTINGS = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2),
    (0.9, 12, 0.6, 0.05), (1.0, 1, 1.0, 0.0), (2.0, 0, 1e-6, 0.0), (1.0, 1000, 0.999, 0.0), (0.01, 3, 0.5, 0.0),
    (100.0, 0, 0.9, 0.9), (1.0, 0, 1.0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "ties", "masked", "one left", "flat", "huge"])
def test_the_law_is_its_definition(kind):
    z = rows(3, len(SETTINGS), 40)
    if kind == "ties":
        z = z.round()
    elif kind == "masked":
        z[:, ::3] = -INF
    elif kind == "one left":
        z[:, 1:] = -INF
    elif kind == "flat":
        z[:] = 0.5
    elif kind == "huge":
        z *= 1e4
    columns = list(zip(*SETTINGS, strict=True))
    inputs = {"z": z} | {
        name: torch.tensor(column, dtype=INT if name == "k" else torch.float32)
        for name, column in zip(("t", "k", "p", "m"), columns, strict=True)
    }
    expected, found = both(target_probs, inputs)
    truth = torch.stack([by_definition(row, *setting) for row, setting in zip(z, SETTINGS, strict=True)])
    for probs in (expected[0], found[0]):
        torch.testing.assert_close(probs.double(), truth, rtol=1e-5, atol=1e-7)
        assert torch.equal(probs > 0, truth.float() > 0)


# -- adjust -------------------------------------------------------------------------------------------


def test_adjust_changes_what_it_names():
    z = torch.tensor([[1.0, -1.0, 2.0], [0.0, 4.0, -2.0]])
    place = torch.tensor([[0, 0], [0, 1], [1, 2], [1, 1], [0, 2]], dtype=INT)
    before = torch.tensor([0.0, 0.0, 3.0, -INF, -5.0])
    factor = torch.tensor([2.0, 2.0, 4.0, 3.0, 2.0])
    after = torch.tensor([-0.5, -0.5, 1.0, 0.0, 0.0])
    expected, found = both(adjust, {"z": z, "place": place, "before": before, "factor": factor, "after": after})
    assert torch.equal(expected[0], found[0])
    assert expected[0].tolist() == [[0.0, -2.5, -6.0], [0.0, -INF, 1.25]]
    assert z[0, 0] == 1.0  # the logits themselves stay


# -- accept -------------------------------------------------------------------------------------------


def test_accept_stops_at_the_first_that_differs():
    said = torch.tensor([5, 6, 7, 8, 1, 2, 3, 9], dtype=INT)
    draft = torch.tensor([5, 6, 0, 8, 1, 2, 3, 9], dtype=INT)
    block = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 6], [7, 7, 7, 7], [4, 5, 5, 5]], dtype=INT)
    count = torch.tensor([3, 2, 0, 1], dtype=INT)
    expected, found = both(accept, {"said": said, "draft": draft, "block": block, "count": count})
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert expected[0].tolist() == [2, 2, 0, 1]
    assert expected[1][0].tolist() == [5, 6, 7, 8]


# -- reject -------------------------------------------------------------------------------------------


def reject_case(seed: int, blocks: int, drafts: int, vocab: int, k: int | None) -> dict[str, torch.Tensor]:
    """Blocks of several lengths, all of whose drafts are drawn from their q (whole, or k candidates)."""
    g = torch.Generator().manual_seed(seed)
    count = torch.arange(blocks, dtype=INT) % (drafts + 1)
    starts = (count + 1).cumsum(0) - (count + 1)
    column = torch.arange(drafts + 1)
    block = (starts[:, None] + torch.minimum(column, count[:, None])).to(INT)
    total = int((count + 1).sum())
    p = rows(seed, total, vocab, 1.5)
    ids = torch.stack([torch.randperm(vocab, generator=g)[: k or vocab] for _ in range(total)])
    ids = ids if k else torch.arange(vocab).expand(total, -1)
    own_q = (p.gather(1, ids) + rows(seed + 1, total, k or vocab, 0.5)).softmax(-1)
    drawn = ids.gather(1, torch.multinomial(own_q, 1, generator=g)).squeeze(1)
    q_row = torch.randperm(total, generator=g)
    made = as_logits(p.softmax(-1)) | {"draft": drawn.to(INT), "q_row": q_row.to(INT), "block": block, "count": count}
    made |= {"u": torch.rand(total, generator=g), "last": torch.rand(blocks, generator=g)}
    made |= {"verify": torch.arange(blocks, dtype=INT) // 2 % 2, "q": torch.empty_like(own_q)}
    made["q"][q_row] = own_q
    if k:
        made["q_ids"] = torch.empty_like(ids)
        made["q_ids"][q_row] = ids
        made["q_ids"] = made["q_ids"].to(INT)
    return made


@pytest.mark.parametrize("k", [None, 18], ids=["whole", "candidates"])
def test_rejection_by_layers_is_the_reference(k):
    inputs = reject_case(7, 90, 5, 24, k)
    expected, found = both(reject, inputs)
    assert torch.equal(expected[0], found[0])
    said = torch.arange(6) <= expected[0].unsqueeze(1)
    assert torch.equal(expected[1][said], found[1][said])
    assert len(set(expected[0].tolist())) > 4


@pytest.mark.parametrize("verify", [0, 1], ids=["standard", "block"])
def test_edges_of_rejection(verify):
    """q equal to p accepts all; a draft that p forbids never stands; q one-hot; a certain p."""
    p = torch.tensor([[0.5, 0.5, 0.0]] * 3 + [[0.5, 0.5, 0.0]] * 2 + [[1.0, 0.0, 0.0]] * 2)
    q = torch.tensor([[0.5, 0.5, 0.0]] * 3 + [[0.0, 0.0, 1.0]] * 2 + [[1.0, 0.0, 0.0]] * 2)
    inputs = as_logits(p) | {
        "draft": torch.tensor([0, 1, 0, 2, 0, 0, 0], dtype=INT), "q_row": torch.arange(7, dtype=INT),
        "block": torch.tensor([[0, 1, 2], [3, 4, 4], [5, 6, 6]], dtype=INT),
        "count": torch.tensor([2, 1, 1], dtype=INT),
        "u": torch.full((7,), 1 - 2**-23), "last": torch.tensor([0.75, 0.75, 0.0]),
        "verify": torch.full((3,), verify, dtype=INT), "q": q,
    }  # fmt: skip
    expected, found = both(reject, inputs)
    for accepted, tokens in (expected, found):
        assert accepted.tolist() == [2, 0, 1]
        assert [int(tokens[b, accepted[b]]) for b in range(3)] == [1, 1, 0]
