"""The client's side of a stream: it hears every kind of end (case G46) and leaves the server in order."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from glmspec.core.errors import RequestError, ServerError
from glmspec.runtime.stats import SpecStats
from glmspec.triton_repo import client
from glmspec.triton_repo.client import Client


class Result:
    """A response: tokens (None: the empty final one) and whether it is the last."""

    def __init__(self, tokens, final: bool) -> None:
        stats = json.dumps(SpecStats(2).to_json()).encode()
        self._arrays = {
            "text_output": np.array([b"ab"], dtype=object),
            "output_ids": np.array(tokens or [], dtype=np.int32),
            "finish_reason": np.array([b"stop" if final else b""], dtype=object),
            "output_logprobs": np.array([b""], dtype=object),
            "speculative_decoding": np.array([stats], dtype=object),
        }
        parameter = SimpleNamespace(bool_param=final)
        outputs = [] if tokens is None else list(self._arrays)
        self._response = SimpleNamespace(outputs=outputs, parameters={"triton_final_response": parameter})

    def get_response(self):
        return self._response

    def as_numpy(self, name):
        return self._arrays[name]


@pytest.fixture
def wire(monkeypatch):
    """Stands in for the gRPC connection: `script` is what the server sends; `calls` what it was told."""

    class Wire:
        script, calls, sent = [], [], {}

        def __init__(self, address):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.calls.append("closed")

        def is_server_live(self):
            return True

        def start_stream(self, callback):
            self._callback = callback

        def async_stream_infer(self, model, inputs, **options):
            self.sent.update(model=model, inputs={one.name(): one for one in inputs}, **options)
            for result, error in self.script:
                self._callback(result, error)

        def stop_stream(self, cancel_requests=False):
            self.calls.append(f"stop, cancel {cancel_requests}")

    monkeypatch.setattr(client.grpc, "InferenceServerClient", Wire)
    return Wire


def test_responses_come_as_chunks_and_the_last_has_a_reason(wire):
    wire.script = [(Result([5, 6], False), None), (Result([7], True), None)]
    chunks = list(Client("x:1").stream(text="a"))
    assert [(one.text, one.tokens, one.finish_reason) for one in chunks] == [
        ("ab", (5, 6), None),
        ("ab", (7,), "stop"),
    ]
    assert chunks[0].stats.num_spec_tokens == 2


@pytest.mark.parametrize("script", [[(Result(None, True), None)], [(Result([], True), None)]])
def test_an_end_without_tokens_is_an_end(wire, script):
    wire.script = script
    assert sum(len(chunk.tokens) for chunk in Client("x:1").stream(text="a")) == 0


def test_the_empty_final_response_is_asked_for(wire):
    wire.script = [(Result(None, True), None)]
    list(Client("x:1").stream(text="a"))
    assert wire.sent["enable_empty_final_response"] is True
    assert wire.sent["model"] == "glmspec"


def test_an_error_is_raised_with_the_servers_words_and_closes_the_stream(wire):
    wire.script = [(None, InferenceServerException("prompt: found nothing"))]
    with pytest.raises(RequestError, match=r"^prompt: found nothing$"):
        list(Client("x:1").stream())
    assert wire.calls[-1] == "closed"


def test_closing_early_cancels(wire):
    wire.script = [(Result([5], False), None)]
    stream = Client("x:1").stream(text="a")
    next(stream)
    stream.close()
    assert wire.calls[-2:] == ["stop, cancel True", "closed"]


def test_fields_become_tensors_under_their_first_names(wire):
    wire.script = [(Result(None, True), None)]
    messages = [{"role": "user", "content": "é"}]
    list(Client("x:1").stream(messages=messages, max_tokens=4, stop=["a", "b"], ignore_eos=True))
    sent = wire.sent["inputs"]
    found = {name: (one.datatype(), tuple(one.shape())) for name, one in sent.items()}
    assert found == {
        "messages": ("BYTES", (1,)),
        "max_tokens": ("INT32", (1,)),
        "stop_words": ("BYTES", (2,)),
        "ignore_eos": ("BOOL", (1,)),
        "stream": ("BOOL", (1,)),
    }
    assert json.dumps(messages).encode() in sent["messages"]._get_content()


def test_a_stream_that_ended_is_not_cancelled(wire):
    """A cancellation that meets the end of its stream makes tritonserver 2.51 keep the model: in about 1 of 4 runs
    (3 requests, then SIGTERM) unloading never ends, and the server exits with code 1 after --exit-timeout-secs."""
    wire.script = [(Result([5], True), None)]
    list(Client("x:1").stream(text="a"))
    assert wire.calls[-2:] == ["stop, cancel False", "closed"]


def test_an_unknown_field_is_named(wire):
    with pytest.raises(RequestError, match="colour: no such field"):
        list(Client("x:1").stream(text="a", colour=5))


def test_no_server_is_one_clear_error():
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9: no Triton server answers there"):
        list(Client("127.0.0.1:9").stream(text="a"))


def test_a_server_that_falls_silent_is_given_up(wire):
    """As when its stub dies: Triton never says so."""
    wire.script = [(Result([5], False), None)]
    stream = Client("x:1", patience_s=0.05).stream(text="a")
    assert next(stream).tokens == (5,)
    with pytest.raises(ServerError, match="said nothing"):
        next(stream)


@pytest.mark.parametrize("fields", [{"text": 5}, {"text": "a", "max_tokens": "many"}, {"input_ids": [1 << 40]}])
def test_a_value_of_a_wrong_type_is_named(wire, fields):
    with pytest.raises(RequestError, match=f"^{list(fields)[-1]}: found"):
        list(Client("x:1").stream(**fields))
