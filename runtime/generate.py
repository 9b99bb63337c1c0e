"""Answering prompts from a file or the terminal: JSON lines out, or answers shown as they grow.

A file's prompts are answered as many at a time as the engine takes; on a terminal one after the other, so that each can
be watched.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from glmspec.core.errors import RequestError
from glmspec.core.files import ENGINES, check_output, json_bytes, producer, sha256, write_output
from glmspec.core.progress import Progress
from glmspec.runtime.answers import KeptAnswers, PrintedAnswers, kept_answers
from glmspec.runtime.engine import Engine
from glmspec.runtime.job import Finished, Job, ignore
from glmspec.runtime.options import GenerateOptions
from glmspec.runtime.prompts import read_requests
from glmspec.runtime.request import Request
from glmspec.runtime.settings import request_of
from glmspec.runtime.stats import SpecStats
from glmspec.runtime.terminal import converse, text_request, watch

MAX_TOKENS = 2**31  # of any vocabulary


def generate(load: Callable[[], Engine], options: GenerateOptions, progress: Progress) -> None:
    """Answer the prompts. load: loads the engine, once the options are checked. Raises naming the line, field or folder
    at fault before anything is answered."""
    for path in (options.output, options.statistics):
        if path is not None and path.exists() and not path.is_file():
            raise RequestError(f"{path}: found something else, expected a file or a name for one")
        if path is not None:
            check_output(path)
    request_of([0], options.settings, None).sampling.check(MAX_TOKENS)  # before anything is loaded
    with progress.stage("Loading engines"):
        engine = load()
    console = Console(highlight=False)
    typed = options.source is None and not options.prompts
    watched = typed or (options.output is None and options.source is None and console.is_terminal)
    requests = [] if typed else _requests(engine, options)
    with _lines(engine, options, None if typed else requests, watched) as lines:

        def finished(at: int, job: Job) -> None:
            if lines is not None:
                lines.add(at, json.dumps(job.to_json(engine)))

        if typed:
            jobs, seconds = converse(engine, options.settings, console, finished, chat=options.chat)
        elif watched:
            jobs, seconds = watch(engine, requests, console, finished)
        else:
            answered = lines.lines if isinstance(lines, KeptAnswers) else {}
            jobs, seconds = _answer_rest(engine, requests, answered, finished, progress)
    if options.statistics is not None:
        write_output(options.statistics, json_bytes(statistics(engine) | _totals(jobs, seconds, engine)))
    _summary(jobs, seconds, engine, progress)


@contextmanager
def _lines(
    engine: Engine, options: GenerateOptions, requests: list[Request] | None, watched: bool
) -> Iterator[KeptAnswers | PrintedAnswers | None]:
    """The place that lines of answers go to; None where answers are only shown. requests: None where they are
    typed."""
    if options.output is None:
        yield None if watched else PrintedAnswers()
        return
    count = None if requests is None else len(requests)
    with kept_answers(options.output, fingerprint(engine, requests or []), count, options.resume) as kept:
        for line in kept.lines.values():  # their steps count too
            if counters := json.loads(line)["speculative_decoding"]:
                engine.stats.add(SpecStats.from_json(counters))
        yield kept


def fingerprint(engine: Engine, requests: Sequence[Request]) -> str:
    """A hash of everything that must be the same for a run to go on where another stopped: the engines, how drafts are
    verified, every prompt's settings."""
    engines = sha256(engine.directory.folder / "config.json")
    how = [engine.drafter_name, engine.verification, repr(engine.adaptive)]
    parts = [producer(ENGINES), engines, *how, *map(repr, requests)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _answer_rest(
    engine: Engine, requests: Sequence[Request], answered: Collection[int], finished: Finished, progress: Progress
) -> tuple[list[Job], float]:
    """Answer together the requests that are not answered yet. Returns the seconds that took too."""
    rest = [at for at in range(len(requests)) if at not in answered]
    start = time.perf_counter()
    with progress.steps("Generating", len(requests)) as advance:
        for _ in range(len(requests) - len(rest)):
            advance("prompt")

        def advanced(number: int, job: Job) -> None:
            finished(rest[number], job)
            advance("prompt")

        jobs = answer_all(engine, [requests[at] for at in rest], advanced)
    return jobs, time.perf_counter() - start


def _requests(engine: Engine, options: GenerateOptions) -> list[Request]:
    """The requests of the file or the texts."""
    if options.source is None:
        return [text_request(engine, text, options.settings, options.chat) for text in options.prompts]
    sizes = {
        "vocab_size": engine.verifier.config.vocab_size,
        "max_model_len": engine.limits.max_model_len,
        "illegal": engine.directory.illegal,
    }
    return list(read_requests(options.source, engine.tokenizer, settings=options.settings, **sizes))


def answer_all(engine: Engine, requests: Sequence[Request], finished: Finished = ignore) -> list[Job]:
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
    """Counters of everything the engine has answered so far, pooled, then divided; positions from the first draft
    on."""
    stats = engine.stats
    return {"drafter": engine.drafter_name, **stats.to_json(), "position_rates": stats.position_rates}


def _totals(jobs: list[Job], seconds: float, engine: Engine) -> dict[str, Any]:
    """The engines that answered, and this run's tokens and speed: a resumed run has only the rest."""
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
    """Show the number of tokens, the speed, and as a table the drafts' acceptance."""
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
