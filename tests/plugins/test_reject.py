"""Rejection: the kernels against the reference, and compiled.

A kernel adds in float32 and in another order, so chances may differ by some 1e-6, and by more where they are quotients
of small masses. So numbers are put 1e-4 from where the verdict or the token changes, on either side: no nearer, or the
outcome might rightly differ, and no further, so that a chance which is off by more is seen.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins import reject
from glmspec.plugins.sample import SPLIT
from glmspec.plugins.spec import NoPlugin
from glmspec.plugins.variants import Recorder, Shaped

INT = torch.int32
INF = float("inf")
APART = 1e-4  # between a number and where something changes
ACCEPT, LAST, COUNT, ROW = 9, 10, 8, 7  # places of inputs
# Temperature, top-k, top-p, min-p: greedy, plain, narrowed to less than the candidates, narrowed otherwise.
SETTINGS = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 4, 1.0, 0.0), (1.2, 0, 0.9, 0.02), (0.5, 0, 1.0, 0.0)]


def said(case: Case, by: tuple[float, float] = (0.0, 0.0)) -> torch.Tensor:
    """What the reference says of each block: accepted, and the last token. by: added to all numbers."""
    inputs = list(case.inputs)
    for at, more in zip((ACCEPT, LAST), by, strict=True):
        inputs[at] = (inputs[at].double() + more).clamp(0, 1 - 2**-24).float()
    accepted, tokens = reference(Case("reject", inputs))
    return torch.stack([accepted, tokens.gather(1, accepted.long().unsqueeze(1)).squeeze(1)], 1)


def firm(case: Case) -> torch.Tensor:
    """Blocks whose outcome is the same a little further on either side."""
    near = APART * 0.6
    changed = [(said(case, by) != said(case)).any(1) for by in [(-near, 0), (near, 0), (0, -near), (0, near)]]
    return ~torch.stack(changed).any(0)


def edge(case: Case, at: int, place: torch.Tensor) -> torch.Tensor:
    """For every block, up from the number that it has at its place: where what is said changes, or NaN."""
    before, kept = said(case), case.inputs[at].clone()
    low, high = kept[place].double(), torch.ones(len(place)).double()
    for step in range(18):
        middle = high if step == 0 else (low + high) / 2
        case.inputs[at][place] = middle.clamp(max=1 - 2**-24).float()
        differs = (said(case) != before).any(1)
        never = ~differs if step == 0 else never  # noqa: F821
        low, high = torch.where(differs, low, middle), torch.where(differs, middle, high)
        low = kept[place].double() if step == 0 else low
    case.inputs[at] = kept
    return torch.where(never, math.nan, high)


def beside(case: Case, seed: int = 0) -> Case:
    """Numbers near the places where something changes: a draft's chance, then the last token's running sum."""
    g, inputs = torch.Generator().manual_seed(seed), case.inputs
    blocks, pick = len(inputs[LAST]), None
    for _ in range(30):
        again = ~firm(case) if pick is not None else torch.ones(blocks, dtype=torch.bool)
        if not again.any():
            return case
        pick = (torch.rand(blocks, generator=g) * inputs[COUNT]).long()
        own = inputs[ROW].gather(1, pick.unsqueeze(1)).squeeze(1).long()
        fresh = [torch.rand(len(inputs[at]), generator=g) for at in (ACCEPT, LAST)]
        rows = inputs[ROW][again].long().flatten().unique()
        inputs[ACCEPT][rows] = fresh[0][rows]
        inputs[LAST][again] = fresh[1][again]
        for at, place in ((ACCEPT, own), (LAST, torch.arange(blocks))):
            side = torch.where(torch.rand(blocks, generator=g) < 0.5, APART, -APART)
            found = edge(case, at, place) + side
            moved = again & found.isfinite() & (found > 0) & (found < 1)
            inputs[at][place[moved]] = found[moved].float()
    raise AssertionError("no numbers keep their distance")


def case(
    seed: int, blocks: int, drafts: int, vocabulary: int, k: int | None, *, settings=SETTINGS, dtype=torch.float32,
    spread: float = 1.5,
) -> Case:  # fmt: skip
    """Blocks of several lengths whose drafts are drawn from their q (whole, or k candidates), verified either way."""
    g = torch.Generator().manual_seed(seed)
    count = (drafts - torch.arange(blocks) % (drafts + 1)).to(INT)
    starts = (count + 1).cumsum(0) - (count + 1)
    row = (starts[:, None] + torch.minimum(torch.arange(drafts + 1), count[:, None])).to(INT)
    total = int((count + 1).sum())
    owner = torch.repeat_interleave(torch.arange(blocks), count + 1) % len(settings)
    t, top_k, top_p, min_p = (torch.tensor(column)[owner] for column in zip(*settings, strict=True))
    z = (spread * torch.randn(total, vocabulary, generator=g)).to(dtype)
    ids = z.float().topk(k or vocabulary).indices if k else torch.arange(vocabulary).expand(total, -1)
    own_q = (z.float().gather(1, ids) + 0.5 * torch.randn(ids.shape, generator=g)).softmax(-1)
    chosen = (t == 0) | (torch.arange(total) % 7 == 3)  # drafts that were not drawn
    own_q[chosen] = torch.nn.functional.one_hot(own_q[chosen].argmax(1), own_q.shape[1]).float()
    column = torch.multinomial(own_q, 1, generator=g)
    q_row = torch.randperm(total, generator=g)
    laid = [torch.empty_like(x).index_copy_(0, q_row, x) for x in (own_q, ids.to(INT))]
    inputs = [z, t.float(), top_k.to(INT), top_p.float(), min_p.float(), ids.gather(1, column).squeeze(1).to(INT)]
    inputs += [q_row.to(INT), row, count, torch.rand(total, generator=g), torch.rand(blocks, generator=g)]
    inputs += [torch.randint(0, 2, (blocks,), generator=g, dtype=INT), *laid[: 2 if k else 1]]
    return beside(Case("reject", inputs), seed)


def edges(candidates: bool) -> Case:
    """q equal to p accepts all; a draft that p forbids never stands; a greedy block stands whole, and what lies behind
    its drafts does not count; where nothing is left of p after q, p itself is drawn from. Either way of verifying."""
    p = torch.tensor([[0.5, 0.5, 0.0]] * 5 + [[1.0, 0.0, 0.0]] * 2 + [[0.0, 1.0, 0.0]] * 2)
    q = torch.tensor([[0.5, 0.5, 0.0]] * 3 + [[0.0, 0.0, 1.0]] * 2 + [[1.0, 0.0, 0.0]] * 2 + [[0.0, 1.0, 0.0]] * 2)
    one, heat = torch.ones(9), torch.ones(9)
    heat[5:7] = 0
    inputs = [p.log(), heat, (0 * one).to(INT), one, 0 * one]
    inputs += [torch.tensor([0, 1, 0, 2, 0, 0, 0, 0, 0], dtype=INT), torch.arange(9, dtype=INT)]
    inputs += [torch.tensor([[0, 1, 2], [3, 4, 4], [5, 6, 6], [7, 8, 8]] * 2, dtype=INT)]
    inputs += [torch.tensor([2, 1, 1, 1] * 2, dtype=INT), torch.full((9,), 1 - 2**-12)]
    inputs += [torch.tensor([0.75, 0.75, 0.0, 0.5] * 2), torch.arange(8, dtype=INT) // 4, q]
    return Case("reject", inputs + ([torch.arange(3, dtype=INT).expand(9, 3).contiguous()] if candidates else []))


def emptied() -> Case:
    """Candidates that take all of the first split. What rounding leaves of it has no token; the next split has."""
    blocks, g = 6, torch.Generator().manual_seed(9)
    z = torch.full((blocks + 1, 2 * SPLIT), -INF)
    z[:, [SPLIT + 5, SPLIT + 900]] = 0.0
    ids = torch.stack([torch.randperm(SPLIT, generator=g)[:7] for _ in range(blocks + 1)])
    near = torch.randn(blocks + 1, 7, generator=g)
    z.scatter_(1, ids, near)
    one, row = torch.ones(blocks + 1), torch.arange(blocks + 1)
    rows = torch.stack([row[:-1], torch.full((blocks,), blocks)], 1)
    inputs = [z, one, (0 * one).to(INT), one, 0 * one, ids[:, 0].to(INT), row.to(INT), rows.to(INT)]
    inputs += [one[1:].to(INT), one - 2**-12, 0 * one[1:], (row[1:] % 2).to(INT), near.softmax(1), ids.to(INT)]
    return Case("reject", inputs)


def without_drafts() -> Case:
    """What stands in q where no draft is does not count, not even NaN."""
    alone = case(7, 1, 0, 24, 3, settings=SETTINGS[1:2])
    alone.inputs[12] = torch.full_like(alone.inputs[12], math.nan)
    return alone


def made(sizes: dict[str, int], seed: int, use: str = "") -> Case:
    return beside(example("reject", sizes, use=use, seed=seed))


WIDE = 2 * SPLIT + 77
MAKERS = {
    "candidates": partial(case, 1, 10, 4, 24, 9),
    "whole": partial(case, 12, 8, 3, 24, None),
    "candidates, bfloat16": partial(case, 3, 4, 3, 40, 7, dtype=torch.bfloat16),
    "candidates, three splits": partial(case, 4, 3, 2, WIDE, 5, spread=4.0, settings=SETTINGS[1:4]),
    "whole, three splits, bfloat16": partial(
        case, 5, 3, 2, WIDE, None, spread=4.0, settings=SETTINGS[1:], dtype=torch.bfloat16
    ),
    "the most rows and candidates": partial(case, 6, 1, 15, 100, 64, settings=SETTINGS[1:2]),
    "blocks of an anchor alone": partial(case, 7, 3, 0, 24, 3),
    "no drafts, and a q of NaN": without_drafts,
    "candidates of all that stays": partial(case, 8, 5, 2, 24, 8, settings=[(1.0, 6, 1.0, 0.0)]),
    "the op's example": partial(made, {"B": 4, "Q": 3, "R": 12, "V": 40, "Z": 8, "K": 6}, 2),
    "the op's example, whole": partial(made, {"B": 2, "Q": 3, "R": 6, "V": 40, "Z": 4, "K": 40}, 3, "whole"),
    "a split that candidates empty": emptied,
    "edges, whole": partial(edges, False),
    "edges, candidates": partial(edges, True),
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def interpreted(cases):
    return interpret(cases)


@pytest.mark.parametrize("name", MAKERS)
def test_the_kernels_equal_the_reference(cases, interpreted, name):
    """Tokens behind the last one are nobody's."""
    accepted, tokens = reference(cases[name])
    mine, found = interpreted[name].outputs
    theirs = torch.arange(tokens.shape[1]) <= accepted.unsqueeze(1)
    assert_agree(cases[name], (mine, torch.where(theirs, found, 0)), (accepted, torch.where(theirs, tokens, 0)))


@pytest.mark.parametrize("inputs", [13, 14], ids=["whole", "candidates"])
@pytest.mark.parametrize("way", [0, 1], ids=["standard", "block"])
def test_the_cases_see_every_outcome(cases, inputs, way):
    """No draft stands, some do, all do."""
    seen = set()
    for one in (one for one in cases.values() if len(one.inputs) == inputs):
        for accepted, count, verify in zip(
            reference(one)[0].tolist(), *(one.inputs[at].tolist() for at in (COUNT, 11)), strict=True
        ):
            if verify == way and count > 1:
                seen.add("none" if not accepted else "all" if accepted == count else "some")
    assert seen == {"none", "some", "all"}


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


@pytest.mark.parametrize(("rows", "candidates", "vocabulary"), [(17, 16, 100), (9, 65, 100), (9, 16, 64 * SPLIT + 1)])
def test_what_a_program_cannot_hold_is_left_to_the_layers(rows, candidates, vocabulary):
    known = {"V": vocabulary, "Q": rows, "K": candidates}
    shapes = [
        Shaped(tuple(known.get(dim, 4) for dim in name.rpartition("_")[2]), "float32" if kind == "T" else kind)
        for name, kind in {**reject.OP.inputs, **reject.OP.optional}.items()
    ]
    with pytest.raises(NoPlugin):
        reject.plugged(Recorder("SM90"), *shapes)


def test_they_compile_within_their_limits():
    assert_compiles("reject")
