"""Answering a file of prompts: JSON lines in, JSON lines out, as many at a time as the engine takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmspec.build.errors import RequestError
from glmspec.build.progress import Progress
from glmspec.convert.files import write_bytes
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Answer, Request
from glmspec.runtime.stats import SpecStats

# Settings that other tools take from a prompt line: refused, because ignoring them would give another answer.
_NOT_A_LINE_S = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "logprobs", "logit_bias"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos"),
    *("stop", "stop_words", "stop_token_ids", "bad_words"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
}


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
) -> None:
    """Answer every line of `source` into `output`, in order. Raises naming the line at fault before it starts."""
    if not output.parent.is_dir():
        raise RequestError(f"{output}: {output.parent} is not a folder")
    with progress.stage("Loading engines"):
        engine = Engine(engines, drafter, speculate)
    requests = list(_requests(source, engine, max_tokens))
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


def _requests(source: Path, engine: Engine, max_tokens: int) -> Iterator[Request]:
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source}: not UTF-8 text ({error})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            ids = _prompt_ids(line, engine)
            request = Request(prompt_ids=tuple(ids), max_tokens=max_tokens)
            config = engine.verifier.config
            request.check(config.vocab_size, engine.limits.max_model_len, engine.tokenizer is not None)
        except RequestError as error:
            raise RequestError(f"{source}: line {number}: {error}") from None
        yield request


def _prompt_ids(line: str, engine: Engine) -> list[int]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("prompt_token_ids" in value):
        raise RequestError("expected an object with either prompt or prompt_token_ids")
    odd = sorted(_NOT_A_LINE_S & value.keys())
    if odd:
        raise RequestError(f"{', '.join(odd)}: not a setting of a line; the command line sets it for all")
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise RequestError(f"prompt: found {value['prompt']!r}, expected a text")
        if engine.tokenizer is None:
            raise RequestError("prompt: this engine has no tokenizer; give prompt_token_ids")
        return engine.tokenizer.encode(value["prompt"])
    ids = value["prompt_token_ids"]
    if not isinstance(ids, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise RequestError("prompt_token_ids: expected a list of integers")
    return ids


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
