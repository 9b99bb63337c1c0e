"""The Triton Python model: requests to the worker, deltas to response senders.

Runs inside Triton's stub process, the only place where `triton_python_backend_utils` exists.

One decoupled model sends one response a step, because responses are what costs in Triton's Python backend: a step's
tokens travel together. Every request hears exactly one end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from glmspec.core.errors import GlmspecError, RequestError
from glmspec.runtime.request import Answer, Delta
from glmspec.runtime.sequence import Sequence
from glmspec.triton_repo.interface import INPUTS, OUTPUTS
from glmspec.triton_repo.parameters import engine_options
from glmspec.triton_repo.repository import open_repository
from glmspec.triton_repo.requests import Call, parse, refuse_unknown
from glmspec.triton_repo.worker import Cancelled, Listener, Worker

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Loads the engine once; every request gets exactly one final response."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine that config.pbtxt names, relative to this model's version folder."""
        from glmspec.runtime.engine import Engine

        parameters = {
            key: value["string_value"] for key, value in json.loads(args["model_config"])["parameters"].items()
        }
        version_folder = Path(args["model_repository"]) / args["model_version"]
        engines = open_repository(Path(args["model_repository"]).parent)
        self._engine = Engine(engines, **engine_options(parameters, version_folder))
        self._worker = Worker(self._engine)

    def execute(self, requests: list[Any]) -> None:
        """Hand every request to the worker; responses go through their senders."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                refuse_unknown(json.loads(request.parameters() or "{}"))
                call = parse(_arrays(request), self._engine.tokenizer)
            except RequestError as error:
                _send_error(sender, error)
                continue
            except Exception as error:  # of this request alone: the others of the batch still want their answers
                _send_error(sender, GlmspecError(f"the request could not be read: {error}"))
                continue
            self._worker.submit(call.request, _listener(call, request, sender))

    def finalize(self) -> None:
        """Finish the requests in flight."""
        self._worker.close()


def _arrays(request: Any) -> dict[str, np.ndarray]:
    arrays = {}
    for field in INPUTS.values():
        for name in field.names:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                arrays[name] = tensor.as_numpy()
    return arrays


def _listener(call: Call, request: Any, sender: Any) -> Listener:
    answer = Answer()

    def delta(sequence: Sequence, gained: Delta) -> None:
        answer.add(gained)
        if call.stream:
            _send(sender, sequence, gained, answer)
        elif gained.finish_reason:
            logprobs = tuple(answer.logprobs)
            whole = Delta(tuple(answer.tokens), answer.text, gained.finish_reason, logprobs=logprobs)
            _send(sender, sequence, whole, answer)

    def failed(error: GlmspecError) -> None:
        if isinstance(error, Cancelled):
            sender.send(flags=_FINAL)
        else:
            _send_error(sender, error)

    return Listener(delta, failed, request.is_cancelled)


def _send(sender: Any, sequence: Sequence, delta: Delta, so_far: Answer) -> None:
    stats = sequence.stats
    pairs = zip(delta.tokens, delta.logprobs, strict=True) if delta.logprobs else ()
    logprobs = [logprob.to_json(token) for token, logprob in pairs]
    values = {
        "text_output": [delta.text],
        "output_ids": delta.tokens,
        "finish_reason": [delta.finish_reason or ""],
        "num_input_tokens": [len(sequence.request.prompt_ids)],
        "num_output_tokens": [len(so_far.tokens)],
        "cumulative_logprob": [so_far.cumulative_logprob],
        "output_logprobs": [json.dumps(logprobs) if logprobs else ""],
        "acceptance_rate": [stats.draft_acceptance_rate or 0.0],
        "total_accepted_draft_tokens": [stats.num_accepted],
        "total_draft_tokens": [stats.num_draft_tokens],
        "speculative_decoding": [json.dumps(stats.to_json())],
    }
    tensors = [pb_utils.Tensor(name, output.array(values[name])) for name, output in OUTPUTS.items()]
    sender.send(pb_utils.InferenceResponse(tensors), flags=_FINAL if delta.finish_reason else 0)


def _send_error(sender: Any, error: GlmspecError) -> None:
    code = pb_utils.TritonError.INVALID_ARG if isinstance(error, RequestError) else pb_utils.TritonError.INTERNAL
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)), flags=_FINAL)
