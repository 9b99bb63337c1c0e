"""Every setting of a request, said once: its kind, its range, its names on Triton's wire, and its meaning.

A setting is called by its name here in a prompt file's JSON, in `Request` or `Sampling`, as a field of the client and
as an option of `generate`; docs/speculation.md has a row for it. The command line reads this, so nothing heavy is
imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glmspec.network.limits import MAX_LOGPROBS, MAX_TOP_K


@dataclass(frozen=True)
class Kind:
    """expected: what a value is, in words. fits: whether a JSON value is of the kind. triton: the input's dtype. many:
    whether the input holds several values."""

    expected: str
    fits: Callable[[Any], bool]
    triton: str
    many: bool = False


@dataclass(frozen=True)
class Setting:
    """meaning: as `generate --help` has it; empty for a setting that is no option. names: of the Triton input, its own
    and its aliases, {0} for the setting's. least, most: of a number, both legal. words: what is legal, where least and
    most do not say it well."""

    kind: Kind
    meaning: str = ""
    names: tuple[str, ...] = ("{0}",)
    least: float = -math.inf
    most: float = math.inf
    words: str = ""

    @property
    def range(self) -> str:
        """What is legal, in words; empty where every value of the kind is."""
        if self.words or self.least == -math.inf:
            return self.words
        return f"at least {self.least:g}" if self.most == math.inf else f"{self.least:g} to {self.most:g}"


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a number."""
    return is_whole(value) or isinstance(value, float)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(fits, value))


WHOLE = Kind("a whole number", is_whole, "TYPE_INT32")
COUNT = Kind("a whole number", is_whole, "TYPE_INT32")  # of tokens: an option of it also takes 128k
SEED = Kind("a whole number", is_whole, "TYPE_UINT64")
NUMBER = Kind("a number", is_number, "TYPE_FP32")
BOOL = Kind("true or false", lambda value: isinstance(value, bool), "TYPE_BOOL")
TEXTS = Kind("a list of texts", _list_of(lambda value: isinstance(value, str)), "TYPE_STRING", many=True)
IDS = Kind("a list of token ids", _list_of(is_whole), "TYPE_INT32", many=True)
# Triton's is the object's JSON.
BIASES = Kind("an object of token ids and biases", lambda value: isinstance(value, (dict, str)), "TYPE_STRING")

_ALIASED = ("{0}", "sampling_param_{0}")
_TOP_K = f"at most {MAX_TOP_K}, or 0 for no limit"

SETTINGS: dict[str, Setting] = {
    "max_tokens": Setting(COUNT, names=_ALIASED, least=1),  # an option that is required, so not told here
    "temperature": Setting(NUMBER, "0: greedy. Default: 0, or 1 with --top-k, --top-p or --min-p.", _ALIASED, 0, 100),
    # -1 is how vLLM says no limit.
    "top_k": Setting(WHOLE, "Draw among so many best tokens. Default: all.", _ALIASED, least=-1, words=_TOP_K),
    "top_p": Setting(NUMBER, "Draw among the best tokens that together have this chance. Default: 1.", _ALIASED, 0, 1),
    "min_p": Setting(
        NUMBER, "Draw among tokens with at least this share of the best one's chance. Default: 0.", _ALIASED, 0, 1
    ),
    "seed": Setting(
        SEED, "The same seed, the same answer. Default: any.", _ALIASED, 0, 2**64 - 1, "a number from 0 to 2^64 - 1"
    ),
    "repetition_penalty": Setting(
        NUMBER, "Above 1: tokens of prompt and answer come less often. Default: 1.", least=0.01, most=100
    ),
    # OpenAI's API has -2 to 2 too.
    "frequency_penalty": Setting(
        NUMBER, "Taken from a token's logit each time the answer has it. Default: 0.", _ALIASED, -2, 2
    ),
    "presence_penalty": Setting(
        NUMBER, "Taken once from the logit of each token of the answer. Default: 0.", _ALIASED, -2, 2
    ),
    "min_tokens": Setting(COUNT, "No end token before so many tokens. Default: 0.", _ALIASED, least=0),
    "logprobs": Setting(
        WHOLE, "Log-probabilities of each token and of so many best ones. Default: none.", _ALIASED, 0, MAX_LOGPROBS
    ),
    "stop": Setting(
        TEXTS, "Text that ends an answer; may be given several times.", ("stop_words", "sampling_param_stop")
    ),
    "ignore_eos": Setting(BOOL, "Go on past end tokens."),
    "stop_token_ids": Setting(IDS),
    "logit_bias": Setting(BIASES),
    "bad_words": Setting(TEXTS),
    "speculate": Setting(BOOL),
}
