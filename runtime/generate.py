"""Answering a file of prompts: JSON lines in, JSON lines out, as many at a time as the engine takes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmspec.build.errors import RequestError
from glmspec.build.progress import Progress
from glmspec.convert.files import write_bytes
from glmspec.runtime.adaptive import Adaptive
from glmspec.runtime.engine import Engine
from glmspec.runtime.prompts import read_requests
from glmspec.runtime.request import Answer, Request
from glmspec.runtime.stats import SpecStats


@dataclass
class Job:
    """One prompt and its answer so far."""

    request: Request
    answer: Answer
    stats: SpecStats

    def to_json(self, speculated: bool) -> dict[str, Any]:
        """The output line."""
        line: dict[str, Any] = {"output_token_ids": self.answer.tokens}
        if self.answer.text is not None:
            line["text"] = self.answer.text
        line["finish_reason"] = self.answer.finish_reason
        line["speculative_decoding"] = self.stats.to_json() if speculated else None
        return line


def generate_file(
    engines: Path,
    source: Path,
    output: Path,
    max_tokens: int,
    speculate: bool,
    drafter: str | None,
    progress: Progress,
    adaptive: Adaptive | None = None,
) -> None:
    """Answer every line of `source` into `output`, in order. Raises naming the line at fault before it starts."""
    if not output.parent.is_dir():
        raise RequestError(f"{output}: {output.parent} is not a folder")
    with progress.stage("Loading engines"):
        engine = Engine(engines, drafter, speculate, adaptive=adaptive)
    limit = engine.limits.max_model_len
    sizes = {"max_tokens": max_tokens, "vocab_size": engine.verifier.config.vocab_size, "max_model_len": limit}
    requests = list(read_requests(source, engine.tokenizer, **sizes))
    start = time.perf_counter()
    with progress.steps("Generating", len(requests)) as advance:
        jobs = answer_all(engine, requests, advance)
    seconds = time.perf_counter() - start
    has_text, speculated = engine.tokenizer is not None, engine.drafter is not None
    for job in jobs:
        if not has_text:
            job.answer.text = None
    write_bytes(output, "".join(json.dumps(job.to_json(speculated)) + "\n" for job in jobs).encode())
    _summary(jobs, seconds, engine)


def answer_all(engine: Engine, requests: list[Request], advance=lambda name: None) -> list[Job]:
    """Answer requests together, in one packed batch a step; the answers do not depend on the company."""
    jobs, by_sequence = [], {}
    for request in requests:
        sequence = engine.add(request)
        jobs.append(Job(request, Answer(), sequence.stats))
        by_sequence[sequence] = jobs[-1]
    while engine.busy:
        for sequence, delta in engine.step():
            by_sequence[sequence].answer.add(delta)
            if sequence.finished:
                advance("prompt")
    return jobs


def _summary(jobs: list[Job], seconds: float, engine: Engine) -> None:
    """A table on stderr: how many tokens, how fast, how well the drafts were accepted."""
    from rich.console import Console

    tokens = sum(len(job.answer.tokens) for job in jobs)
    console = Console(stderr=True, highlight=False)
    console.print(f"{len(jobs)} prompts, {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s")
    if engine.drafter is not None and engine.stats.num_steps:
        console.print(stats_table(engine.stats, engine.drafter_name))


def stats_table(stats: SpecStats, drafter: str) -> Any:
    """Acceptance length, rate and per-position rates as a rich table."""
    from rich.table import Table

    table = Table()
    table.add_column("speculative decoding")
    table.add_column(drafter, justify="right")
    table.add_row("acceptance length", f"{stats.mean_acceptance_length:.2f}")
    table.add_row("acceptance rate", f"{stats.draft_acceptance_rate:.1%}")
    for position, rate in enumerate(stats.position_rates, 1):
        table.add_row(f"position {position}", f"{rate:.1%}")
    return table
