"""Names that tell shapes, rules on symbols, and what a plugin refuses."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_checks import launch
from kernel_checks.agree import disagreement

from glmspec.core.errors import NetworkError
from glmspec.plugins import OPS
from glmspec.plugins.accept import ACCEPT
from glmspec.plugins.argmax import ARGMAX_SPLIT
from glmspec.plugins.kv_append import APPEND
from glmspec.plugins.spec import (
    UNKNOWN,
    Compute,
    Float32,
    Int32,
    NoPlugin,
    Op,
    Plugin,
    attributes_of,
    bind,
    cdiv,
    dims,
    inputs_of,
    pow2,
    text,
    value,
)
from glmspec.plugins.variants import Recorder, Shaped


def test_names_tell_shapes():
    assert dims("row_BQ") == ("B", "Q")
    assert dims("keys_cache_X1PD") == ("X", "1", "P", "D")


def test_a_number_says_more_than_an_expression():
    inputs = {"a_NV": "T", "b_N": "T"}
    assert bind("x", inputs, [(UNKNOWN, 5), (3,)]) == {"N": 3, "V": 5}
    assert bind("x", inputs, [(3, 5), (UNKNOWN,)]) == {"N": 3, "V": 5}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3), (4,)], "x: b_N: found 4 for N, expected 2"),
        ([(2,), (2,)], "x: a_NV: found 1 dimensions, expected 2"),
    ],
)
def test_contradictions_are_refused(shapes, message):
    with pytest.raises(NetworkError, match=message):
        bind("x", {"a_NV": "T", "b_N": "T"}, shapes)


def test_rules():
    symbols = {"B": 5, "D": 48}
    rules = (7, "D", lambda B: cdiv(B, 2), lambda D: pow2(D), lambda: pow2(1), lambda D, B: min(B, D))
    assert [value(rule, symbols) for rule in rules] == [7, 48, 3, 64, 1, 5]
    assert value(lambda B: cdiv(B, 2) * 3, {"B": UNKNOWN}) is UNKNOWN


def test_rules_are_shown_as_they_are_written():
    rules = (7, "D", lambda B: cdiv(B, 2), lambda B, D: (B + 1) // (D - 1), lambda D: 96 if D else 1)
    assert [text(rule) for rule in rules] == ["7", "D", "cdiv(B, 2)", "(B + 1) // (D - 1)", "96 if D else 1"]


@pytest.mark.parametrize("grid", [("Q",), (lambda N, Q: N * Q,)])
def test_a_rule_of_an_unknown_symbol_is_refused(grid):
    with pytest.raises(NetworkError, match="plugin p: rule of x: found Q, which is no symbol yet"):
        Plugin(name="p", op="p", inputs={"a_N": "T"}, outputs={"b_N": "T"}, grid=grid, tiles={"": {"WARPS": 1}})


def test_dtypes_decide_the_compute_dtype():
    assert ARGMAX_SPLIT.compute(["bfloat16"]) == "bfloat16"
    with pytest.raises(NoPlugin, match="plugin accept_v1: inputs of int32, int32, int64, int32, expected int32"):
        ACCEPT.compute(["int32", "int32", "int64", "int32"])


def test_what_reads_only_names_of_sizes_needs_no_sizes():
    """A recorder meets sizes that are known at run time only; they stay so through a reshape."""
    run = Recorder("SM90")
    (accepted, tokens) = OPS["accept"].plugged(
        run, *(Shaped(shape, "int32") for shape in ((-1,), (-1,), (-1, 9), (-1,)))
    )
    assert (accepted.shape, tokens.shape) == ((-1,), (-1, 9))
    assert run.reshape(Shaped((4, -1, 6), "int32"), (0, -1, 2)).shape == (4, -1, 2)
    assert run.reshape(Shaped((4, 6), "int32"), (-1, 8)).shape == (3, 8)


def test_writing_behind_an_output_is_seen(monkeypatch):
    """A kernel that writes one number more than there is room for."""

    class Kernel:
        def __getitem__(self, grid):
            def run(*, index_NZ, best_NZ, **_):
                best_NZ.fill_(0)
                torch.as_strided(index_NZ, (index_NZ.numel() + 1,), (1,)).fill_(0)

            return run

    monkeypatch.setattr(launch, "kernel_of", lambda plugin: Kernel())
    with pytest.raises(NetworkError, match="plugin argmax_split_v1: index_NZ: the kernel writes behind its end"):
        launch.Launcher(poison=77)(ARGMAX_SPLIT, torch.zeros(2, 5))


def test_an_aliased_output_is_the_input_itself(monkeypatch):
    class Kernel:
        def __getitem__(self, grid):
            return lambda **arguments: None

    monkeypatch.setattr(launch, "kernel_of", lambda plugin: Kernel())
    monkeypatch.setattr(launch, "variant_of", lambda *_: SimpleNamespace(constants=()))
    cache, rows, plan = torch.zeros(2, 1, 4, 8), torch.zeros(3, 1, 8), torch.zeros(3, dtype=torch.int32)
    (updated,) = launch.Launcher()(APPEND, cache, rows, plan, plan[:2], plan)
    assert updated is cache


def test_strided_inputs_are_refused():
    with pytest.raises(NetworkError, match=r"plugin argmax_split_v1: x_NV: found strides \(1, 2\), expected it contig"):
        launch.Launcher()(ARGMAX_SPLIT, torch.zeros(5, 2).t())


def test_disagreements_are_told():
    op, x = OPS["sparse_mla"], torch.tensor([[[1.0, 2.0]]])
    assert disagreement(op, [x], [x.clone()]) == ""
    assert "off by" in disagreement(op, [x + 1], [x])
    assert "off by" in disagreement(op, [x * float("nan")], [x])
    assert "infinities" in disagreement(op, [x], [x / 0])
    assert "2 outputs, expected 1" in disagreement(op, [x, x], [x])
    assert "expected torch.float32[1, 1, 2]" in disagreement(op, [x.half()], [x])
    rows = torch.tensor([3, 4], dtype=torch.int32)
    assert disagreement(OPS["argmax"], [rows - 1], [rows]) == "index_N: 2 of 2 differ, the first at [0]: 2, expected 3"


def test_few_blocks_may_take_other_tokens_where_that_is_allowed():
    """What such a block holds besides is not compared; everything of the others is."""
    op = OPS["markov_walk"]
    ids, scores, embeddings = torch.arange(64, dtype=torch.int32).view(32, 2), torch.ones(32, 2), torch.ones(32, 2, 4)
    other_ids, other_scores, other_embeddings = ids.clone(), scores.clone(), embeddings.clone()
    other_ids[3, 1], other_scores[3], other_embeddings[3] = 99, 5.0, 7.0
    found, expected = [other_ids, other_scores, other_embeddings], [ids, scores, embeddings]
    assert "ids_BJ: 1 of 64 differ" in disagreement(op, found, expected)
    assert disagreement(op, found, expected, share=0.01) == ""
    other_scores[4, 0] = 5.0
    assert "scores_BJ: off by" in disagreement(op, found, expected, share=0.01)
    other_scores[4, 0], other_ids[4, 0] = 1.0, 99
    assert "ids_BJ: 2 of 64 differ" in disagreement(op, found, expected, share=0.01)
    one = [x[3:4] for x in found], [x[3:4] for x in expected]
    assert "ids_BJ: 1 of 2 differ" in disagreement(op, *one, share=0.01)


def declared_by(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """A function's inputs and attributes, by name, but for those that name what `others` hold."""
    parameters = inspect.signature(function).parameters.values()
    inputs = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    attributes = sorted(one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name != "given")
    return inputs, attributes


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.plugged], ids=lambda op: op.name)
def test_plugins_take_the_inputs_that_the_reference_declares(op):
    (run, *inputs), attributes = declared_by(op.plugged)
    kinds = {one.kind for one in inspect.signature(op.plugged).parameters.values()}
    assert run == "run"
    assert inputs == declared_by(op.reference)[0]
    assert attributes == declared_by(op.reference)[1] or inspect.Parameter.VAR_KEYWORD in kinds
    assert (inspect.Parameter.VAR_POSITIONAL in kinds) == bool(op.others)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_layers_take_the_inputs_and_attributes_that_the_reference_declares(op):
    """A region hands what the lowering's parameters hold to the reference, in this order and by these names."""
    module = sys.modules[op.reference.__module__]
    lowering = module.native
    assert declared_by(lowering) == declared_by(op.reference)


def test_a_plugin_s_inputs_are_those_of_its_op():
    assert inputs_of(OPS["kv_append"].reference, "scale_1", "order_L") == {"scale_1": "float32", "order_L": "int32"}
    assert attributes_of(OPS["sparse_mla"].reference) == {"scale": float, "value_start": int}
    with pytest.raises(KeyError, match="ordre_L"):
        inputs_of(OPS["kv_append"].reference, "ordre_L")


def test_a_reference_declares_the_op_s_inputs():
    def reference(x_NV: Compute, k_N: Int32, bias_V: Float32 | None = None, *, eps: float) -> None: ...

    op = Op(name="x", outputs={}, reference=reference, others={"u_N": "float32"})
    assert op.inputs == {"x_NV": "T", "k_N": "int32"}
    assert op.optional == {"bias_V": "float32", "u_N": "float32"}
