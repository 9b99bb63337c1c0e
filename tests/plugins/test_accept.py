"""Greedy acceptance: the kernel against the reference, and compiled."""

from __future__ import annotations

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

INT = torch.int32


def block(said: list[int], draft: list[int], count: int) -> Case:
    """One block of as many rows as there are tokens said."""
    rows = torch.arange(len(said), dtype=INT).unsqueeze(0)
    return Case(
        "accept",
        [torch.tensor(said, dtype=INT), torch.tensor(draft, dtype=INT), rows, torch.tensor([count], dtype=INT)],
    )


CASES = {
    "random": example("accept", {"B": 13, "Q": 9, "R": 120}),
    "as many columns as a power of two": example("accept", {"B": 5, "Q": 8, "R": 40}),
    "blocks of an anchor alone": example("accept", {"B": 4, "Q": 1, "R": 4}),
    "no drafts": block([7, 8, 9], [7, 8, 9], 0),
    "all stand": block([7, 8, 9, 4], [7, 8, 9, 4], 3),
    "none stands": block([7, 8, 9, 4], [6, 8, 9, 4], 3),
    "one in the middle fails": block([7, 8, 9, 4, 5], [7, 0, 9, 4, 5], 4),
    "what lies behind the drafts does not count": block([7, 8, 9, 4, 5], [7, 8, 9, 4, 5], 2),
}


@pytest.fixture(scope="module")
def interpreted():
    return interpret(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_it_compiles_within_its_limits():
    assert_compiles("accept")
