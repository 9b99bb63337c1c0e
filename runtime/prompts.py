"""Prompt files: JSON lines, each with `prompt` (text), `prompt_token_ids` or `messages` (a conversation, for the chat
template), and with settings of its own if it has any (see `settings.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glmspec.core.errors import RequestError
from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.runtime.request import Request
from glmspec.runtime.request_table import SETTINGS
from glmspec.runtime.settings import chat_ids, request_of
from glmspec.runtime.text import Tokenizer

_PROMPTS = ("prompt", "prompt_token_ids", "messages")  # the first that is there is meant; messages may tell the same
LABELS = {"id", "name", "kind", "form", "category", "source", "metadata"}  # keys that only describe a line


def read_requests(
    source: Path,
    tokenizer: Tokenizer | None,
    *,
    settings: Mapping[str, Any],
    vocab_size: int,
    max_model_len: int,
    illegal: IllegalIds = ALL_LEGAL,
) -> Iterator[Request]:
    """The requests of a file, in order; blank lines are skipped. settings: of lines that have none of their own.
    Raises `RequestError` naming the line at fault."""
    try:
        text = source.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: not UTF-8 text ({error})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            request = _request(line, tokenizer, settings)
            request.check(vocab_size, max_model_len, tokenizer is not None, illegal)
        except RequestError as error:
            raise RequestError(f"{source}: line {number}: {error}") from None
        yield request


def _request(line: str, tokenizer: Tokenizer | None, settings: Mapping[str, Any]) -> Request:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None
    given = value.keys() & set(_PROMPTS) if isinstance(value, dict) else set()
    if not given or {"prompt", "prompt_token_ids"} <= given:
        raise RequestError("expected an object with either prompt or prompt_token_ids, or with messages")
    odd = sorted(value.keys() - SETTINGS.keys() - set(_PROMPTS) - LABELS)
    if odd:
        raise RequestError(f"{', '.join(odd)}: not a setting of a line, expected some of {', '.join(SETTINGS)}")
    own = {name: value[name] for name in SETTINGS if value.get(name) is not None}
    return request_of(_prompt_ids(value, tokenizer), {**settings, **own}, tokenizer)


def _prompt_ids(value: dict[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise RequestError(f"prompt: found {value['prompt']!r}, expected a text")
        if tokenizer is None:
            raise RequestError("prompt: this engine has no tokenizer; give prompt_token_ids")
        return tokenizer.encode(value["prompt"])
    if "prompt_token_ids" not in value:
        return chat_ids(value["messages"], tokenizer)
    ids = value["prompt_token_ids"]
    if not isinstance(ids, list) or any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise RequestError("prompt_token_ids: expected a list of integers")
    return ids
