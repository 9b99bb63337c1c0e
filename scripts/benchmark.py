"""CPU benchmark of the executor and of speculation, with the tiny models; writes docs/benchmarks/cpu.md and .json.

Three questions, each answered by medians of interleaved rounds in one run, because machines are noisy:
what a layer costs the reference executor, how the plain verifier compares with transformers' own eager decode
with its cache, and how many tokens a second speculation adds. These are numbers of this executor on a CPU; they
say nothing about a GPU.

    python scripts/benchmark.py [--rounds N]

Legend: P prompts, C columns of counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import click
import numpy as np
import torch
from measured import ASSETS, console, interval, length, made_by, origin, prompts, spread, write
from rich.progress import track
from tiny_engines import BLOCK_DRAFTERS, build_tiny, prompt_ids

from glmspec.build.settings import BuildOptions
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.runtime.engine import Engine
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.request import Request

CONTEXT, NEW_TOKENS, ROUNDS, STEPS = 200, 96, 5, 60
LENGTHS, RATIOS = "length's interval", "ratio's interval"
PACKAGES = ("glmspec", "torch", "transformers", "tensorrt-rtx", "numpy")


@click.command()
@click.option("--rounds", default=ROUNDS, show_default=True, help="Interleaved rounds; the medians are reported.")
def main(rounds: int) -> None:
    """Measure and write the report."""
    with tempfile.TemporaryDirectory() as scratch:
        engines = build_tiny(Path(scratch) / "engines", BuildOptions())
        loaded = {"plain": Engine(engines, speculate=False)} | {name: Engine(engines, name) for name in BLOCK_DRAFTERS}
        result = made_by(PACKAGES, context=CONTEXT, new_tokens=NEW_TOKENS, rounds=rounds, threads=1) | {
            "decode": measure_decode(loaded["plain"], rounds),
            "speculation": measure_speculation(loaded, rounds),
        }
    write("cpu", result, report)


def measure_decode(engine: Engine, rounds: int) -> dict[str, float]:
    """Milliseconds of one verifier run with 1 and 9 rows, and of one transformers decode step, at CONTEXT tokens."""
    from transformers import GlmMoeDsaForCausalLM

    oracle = GlmMoeDsaForCausalLM.from_pretrained(
        ASSETS / "tiny-verifier", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    torch.set_num_threads(1)
    ids = list((b"Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10. " * 8)[:CONTEXT])
    verifier = engine.verifier
    every = Model(
        model_of(verifier.config), engine.limits, NetworkConfig(compute="float32"), verifier.weights, regions=False
    )
    cases = {"1 row": (verifier, 1), "9 rows": (verifier, 9), "1 row, every layer": (every, 1)}
    times: dict[str, list[float]] = {name: [] for name in ("transformers", *cases)}
    for _ in track(range(rounds), "Decode steps", console=console):
        times["transformers"].append(transformers_step(oracle, ids))
        for name, (model, rows) in cases.items():
            times[name].append(verifier_step(model, engine.limits, ids, rows))
    medians = {name: statistics.median(values) for name, values in times.items()}
    layers = verifier.executor.program.layers
    medians |= {"layers": layers, "statements": len(verifier.executor.program.step_statements)}
    medians |= {
        f"us a layer, {name}": medians[name] * 1000 / model.executor.program.layers
        for name, (model, _) in cases.items()
    }
    ratios = [mine / theirs for mine, theirs in zip(times["1 row"], times["transformers"], strict=True)]
    return medians | {"verifier to transformers": statistics.median(ratios)}


def transformers_step(oracle: torch.nn.Module, ids: list[int]) -> float:
    """Median milliseconds of a decode step with transformers' dynamic cache."""
    samples = []
    with torch.inference_mode():
        out = oracle(torch.tensor([ids]), use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        for _ in range(STEPS):
            start = time.perf_counter()
            out = oracle(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1000


def verifier_step(model: Model, limits: EngineLimits, ids: list[int], rows: int) -> float:
    """Median milliseconds of packing and running `rows` rows after the context, at growing positions."""
    least = limits.least_pages(model.config.index_topk)
    pages = list(range(1, limits.pages_per_sequence + 1))
    model.run(pack_rows([Rows(Span(pages, 0, len(ids)), ids, 1)], limits, least))
    samples = []
    for step in range(STEPS):
        start = time.perf_counter()
        model.run(pack_rows([Rows(Span(pages, len(ids) + step, rows), ids[:rows], rows)], limits, least))
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1000


def measure_speculation(engines: dict[str, Engine], rounds: int) -> dict[str, object]:
    """Tokens a second over all held-out prompts, one at a time, and acceptance, by kind of text too. Every prompt is
    answered by every engine in turn, so that a machine's drift is in all of them."""
    asked = prompts()
    ids = prompt_ids(engines["plain"], (prompt.text for prompt in asked))
    requests = [Request(prompt_ids=prompt, max_tokens=NEW_TOKENS) for prompt in ids]
    seconds = {name: np.zeros((rounds, len(asked))) for name in engines}
    counts_PC = {name: np.zeros((len(asked), 2)) for name in BLOCK_DRAFTERS}  # accepted drafts and steps
    tokens_P = np.zeros(len(asked))
    for at, request in enumerate(track(requests, "Speculation", console=console)):
        for turn in range(rounds):
            for name, engine in engines.items():
                start = time.perf_counter()
                answer, stats = engine.answer(request)
                seconds[name][turn, at] = time.perf_counter() - start
                if name == "plain":
                    tokens_P[at] = len(answer.tokens)
                else:
                    counts_PC[name][at] = stats.num_accepted, stats.num_steps
    kinds = np.array([prompt.kind for prompt in asked])
    taken_P = {name: np.median(times, 0) for name, times in seconds.items()}
    rates = {name: tokens_P.sum() / taken.sum() for name, taken in taken_P.items()}
    by_kind = dict(Counter(kinds.tolist()))
    speculation: dict[str, object] = {"prompts": by_kind, "plain": {"tokens/s": rates["plain"]}}
    for name in BLOCK_DRAFTERS:
        mine = counts_PC[name]
        drafts = engines[name].stats.num_spec_tokens
        speculation[name] = {
            "tokens/s": rates[name],
            "ratio to plain": rates[name] / rates["plain"],
            RATIOS: interval(np.divide, taken_P["plain"], taken_P[name]),
            "acceptance length": float(length(mine.sum(0))),
            LENGTHS: interval(length, mine),
            "length by kind": {kind: float(length(mine[kinds == kind].sum(0))) for kind in by_kind},
            "acceptance rate": (float(length(mine.sum(0))) - 1) / drafts,
        }
    return speculation


def report(result: dict) -> str:
    """The page people read."""
    decode, speculation, config = result["decode"], result["speculation"], result["config"]
    kinds = list(speculation["prompts"])
    rows = []
    for name in BLOCK_DRAFTERS:
        numbers = speculation[name]
        by_kind = " | ".join(f"{numbers['length by kind'][kind]:.2f}" for kind in kinds)
        rows.append(
            f"| {name} | {numbers['acceptance length']:.2f} ({spread(numbers[LENGTHS])}) | {by_kind} "
            f"| {numbers['tokens/s']:.0f} | {numbers['ratio to plain']:.2f} ({spread(numbers[RATIOS])}) |"
        )
    table, shares = "\n".join(rows), ", ".join(f"{n} of {kind}" for kind, n in speculation["prompts"].items())
    return f"""# CPU benchmark: reference executor and speculation, tiny models

{origin("benchmark.py", result)}
One thread. Medians of {config["rounds"]} interleaved rounds in one run. Shared machines drift: compare the ratios.
Nothing here was measured on a GPU.

One step at {config["context"]} tokens of context (the tiny verifier, float32):

| what | ms |
|---|---|
| transformers, eager, its own cache, 1 token | {decode["transformers"]:.2f} |
| glmspec verifier on the executor, 1 row (packing included) | {decode["1 row"]:.2f} |
| the same, 9 rows (a verify block) | {decode["9 rows"]:.2f} |
| the same, 1 row, no op replaced by its reference: every layer runs | {decode["1 row, every layer"]:.2f} |

Ratio of the second line to the first: {decode["verifier to transformers"]:.2f}.
A step stands for {decode["layers"]} TensorRT layers, run as {decode["statements"]} statements:
{decode["us a layer, 1 row"]:.1f} us a layer with 1 row, {decode["us a layer, 9 rows"]:.1f} us with 9,
{decode["us a layer, 1 row, every layer"]:.1f} us with 1 row and every layer.

Greedy decoding of all {sum(speculation["prompts"].values())} held-out prompts ({shares}), one at a time, up to
{config["new_tokens"]} new tokens, the same text in every case (plain: {speculation["plain"]["tokens/s"]:.0f} tokens/s).
Tokens a speculative step are pooled over the prompts; in brackets the middle 95 % over drawn sets of prompts:

| drafter | tokens a step | {" | ".join(kinds)} | tokens/s | ratio to plain |
|---|---|{"---|" * len(kinds)}---|---|
{table}
"""


if __name__ == "__main__":
    main()
