"""The Markov walk: the kernels against the reference, and compiled.

Triton's interpreter multiplies bfloat16 matrices wrongly, so float16 stands for dtypes that round.
"""

from __future__ import annotations

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins.markov_walk import OP, STEPS

INF = float("inf")
TILE = STEPS[False].tile("SM90")
SPLIT = TILE["TOKENS"] * TILE["TILES"]
SIZES = {"B": 3, "J": 2, "R": 2, "V": SPLIT + 70, "C": 500, "A": 12}


def walk(name: str, use: str = "", compute: torch.dtype = torch.float32, **sizes: int) -> Case:
    """An example. Columns of a row are as many as the use has."""
    widths = {"gated": (1, 1), "rnn": (3, 2)}.get(use, (0, 0))
    sizes = {**SIZES, **sizes}
    columns = {"F": widths[0] * sizes["A"], "H": widths[1] * sizes["A"]}
    return example("markov_walk", {**sizes, **columns}, use=use, compute=compute, seed=len(name))


def given(case: Case, **tensors: torch.Tensor) -> Case:
    """Other inputs: the first ones by place, the optional ones by name."""
    names = ["logits", "anchor", "w1", "w2", *case.attributes["given"]]
    for name, tensor in tensors.items():
        at = names.index(name)
        case.inputs[at] = tensor.to(case.inputs[at].dtype).expand_as(case.inputs[at]).contiguous()
    return case


def heads_drawn() -> dict[str, Case]:
    """Gated and rnn heads of a reduced vocabulary, drawn, one with an anchor's row that drafts nothing."""
    made = {}
    for head, rows in (("gated", 2), ("rnn", 3)):
        case, noise = walk(head, head, J=2, R=rows, V=90), walk("noise", "reduced, drawn", J=2, V=90)
        case.inputs += noise.inputs[4:]
        case.attributes = {**case.attributes, "given": case.attributes["given"] + noise.attributes["given"]}
        made[f"{head}, reduced, drawn"] = case
    return made


def cases() -> dict[str, Case]:
    made = {
        f"{use or 'greedy'}, {compute}": walk(use, use, compute)
        for use in OP.uses
        for compute in (torch.float32, torch.float16)
        if compute == torch.float32 or "reduced" not in use
    }
    tokens = torch.arange(SPLIT + 70)
    small = dict(B=1, J=1)
    zeros = {"w2": torch.zeros(1, 1)}
    late = torch.where(torch.arange(SPLIT + 70) >= SPLIT, 0.0, -INF)
    made |= heads_drawn()
    made |= {
        "ties": given(walk("ties", V=300, A=4, J=1), logits=walk("ties", V=300, A=4, J=1).inputs[0].round(), **zeros),
        "equal logits": given(walk("equal", **small), logits=torch.zeros(1), **zeros),
        "a tie of two splits": given(
            walk("two", **small), logits=((tokens == 5) | (tokens == SPLIT + 3)).float(), **zeros
        ),
        "a tie in two tiles of a split": given(
            walk("tiles", **small), logits=((tokens == 7) | (tokens == TILE["TOKENS"] + 2)).float(), **zeros
        ),
        "both best in one lane": given(
            walk("lane", **small), logits=2.0 * (tokens == 7) + 1.0 * (tokens == TILE["TOKENS"] + 7), **zeros
        ),
        "the last token": given(walk("last", **small), logits=(tokens == SPLIT + 69).float(), **zeros),
        "a split of -inf, drawn": given(walk("late", "drawn", J=1), logits=late),
        "one token above -inf, drawn": given(
            walk("one", "drawn", J=1), logits=torch.where(tokens == SPLIT + 1, 0.0, -INF), **zeros
        ),
        "rows of -inf": given(walk("none", **small), logits=torch.tensor(-INF)),
        "one block": walk("block", B=1, V=33),
        "one draft": walk("draft", "drawn", J=1, V=33),
        "one token": walk("token", "drawn", V=1, J=2),
        "many blocks": walk("blocks", B=TILE["BLOCKS"] + 1, J=1, V=40),
        "a rank of more than a chunk": walk("rank", "rnn", B=1, A=TILE["AC"] + 6, V=40),
        "a whole split": walk("whole", "drawn", V=SPLIT, J=1),
        "a column tile and one": walk("column", "gated", B=1, A=33, V=40),
        "without margins": walk("without", V=40, J=1),
    }
    made["without margins"].attributes["margins"] = False
    edges = given(walk("edges", "drawn", J=1), temperature=torch.tensor([1e-4, 1.0, 3.0]))
    return made | {
        "the last uniform number": given(edges, uniform=torch.tensor(1 - 2**-24)),
        "a uniform number at an edge between splits": given(
            walk("edge", "drawn", B=2, J=1),
            logits=torch.where((tokens == 5) | (tokens == SPLIT + 3), 0.0, -INF),
            uniform=torch.tensor(0.5),
            **zeros,
        ),
        "a uniform number at an edge between tokens": given(
            walk("edge", "drawn", B=2, J=1),
            logits=torch.where((tokens == 5) | (tokens == 9), 0.0, -INF),
            uniform=torch.tensor(0.5),
            **zeros,
        ),
        "a uniform number of zero": given(walk("zero", "drawn", J=1), uniform=torch.tensor(0.0)),
    }


CASES = cases()


def probs_case() -> Case:
    """One draft of many like blocks, of tokens in two splits."""
    blocks = 24
    case = walk("law", "drawn", B=blocks, J=1)
    tokens = torch.arange(SPLIT + 70)
    few = (tokens % 60 == 9) * (1.0 + tokens / 300)
    return given(
        case,
        logits=torch.where(few > 0, few, -INF),
        w2=torch.zeros(1, 1),
        temperature=torch.tensor(0.8),
        uniform=((torch.arange(blocks) + 0.5) / blocks).unsqueeze(1),
    )


LAW = probs_case()


@pytest.fixture(scope="module")
def interpreted():
    return interpret({**CASES, "law": LAW, "no number": NAN})


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def test_drafts_follow_their_law(interpreted):
    """Uniform numbers at equal distances: each token comes as often as its probability says, to one."""
    ids_BJ, *_, probs_BJV = interpreted["law"].outputs
    found_V = torch.bincount(ids_BJ[:, 0].long(), minlength=SPLIT + 70)
    assert int(found_V.sum()) == len(ids_BJ)
    assert (found_V - len(ids_BJ) * probs_BJV[0, 0]).abs().max() <= 1.0
    assert (found_V > 2).sum() >= 3
    assert found_V[:SPLIT].sum() > 2
    assert found_V[SPLIT:].sum() > 2


NAN = given(walk("nan", B=1, J=1, V=40), logits=torch.tensor(float("nan")))


def test_logits_that_are_no_numbers_lead_to_a_token(interpreted):
    """From an id beyond the vocabulary the next draft would read where nothing is."""
    ids_BJ = interpreted["no number"].outputs[0]
    assert 0 <= ids_BJ.item() < 40


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_they_compile_within_their_limits():
    assert_compiles("markov_walk")
