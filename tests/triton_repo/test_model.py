"""The Triton model against a stand-in for Triton's Python backend: one final response per request (case G46)."""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from glmspec.core.files import sha256
from glmspec.runtime.adaptive import Adaptive
from glmspec.runtime.cost_table import CostCurve, CostTable, MeasuredOn, save_costs
from glmspec.runtime.request import Request
from glmspec.triton_repo.interface import OUTPUTS
from glmspec.triton_repo.parameters import parameters_of
from glmspec.triton_repo.repository import write_repository

FINAL = 1
PATIENCE_S = 60


class TritonError(Exception):
    INVALID_ARG, INTERNAL = "invalid", "internal"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Response:
    def __init__(self, tensors=(), error=None) -> None:
        self.values, self.error = {one.name: one.value for one in tensors}, error


class Call:
    """A request and its response sender in one."""

    def __init__(self, **inputs) -> None:
        self.inputs = {name: np.array(value) for name, value in inputs.items()}
        self.sent: list[Response | None] = []
        self.finals, self.gone = 0, False
        self.ended, self.started = threading.Event(), threading.Event()

    def get_response_sender(self) -> Call:
        return self

    def parameters(self) -> str:
        return "{}"

    def is_cancelled(self) -> bool:
        return self.gone

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        assert not self.finals, "a response after the final one"
        self.sent.append(response)
        self.started.set()
        if flags == FINAL:
            self.finals += 1
            self.ended.set()

    def wait(self) -> list[Response | None]:
        assert self.ended.wait(PATIENCE_S), "no final response"
        return self.sent


@pytest.fixture(scope="module")
def model(tiny_engines, tmp_path_factory):
    def tensor(request, name):
        return SimpleNamespace(as_numpy=lambda: request.inputs[name]) if name in request.inputs else None

    stand_in = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        TritonError=TritonError,
        InferenceResponse=Response,
        Tensor=lambda name, value: SimpleNamespace(name=name, value=value),
        get_input_tensor_by_name=tensor,
    )
    repo = tmp_path_factory.mktemp("model") / "repo"
    # Verification costs nothing: what is chosen, and so what is counted, is all there is.
    free = CostCurve((1,), (1.0,))
    costs = repo.parent / "costs.json"
    save_costs(costs, CostTable(free, free), MeasuredOn(sha256(tiny_engines / "config.json"), "dspark"))
    write_repository(tiny_engines, repo, None, True)
    parameters = parameters_of(None, True, "standard", Adaptive(costs=costs), repo / "glmspec" / "1")
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", stand_in)
        patch.delitem(sys.modules, "glmspec.triton_repo.model", raising=False)
        from glmspec.triton_repo.model import TritonPythonModel

        made = TritonPythonModel()
        made.initialize(
            {"model_config": json.dumps(config), "model_repository": str(repo / "glmspec"), "model_version": "1"}
        )
        yield made
        made.finalize()
        sys.modules.pop("glmspec.triton_repo.model", None)


def test_the_engine_is_made_as_the_repository_says(model):
    assert model._engine.drafter_name == "dspark"
    assert model._engine.loop.adaptive.costs.verify_ms.ms == (1.0,)


def text(value: str, **inputs) -> Call:
    inputs = {"max_tokens": np.array([12], dtype=np.int32), "ignore_eos": [True], **inputs}
    return Call(text_input=np.array([value.encode()], dtype=object), **inputs)


def expected(oracle, value: str):
    ids = tuple(oracle.tokenizer.encode(value))
    return oracle.answer(Request(prompt_ids=ids, max_tokens=12, ignore_eos=True))


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_ends_with_its_one_final_response(model, oracle, stream):
    call = text("Count: 1,", stream=[stream])
    model.execute([call])
    sent = call.wait()
    answer, stats = expected(oracle, "Count: 1,")
    assert call.finals == 1
    assert len(sent) > 1 if stream else len(sent) == 1
    assert [token for one in sent for token in one.values["output_ids"]] == answer.tokens
    assert b"".join(one.values["text_output"][0] for one in sent).decode() == answer.text
    assert [one.values["finish_reason"][0] for one in sent] == [b""] * (len(sent) - 1) + [b"length"]
    last = {name: value[0] for name, value in sent[-1].values.items()}
    assert (last["num_input_tokens"], last["num_output_tokens"]) == (9, 12)
    assert json.loads(last["speculative_decoding"]) == stats.to_json()
    assert last["total_draft_tokens"] == stats.num_draft_tokens
    assert last["total_accepted_draft_tokens"] == stats.num_accepted
    assert last["acceptance_rate"] == pytest.approx(stats.draft_acceptance_rate)


def test_responses_have_the_declared_tensors_types_and_shapes(model):
    call = text("ab")
    model.execute([call])
    values = call.wait()[-1].values
    kinds = {"TYPE_STRING": np.dtype(object), "TYPE_INT32": np.dtype(np.int32), "TYPE_FP32": np.dtype(np.float32)}
    assert {name: value.dtype for name, value in values.items()} == {
        name: kinds[spec.dtype] for name, spec in OUTPUTS.items()
    }
    assert all(values[name].shape == (1,) for name, spec in OUTPUTS.items() if spec.dims == (1,))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Call(), "prompt: found nothing, expected one of text_input, messages and input_ids"),  # refused in parse
        (text(""), "prompt: found no tokens, expected at least one"),  # refused by the engine
    ],
)
def test_a_refused_request_gets_one_final_error(model, call, message):
    model.execute([call])
    (response,) = call.wait()
    assert (str(response.error), response.error.code) == (message, TritonError.INVALID_ARG)
    assert call.finals == 1


def test_a_cancelled_request_gets_one_empty_final_response(model):
    call = text("ab", max_tokens=np.array([1500], dtype=np.int32), stream=[True])
    model.execute([call])
    assert call.started.wait(PATIENCE_S)
    call.gone = True
    assert call.wait()[-1] is None
    assert call.finals == 1


def test_a_failing_engine_gives_one_final_internal_error(model, monkeypatch):
    def broken(inputs):
        raise RuntimeError("no more memory")

    monkeypatch.setattr(model._engine.verifier, "run", broken)
    call = text("ab")
    model.execute([call])
    (response,) = call.wait()
    assert (str(response.error), response.error.code) == ("the engine failed: no more memory", TritonError.INTERNAL)


def test_requests_handed_over_together_do_not_mix(model, oracle):
    values = ["a", "bc ", "def f(", "| x | y |"]
    answers = [expected(oracle, value)[0] for value in values]
    calls = [Call(), *(text(value) for value in values)]
    model.execute(calls)
    found = [call.wait()[-1].values for call in calls[1:]]
    assert [one["output_ids"].tolist() for one in found] == [answer.tokens for answer in answers]
    assert [call.finals for call in calls] == [1] * 5
