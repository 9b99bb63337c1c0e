"""Acceptance by drafter, temperature and way of drafting, with the tiny models, and memory over 20,000 sampled steps;
writes docs/benchmarks/sampling.md and .json.

Acceptance is a property of models and distributions, not of a machine. Memory is the process's resident set.

    python scripts/benchmark_sampling.py [--steps N] [--seeds N] [--workers N]

Legend: P prompts, C columns of counts.
"""

from __future__ import annotations

import gc
import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
from measured import (
    SPECULATION,
    console,
    interval,
    length,
    made_by,
    origin,
    prompts,
    quote,
    spread,
    write,
)
from tiny_engines import BLOCK_DRAFTERS, build_tiny, prompt_ids

from glmspec.build.settings import BuildOptions
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling

DRAFTERS, TEMPERATURES = (*BLOCK_DRAFTERS, "mtp"), (0.0, 0.7, 1.0, 1.5)
GREEDY, STANDARD, BLOCK = WAYS = ("greedy drafts", "drawn, standard", "drawn, block")
GAIN = "block less standard"
TOP_K = (None, 8, 1)  # best logits of a row that a Markov head's drafts are among
NEW_TOKENS, SEEDS = 96, 4
MIXED = (
    Sampling(temperature=1.0, top_p=0.95),
    Sampling(temperature=0.8, repetition_penalty=1.1, logprobs=2),
    Sampling(temperature=1.2, top_k=50, min_tokens=20),
    Sampling(),
)


@click.command()
@click.option("--steps", default=20_000, show_default=True, help="Sampled steps over which memory is watched.")
@click.option("--seeds", default=SEEDS, show_default=True, help="Of every prompt, where it is sampled.")
@click.option("--workers", default=os.cpu_count(), show_default=True, help="Processes: nothing here is timed.")
def main(steps: int, seeds: int, workers: int) -> None:
    """Measure and write the report."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        chosen = BuildOptions(mtp=True, max_num_seqs=16)
        folders = {
            way: build_tiny(home / way, replace(chosen, draft_sampling=way)) for way in ("greedy", "probabilistic")
        }
        narrowed = {top_k: build_tiny(home / f"among-{top_k}", replace(chosen, markov_top_k=top_k)) for top_k in TOP_K}
        context = get_context("spawn")  # so that no memory which was freed before hides what one takes
        with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
            memory = pool.submit(measure_memory, folders["probabilistic"], steps)
            acceptance = [pool.submit(measure_acceptance, name, folders, seeds) for name in DRAFTERS]
            among = [pool.submit(measure_top_k, top_k, folder) for top_k, folder in narrowed.items()]
            measured = {
                "acceptance": [line for future in acceptance for line in future.result()],
                "markov top k": [future.result() for future in among],
                "memory": memory.result(),
            }
    config = {"new_tokens": NEW_TOKENS, "seeds": seeds, "prompts": len(prompts()), "steps": steps}
    result = made_by(("glmspec", "torch", "numpy"), **config) | measured
    write("sampling", result, report)
    quote(SPECULATION, "and fewer drafts stand:", top_k_sentence(result), ". Answers stay the verifier's")


def counts_of(engine: Engine, temperature: float, seeds: int) -> np.ndarray:
    """Accepted drafts and steps [prompts, 2], over all seeds of a prompt."""
    requests = [
        Request(prompt_ids=ids, max_tokens=NEW_TOKENS, sampling=Sampling(temperature=temperature, seed=seed))
        for seed in range(seeds)
        for ids in prompt_ids(engine, (prompt.text for prompt in prompts()))
    ]
    jobs = answer_all(engine, requests)
    return np.array([(job.stats.num_accepted, job.stats.num_steps) for job in jobs]).reshape(seeds, -1, 2).sum(0)


def of_counts(counts_PC: np.ndarray) -> dict[str, object]:
    """Tokens a step, pooled, and their interval."""
    return {"length": float(length(counts_PC.sum(0))), "interval": interval(length, counts_PC)}


def measure_acceptance(name: str, folders: dict[str, Path], seeds: int) -> list[dict]:
    """Tokens a speculative step of a drafter by way and temperature, and what block verification adds to the standard
    one, prompt by prompt."""
    engines = {
        GREEDY: Engine(folders["greedy"], name),
        STANDARD: Engine(folders["probabilistic"], name),
        BLOCK: Engine(folders["probabilistic"], name, verification="block"),
    }
    lines = []
    for temperature in TEMPERATURES:  # greedy requests have greedy drafts
        ways, of_prompt = (WAYS, seeds) if temperature else ((GREEDY,), 1)
        counts = {way: counts_of(engines[way], temperature, of_prompt) for way in ways}
        console.print(f"{name}: temperature {temperature:g}")
        lines += [
            {"drafter": name, "drafting": way, "temperature": temperature} | of_counts(counts_PC)
            for way, counts_PC in counts.items()
        ]
        if temperature:
            pair = counts[BLOCK], counts[STANDARD]
            gain = {
                "length": float(length(pair[0].sum(0)) - length(pair[1].sum(0))),
                "interval": interval(lambda block, standard: length(block) - length(standard), *pair),
            }
            lines.append({"drafter": name, "drafting": GAIN, "temperature": temperature} | gain)
    return lines


def measure_top_k(top_k: int | None, folder: Path) -> dict[str, object]:
    """Tokens a speculative step of DSpark's greedy drafts among so many best logits of their row."""
    return {"top k": top_k} | of_counts(counts_of(Engine(folder, "dspark"), 0.0, 1))


def measure_memory(folder: Path, steps: int) -> list[dict[str, float]]:
    """Megabytes resident, every tenth of the steps, while requests of every kind come and go."""
    engine = Engine(folder, "dspark")
    prompt_texts = (prompt.text for prompt in prompts())
    source = (
        Request(prompt_ids=ids, max_tokens=NEW_TOKENS, sampling=setting)
        for ids, setting in zip(cycle(prompt_ids(engine, prompt_texts)), cycle(MIXED), strict=False)
    )
    resident = []
    for step in range(1, steps + 1):
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 5:
            engine.add(next(source))
        engine.step()
        if step % (steps // 10) == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append({"steps": step, "MB": pages * resource.getpagesize() / 1e6})
    return resident


def with_interval(line: dict) -> str:
    """A length and its interval."""
    return f"{line['length']:.2f} ({spread(line['interval'])})"


def top_k_sentence(result: dict) -> str:
    """What `docs/speculation.md` says of `--markov-top-k`."""
    lengths = {line["top k"]: with_interval(line) for line in result["markov top k"]}
    return (
        f"with the shipped DSpark drafter {lengths[8]} tokens a step for K = 8, {lengths[1]} for K = 1, "
        f"{lengths[None]} without ({result['config']['prompts']} prompts, temperature 0)"
    )


def report(result: dict) -> str:
    """The page people read."""
    config = result["config"]
    lengths = {
        (line["drafter"], line["drafting"], line["temperature"]): with_interval(line) for line in result["acceptance"]
    }
    heads = " | ".join(f"T = {temperature:g}" for temperature in TEMPERATURES)
    rows = [
        f"| {name} | {way} | {' | '.join(lengths.get((name, way, temperature), '') for temperature in TEMPERATURES)} |"
        for name in DRAFTERS
        for way in (*WAYS, GAIN)
    ]
    memory = "\n".join(f"| {line['steps']:,} | {line['MB']:.1f} |" for line in result["memory"])
    among = "\n".join(f"| {line['top k'] or 'all'} | {with_interval(line)} |" for line in result["markov top k"])
    table = "\n".join(rows)
    return f"""# Sampling: acceptance and memory, tiny models

{origin("benchmark_sampling.py", result)}

Tokens a speculative step (1 + accepted drafts / steps, pooled), {config["prompts"]} held-out prompts of four kinds of
text, up to {config["new_tokens"]} new tokens, {config["seeds"]} seeds a prompt where it is sampled. In brackets the
middle 95 % over drawn sets of prompts. The tiny models are sure of themselves: what a large model does at these
temperatures is another matter.

| drafter | drafts | {heads} |
|---|---|{"---|" * len(TEMPERATURES)}
{table}

Greedy drafts stand with chance p(draft), drawn ones with min(1, p / q). Greedy requests have greedy drafts either way.
Of one block, block verification accepts at least as many drafts as the standard one in expectation. The two make other
texts of the same distribution, whose blocks begin elsewhere: the last line of a drafter says what the difference came
to here, and where its interval holds 0, these prompts and seeds do not tell the two apart.

DSpark at temperature 0, drafts among the K best logits of their row (`engine --markov-top-k K`):

| K | tokens a step |
|---|---|
{among}

Memory of a process of its own over {config["steps"]:,} steps of requests with four kinds of settings, five at a time,
drafts drawn:

| steps | MB resident |
|---|---|
{memory}
"""


if __name__ == "__main__":
    main()
