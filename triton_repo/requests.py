"""From a Triton request's inputs to a `Request`: the checks that Triton does not make.

What Triton decides is Triton's. A field that is no input of the model is refused by name, but request parameters that
Triton itself defines (`priority`, `timeout`, `sequence_*`, `triton_*`) pass, without effect. Triton tells the model of
a dropped gRPC stream, not of a dropped HTTP connection that waits for one whole answer: that is computed to its end.
And an HTTP number beyond int32 reaches the model already wrapped around.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from glmspec.core.errors import RequestError
from glmspec.runtime.request import Request
from glmspec.runtime.request_table import SETTINGS
from glmspec.runtime.settings import chat_ids, request_of
from glmspec.runtime.text import Tokenizer
from glmspec.triton_repo.interface import INPUTS

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class Call:
    """A parsed request. stream: one response a step, rather than one at the end."""

    request: Request
    stream: bool


# Parameters that Triton or a client library sets by itself; any other is a field we do not know.
_TRITON_PARAMETERS = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}


def refuse_unknown(parameters: Mapping[str, Any]) -> None:
    """Triton's HTTP generate endpoints turn fields that are no inputs into request parameters: refuse them."""
    for name in parameters:
        if name not in _TRITON_PARAMETERS and not name.startswith(("triton_", "headers")):
            known = ", ".join(name for field in INPUTS.values() for name in field.names)
            raise RequestError(f"{name}: no such input, expected one of {known}")


def parse(inputs: Mapping[str, np.ndarray], tokenizer: Tokenizer | None) -> Call:
    """Parse inputs by tensor name. Raises `RequestError` naming the input."""
    fields = _fields(inputs)
    if not fields.get("exclude_input", True):
        raise RequestError(f"{INPUTS['exclude_input'].names[0]}: found False, this version can only do True")
    settings = {name: fields[name] for name in SETTINGS if name in fields}
    settings.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if fields.get("return_cumulative_logprob"):
        settings.setdefault("logprobs", 0)
    return Call(request_of(_prompt(fields, tokenizer), settings, tokenizer), fields.get("stream", False))


def _fields(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Field -> value. One alias at most; scalars as Python values, lists as lists, text decoded."""
    fields: dict[str, Any] = {}
    for field, spec in INPUTS.items():
        given = [name for name in spec.names if name in inputs]
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)}: the same setting under two names; send one")
        if given:
            values = [_plain(value, given[0]) for value in inputs[given[0]].reshape(-1)]
            if spec.dims == (1,) and len(values) != 1:
                raise RequestError(f"{given[0]}: found {len(values)} values, expected 1")
            fields[field] = values[0] if spec.dims == (1,) else values
    return fields


def _plain(value: Any, name: str) -> Any:
    if not isinstance(value, bytes):
        return value.item()
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(f"{name}: not UTF-8 text") from None


def _prompt(fields: dict[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    given = [field for field in ("text", "messages", "input_ids") if field in fields]
    if len(given) != 1:
        names = [INPUTS[field].names[0] for field in given]
        raise RequestError(f"prompt: found {names or 'nothing'}, expected one of text_input, messages and input_ids")
    if given == ["input_ids"]:
        return fields["input_ids"]
    if tokenizer is None:
        raise RequestError(f"{INPUTS[given[0]].names[0]}: this engine has no tokenizer; send input_ids")
    if given == ["text"]:
        return tokenizer.encode(fields["text"])
    return chat_ids(_parsed(fields["messages"]), tokenizer)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"messages: not JSON ({error})") from None
