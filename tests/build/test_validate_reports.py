"""`validate`: TensorRT's limits as data, and reports."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from glmspec.build.validate import tensorrt_limits
from glmspec.build.validate.report import Fault, Outcome, Report
from glmspec.build.validate.run import refuse_failures
from glmspec.network import limits
from glmspec.network.reader import Graph, Node, Value

# -- limits as data ----------------------------------------------------------------------------------------------------


def node(kind: str, inputs, output: Value, **attributes: Any) -> Node:
    return Node("model.layers.0/x", kind, tuple(inputs), (output,), attributes)


@pytest.mark.parametrize(
    "broken, text",
    [
        (node("TOPK", [Value("a", "float32", (1, 9000))], Value("b", "float32", (1, 4096)), k=4096), "at most 3840"),
        (node("KV_CACHE_UPDATE", [Value("a", "float8_e4m3fn", (2, 1, 8, 8))], Value("b", "int32", (2,))), "bfloat16."),
        (node("SHUFFLE", [Value("a", "bfloat16", (2,))], Value("b", "bfloat16", (1,) * 9)), "9 axes"),
        (node("CONSTANT", [], Value("b", "float4_e2m1fn", (2, 24))), "24 columns"),
    ],
)  # fmt: skip
def test_a_layer_beyond_tensorrt_s_limits(broken, text):
    graph = Graph("g", broken.inputs, broken.outputs, (broken,))
    (fault,) = tensorrt_limits.layer_faults(graph)
    assert fault.where == "model.layers.0/x" and text in str(fault)


def test_elements_are_counted_to_the_last():
    most = 2**31 - 1
    for size, faults in ((most, 0), (most + 1, 1)):
        one = node("CAST", [Value("a", "bfloat16", (1,))], Value("b", "bfloat16", (size,)))
        graph = Graph("g", (), one.outputs, (one,))
        found = tensorrt_limits.volume_faults(tensorrt_limits.step_volumes(graph, set()), limits_of(512, 8))
        assert len(list(found)) == faults


def limits_of(tokens: int, seqs: int) -> limits.EngineLimits:
    sizes = {"max_model_len": 64, "page_size": 64, "segment_rows": 64, "block_rows": 16}
    return limits.EngineLimits(max_num_batched_tokens=tokens, max_num_seqs=seqs, **sizes)


@pytest.mark.parametrize(
    ("shape", "tokens", "seqs", "advice"),
    [
        ((1024, 2**22), 1024, 8, "--max-num-batched-tokens to 511 or less."),
        ((1024, 2**22), 1024, 64, "--max-num-batched-tokens to 511 or less and --max-num-seqs to 31 or less."),
        ((512, 2**22), 1024, 32, "--max-num-seqs to 31 or less."),
        ((512, 2**28), 512, 8, "--max-num-batched-tokens, --max-num-seqs or --max-model-len."),
        ((7, 2**29), 512, 8, "--max-num-batched-tokens, --max-num-seqs or --max-model-len."),
    ],
)
def test_too_many_elements_name_what_fits(shape, tokens, seqs, advice):
    (fault,) = tensorrt_limits.volume_faults([("x", Value("x", "float32", shape))], limits_of(tokens, seqs))
    assert str(fault).endswith(f"Lower {advice}")


# -- reports -----------------------------------------------------------------------------------------------------------


REPORT = Report(
    {"source": "x", "target": "b200"},
    (
        Outcome("config", "configs", 0.5, ("fine",)),
        Outcome("weights", "weights", 1.0, (), (Fault("a[1]", "broken \x00 <here>.", "Mend it."), Fault("b", "c", ""))),
        Outcome("build", "build", why="needs weights"),
    ),
)


def test_junit_is_what_ci_reads():
    suite = ElementTree.fromstring(REPORT.junit())
    counts = [suite.get(name) for name in ("tests", "failures", "skipped", "errors")]
    assert counts == ["3", "1", "1", "0"]
    fine, broken, skipped = suite.findall("testcase")
    assert fine.find("failure") is None and fine.findtext("system-out") == "fine"
    assert broken.find("failure").get("message") == "a[1]: broken  <here>. Mend it."
    assert broken.find("failure").text == "a[1]: broken  <here>. Mend it.\nb: c"
    assert skipped.find("skipped").get("message") == "needs weights"


def test_json_holds_everything():
    values = json.loads(json.dumps(REPORT.to_json()))
    assert values["ok"] is False
    assert [(one["stage"], one["status"]) for one in values["stages"]] == [
        ("config", "passed"), ("weights", "failed"), ("build", "not run"),
    ]  # fmt: skip
    assert values["stages"][1]["faults"][0] == {
        "where": "a[1]", "message": "broken \x00 <here>.", "advice": "Mend it.",
    }  # fmt: skip


def test_the_table_shows_faults_whole():
    console = Console(record=True, width=100, force_terminal=False)
    REPORT.show(console)
    shown = console.export_text()
    assert "a[1]: broken" in shown and "Mend it." in shown and "needs weights" in shown


def test_engine_refuses_with_the_first_faults():
    with pytest.raises(Exception, match=r"weights: a\[1\]: broken"):
        refuse_failures(REPORT)
    refuse_failures(Report({}, (REPORT.outcomes[0],)))
