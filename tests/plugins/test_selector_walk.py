"""The selector walk: the kernels against the reference, and compiled."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins.selector_walk import CANDIDATES, CHOICE, MAXIMA, OP
from glmspec.plugins.spec import NoPlugin
from glmspec.plugins.variants import Recorder, shaped

INF = float("inf")
WIDTH = MAXIMA.tile("SM90")["WIDTH"]
BRANCH = WIDTH * CHOICE.tile("SM90")["FAN"]
SIZES = {"B": 2, "J": 3, "V": 3 * BRANCH + 77, "C": 5000, "A": 12}


def walk(name: str, use: str = "", k: int = 6, compute: torch.dtype = torch.float32, **sizes: int) -> Case:
    """An example of so many candidates."""
    case = example("selector_walk", {**SIZES, **sizes}, use=use, compute=compute, seed=len(name))
    case.attributes["k"] = k
    return case


def tied(case: Case, quantum: float) -> Case:
    """Logits and codebooks are whole multiples, so that many scores are equal."""
    for at in (0, 1, 3, 4):
        case.inputs[at] = (case.inputs[at] / quantum).round() * quantum
    return case


def logits(case: Case, **rows: torch.Tensor) -> Case:
    """All rows of logits are this one."""
    case.inputs[0] = rows["row"].expand_as(case.inputs[0]).contiguous()
    return case


def cases() -> dict[str, Case]:
    columns = torch.arange(2 * BRANCH + 9)
    made = {
        f"{use or 'greedy'}, {compute}": walk(use, use, 6 if compute == torch.float32 else 16, compute)
        for use in OP.uses
        for compute in (torch.float32, torch.bfloat16)
    }
    small = dict(V=2 * BRANCH + 9, B=1, J=2)
    made |= {
        "ties of scores": tied(walk("ties", V=300, A=4), 1.0),
        "ties of scores, drawn": tied(walk("ties!", "reduced, drawn", V=300, A=4), 1.0),
        "equal logits": logits(walk("equal", **small), row=torch.zeros(1)),
        "rising logits": logits(walk("rising", k=16, **small), row=columns.float()),
        "rising logits, lanes without a candidate": logits(
            walk("lanes", k=6, V=8 * BRANCH, B=1, J=1), row=torch.arange(8.0 * BRANCH)
        ),
        "the best is the last column": logits(walk("end", k=3, **small), row=(columns == 2 * BRANCH + 8).float()),
        "falling logits": logits(walk("falling", k=16, **small), row=-columns.float()),
        "the best one in every group": logits(walk("groups", **small), row=(columns % WIDTH == 5).float()),
        "the best in one part": logits(walk("part", k=8, **small), row=(columns // 8 == 201).float()),
        "the best in the last columns": logits(walk("last", k=7, **small), row=(columns > 2 * BRANCH + 2).float()),
        "few finite logits": logits(walk("few", k=5, **small), row=torch.where(columns % 800 == 7, 1.0, -INF)),
        "zeros of both signs": logits(walk("signs", k=5, **small), row=torch.where(columns % 3 == 0, 0.0, -0.0)),
        "as many candidates as columns": walk("all", "drawn", k=30, V=30),
        "one candidate": walk("one", "drawn", k=1, V=200),
        "most candidates": walk("most", "drawn", k=CANDIDATES, B=1, J=2),
        "one draft": walk("draft", "drawn", J=1),
        "a rank of one": walk("rank", A=1, V=200),
        "a group's width": walk("width", V=WIDTH, k=16),
        "one column more": walk("more", V=WIDTH + 1, k=16),
    }
    edge = logits(walk("edge", "drawn", k=2, V=40, J=1), row=torch.zeros(1))
    edge.inputs[4], edge.inputs[6] = torch.zeros_like(edge.inputs[4]), torch.full((2, 1), 0.5)
    made["a uniform number at an edge"] = edge
    sure = walk("sure", "drawn", V=200)
    sure.inputs[5], sure.inputs[6] = torch.tensor([1e-4, 1.0]), torch.full((2, 3), 1 - 2**-24)
    return made | {"the last uniform number, cold and hot": sure}


CASES = cases()


@pytest.fixture(scope="module")
def interpreted():
    nan = {"no number": nan_case(), "a NaN": nan_logits([20]), "NaNs only": nan_logits(range(33))}
    return interpret({**CASES, "law": LAW, **nan})


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def probs_case() -> Case:
    """One draft of many like blocks."""
    case = walk("law", "drawn", k=5, B=40, J=1, V=40, A=4)
    case.inputs[:3] = (x[:1].expand_as(x).contiguous() for x in case.inputs[:3])
    case.inputs[5] = torch.full((40,), 4.0)
    case.inputs[6] = ((torch.arange(40) + 0.5) / 40).unsqueeze(1)
    return case


LAW = probs_case()


def test_drafts_follow_their_law(interpreted):
    """Uniform numbers at equal distances: each candidate comes as often as its probability says, to one."""
    ids_BJ, _, _, targets_BJK, probs_BJK = interpreted["law"].outputs
    found_K = (ids_BJ == targets_BJK[0, 0]).sum(0)
    assert int(found_K.sum()) == 40
    assert (found_K - 40 * probs_BJK[0, 0]).abs().max() <= 1.0
    assert (found_K > 2).sum() >= 3


def nan_case() -> Case:
    """A block without a number among its scores, beside a sound one."""
    case = walk("nan", k=4, V=200, J=2)
    case.inputs[1][1] = float("nan")
    return case


def test_scores_that_are_no_numbers_lead_to_a_candidate(interpreted):
    """To an id beyond the codebook's rows they would stop the whole process."""
    case = nan_case()
    ids_BJ, scores_BJ, margins_BJ = interpreted["no number"].outputs
    case.inputs = [x[:1] if len(x) == len(ids_BJ) else x for x in case.inputs]
    assert_agree(case, (ids_BJ[:1], scores_BJ[:1], margins_BJ[:1]), reference(case))
    found_JK = case.inputs[0].new_tensor(nan_case().inputs[0][1].topk(4).indices.tolist())
    assert (ids_BJ[1].unsqueeze(1) == found_JK).any(1).all()


def nan_logits(columns: Iterable[int]) -> Case:
    """Rows of 33 logits, less than a group, some of which are no numbers. All five parts of a row have a candidate."""
    case = walk("nan logits", "drawn", k=5, V=33)
    case.inputs[0][:, :, list(columns)] = float("nan")
    return case


def test_a_logit_that_is_no_number_has_no_chance(interpreted):
    """It may take a candidate's place; the others are drawn as they would be without it."""
    ids_BJ, scores_BJ, margins_BJ, targets_BJK, probs_BJK = interpreted["a NaN"].outputs
    nan_BJK = targets_BJK == 20
    assert (nan_BJK.sum(-1) == 1).all()
    assert (probs_BJK[nan_BJK] == 0).all()
    torch.testing.assert_close(probs_BJK.sum(-1), torch.ones(2, 3))
    assert (ids_BJ != 20).all()
    assert scores_BJ.isfinite().all()
    assert margins_BJ.isfinite().all()


def test_logits_that_are_no_numbers_lead_to_columns(interpreted):
    """Beyond the row there may be nothing to read."""
    ids_BJ, _, _, targets_BJK, _ = interpreted["NaNs only"].outputs
    assert (targets_BJK >= 0).all()
    assert (targets_BJK < 33).all()
    assert (targets_BJK.diff() > 0).all()
    assert (ids_BJ.unsqueeze(2) == targets_BJK).any(2).all()


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_more_candidates_keep_the_layers():
    inputs = shaped(OP, OP.uses[""], SIZES, "bfloat16")
    with pytest.raises(NoPlugin, match=f"{CANDIDATES + 1} candidates"):
        OP.plugged(Recorder("SM90"), *inputs, k=CANDIDATES + 1, given=[])


def test_they_compile_within_their_limits():
    assert_compiles("selector_walk")
