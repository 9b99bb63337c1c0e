"""Typing prompts: a chat is one conversation until an empty line, Ctrl-C ends the answer and not the program."""

from __future__ import annotations

import io
import os
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from glmspec.runtime import terminal
from glmspec.runtime.engine import Engine
from glmspec.runtime.settings import chat_ids
from glmspec.runtime.terminal import NEW, converse

SETTINGS = {"max_tokens": 8, "ignore_eos": True}
FIRST, SECOND = "Write a function for the total.", "And another."


@pytest.fixture(scope="module")
def engine(tiny_engines) -> Engine:
    return Engine(tiny_engines)


class Typist(Console):
    """A console at which lines are typed; an exception among them is raised at the prompt. Ctrl-D ends them."""

    def __init__(self, *lines: object) -> None:
        super().__init__(file=io.StringIO(), force_terminal=False, width=200)
        self._lines = list(lines)

    def input(self, *_: object, **__: object) -> str:
        line = self._lines.pop(0) if self._lines else EOFError()
        if isinstance(line, BaseException):
            raise line
        return line

    @property
    def shown(self) -> str:
        return self.file.getvalue()


def prompts(engine: Engine, *lines: object, chat: bool = True) -> tuple[list[tuple[int, ...]], list[str]]:
    """The prompts that were made of what was typed, and the answers' texts."""
    jobs, _ = converse(engine, SETTINGS, Typist(*lines), chat=chat)
    return [job.sequence.request.prompt_ids for job in jobs], [job.answer.text for job in jobs]


def said(engine: Engine, *texts: str) -> tuple[int, ...]:
    """The prompt of messages, the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return tuple(chat_ids(messages, engine.tokenizer))


def test_a_chat_keeps_the_conversation(engine):
    made, texts = prompts(engine, FIRST, SECOND, "more")
    assert made[0] == said(engine, FIRST)
    assert made[1] == said(engine, FIRST, texts[0], SECOND)
    assert made[2] == said(engine, FIRST, texts[0], SECOND, texts[1], "more")


@pytest.mark.parametrize("line", ["", NEW, f" {NEW} ", "  "])
def test_an_empty_line_begins_another_conversation(engine, line):
    made, _ = prompts(engine, FIRST, line, SECOND)
    assert made == [said(engine, FIRST), said(engine, SECOND)]


def test_without_chat_every_line_stands_alone(engine):
    made, _ = prompts(engine, FIRST, "", SECOND, chat=False)
    assert made == [tuple(engine.tokenizer.encode(text)) for text in (FIRST, SECOND)]


def test_a_conversation_that_is_too_long_says_how_to_go_on(engine):
    typist = Typist(FIRST, "word " * 3000, SECOND)
    jobs, _ = converse(engine, SETTINGS, typist, chat=True)
    assert len(jobs) == 2 and f"({NEW} begins another conversation)" in typist.shown
    assert jobs[1].sequence.request.prompt_ids == said(engine, FIRST, jobs[0].answer.text, SECOND)
    typist = Typist("word " * 3000)
    assert converse(engine, SETTINGS, typist, chat=True)[0] == [] and f"({NEW}" not in typist.shown


def pressing(engine: Engine, monkeypatch, at_step: int, times: int = 1) -> None:
    """Ctrl-C, in the middle of a step."""
    real, steps = engine.step, []

    def step():
        steps.append(1)
        if len(steps) == at_step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        return real()

    monkeypatch.setattr(engine, "step", step)


@pytest.mark.parametrize("at_step", [1, 2])
def test_ctrl_c_ends_the_answer_and_the_next_is_as_ever(engine, monkeypatch, at_step):
    free, handler = engine.scheduler.pool.free, signal.getsignal(signal.SIGINT)
    (alone,), _ = converse(engine, SETTINGS, Typist(SECOND), chat=False)
    typist = Typist(FIRST, SECOND)
    with monkeypatch.context() as patch:
        pressing(engine, patch, at_step)
        jobs, _ = converse(engine, SETTINGS | {"max_tokens": 200}, typist, chat=False)
    assert "ended by Ctrl-C" in typist.shown
    assert len(jobs[0].answer.tokens) < 200 and jobs[0].answer.finish_reason == "aborted"
    assert jobs[1].answer.tokens[:8] == alone.answer.tokens
    assert engine.scheduler.pool.free == free and not engine.busy
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_ends_the_program(engine, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        pressing(engine, patch, 2, times=2)
        converse(engine, SETTINGS | {"max_tokens": 200}, Typist(FIRST), chat=False)
    for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(sequence)


def test_ctrl_c_at_the_prompt_ends_the_program(engine):
    made, _ = prompts(engine, FIRST, KeyboardInterrupt(), SECOND)
    assert made == [said(engine, FIRST)]


def test_what_was_said_before_ctrl_c_is_part_of_the_conversation(engine, monkeypatch):
    with monkeypatch.context() as patch:
        pressing(engine, patch, 2)
        jobs, _ = converse(engine, SETTINGS | {"max_tokens": 40}, Typist(FIRST, SECOND), chat=True)
    assert jobs[0].answer.finish_reason == "aborted" and jobs[0].answer.text
    assert jobs[1].sequence.request.prompt_ids == said(engine, FIRST, jobs[0].answer.text, SECOND)


def test_a_seed_that_was_drawn_is_told(engine):
    for seed in (None, 7):
        typist = Typist(FIRST)
        jobs, _ = converse(engine, SETTINGS | {"temperature": 1.0, "seed": seed}, typist, chat=False)
        assert (f"(seed {jobs[0].sequence.noise.seed})" in typist.shown) == (seed is None)


def test_seconds_are_of_all_answers_without_the_typing(engine, monkeypatch):
    clock = iter([0.0, 1.0, 100.0, 102.0])
    monkeypatch.setattr(terminal, "time", SimpleNamespace(perf_counter=clock.__next__))
    _, seconds = converse(engine, SETTINGS, Typist(FIRST, SECOND), chat=False)
    assert seconds == 3.0
