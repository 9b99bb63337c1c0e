"""A request's settings under the names that clients know, read in one place: for Triton's inputs and for prompt files.

Temperature decides between greedy and sampled: where it is left out it is 0, or 1 when top_k, top_p or min_p narrow the
choice. Top-k 1 is greedy whatever else is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from glmspec.core.errors import RequestError
from glmspec.runtime.request import Request
from glmspec.runtime.request_table import NUMBER, SETTINGS, is_number
from glmspec.runtime.sampling import Sampling
from glmspec.runtime.text import Tokenizer

_OF_SAMPLING = {field.name for field in fields(Sampling)} & SETTINGS.keys()


def request_of(prompt_ids: list[int], settings: Mapping[str, Any], tokenizer: Tokenizer | None) -> Request:
    """The request of a prompt with these settings; None is as good as left out. Raises `RequestError` naming the
    setting."""
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        kind = SETTINGS[name].kind
        if not kind.fits(value):
            raise RequestError(f"{name}: found {value!r}, expected {kind.expected}")
        if kind is NUMBER:
            given[name] = _float(name, value)
    own = {name: _frozen(value) for name, value in given.items() if name not in _OF_SAMPLING}
    if ends := _stop_tokens(own.get("stop", ()), tokenizer):
        own["stop_token_ids"] = tuple(dict.fromkeys([*own.get("stop_token_ids", ()), *ends]))
    return Request(prompt_ids=tuple(prompt_ids), sampling=_sampling(given, tokenizer), **own)


def chat_ids(messages: Any, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt of a conversation, by the chat template. Raises `RequestError` for what is none."""
    fits = isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= set(message) for message in messages
    )
    if not messages or not fits:
        raise RequestError('messages: expected a JSON list of objects with "role" and "content"')
    if tokenizer is None:
        raise RequestError("messages: this engine has no tokenizer; send token ids")
    return tokenizer.encode(tokenizer.chat(messages), templated=True)


def _stop_tokens(texts: Sequence[str], tokenizer: Tokenizer | None) -> list[int]:
    """The ids of stop texts that are a special token: such a token is no text, so no text is looked for. Raises for one
    that holds a special token and more, which could never match."""
    special = tokenizer.special if tokenizer and texts else {}
    for text in texts:
        inside = next((token for token in special if token in text and text not in special), None)
        if inside is not None:
            raise RequestError(
                f"stop: found {text!r}, which holds the special token {inside!r} and so never appears in text, "
                f"expected text without special tokens, or {inside!r} alone"
            )
    return [special[text] for text in texts if text in special]


def _sampling(given: dict[str, Any], tokenizer: Tokenizer | None) -> Sampling:
    values = {name: value for name, value in given.items() if name in _OF_SAMPLING}
    if values.get("top_k") == -1:  # how vLLM says none
        values["top_k"] = 0
    if values.get("top_k") == 1:
        values |= {"temperature": 0.0, "top_k": 0}
    narrowed = values.get("top_k", 0) > 0 or values.get("top_p", 1.0) < 1 or values.get("min_p", 0.0) > 0
    values.setdefault("temperature", 1.0 if narrowed else 0.0)
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    if "bad_words" in values:
        values["bad_words"] = tuple(word for text in values["bad_words"] for word in _words(text, tokenizer))
    return Sampling(**values)


def _biases(value: dict[str, Any] | str) -> tuple[tuple[int, float], ...]:
    """{"token id": bias}, as OpenAI's API has it, or its JSON."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, dict) or not all(map(is_number, value.values())):
            raise ValueError("its biases are no numbers")
        odd = next((token for token in value if not token.strip().isdecimal()), None)
        if odd is not None:
            raise ValueError(f"{odd!r} is no token id")
        return tuple(sorted((int(token), _float("logit_bias", bias)) for token, bias in value.items()))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"logit_bias: expected an object of token ids and biases ({error})") from None


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name}: found a number of {len(str(value))} digits, expected a sensible one") from None


def _words(text: str, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """A forbidden word as tokens: as it begins a text and, where that is another token, as it follows a space."""
    if tokenizer is None:
        raise RequestError("bad_words: this engine has no tokenizer, so it cannot tell their tokens")
    try:
        alone, after = (tuple(tokenizer.encode(lead + text, templated=True)) for lead in ("", " "))
    except RequestError as error:
        raise RequestError(f"bad_words: {error}") from None
    return [alone, after] if len(after) == len(alone) and after != alone else [alone]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
