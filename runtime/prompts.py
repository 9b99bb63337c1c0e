"""Prompt files: JSON lines, each with `prompt` (text) or `prompt_token_ids`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from glmspec.build.errors import RequestError
from glmspec.runtime.request import Request
from glmspec.runtime.text import Tokenizer

# Settings that other tools take from a prompt line: refused, because ignoring them would give another answer.
_NOT_A_LINE_S = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "logprobs", "logit_bias"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos"),
    *("stop", "stop_words", "stop_token_ids", "bad_words"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
}


def read_requests(
    source: Path, tokenizer: Tokenizer | None, *, max_tokens: int, vocab_size: int, max_model_len: int
) -> Iterator[Request]:
    """The requests of a file, in order; blank lines are skipped. Raises `RequestError` naming the line at fault."""
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: not UTF-8 text ({error})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            request = Request(prompt_ids=tuple(_prompt_ids(line, tokenizer)), max_tokens=max_tokens)
            request.check(vocab_size, max_model_len, tokenizer is not None)
        except RequestError as error:
            raise RequestError(f"{source}: line {number}: {error}") from None
        yield request


def _prompt_ids(line: str, tokenizer: Tokenizer | None) -> list[int]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("prompt_token_ids" in value):
        raise RequestError("expected an object with either prompt or prompt_token_ids")
    odd = sorted(_NOT_A_LINE_S & value.keys())
    if odd:
        raise RequestError(f"{', '.join(odd)}: not a setting of a line; the command line sets it for all")
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise RequestError(f"prompt: found {value['prompt']!r}, expected a text")
        if tokenizer is None:
            raise RequestError("prompt: this engine has no tokenizer; give prompt_token_ids")
        return tokenizer.encode(value["prompt"])
    ids = value["prompt_token_ids"]
    if not isinstance(ids, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise RequestError("prompt_token_ids: expected a list of integers")
    return ids
