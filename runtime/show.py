"""Answers on a terminal: accepted drafts green, the draft that did not stand struck out in red before the token that
stands in its place, the verifier's own tokens plain."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from glmspec.runtime.request import Delta
from glmspec.runtime.text import TextStream, Tokenizer

ACCEPTED, REJECTED = "green", "red strike"


class GrowingAnswer:
    """An answer on the terminal, printed step by step."""

    def __init__(self, console: Console, tokenizer: Tokenizer | None) -> None:
        self._console, self._tokenizer = console, tokenizer
        self._stream: TextStream | None = tokenizer.stream() if tokenizer else None

    def add(self, delta: Delta) -> None:
        """Print what a step added."""
        line = Text()
        pieces = [self._piece(token) for token in delta.tokens]
        if self._stream and "".join(pieces) != delta.text:  # a stop text was cut, or waits for its rest
            line.append(delta.text)
        else:
            line.append("".join(pieces[: delta.accepted]), ACCEPTED)
            if self._console.color_system and not self._console.no_color:  # else it would look like the answer
                line.append(self._decoded(delta.rejected[:1]), REJECTED)  # later ones never had a chance
            line.append("".join(pieces[delta.accepted :]))
        self._console.print(line, end="" if delta.finish_reason is None else "\n", soft_wrap=True)

    def _piece(self, token: int) -> str:
        return self._stream.push(token) if self._stream else f"{token} "

    def _decoded(self, tokens: tuple[int, ...]) -> str:
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return self._tokenizer.decode(tokens).replace("\n", "⏎")  # it is not part of the answer's lines


def legend(console: Console) -> None:
    """One line that says what the colours mean, where there are any."""
    if not console.color_system or console.no_color:
        return
    console.print(
        Text.assemble(("accepted drafts", ACCEPTED), ", ", ("a rejected one", REJECTED), ", the verifier's own")
    )
