"""What a user asks for, checked before anything runs, and the pieces of the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glmspec.core.errors import RequestError
from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.network.limits import MAX_ADJUSTED
from glmspec.runtime.request_table import SETTINGS
from glmspec.runtime.sampling import GREEDY, Sampling, check_ids

STOP, LENGTH = "stop", "length"
MAX_STOPS, STOP_LONGEST = 64, 1024  # stop texts, and characters of one: every token is compared with all of them


@dataclass(frozen=True, kw_only=True)
class Request:
    """A generation request.

    prompt_ids: the prompt's tokens. max_tokens: most new tokens. stop: texts that end the answer (cut from it).
    stop_token_ids: tokens that end it, besides the model's own end tokens. ignore_eos: go on past those. speculate:
    draft for this request, when the engine has a drafter. sampling: how tokens are drawn; greedy by default.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculate: bool = True
    sampling: Sampling = GREEDY

    def check(self, vocab_size: int, max_model_len: int, has_text: bool, illegal: IllegalIds = ALL_LEGAL) -> None:
        """Raise `RequestError` for what cannot be served, naming the field, what was found and the limit. illegal: ids
        that are never chosen; a prompt may hold them."""
        if not self.prompt_ids:
            raise RequestError("prompt: found no tokens, expected at least one")
        check_ids("prompt", self.prompt_ids, vocab_size)
        if len(self.prompt_ids) >= max_model_len:
            raise RequestError(
                f"prompt: found {len(self.prompt_ids)} tokens, "
                f"expected fewer than {max_model_len} (the engine's max_model_len)"
            )
        if self.max_tokens < SETTINGS["max_tokens"].least:
            raise RequestError(f"max_tokens: found {self.max_tokens}, expected {SETTINGS['max_tokens'].range}")
        if any(not text for text in self.stop):
            raise RequestError("stop: found an empty text, expected at least one character")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop: found {len(self.stop)} texts, expected at most {MAX_STOPS}")
        if longest := next((len(text) for text in self.stop if len(text) > STOP_LONGEST), 0):
            raise RequestError(f"stop: found a text of {longest} characters, expected at most {STOP_LONGEST}")
        if self.stop and not has_text:
            raise RequestError("stop: this engine has no tokenizer, so it cannot look for text")
        check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.sampling.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: found {self.sampling.min_tokens}, expected at most max_tokens ({self.max_tokens})"
            )
        ends = len(set(self.stop_token_ids))
        if ends > MAX_ADJUSTED or ends >= vocab_size:
            most = min(MAX_ADJUSTED, vocab_size - 1)
            raise RequestError(f"stop_token_ids: found {ends} tokens, expected at most {most}")
        never = next((token for token in self.stop_token_ids if token in illegal), None)
        if never is not None:
            raise RequestError(f"stop_token_ids: token id {never} is none of the tokenizer's and is never chosen")
        self.sampling.check(vocab_size, illegal)


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, and the best tokens' ids with theirs, best first: natural logarithms of the verifier's
    probs before any setting of the request."""

    logprob: float
    best: tuple[tuple[int, float], ...]

    def to_json(self, token: int) -> dict[str, Any]:
        """Returns the part of an answer's JSON that is about a token. token: its id."""
        return {"token": token, "logprob": self.logprob, "top": [list(pair) for pair in self.best]}


@dataclass(frozen=True)
class Delta:
    """What one step adds to an answer. tokens: new ids. text: new text, where there is a tokenizer. finish_reason:
    "stop" or "length" on the last one. accepted: how many of the tokens, the first ones, were drafts. rejected: drafts
    that the verifier saw and that did not stand. logprobs: one a token, when the request wants them."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    accepted: int = 0
    rejected: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass
class Answer:
    """A whole answer, put together from its deltas."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    def add(self, delta: Delta) -> None:
        """Append what a step adds."""
        self.tokens.extend(delta.tokens)
        self.logprobs.extend(delta.logprobs)
        self.cumulative_logprob += sum(token.logprob for token in delta.logprobs)
        self.text += delta.text
        self.finish_reason = delta.finish_reason
