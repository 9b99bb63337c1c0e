"""The sampling settings of a request, checked before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from glmspec.core.errors import RequestError
from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.network.limits import MAX_ADJUSTED, MAX_TOP_K
from glmspec.runtime.request_table import NUMBER, SETTINGS

MAX_BIAS, MIN_TEMPERATURE = 10_000.0, 1e-4


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature 0 is greedy decoding. top_k 0, top_p 1 and min_p 0 leave every token in. seed: None draws one.

    Before temperature: logit_bias adds to a token's logit; bad_words may not be completed (the last token of each is
    forbidden after the others); end tokens are forbidden for the first min_tokens; repetition_penalty divides positive
    logits, and multiplies others, of tokens in the prompt or the answer; frequency_penalty (times its count) and
    presence_penalty are taken from tokens of the answer. All of it row by row of a block, drafts before a row included.

    logprobs: of how many best tokens, besides the chosen one, log-probabilities are wanted; None of none. They are the
    model's own, before all of the above.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def adjusts(self) -> bool:
        """True when logits change before anything is drawn."""
        neutral = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) == (1.0, 0.0, 0.0)
        return not neutral or bool(self.logit_bias or self.bad_words or self.min_tokens)

    @property
    def plain(self) -> bool:
        """True when the answer is the verifier's argmax as it is."""
        return self.temperature == 0 and not self.adjusts

    def check_choice(self, legal: int, end_ids: Collection[int]) -> None:
        """Raise `RequestError` when a row may be left without a token to choose. legal: tokens there are. end_ids:
        those that end the answer."""
        forbidden = {word[-1] for word in self.bad_words} | set(end_ids if self.min_tokens else ())
        if len(forbidden) >= legal:
            raise RequestError(f"bad_words and min_tokens: they may forbid all {legal} tokens, expected fewer")

    def check(self, vocab_size: int, illegal: IllegalIds = ALL_LEGAL) -> None:
        """Raise `RequestError` for what cannot be served, naming the field, what was found and the limits. illegal: ids
        that are never chosen."""
        for name, setting in SETTINGS.items():
            value = getattr(self, name, None)  # None: not of sampling, or left out
            if isinstance(value, (int, float)) and not setting.least <= value <= setting.most:  # as NaN is not either
                shown = f"{value:g}" if setting.kind is NUMBER else value
                raise RequestError(f"{name}: found {shown}, expected {setting.range}")
        if 0 < self.temperature < MIN_TEMPERATURE * (1 - 1e-6):  # which travels as float32
            raise RequestError(
                f"temperature: found {self.temperature:g}, expected 0 (greedy) or at least {MIN_TEMPERATURE:g}"
            )
        if self.top_p == 0:
            raise RequestError("top_p: found 0, expected more; for greedy decoding set temperature 0")
        if self.top_k < 0 or MAX_TOP_K < self.top_k < vocab_size or self.top_k >= 2**31:
            raise RequestError(f"top_k: found {self.top_k}, expected {SETTINGS['top_k'].range}")
        self._check_tokens(vocab_size)
        never = next((token for token, bias in self.logit_bias if bias > 0 and token in illegal), None)
        if never is not None:
            raise RequestError(f"logit_bias: token id {never} is none of the tokenizer's and is never chosen")

    def _check_tokens(self, vocab_size: int) -> None:
        ids = [token for token, _ in self.logit_bias]
        named = len(ids) + len(self.bad_words)
        if named > MAX_ADJUSTED:
            raise RequestError(
                f"logit_bias and bad_words: found {named} tokens and words, expected at most {MAX_ADJUSTED}"
            )
        if len(set(ids)) < len(ids):
            raise RequestError("logit_bias: the same token twice")
        large = next((bias for _, bias in self.logit_bias if not abs(bias) <= MAX_BIAS), None)
        if large is not None:
            raise RequestError(f"logit_bias: found a bias of {large:g}, expected {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if any(not word for word in self.bad_words):
            raise RequestError("bad_words: found an empty word")
        check_ids("logit_bias", ids, vocab_size)
        check_ids("bad_words", (token for word in self.bad_words for token in word), vocab_size)


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise `RequestError` when one of a field's token ids is none of the vocabulary's. name: the field's."""
    odd = next((token for token in ids if not 0 <= token < vocab_size), None)
    if odd is not None:
        raise RequestError(f"{name}: found token id {odd}, expected ids from 0 to {vocab_size - 1}")


GREEDY = Sampling()
