"""Answers on a terminal, one after the other, shown as they grow; prompts typed there, one conversation if asked."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from glmspec.core.errors import RequestError
from glmspec.runtime.engine import Engine
from glmspec.runtime.job import Finished, Job, ignore, note_of
from glmspec.runtime.request import Request
from glmspec.runtime.settings import chat_ids, request_of
from glmspec.runtime.show import GrowingAnswer, legend

NEW = "/new"  # typed: begins another conversation, as an empty line does


def text_request(
    engine: Engine, text: str, settings: Mapping[str, Any], chat: bool, before: Sequence[dict[str, str]] = ()
) -> Request:
    """The request of a text. chat: it is a user's message, after the messages `before`. Raises `RequestError`."""
    if engine.tokenizer is None:
        raise RequestError("--prompt: this engine has no tokenizer; give --input with prompt_token_ids")
    messages = [*before, {"role": "user", "content": text}]
    ids = chat_ids(messages, engine.tokenizer) if chat else engine.tokenizer.encode(text)
    request = request_of(ids, settings, engine.tokenizer)
    engine.check(request)
    return request


def watch(
    engine: Engine, requests: Iterable[Request], console: Console, finished: Finished = ignore
) -> tuple[list[Job], float]:
    """Answer requests one by one, shown as they grow. Returns the seconds that took too."""
    _legend(engine, console)
    jobs: list[Job] = []
    start = time.perf_counter()
    for at, request in enumerate(requests):
        jobs.append(_answer(engine, request, console))
        finished(at, jobs[-1])
    return jobs, time.perf_counter() - start


def converse(
    engine: Engine,
    settings: Mapping[str, Any],
    console: Console,
    finished: Finished = ignore,
    *,
    chat: bool,
) -> tuple[list[Job], float]:
    """Answer one prompt a line until Ctrl-D, or Ctrl-C at the prompt; Ctrl-C in an answer ends the answer. chat: the
    lines are one conversation, until an empty one. Returns the seconds without the typing."""
    jobs: list[Job] = []
    messages: list[dict[str, str]] = []
    seconds = 0.0
    begins = f"; an empty line or {NEW} begins another conversation" if chat else ""
    console.print(f"one prompt a line{begins}; Ctrl-C ends an answer, Ctrl-D the program", style="dim")
    _legend(engine, console)
    for text in _lines(console):
        if chat and text.strip() in ("", NEW):
            messages = []
            console.print("(a new conversation)", style="dim")
        elif text:
            start = time.perf_counter()
            try:
                request = text_request(engine, text, settings, chat, messages)
            except RequestError as error:
                advice = f" ({NEW} begins another conversation)" if messages else ""
                console.print(f"{error}{advice}", style="red", markup=False)
                continue
            with _presses() as pressed:
                jobs.append(_answer(engine, request, console, pressed))
            seconds += time.perf_counter() - start
            finished(len(jobs) - 1, jobs[-1])
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": jobs[-1].answer.text}]
    return jobs, seconds


def _lines(console: Console) -> Iterator[str]:
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return


@contextmanager
def _presses() -> Iterator[Callable[[], bool]]:
    """A function that tells whether Ctrl-C was pressed, to be asked between steps: a step that is cut short leaves the
    caches half written. A second press is the ordinary interrupt."""
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(engine: Engine, request: Request, console: Console, pressed: Callable[[], bool] = lambda: False) -> Job:
    """Answer one request, shown as it grows, until it ends or `pressed` is true."""
    shown, job = GrowingAnswer(console, engine.tokenizer), Job(engine.add(request))
    while engine.busy:
        if pressed():
            engine.abort(job.sequence)
            job.answer.finish_reason = job.sequence.finish_reason
            console.print("\n(ended by Ctrl-C)", style="dim")
            break
        for _, delta in engine.step():
            job.answer.add(delta)
            shown.add(delta)
    sampling = request.sampling
    if sampling.temperature and sampling.seed is None:
        console.print(f"(seed {job.sequence.noise.seed})", style="dim")
    if note := note_of(job.sequence, engine):
        console.print(f"({note})", style="dim")
    return job


def _legend(engine: Engine, console: Console) -> None:
    if engine.drafter:
        legend(console)
