"""A prompt that is being answered: the pieces that steps add to its answer, and the output line they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Answer
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.stats import SpecStats


@dataclass
class Job:
    """One prompt and its answer so far."""

    sequence: Sequence
    answer: Answer = field(default_factory=Answer)

    @property
    def stats(self) -> SpecStats:
        """Its speculative steps."""
        return self.sequence.stats

    def to_json(self, engine: Engine) -> dict[str, Any]:
        """The output line."""
        answer = self.answer
        line: dict[str, Any] = {"output_token_ids": answer.tokens}
        if engine.tokenizer is not None:
            line["text"] = answer.text
        line["finish_reason"] = answer.finish_reason
        if self.sequence.request.sampling.logprobs is not None:
            pairs = zip(answer.tokens, answer.logprobs, strict=True)
            line["logprobs"] = [logprob.to_json(token) for token, logprob in pairs]
        if self.sequence.request.sampling.temperature:
            line["seed"] = self.sequence.noise.seed
        line["speculative_decoding"] = self.stats.to_json() if engine.drafter else None
        if note := note_of(self.sequence, engine):
            line["note"] = note
        return line


Finished = Callable[[int, Job], None]  # called with a prompt's place and its whole answer


def ignore(at: int, job: Job) -> None:
    """Do nothing with an answer that is only shown or returned."""


def note_of(sequence: Sequence, engine: Engine) -> str | None:
    """A sentence that the reader of an answer should know, if there is one."""
    if engine.drafter is None or not sequence.outgrew_drafter:
        return None
    return f"{engine.drafter_name} knows {engine.drafter.max_positions:,} positions; beyond them nothing was drafted"
