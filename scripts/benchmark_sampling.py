"""Acceptance by drafter, temperature and way of drafting, with the tiny models, and memory over 20,000 sampled steps;
writes docs/benchmarks/sampling.md and .json.

Acceptance is a property of models and laws, not of a machine. Memory is the process's resident set.
"""

from __future__ import annotations

import gc
import json
import resource
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib.metadata import version
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

import click
from benchmark import ASSETS, OUT, machine, prompts
from rich.console import Console
from rich.progress import track

from glmspec.build.configs.target import TARGETS
from glmspec.build.engine import Options, build_engines
from glmspec.build.progress import Progress
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling

DRAFTERS, TEMPERATURES = ("dspark", "dflash2", "mtp"), (0.0, 0.7, 1.0, 1.5)
WAYS = ("greedy drafts", "drawn, standard", "drawn, block")
NEW_TOKENS, SEEDS = 96, 1
MIXED = (
    Sampling(temperature=1.0, top_p=0.95),
    Sampling(temperature=0.8, repetition_penalty=1.1, logprobs=2),
    Sampling(temperature=1.2, top_k=50, min_tokens=20),
    Sampling(),
)

console = Console(highlight=False)


@click.command()
@click.option("--steps", default=20_000, show_default=True, help="Sampled steps over which memory is watched.")
def main(steps: int) -> None:
    """Measure and write the report."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {way: build(Path(scratch), way) for way in ("greedy", "probabilistic")}
        result = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "versions": {name: version(name) for name in ("glmspec", "torch", "numpy")},
            "config": {"new_tokens": NEW_TOKENS, "seeds": SEEDS, "prompts": len(prompts()), "steps": steps},
            "acceptance": measure_acceptance(folders),
            "memory": alone(measure_memory, folders["probabilistic"], steps),
        }
    (OUT / "sampling.json").write_text(json.dumps(result, indent=2) + "\n")
    (OUT / "sampling.md").write_text(report(result))
    console.print((OUT / "sampling.md").read_text(), markup=False)


def build(home: Path, way: str) -> Path:
    """An engine directory of the tiny models that drafts this way."""
    options = Options(mtp=True, draft_sampling=way, max_num_seqs=16)
    drafters = [ASSETS / f"tiny-{name}" for name in DRAFTERS if name != "mtp"]
    build_engines(ASSETS / "tiny-verifier", drafters, TARGETS["cpu"], options, home / way, Progress())
    return home / way


def requests_of(engine: Engine, temperature: float) -> list[Request]:
    """Every prompt, with a few seeds where it is sampled."""
    ids = [tuple(engine.tokenizer.encode(text)) for text in prompts()]
    return [
        Request(prompt_ids=one, max_tokens=NEW_TOKENS, sampling=Sampling(temperature=temperature, seed=seed))
        for seed in range(SEEDS if temperature else 1)
        for one in ids
    ]


def measure_acceptance(folders: dict[str, Path]) -> list[dict]:
    """Tokens a speculative step, pooled over all answers."""
    cases = [(name, way, heat) for name in DRAFTERS for way in WAYS for heat in TEMPERATURES]
    made = []
    for name, way, heat in track(cases, "Acceptance", console=console):
        if heat == 0 and way != WAYS[0]:
            continue  # greedy requests have greedy drafts
        folder = folders["greedy" if way == WAYS[0] else "probabilistic"]
        engine = Engine(folder, name, verification="block" if way == WAYS[2] else "standard")
        answer_all(engine, requests_of(engine, heat))
        stats = engine.stats
        made.append(
            {
                "drafter": name, "drafting": way, "temperature": heat, "length": stats.mean_acceptance_length,
                "rate": stats.draft_acceptance_rate, "positions": stats.position_rates, "steps": stats.num_steps,
            }
        )  # fmt: skip
    return made


def alone(measure: Callable[..., list], *arguments: object) -> list:
    """What a function finds in a process of its own: no memory that was freed before hides what it takes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def measure_memory(folder: Path, steps: int) -> list[dict[str, float]]:
    """Megabytes resident, every tenth of the steps, while requests of every kind come and go."""
    engine = Engine(folder, "dspark")
    ids = [tuple(engine.tokenizer.encode(text)) for text in prompts()]
    source = (
        Request(prompt_ids=one, max_tokens=NEW_TOKENS, sampling=setting)
        for one, setting in zip(cycle(ids), cycle(MIXED), strict=False)
    )
    made = []
    for step in track(range(1, steps + 1), "Memory", console=console):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 5:
            engine.add(next(source))
        engine.step()
        if step % (steps // 10) == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            made.append({"steps": step, "MB": pages * resource.getpagesize() / 1e6})
    return made


def report(result: dict) -> str:
    """The page people read."""
    machine, config = result["machine"], result["config"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    found = {(one["drafter"], one["drafting"], one["temperature"]): one["length"] for one in result["acceptance"]}
    heads = " | ".join(f"T = {heat:g}" for heat in TEMPERATURES)
    rows = []
    for name in DRAFTERS:
        for way in WAYS:
            cells = [f"{found[key]:.2f}" if (key := (name, way, heat)) in found else "" for heat in TEMPERATURES]
            rows.append(f"| {name} | {way} | {' | '.join(cells)} |")
    memory = "\n".join(f"| {one['steps']:,} | {one['MB']:.1f} |" for one in result["memory"])
    table = "\n".join(rows)
    return f"""# Sampling: acceptance and memory, tiny models

Written by `scripts/benchmark_sampling.py` on {result["date"]}: {machine["cpu"]}, {machine["cores"]} cores,
Python {machine["python"]}; {versions}.

Tokens a speculative step (1 + accepted drafts / steps, pooled), {config["prompts"]} held-out prompts of up to
{config["new_tokens"]} new tokens, seeds a prompt where it is sampled: {config["seeds"]}. The tiny models are sure of
themselves: what a large model does at these temperatures is another matter.

| drafter | drafts | {heads} |
|---|---|{"---|" * len(TEMPERATURES)}
{table}

Greedy drafts stand with chance p(draft), drawn ones with min(1, p / q). Greedy requests have greedy drafts either way.

Memory of a process of its own over {config["steps"]:,} steps of requests with four kinds of settings, five at a time,
drafts drawn:

| steps | MB resident |
|---|---|
{memory}
"""


if __name__ == "__main__":
    main()
