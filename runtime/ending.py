"""Ends an answer: end tokens, stop texts and max_tokens, in one place.

A step yields several tokens and any of them may be the last. Whatever comes after it in the same block
is dropped here, before anyone counts, caches or shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from glmspec.runtime.request import LENGTH, STOP, Delta, Request
from glmspec.runtime.text import TextStream


class Ending:
    """Watches one sequence's new tokens. end_ids: the model's own end tokens. text: its decoder, None when the engine
    has no tokenizer. max_tokens: the count at which it ends anyway. tokens: those that end it."""

    def __init__(self, request: Request, end_ids: Collection[int], text: TextStream | None, max_tokens: int) -> None:
        self.tokens = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(end_ids))
        self._stop = request.stop
        self._max_tokens = max_tokens
        self._text = text
        self._held = ""  # text that could be the beginning of a stop text
        self._count = 0

    def take(self, tokens: Sequence[int]) -> Delta:
        """Returns the tokens that belong to the answer, their text, and the reason why it ends, if it does. An end
        token is kept as the last token; a stop text is cut from the text, its tokens are kept."""
        shown = ""
        for index, token in enumerate(tokens):
            self._count += 1
            fresh, stopped = self._decode(token)
            shown += fresh
            if token in self.tokens or stopped:
                return self._last(tokens[: index + 1], shown, STOP, cut=stopped)
            if self._count == self._max_tokens:
                return self._last(tokens[: index + 1], shown, LENGTH)
        return Delta(tuple(tokens), shown)

    def _decode(self, token: int) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop text was completed."""
        if self._text is None:
            return "", False
        self._held += self._text.push(token)
        return self._release()

    def _release(self) -> tuple[str, bool]:
        """Text that cannot be the beginning of a stop text any more, and whether a stop text was completed."""
        stops = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if stops:
            shown, self._held = self._held[: min(stops)], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, False

    def _last(self, tokens: Sequence[int], shown: str, reason: str, cut: bool = False) -> Delta:
        """The answer's last piece. cut: a stop text ended it, so that no text follows."""
        if self._text is not None and not cut:
            self._held += self._text.finish()
            more, stopped = self._release()
            shown += more if stopped else more + self._held
        return Delta(tuple(tokens), shown, reason)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
