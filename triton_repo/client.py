"""A small gRPC client of the `glmspec` model: one request, its responses as they come."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from glmspec.core.errors import RequestError, ServerError
from glmspec.runtime.stats import SpecStats
from glmspec.triton_repo.interface import INPUTS, MODEL_NAME


@dataclass(frozen=True)
class Chunk:
    """One response: what a step added (or the whole answer, when not streaming). logprobs: an object a token, where the
    request asked for them: token, logprob, top."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    stats: SpecStats
    logprobs: tuple[dict[str, Any], ...] = ()


class Client:
    """Talks to a server at `address` ("host:port" of its gRPC endpoint). One request at a time: its own stream.

    patience_s: the longest silence before a request is given up.
    """

    def __init__(self, address: str, patience_s: float = 300.0) -> None:
        self._address = address
        self._patience_s = patience_s

    def stream(self, **fields: Any) -> Iterator[Chunk]:
        """Send a request and yield its responses. fields: names of `interface.INPUTS`, such as text, messages,
        input_ids, max_tokens, stop, speculate. Raises `RequestError` with the server's message, `ServerError` when
        there is no server or it falls silent. Closing the iterator early cancels the request."""
        fields = {"stream": True, **fields}
        inputs = _inputs(fields)
        with grpc.InferenceServerClient(self._address) as client:
            _require_server(client, self._address)
            inbox: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
            client.start_stream(lambda result, error: inbox.put((result, error)))
            # Without the empty final response, a request that ends with no data would never be heard to end.
            client.async_stream_infer(MODEL_NAME, inputs, enable_empty_final_response=True)
            ended = False
            try:
                yield from _chunks(inbox, self._patience_s)
                ended = True
            finally:
                # Only a stream that goes on: a cancellation that meets the end of its stream makes tritonserver
                # 2.51 keep the model loaded, and then a stop takes its whole exit timeout.
                client.stop_stream(cancel_requests=not ended)


def _require_server(client: Any, address: str) -> None:
    try:
        live = client.is_server_live()
    except InferenceServerException as error:
        raise ServerError(f"{address}: no Triton server answers there ({error.message()})") from None
    if not live:
        raise ServerError(f"{address}: the Triton server there is not live")


def _chunks(inbox: queue.SimpleQueue, patience_s: float) -> Iterator[Chunk]:
    while True:
        try:
            result, error = inbox.get(timeout=patience_s)
        except queue.Empty:
            raise ServerError(f"the server has said nothing for {patience_s:.0f} s") from None
        if error is not None:
            raise RequestError(error.message() if isinstance(error, InferenceServerException) else str(error))
        response = result.get_response()
        if response.outputs:
            yield _chunk(result)
        if response.parameters["triton_final_response"].bool_param:
            return


def _chunk(result: Any) -> Chunk:
    def text(name: str) -> str:
        return result.as_numpy(name)[0].decode()

    stats = SpecStats.from_json(json.loads(text("speculative_decoding")))
    return Chunk(
        text("text_output"),
        tuple(result.as_numpy("output_ids").tolist()),
        text("finish_reason") or None,
        stats,
        tuple(json.loads(text("output_logprobs") or "[]")),
    )


def _inputs(fields: dict[str, Any]) -> list[Any]:
    inputs = []
    for field, value in fields.items():
        if field not in INPUTS:
            raise RequestError(f"{field}: no such field, expected one of {', '.join(INPUTS)}")
        spec = INPUTS[field]
        if field == "messages" and not isinstance(value, str):
            value = json.dumps(value)
        values = value if isinstance(value, (list, tuple)) else [value]
        try:
            array = spec.array(values)
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise RequestError(f"{field}: found {value!r}, expected {spec.dtype.removeprefix('TYPE_')}") from None
        infer_input = grpc.InferInput(spec.names[0], array.shape, np_to_triton_dtype(array.dtype))
        infer_input.set_data_from_numpy(array)
        inputs.append(infer_input)
    return inputs
