"""Requests that cannot be served are refused naming the field, what was found and the limit."""

from __future__ import annotations

import re

import pytest

from glmspec.core.errors import RequestError
from glmspec.runtime.request import LENGTH, Answer, Delta, Request

GOOD = {"prompt_ids": (1, 2, 3), "max_tokens": 4}


def check(has_text: bool = True, **fields) -> None:
    Request(**{**GOOD, **fields}).check(vocab_size=10, max_model_len=8, has_text=has_text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt_ids": (0, 9)},
        {"prompt_ids": (1,) * 7},  # one token is left to answer with
        {"max_tokens": 1},
        {"max_tokens": 10**6},  # the answer then ends at max_model_len
        {"stop": ("a", "bc")},
        {"ignore_eos": True, "speculate": False},
    ],
)
def test_what_can_be_served_passes(fields):
    check(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": ()}, "prompt: found no tokens, expected at least one"),
        ({"prompt_ids": (3, 10)}, "prompt: found token id 10, expected ids from 0 to 9"),
        ({"prompt_ids": (3, -1)}, "prompt: found token id -1, expected ids from 0 to 9"),
        ({"prompt_ids": (1,) * 8}, "prompt: found 8 tokens, expected fewer than 8 (the engine's max_model_len)"),
        ({"max_tokens": 0}, "max_tokens: found 0, expected at least 1"),
        ({"max_tokens": -5}, "max_tokens: found -5, expected at least 1"),
        ({"stop": ("a", "")}, "stop: found an empty text, expected at least one character"),
        ({"stop": ("a",), "has_text": False}, "stop: this engine has no tokenizer, so it cannot look for text"),
    ],
)
def test_what_cannot_is_refused(fields, message):
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        check(**fields)


def test_an_answer_is_its_deltas_put_together():
    answer = Answer()
    answer.add(Delta((1, 2), "ab"))
    assert answer.finish_reason is None
    answer.add(Delta((3,), "", LENGTH))
    assert (answer.tokens, answer.text, answer.finish_reason) == ([1, 2, 3], "ab", LENGTH)
    assert Answer().tokens == []
