"""Absorbed MLA over selected rows: the kernels against the reference, and compiled.

bfloat16 products are wrong in Triton's interpreter, so they are tested in float16, of which all else is the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_checks.launch import Launcher
from support.compiled import assert_compiles
from support.faces import PROGRAMS, Case, assert_agree, example, interpret, reference

from glmspec.plugins.sparse_mla import OP, plugged
from glmspec.plugins.spec import NoPlugin, value
from glmspec.plugins.variants import Recorder, shaped

HALF = torch.float16
SMALL = {"N": 2, "H": 3, "D": 12, "K": 70, "P": 4, "X": 30}  # five splits of a tile each
LONG = SMALL | {"N": 1, "K": 2500}  # three or four tiles a split


def case(sizes: dict[str, int], value_start: int = 4, **given) -> Case:
    """The op's example with another rotary part."""
    made = example("sparse_mla", sizes, **given)
    return Case("sparse_mla", made.inputs, {"scale": 0.4, "value_start": value_start})


def with_rows(made: Case, **changed) -> Case:
    """The case with other inputs, by name."""
    names = ["q", "cache", "rows", "visible", "scale"]
    inputs = [changed.get(name, x) for name, x in zip(names, made.inputs, strict=False)]
    return replace(made, inputs=inputs)


def visible(*columns: int) -> torch.Tensor:
    """Each token sees these columns alone."""
    made = torch.zeros(SMALL["N"], SMALL["K"], dtype=torch.int32)
    made[:, list(columns)] = 1
    return made


def poisoned(made: Case) -> Case:
    """What no token sees is NaN, in the cache too."""
    cache, rows, seen = made.inputs[1].clone(), made.inputs[2], made.inputs[3]
    hidden = set(range(len(cache.view(-1, 12)))) - set(rows[seen > 0].tolist())
    cache.view(-1, 12)[sorted(hidden)] = float("nan")
    return with_rows(made, cache=cache)


ROWS, FULL = case(SMALL), {"N": 1, "H": 8, "D": 576, "K": 90, "P": 64, "X": 3}
CASES = {
    "random": ROWS,
    "several tiles a split": case(LONG),
    "several tiles a split, the largest scores first": with_rows(
        case(LONG, value_start=11), rows=torch.arange(2500, dtype=torch.int32).unsqueeze(0) // 21
    ),
    "many tokens": case(SMALL | {"N": 30, "H": 1, "K": 40}),
    "fewer rows than a tile": case(SMALL | {"K": 7}),
    "one row": case(SMALL | {"K": 1}),
    "more heads than a tile": case(SMALL | {"H": 19, "K": 33}),
    "parts of powers of two": case(SMALL | {"D": 80, "H": 8}, value_start=16),
    "compressed narrower than the rotary": case(SMALL | {"D": 40}, value_start=33),
    "only the first row is seen": with_rows(ROWS, visible=visible(0)),
    "only the last row is seen": with_rows(ROWS, visible=visible(69)),
    "rows on both sides of an edge": with_rows(ROWS, visible=visible(31, 32)),
    "large scores of both signs": with_rows(ROWS, q=ROWS.inputs[0] * 60),
    "the same row again": with_rows(ROWS, rows=ROWS.inputs[2][:, :1].expand(-1, 70).contiguous()),
    "half": case(SMALL, compute=HALF),
    "half, several tiles a split": case(LONG, compute=HALF),
    "half, full width": replace(case(FULL, compute=HALF), attributes={"scale": 0.0625, "value_start": 64}),
    "fp8": case(SMALL, use="fp8"),
    "fp8, half": case(SMALL | {"H": 9}, use="fp8", compute=HALF),
    "fp8, several tiles a split": case(LONG, use="fp8"),
}
EVERY = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num().view(2, 128)
CODES = with_rows(
    case({"N": 2, "H": 1, "D": 132, "K": 1, "P": 2, "X": 1}, use="fp8"),
    cache=torch.cat([torch.zeros(2, 4), EVERY], 1).to(torch.float8_e4m3fn).view(1, 1, 2, 132),
    rows=torch.tensor([[0], [1]], dtype=torch.int32),
    visible=torch.ones(2, 1, dtype=torch.int32),
    scale=torch.tensor([0.3]),
)
HIDDEN = poisoned(case(SMALL | {"X": 200}))
NOTHING = with_rows(ROWS, visible=visible())


@pytest.fixture(scope="module")
def interpreted():
    return interpret({**CASES, "codes": CODES, "hidden": HIDDEN, "nothing": NOTHING})


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_reference(interpreted, name):
    assert_agree(CASES[name], interpreted[name].outputs, reference(CASES[name]))


def test_what_is_not_seen_is_not_read(interpreted):
    (found,) = interpreted["hidden"].outputs
    clean = with_rows(HIDDEN, cache=HIDDEN.inputs[1].nan_to_num())
    assert_agree(HIDDEN, (found,), reference(clean))


def test_every_float8_is_read_as_what_it_is(interpreted):
    assert torch.equal(interpreted["codes"].outputs[0][:, 0], EVERY * 0.3)


def test_a_token_that_sees_nothing_gets_zeros(interpreted):
    assert interpreted["nothing"].outputs[0].eq(0).all()


@pytest.mark.parametrize(
    ("use", "changed", "told"),
    [
        ("", {"value_start": 0}, "without a rotary part"),
        ("fp8", {"inputs": 4}, "float8_e4m3fn without a scale"),
        ("", {"scale": True}, "float32 with a scale"),
        ("", {"sizes": {"D": 300}}, "float32 rows of 300 columns"),
    ],
)
def test_what_the_plugins_do_not_take(use, changed, told):
    made = case(SMALL | changed.get("sizes", {}), use=use, value_start=changed.get("value_start", 4))
    inputs = made.inputs[: changed.get("inputs")] + ([torch.ones(1)] if changed.get("scale") else [])
    with pytest.raises(NoPlugin, match=told):
        plugged(Launcher(), *inputs, **made.attributes)


@pytest.mark.parametrize("use", OP.uses)
def test_a_step_may_have_more_tokens_than_most_axes_have_programs(use):
    recorder, used = Recorder("SM90"), OP.uses[use]
    inputs = shaped(OP, used, OP.sizes(1, used) | {"N": 100_000}, "bfloat16")
    plugged(recorder, *inputs, **used.attributes)
    for launch in recorder.launches:
        _, *others = (value(rule, launch.symbols) for rule in launch.plugin.grid)
        assert all(programs < 2**16 for programs in others)


def test_the_cases_are_few_programs(interpreted):
    assert sum(one.programs for one in interpreted.values()) < PROGRAMS


def test_they_compile_within_their_limits():
    assert_compiles("sparse_mla")
