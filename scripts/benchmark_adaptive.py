"""Benchmark of adaptive verification, with the tiny models; writes docs/benchmarks/adaptive.md and .json.

How many rows are verified for every token, and how many tokens a step yields, when whole blocks are verified and when
as much of them as pays. The rows, steps and tokens are real runs of the engine; what they would cost is reckoned from a
table of step times, because a CPU is not bound by rows as a GPU is. Only decoding is counted: the rows of prompts are
the same either way.

What the estimates learn, they learn beforehand, of other held-out prompts: temperatures of the confidence head, and the
law of margins, which goes on learning.
"""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
from benchmark import ASSETS, DRAFTERS, OUT, console, machine
from rich.progress import Progress as Bar
from tiny.corpus import held_out_prompts

from glmspec.build.configs.target import TARGETS
from glmspec.build.engine import Options, build_engines
from glmspec.build.progress import Progress
from glmspec.runtime.adaptive import AdaptiveVerification
from glmspec.runtime.cost_table import Column, CostTable
from glmspec.runtime.engine import Engine
from glmspec.runtime.estimates import Confidence, Estimates, Margins, fit_temperatures
from glmspec.runtime.profile import Machinery, measure_costs
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling

SEQUENCES, NEW_TOKENS, PROSE, WARM_UP = 16, 96, 32, 60
TEMPERATURES = (0.0, 1.0)
FEW_ROWS, MOST_ROWS = 16, 16 * 9


def bound_by_rows(ms_a_row: float) -> CostTable:
    """2 ms up to FEW_ROWS rows, as when reading the weights takes longest, then so much more for every row; a drafter
    run takes 0.5 ms, and 0.02 ms for every block."""
    most = 2.0 + ms_a_row * (MOST_ROWS - FEW_ROWS)
    return CostTable(Column((1, 16), (0.52, 0.82)), Column((FEW_ROWS, MOST_ROWS), (2.0, most)))


COSTS = {"half bound by rows": bound_by_rows(0.025), "bound by rows": bound_by_rows(0.1)}
FIXED, CPU = "fixed blocks", "CPU, as measured"


@dataclass
class Tally:
    """What a run did, decoding alone. sequence_steps: steps, counted once for every sequence in them."""

    steps: int = 0
    sequence_steps: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    sizes: tuple[tuple[int, int], ...] = ()  # sequences and rows of every step

    def ms(self, costs: CostTable) -> float:
        """What it would have taken."""
        return sum(float(costs.step_ms(sequences, np.array(rows))) for sequences, rows in self.sizes)

    def summary(self, costs: dict[str, CostTable]) -> dict[str, object]:
        """The numbers that are reported."""
        return {
            "rows a token": (self.sequence_steps + self.drafts) / self.tokens,
            "drafts a token": self.drafts / self.tokens,
            "tokens a step": self.tokens / self.sequence_steps,
            "acceptance rate": self.accepted / self.drafts,
            "modelled tokens/s": {name: 1000 * self.tokens / self.ms(table) for name, table in costs.items()},
            "counts": {key: value for key, value in asdict(self).items() if key != "sizes"},
        }


class Watched:
    """What chooses, or all drafts; remembers the choices, and what came of them when all are verified."""

    def __init__(self, inner: AdaptiveVerification | None) -> None:
        self.inner = inner
        self.counts: list[int] = []
        self.seen: list[tuple[np.ndarray, int, int]] = []

    def choose(self, most, drafts) -> list[int]:
        """See `AdaptiveVerification`."""
        self.counts = self.inner.choose(most, drafts) if self.inner else list(most)
        return self.counts

    def learn(self, ballots, verdicts, drafts) -> None:
        """See `AdaptiveVerification`."""
        if self.inner:
            self.inner.learn(ballots, verdicts, drafts)
            return
        for row, ballot, verdict in zip(drafts.signal.double().numpy(), ballots, verdicts, strict=True):
            self.seen.append((row, len(ballot.drafts), verdict.accepted))


def run(engine: Engine, requests: list[Request], watched: Watched) -> Tally:
    """Answer the requests, up to SEQUENCES at once."""
    engine.loop.adaptive = watched
    tally, begun, sizes = Tally(), set(), []
    for request in requests:
        engine.add(request)
    while engine.busy:
        watched.counts = []
        gained = [(sequence, delta) for sequence, delta in engine.step() if delta.tokens]
        decoding = [(sequence, delta) for sequence, delta in gained if sequence in begun]
        begun.update(sequence for sequence, _ in gained)
        if not decoding:
            continue
        tally.steps += 1
        tally.sequence_steps += len(decoding)
        tally.drafts += sum(watched.counts)
        tally.tokens += sum(len(delta.tokens) for _, delta in decoding)
        tally.accepted += sum(delta.accepted for _, delta in decoding)
        sizes.append((len(decoding), len(decoding) + sum(watched.counts)))
    tally.sizes = tuple(sizes)
    return tally


def requests_of(engine: Engine, prompts: list[str], temperature: float, first_seed: int = 0) -> list[Request]:
    """A request a prompt, with a seed of its own."""
    return [
        Request(
            prompt_ids=tuple(engine.tokenizer.encode(prompt)),
            max_tokens=NEW_TOKENS,
            sampling=Sampling(temperature=temperature, seed=first_seed + at),
        )
        for at, prompt in enumerate(prompts)
    ]


def workloads() -> dict[str, list[str]]:
    """Prompts to measure with, and some to learn of beforehand; none in two of them."""
    lines = (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    mixed = [json.loads(line)["prompt"] for line in lines]
    prose = [one.prompt for one in held_out_prompts(8 * PROSE, seed=8) if one.kind == "prose"]
    prose = [one for one in dict.fromkeys(prose) if one not in mixed][:PROSE]
    warm = [one.prompt for one in held_out_prompts(2 * WARM_UP, seed=9)]
    warm = [one for one in dict.fromkeys(warm) if one not in mixed + prose][:WARM_UP]
    return {"mixed": mixed, "prose": prose, "warm-up": warm}


def learned(engine: Engine, prompts: list[str]) -> Estimates:
    """Estimates from whole blocks of other prompts, at both temperatures."""
    watched = Watched(None)
    for temperature in TEMPERATURES:
        run(engine, requests_of(engine, prompts, temperature, first_seed=10_000), watched)
    signal_BJ = np.array([row for row, _, _ in watched.seen])
    verified_B, accepted_B = (np.array([one[at] for one in watched.seen]) for at in (1, 2))
    drafts = engine.drafter.num_drafts
    if engine.drafter.confident:
        place_J = np.arange(drafts)
        told_BJ = (verified_B[:, None] > place_J) & (accepted_B[:, None] >= place_J)
        place_BJ = np.broadcast_to(place_J, signal_BJ.shape)
        stood_BJ = accepted_B[:, None] > place_J
        return Confidence(fit_temperatures(place_BJ[told_BJ], signal_BJ[told_BJ], stood_BJ[told_BJ], drafts))
    estimates = Margins(drafts)
    for first in range(0, len(signal_BJ), SEQUENCES):
        step = slice(first, first + SEQUENCES)
        estimates.observe(signal_BJ[step], verified_B[step], accepted_B[step])
    return estimates


def measure(engine: Engine, prompts: dict[str, list[str]], advance) -> list[dict[str, object]]:
    """Every workload, temperature and table of costs."""
    estimates = learned(engine, prompts["warm-up"])
    machinery = Machinery(engine.verifier, engine.drafter, engine.limits, engine.scheduler.pool)
    costs = COSTS | {CPU: measure_costs(machinery)}
    found = []
    for workload in ("mixed", "prose"):
        for temperature in TEMPERATURES:
            requests = requests_of(engine, prompts[workload], temperature)
            ways: dict[str, AdaptiveVerification | None] = {FIXED: None}
            for name, table in costs.items():
                ways[name] = AdaptiveVerification(copy.deepcopy(estimates), table)
            for name, way in ways.items():
                tally = run(engine, requests, Watched(way))
                place = {"drafter": engine.drafter_name, "workload": workload, "temperature": temperature}
                found.append(place | {"verified": name} | tally.summary(costs))
                advance()
    return found


@click.command()
def main() -> None:
    """Measure and write the report."""
    prompts = workloads()
    result = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("glmspec", "torch", "tensorrt-rtx", "numpy")},
        "config": {
            "sequences at once": SEQUENCES,
            "new tokens": NEW_TOKENS,
            "prompts": {name: len(of) for name, of in prompts.items()},
            "costs": {name: asdict(table) for name, table in COSTS.items()},
        },
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as scratch, Bar(console=console) as bar:
        engines = Path(scratch) / "engines"
        options, drafters = Options(max_num_seqs=SEQUENCES), [ASSETS / f"tiny-{name}" for name in DRAFTERS]
        build_engines(ASSETS / "tiny-verifier", drafters, TARGETS["cpu"], options, engines, Progress())
        task = bar.add_task("Runs", total=len(DRAFTERS) * 2 * len(TEMPERATURES) * (2 + len(COSTS)))
        for name in DRAFTERS:
            result["runs"] += measure(Engine(engines, name), prompts, lambda: bar.advance(task))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "adaptive.json").write_text(json.dumps(result, indent=2) + "\n")
    (OUT / "adaptive.md").write_text(report(result))
    console.print((OUT / "adaptive.md").read_text(), markup=False)


def rows_of(runs: list[dict], temperature: float) -> str:
    """Lines of a table: every run beside that of fixed blocks."""
    lines = []
    for one in runs:
        if one["temperature"] != temperature:
            continue
        same = ("drafter", "workload", "temperature")
        (fixed,) = (of for of in runs if of["verified"] == FIXED and all(of[key] == one[key] for key in same))
        name = one["verified"]
        change = f"{one['rows a token'] / fixed['rows a token'] - 1:+.1%}" if one is not fixed else ""
        fewer = f"{one['tokens a step'] / fixed['tokens a step'] - 1:+.1%}" if one is not fixed else ""
        gain = one["modelled tokens/s"].get(name, 0) / fixed["modelled tokens/s"].get(name, 1)
        lines.append(
            f"| {one['drafter']} | {one['workload']} | {name} | {one['drafts a token']:.2f} "
            f"| {one['rows a token']:.2f} | {change} | {one['tokens a step']:.2f} | {fewer} "
            f"| {one['acceptance rate']:.1%} | {f'{gain:.2f}' if one is not fixed else ''} |"
        )
    return "\n".join(lines)


def report(result: dict) -> str:
    """The page people read."""
    config, host = result["config"], result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    count = config["prompts"]
    head = (
        "| drafter | prompts | costs | verified drafts a token | rows a token | change | tokens a step | change "
        "| acceptance rate | modelled speed |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    return f"""# Adaptive verification, tiny models

Written by `scripts/benchmark_adaptive.py` on {result["date"]}: {host["cpu"]}, {host["cores"]} cores,
Python {host["python"]}; {versions}.

{config["sequences at once"]} sequences at once, up to {config["new tokens"]} new tokens each, blocks of 8 drafts. Prompts: `mixed` are the
{count["mixed"]} of `assets/prompts.jsonl` (code, arithmetic, tables, prose), `prose` are {count["prose"]} other held-out ones, whose text
is the hardest to draft. Temperatures of the confidence head (dspark) and the law of margins (dflash2) were learned of
{count["warm-up"]} more held-out prompts beforehand, at temperatures 0 and 1 together. Rows are verified drafts and anchors; a step is counted
once for every sequence in it. Nothing here was measured on a GPU: a step's time is reckoned from a table.

| costs | drafter run | verifier run |
|---|---|---|
| half bound by rows | 0.5 ms + 0.02 ms a block | 2 ms, + 0.025 ms a row above {FEW_ROWS}: whole blocks take 2.6 times that of anchors |
| bound by rows | the same | 2 ms, + 0.1 ms a row above {FEW_ROWS}: 7.4 times |
| {CPU} | measured on this machine when the engine was loaded | likewise |

`modelled speed` is tokens a millisecond under the costs of the line, in units of fixed blocks under the same costs.

Temperature 0 (the same text in every case):

{head}
{rows_of(result["runs"], 0.0)}

Temperature 1:

{head}
{rows_of(result["runs"], 1.0)}
"""


if __name__ == "__main__":
    main()
