"""The grouped dynamic convolution: the kernel against the reference, and compiled."""

from __future__ import annotations

import pytest
import torch
from support.compiled import assert_compiles
from support.faces import PROGRAMS, assert_agree, example, interpret, reference

from glmspec.plugins.grouped_conv import OP
from glmspec.plugins.spec import NoPlugin
from glmspec.plugins.variants import Recorder, shaped

SIZES = {
    "whole tiles": {"B": 2, "R": 9, "T": 2, "D": 512, "U": 32},
    "a tile partly filled": {"B": 3, "R": 4, "T": 2, "D": 272, "U": 17},
    "groups that are no power of two": {"B": 1, "R": 5, "T": 3, "D": 300, "U": 25},
    "groups wider than a tile": {"B": 1, "R": 3, "T": 2, "D": 600, "U": 2},
    "a column a group": {"B": 1, "R": 3, "T": 2, "D": 20, "U": 20},
    "one tap": {"B": 2, "R": 3, "T": 1, "D": 32, "U": 4},
    "one row": {"B": 2, "R": 1, "T": 2, "D": 32, "U": 4},
    "more taps than rows": {"B": 1, "R": 2, "T": 4, "D": 32, "U": 4},
}
CASES = {
    f"{name}, {use}, {dtype}": example("grouped_conv", sizes, use=use, compute=dtype)
    for name, sizes in SIZES.items()
    for use, dtype in (("before", torch.bfloat16), ("after", torch.bfloat16), ("after", torch.float32))
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
    assert_compiles("grouped_conv")


def test_blocks_too_long_for_registers_keep_the_layers():
    sizes = {"B": 1, "T": 2, "D": 32, "U": 4}
    for compute, rows in (("bfloat16", 18), ("float32", 9)):
        fits, longer = (shaped(OP, OP.uses["after"], sizes | {"R": rows + more}, compute) for more in (0, 1))
        OP.plugged(Recorder("SM90"), *fits, side=1)
        with pytest.raises(NoPlugin, match=f"{rows + 1} rows, and the kernel's registers hold {rows}"):
            OP.plugged(Recorder("SM90"), *longer, side=1)
