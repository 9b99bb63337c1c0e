"""Answering prompts from a file or the terminal: JSON lines out, or answers shown as they grow.

A file's prompts are answered as many at a time as the engine takes; on a terminal one after the other, so that each can
be watched.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from glmspec.build.errors import RequestError
from glmspec.build.progress import Progress
from glmspec.convert.files import write_bytes, write_json
from glmspec.runtime.engine import Engine
from glmspec.runtime.prompts import read_requests
from glmspec.runtime.request import Answer, Request
from glmspec.runtime.sequence import Sequence as Running
from glmspec.runtime.settings import chat_ids, request_of
from glmspec.runtime.show import Shown, legend
from glmspec.runtime.stats import SpecStats

MOST_TOKENS = 2**31  # of any vocabulary


@dataclass
class Job:
    """One prompt and its answer so far."""

    sequence: Running
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
            line["logprobs"] = [one.to_json(token) for token, one in pairs]
        if self.sequence.request.sampling.temperature:
            line["seed"] = self.sequence.noise.seed
        line["speculative_decoding"] = self.stats.to_json() if engine.drafter else None
        if note := _note(self.sequence, engine):
            line["note"] = note
        return line


def _note(sequence: Running, engine: Engine) -> str | None:
    if not sequence.beyond_reach:
        return None
    reach = engine.drafter.reach
    return f"{engine.drafter_name} knows {reach:,} positions; beyond them nothing was drafted"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to answer and where to. source: a file of JSON lines; prompts: texts instead; neither: lines typed on the
    terminal. output: a file of JSON lines; None shows answers on a terminal and writes JSON lines elsewhere.
    statistics: a JSON file for the counters of all answers. settings: of every prompt that has none of its own. chat:
    texts are what a user says, for the chat template."""

    source: Path | None
    prompts: tuple[str, ...]
    chat: bool = False
    output: Path | None
    statistics: Path | None
    settings: Mapping[str, Any]


def generate(load: Callable[[], Engine], wanted: Wanted, progress: Progress) -> None:
    """Answer what is wanted. Raises naming the line, field or folder at fault before anything is answered."""
    for path in (wanted.output, wanted.statistics):
        if path is not None and not path.parent.is_dir():
            raise RequestError(f"{path}: {path.parent} is not a folder")
        if path is not None and path.exists() and not path.is_file():
            raise RequestError(f"{path}: found something else, expected a file or a name for one")
    request_of([0], wanted.settings, None).sampling.check(MOST_TOKENS)  # before anything is loaded
    with progress.stage("Loading engines"):
        engine = load()
    console = Console(highlight=False)
    typed = wanted.source is None and not wanted.prompts
    if typed or (wanted.output is None and wanted.source is None and console.is_terminal):
        requests = _typed(engine, wanted, console) if typed else _requests(engine, wanted)
        jobs, seconds = _watched(engine, requests, console)
    else:
        requests = _requests(engine, wanted)
        start = time.perf_counter()
        with progress.steps("Generating", len(requests)) as advance:
            jobs = answer_all(engine, requests, advance)
        seconds = time.perf_counter() - start
    lines = "".join(json.dumps(job.to_json(engine)) + "\n" for job in jobs)
    if wanted.output is not None:
        write_bytes(wanted.output.resolve(), lines.encode())  # through a link, not in its place
    elif not console.is_terminal:
        _print(lines)
    if wanted.statistics is not None:
        write_json(wanted.statistics.resolve(), statistics(engine))
    _summary(jobs, seconds, engine)


def _requests(engine: Engine, wanted: Wanted) -> list[Request]:
    """Of the file or the texts."""
    sizes = {
        "vocab_size": engine.verifier.config.vocab_size,
        "max_model_len": engine.limits.max_model_len,
        "illegal": engine.directory.illegal,
    }
    if wanted.source is not None:
        return list(read_requests(wanted.source, engine.tokenizer, settings=wanted.settings, **sizes))
    made = []
    for text in wanted.prompts:
        if engine.tokenizer is None:
            raise RequestError("--prompt: this engine has no tokenizer; give --input with prompt_token_ids")
        said = [{"role": "user", "content": text}]
        ids = chat_ids(said, engine.tokenizer) if wanted.chat else engine.tokenizer.encode(text)
        made.append(request_of(ids, wanted.settings, engine.tokenizer))
        made[-1].check(has_text=True, **sizes)
    return made


def _typed(engine: Engine, wanted: Wanted, console: Console) -> Iterator[Request]:
    """One prompt a line until Ctrl-D or Ctrl-C; a line at fault is told, and the next asked for."""
    console.print("one prompt a line, Ctrl-D ends", style="dim")
    while True:
        try:
            text = console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text:
            try:
                yield from _requests(engine, replace(wanted, prompts=(text,)))
            except RequestError as error:
                console.print(str(error), style="red", markup=False)


def _watched(engine: Engine, requests: Iterable[Request], console: Console) -> tuple[list[Job], float]:
    """Answer one by one, shown as they grow; the seconds that took, without the typing."""
    jobs, seconds = [], 0.0
    if engine.drafter:
        legend(console)
    for request in requests:
        shown, job, start = Shown(console, engine.tokenizer), Job(engine.add(request)), time.perf_counter()
        while engine.busy:
            for _, delta in engine.step():
                job.answer.add(delta)
                shown.add(delta)
        seconds += time.perf_counter() - start
        sampling = request.sampling
        if sampling.temperature and sampling.seed is None:
            console.print(f"(seed {job.sequence.noise.seed})", style="dim")
        if note := _note(job.sequence, engine):
            console.print(f"({note})", style="dim")
        jobs.append(job)
    return jobs, seconds


def _print(text: str) -> None:
    """To standard output, which may be full, or closed by who has read enough."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at exit
    except OSError as error:
        raise RequestError(f"standard output: {error.strerror}; give --output") from None


def answer_all(
    engine: Engine, requests: Sequence[Request], advance: Callable[[str], None] = lambda name: None
) -> list[Job]:
    """Answer requests together, in one packed batch a step; but for near ties the answers do not depend on the
    company."""
    jobs = {job.sequence: job for job in (Job(engine.add(request)) for request in requests)}
    while engine.busy:
        for sequence, delta in engine.step():
            jobs[sequence].answer.add(delta)
            if sequence.finished:
                advance("prompt")
    return list(jobs.values())


def statistics(engine: Engine) -> dict[str, Any]:
    """Everything the engine has answered so far: counters pooled, then divided; positions from the first draft on."""
    stats = engine.stats
    return {"drafter": engine.drafter_name, **stats.to_json(), "position_rates": stats.position_rates}


def _summary(jobs: list[Job], seconds: float, engine: Engine) -> None:
    """A table on stderr: how many tokens, how fast, how well the drafts were accepted."""
    tokens = sum(len(job.answer.tokens) for job in jobs)
    console = Console(stderr=True, highlight=False)
    console.print(f"{len(jobs)} prompts, {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s")
    if engine.drafter is not None and engine.stats.num_steps:
        console.print(stats_table(engine.stats, engine.drafter_name))


def stats_table(stats: SpecStats, drafter: str) -> Table:
    """Acceptance length, rate and per-position rates as a rich table."""
    table = Table()
    table.add_column("speculative decoding")
    table.add_column(drafter, justify="right")
    table.add_row("acceptance length", f"{stats.mean_acceptance_length:.2f}")
    table.add_row("acceptance rate", f"{stats.draft_acceptance_rate:.1%}")
    for position, rate in enumerate(stats.position_rates, 1):
        table.add_row(f"position {position}", f"{rate:.1%}")
    return table
