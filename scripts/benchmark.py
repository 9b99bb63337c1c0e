"""CPU benchmark of the executor and of speculation, with the tiny models; writes docs/benchmarks/cpu.md and .json.

Three questions, each answered by medians of interleaved rounds in one run, because machines are noisy:
what a layer costs the reference executor, how the plain verifier compares with transformers' own eager decode
with its cache, and how many tokens a second speculation adds. These are numbers of this executor on a CPU; they
say nothing about a GPU.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track

from glmspec.build.configs.limits import EngineLimits
from glmspec.build.configs.target import TARGETS
from glmspec.build.engine import Options, build_engines
from glmspec.build.network.form import Form
from glmspec.build.progress import Progress
from glmspec.runtime.engine import Engine
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.request import Request
from glmspec.runtime.stats import SpecStats

ROOT = Path(__file__).resolve().parent.parent
ASSETS, OUT = ROOT / "assets", ROOT / "docs" / "benchmarks"
CONTEXT, NEW_TOKENS, ROUNDS, STEPS = 200, 96, 7, 60
DRAFTERS = ("dspark", "dflash2")

console = Console(highlight=False)


@click.command()
@click.option("--rounds", default=ROUNDS, show_default=True, help="Interleaved rounds; the medians are reported.")
def main(rounds: int) -> None:
    """Measure and write the report."""
    with tempfile.TemporaryDirectory() as scratch:
        engines = Path(scratch) / "engines"
        drafters = [ASSETS / f"tiny-{name}" for name in DRAFTERS]
        build_engines(ASSETS / "tiny-verifier", drafters, TARGETS["cpu"], Options(), engines, Progress())
        loaded = {"plain": Engine(engines, speculate=False)} | {name: Engine(engines, name) for name in DRAFTERS}
        result = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "versions": {name: version(name) for name in ("glmspec", "torch", "transformers", "tensorrt-rtx", "numpy")},
            "config": {"context": CONTEXT, "new_tokens": NEW_TOKENS, "rounds": rounds, "threads": 1},
            "decode": measure_decode(loaded["plain"], rounds),
            "speculation": measure_speculation(loaded, rounds),
        }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "cpu.json").write_text(json.dumps(result, indent=2) + "\n")
    (OUT / "cpu.md").write_text(report(result))
    console.print((OUT / "cpu.md").read_text(), markup=False)


def machine() -> dict[str, object]:
    """What this ran on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "python": platform.python_version(),
    }


def measure_decode(engine: Engine, rounds: int) -> dict[str, float]:
    """Milliseconds of one verifier run with 1 and 9 rows, and of one transformers decode step, at CONTEXT tokens."""
    from transformers import GlmMoeDsaForCausalLM

    oracle = GlmMoeDsaForCausalLM.from_pretrained(
        ASSETS / "tiny-verifier", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    torch.set_num_threads(1)
    ids = list((b"Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10. " * 8)[:CONTEXT])
    verifier = engine.verifier
    every = Model(verifier.config, engine.limits, Form(compute="float32"), verifier.weights, regions=False)
    cases = {"1 row": (verifier, 1), "9 rows": (verifier, 9), "1 row, every layer": (every, 1)}
    times: dict[str, list[float]] = {name: [] for name in ("transformers", *cases)}
    for _ in track(range(rounds), "Decode steps", console=console):
        times["transformers"].append(transformers_step(oracle, ids))
        for name, (model, rows) in cases.items():
            times[name].append(verifier_step(model, engine.limits, ids, rows))
    medians = {name: statistics.median(values) for name, values in times.items()}
    layers = verifier.executor.program.layers
    medians |= {"layers": layers, "statements": len(verifier.executor.program.step_lines)}
    medians |= {
        f"us a layer, {name}": medians[name] * 1000 / model.executor.program.layers
        for name, (model, _) in cases.items()
    }
    ratios = [mine / theirs for mine, theirs in zip(times["1 row"], times["transformers"], strict=True)]
    return medians | {"verifier to transformers": statistics.median(ratios)}


def transformers_step(oracle: object, ids: list[int]) -> float:
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


def prompts() -> list[str]:
    """The held-out prompts."""
    return [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


def measure_speculation(engines: dict[str, Engine], rounds: int) -> dict[str, dict[str, float]]:
    """Tokens a second over held-out prompts, one at a time, and acceptance."""
    encode = engines["plain"].tokenizer.encode
    requests = [Request(prompt_ids=tuple(encode(text)), max_tokens=NEW_TOKENS) for text in prompts()[::4]]
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    pooled: dict[str, SpecStats] = {}
    for _ in track(range(rounds), "Speculation", console=console):
        for name, engine in engines.items():
            pooled[name] = SpecStats(engine.stats.num_spec_tokens)
            start, tokens = time.perf_counter(), 0
            for request in requests:
                answer, stats = engine.answer(request)
                tokens += len(answer.tokens)
                pooled[name].add(stats)
            speeds[name].append(tokens / (time.perf_counter() - start))
    result = {"plain": {"tokens/s": statistics.median(speeds["plain"])}}
    for name in DRAFTERS:
        ratios = [fast / slow for fast, slow in zip(speeds[name], speeds["plain"], strict=True)]
        result[name] = {
            "tokens/s": statistics.median(speeds[name]),
            "ratio to plain": statistics.median(ratios),
            "acceptance length": pooled[name].mean_acceptance_length,
            "acceptance rate": pooled[name].draft_acceptance_rate,
        }
    return result


def report(result: dict) -> str:
    """The page people read."""
    machine, decode, speculation = result["machine"], result["decode"], result["speculation"]
    config = result["config"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    rows = "\n".join(
        f"| {name} | {one['acceptance length']:.2f} | {one['acceptance rate']:.1%} | {one['tokens/s']:.0f} "
        f"| {one['ratio to plain']:.2f} |"
        for name, one in speculation.items()
        if name != "plain"
    )
    plain = speculation["plain"]["tokens/s"]
    return f"""# CPU benchmark: reference executor and speculation, tiny models

Written by `scripts/benchmark.py` on {result["date"]}: {machine["cpu"]}, {machine["cores"]} cores, 1 thread,
Python {machine["python"]}; {versions}.
Medians of {config["rounds"]} interleaved rounds in one run. Shared machines drift: compare the ratios. Nothing here
was measured on a GPU.

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

Greedy decoding of held-out prompts, one at a time, up to {config["new_tokens"]} new tokens, the same text in every
case (plain: {plain:.0f} tokens/s):

| drafter | acceptance length | acceptance rate | tokens/s | ratio to plain |
|---|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    main()
