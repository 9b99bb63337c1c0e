"""Answering prompts from a file or the terminal: JSON lines out, or answers shown as they grow.

A file's prompts are answered as many at a time as the engine takes; on a terminal one after the other, so that each can
be watched.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from glmspec.core.errors import RequestError
from glmspec.core.files import ENGINES, check_output, json_bytes, producer, sha256, write_output
from glmspec.core.progress import Progress
from glmspec.runtime.answers import Kept, Printed, kept_answers
from glmspec.runtime.engine import Engine
from glmspec.runtime.job import Job
from glmspec.runtime.prompts import read_requests
from glmspec.runtime.request import Request
from glmspec.runtime.settings import request_of
from glmspec.runtime.stats import SpecStats
from glmspec.runtime.terminal import converse, text_request, watch

MAX_TOKENS = 2**31  # of any vocabulary


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to answer and where to. source: a file of JSON lines; prompts: texts instead; neither: lines typed on the
    terminal. output: a file of JSON lines; None shows answers on a terminal and writes JSON lines elsewhere. resume: go
    on with what an interrupted run kept for it. statistics: a JSON file for the counters of all answers. settings: of
    every prompt that has none of its own. chat: texts are what a user says, for the chat template."""

    source: Path | None
    prompts: tuple[str, ...]
    chat: bool = False
    output: Path | None
    resume: bool = False
    statistics: Path | None
    settings: Mapping[str, Any]


def generate(load: Callable[[], Engine], wanted: Wanted, progress: Progress) -> None:
    """Answer what is wanted. Raises naming the line, field or folder at fault before anything is answered."""
    for path in (wanted.output, wanted.statistics):
        if path is not None and path.exists() and not path.is_file():
            raise RequestError(f"{path}: found something else, expected a file or a name for one")
        if path is not None:
            check_output(path)
    request_of([0], wanted.settings, None).sampling.check(MAX_TOKENS)  # before anything is loaded
    with progress.stage("Loading engines"):
        engine = load()
    console = Console(highlight=False)
    typed = wanted.source is None and not wanted.prompts
    watched = typed or (wanted.output is None and wanted.source is None and console.is_terminal)
    requests = [] if typed else _requests(engine, wanted)
    with _lines(engine, wanted, None if typed else requests, watched) as lines:

        def finished(at: int, job: Job) -> None:
            _add(lines, at, job, engine)

        if typed:
            jobs, seconds = converse(engine, wanted.settings, console, finished, chat=wanted.chat)
        elif watched:
            jobs, seconds = watch(engine, requests, console, finished)
        else:
            jobs, seconds = _answered(engine, requests, lines, progress)
    if wanted.statistics is not None:
        write_output(wanted.statistics, json_bytes(statistics(engine) | _totals(jobs, seconds, engine)))
    _summary(jobs, seconds, engine, progress)


@contextmanager
def _lines(
    engine: Engine, wanted: Wanted, requests: list[Request] | None, watched: bool
) -> Iterator[Kept | Printed | None]:
    """Where lines go: None where answers are only shown. requests: None where they are typed."""
    if wanted.output is None:
        yield None if watched else Printed()
        return
    count = None if requests is None else len(requests)
    with kept_answers(wanted.output, fingerprint(engine, requests or []), count, wanted.resume) as kept:
        for line in kept.lines.values():  # their steps count too
            if counters := json.loads(line)["speculative_decoding"]:
                engine.stats.add(SpecStats.from_json(counters))
        yield kept


def fingerprint(engine: Engine, requests: Sequence[Request]) -> str:
    """What must be the same for a run to go on where another stopped: the engines, how drafts are verified, every
    prompt's settings."""
    engines = sha256(engine.directory.folder / "config.json")
    how = [engine.drafter_name, engine.verification, repr(engine.adaptive)]
    parts = [producer(ENGINES), engines, *how, *map(repr, requests)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _answered(
    engine: Engine, requests: Sequence[Request], lines: Kept | Printed | None, progress: Progress
) -> tuple[list[Job], float]:
    """Answer together those that are not answered yet; the seconds that took."""
    done = lines.lines if isinstance(lines, Kept) else {}
    left = [at for at in range(len(requests)) if at not in done]
    start = time.perf_counter()
    with progress.steps("Generating", len(requests)) as advance:
        for _ in range(len(requests) - len(left)):
            advance("prompt")

        def finished(number: int, job: Job) -> None:
            _add(lines, left[number], job, engine)
            advance("prompt")

        jobs = answer_all(engine, [requests[at] for at in left], finished)
    return jobs, time.perf_counter() - start


def _add(lines: Kept | Printed | None, at: int, job: Job, engine: Engine) -> None:
    if lines is not None:
        lines.add(at, json.dumps(job.to_json(engine)))


def _requests(engine: Engine, wanted: Wanted) -> list[Request]:
    """Of the file or the texts."""
    if wanted.source is None:
        return [text_request(engine, text, wanted.settings, wanted.chat) for text in wanted.prompts]
    sizes = {
        "vocab_size": engine.verifier.config.vocab_size,
        "max_model_len": engine.limits.max_model_len,
        "illegal": engine.directory.illegal,
    }
    return list(read_requests(wanted.source, engine.tokenizer, settings=wanted.settings, **sizes))


def answer_all(
    engine: Engine, requests: Sequence[Request], finished: Callable[[int, Job], None] = lambda at, job: None
) -> list[Job]:
    """Answer requests together, in one packed batch a step; but for near ties the answers do not depend on the
    company. finished: called with each request's place and answer, when it is whole."""
    jobs = {job.sequence: job for job in (Job(engine.add(request)) for request in requests)}
    places = {sequence: at for at, sequence in enumerate(jobs)}
    while engine.busy:
        for sequence, delta in engine.step():
            jobs[sequence].answer.add(delta)
            if sequence.finished:
                finished(places[sequence], jobs[sequence])
    return list(jobs.values())


def statistics(engine: Engine) -> dict[str, Any]:
    """Everything the engine has answered so far: counters pooled, then divided; positions from the first draft on."""
    stats = engine.stats
    return {"drafter": engine.drafter_name, **stats.to_json(), "position_rates": stats.position_rates}


def _totals(jobs: list[Job], seconds: float, engine: Engine) -> dict[str, Any]:
    """What answered, and how much of it this run did, how fast: a resumed one has only the rest."""
    tokens = sum(len(job.answer.tokens) for job in jobs)
    run = {
        "num_prompts": len(jobs),
        "num_prompt_tokens": sum(len(job.sequence.request.prompt_ids) for job in jobs),
        "num_output_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
    }
    return {
        "glmspec": version("glmspec"),
        "engines_sha256": sha256(engine.directory.folder / "config.json"),
        "this_run": run,
    }


def _summary(jobs: list[Job], seconds: float, engine: Engine, progress: Progress) -> None:
    """How many tokens, how fast, and as a table how well the drafts were accepted."""
    tokens = sum(len(job.answer.tokens) for job in jobs)
    progress.say(f"{len(jobs)} prompts, {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s")
    if engine.drafter_name and engine.stats.num_steps:
        progress.show(stats_table(engine.stats, engine.drafter_name))


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
