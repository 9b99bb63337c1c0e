"""Benchmark of adaptive verification, with the tiny models; writes docs/benchmarks/adaptive.md and .json.

How many drafts are verified for every token, and how many tokens a step yields, when whole blocks are verified and
when as much of them as pays. The drafts, steps and tokens are real runs of the engine; what they would cost is reckoned
from a table of step times, because a CPU is not bound by rows as a GPU is. Only decoding is counted: the rows of
prompts are the same either way.

What the estimates learn, they learn beforehand, of other held-out prompts: temperatures of the confidence head, and the
chances by margin, which go on learning.

    python scripts/benchmark_adaptive.py [--workers N]

Legend: B blocks, J drafts of a block, D draws of a bootstrap, P prompts, C columns of counts.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
from measured import SPECULATION, console, interval, made_by, origin, prompts, quote, write
from temperatures import fit_temperatures
from tiny.corpus import held_out_prompts
from tiny_engines import build_tiny, prompt_ids

from glmspec.build.settings import BuildOptions
from glmspec.runtime.accept import DraftBlock
from glmspec.runtime.adaptive import AdaptiveVerification
from glmspec.runtime.cost_table import CostCurve, CostTable
from glmspec.runtime.engine import Engine
from glmspec.runtime.estimates import Confidence, Estimates, Margins
from glmspec.runtime.profile import LoadedModels, measure_costs
from glmspec.runtime.propose import Drafter, Drafts
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling
from glmspec.runtime.sequence import Accepted

SEQUENCES, NEW_TOKENS, WARM_UP = 16, 96, 60
DRAFTERS = {"greedy": ("dspark", "dflash2", "mtp"), "probabilistic": ("dspark", "dflash2")}
WAYS = {"greedy": (0.0, 1.0), "probabilistic": (1.0,)}  # temperatures, by how drafts are chosen
ROUNDS = {"greedy": 1, "probabilistic": 2}  # of other seeds: drawn drafts make other texts, so that noise does not pair
ROW_MS = (0.02, 0.025, 0.03)
FEWER_DRAFTS, FEWER_TOKENS = 0.25, 0.05  # what is required: at least, of drafts a token; at most, of tokens a step
FEW_ROWS, MAX_ROWS = 16, 16 * 9


def bound_by_rows(ms_a_row: float) -> CostTable:
    """2 ms up to FEW_ROWS rows, as when reading the weights takes longest, then so much more for every row; a drafter
    run takes 0.5 ms, and 0.02 ms for every block."""
    most = 2.0 + ms_a_row * (MAX_ROWS - FEW_ROWS)
    return CostTable(CostCurve((1, 16), (0.52, 0.82)), CostCurve((FEW_ROWS, MAX_ROWS), (2.0, most)))


COSTS = {f"{ms:g} ms a row": bound_by_rows(ms) for ms in ROW_MS}
QUOTED = f"{ROW_MS[1]:g} ms a row"
FIXED, CPU = "fixed blocks", "this CPU's"


@dataclass
class Tally:
    """What a run did, decoding alone. sequence_steps: steps, counted once for every sequence in them. by_request:
    tokens and steps of every request."""

    steps: int = 0
    sequence_steps: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    sizes: tuple[tuple[int, int], ...] = ()  # sequences and rows of every step
    by_request: tuple[tuple[int, int], ...] = ()

    def ms(self, costs: CostTable) -> float:
        """What it would have taken."""
        return sum(float(costs.step_ms(sequences, np.array(rows))) for sequences, rows in self.sizes)

    def by_prompt(self, prompts: int) -> np.ndarray:
        """Tokens and steps [prompts, 2], over all rounds of requests."""
        return np.array(self.by_request).reshape(-1, prompts, 2).sum(0)

    def summary(self, costs: dict[str, CostTable]) -> dict[str, object]:
        """The numbers that are reported."""
        return {
            "rows a token": (self.sequence_steps + self.drafts) / self.tokens,
            "drafts a token": self.drafts / self.tokens,
            "tokens a step": self.tokens / self.sequence_steps,
            "acceptance rate": self.accepted / self.drafts,
            "modelled tokens/s": {name: 1000 * self.tokens / self.ms(table) for name, table in costs.items()},
            "counts": {key: value for key, value in asdict(self).items() if key not in ("sizes", "by_request")},
        }


class Watched(AdaptiveVerification):
    """Hands on to `inner`, or has all drafts verified; remembers the choices.

    counts: drafts of each block of the newest step. observed: signal [J], verified and accepted drafts of every block,
    when all are verified."""

    def __init__(self, inner: AdaptiveVerification | None) -> None:
        self.inner = inner
        self.counts: list[int] = []
        self.observed: list[tuple[np.ndarray, int, int]] = []

    def choose(self, max_drafts: Sequence[int], drafts: Drafts, endings: Sequence[Collection[int]]) -> list[int]:
        """See `AdaptiveVerification`."""
        self.counts = self.inner.choose(max_drafts, drafts, endings) if self.inner else list(max_drafts)
        return self.counts

    def learn(self, blocks: Sequence[DraftBlock], accepted: Sequence[Accepted], drafts: Drafts) -> None:
        """See `AdaptiveVerification`."""
        if self.inner:
            self.inner.learn(blocks, accepted, drafts)
            return
        for signal_J, block, outcome in zip(drafts.signal.double().numpy(), blocks, accepted, strict=True):
            self.observed.append((signal_J, len(block.drafts), outcome.count))


def run(engine: Engine, requests: list[Request], watched: Watched) -> tuple[Tally, list[list[int]]]:
    """Answer the requests, up to SEQUENCES at once: what was done, and the answers' tokens."""
    engine.loop.adaptive = watched
    tally, begun, sizes = Tally(), set(), []
    answers = {engine.add(request): [] for request in requests}
    counts = {sequence: np.zeros(2, dtype=int) for sequence in answers}
    while engine.busy:
        watched.counts = []
        gained = [(sequence, delta) for sequence, delta in engine.step() if delta.tokens]
        for sequence, delta in gained:
            answers[sequence] += delta.tokens
        decoding = [(sequence, delta) for sequence, delta in gained if sequence in begun]
        begun.update(sequence for sequence, _ in gained)
        if not decoding:
            continue
        for sequence, delta in decoding:
            counts[sequence] += len(delta.tokens), 1
        tally.steps += 1
        tally.sequence_steps += len(decoding)
        tally.drafts += sum(watched.counts)
        tally.tokens += sum(len(delta.tokens) for _, delta in decoding)
        tally.accepted += sum(delta.accepted for _, delta in decoding)
        sizes.append((len(decoding), len(decoding) + sum(watched.counts)))
    tally.sizes = tuple(sizes)
    tally.by_request = tuple(map(tuple, counts.values()))
    return tally, list(answers.values())


def requests_of(engine: Engine, prompts: list[str], temperature: float, first_seed: int = 0) -> list[Request]:
    """A request a prompt, with a seed of its own."""
    return [
        Request(
            prompt_ids=ids,
            max_tokens=NEW_TOKENS,
            sampling=Sampling(temperature=temperature, seed=first_seed + at),
        )
        for at, ids in enumerate(prompt_ids(engine, prompts))
    ]


def prompts_of() -> tuple[list[str], list[str]]:
    """Prompts to measure with, and others to learn of beforehand."""
    measured = [prompt.text for prompt in prompts()]
    others = [prompt.prompt for prompt in held_out_prompts(2 * WARM_UP, seed=8)]
    return measured, [text for text in others if text not in measured][:WARM_UP]


def learned(engine: Engine, drafter: Drafter, prompts: list[str], temperatures: tuple[float, ...]) -> Estimates:
    """Estimates from whole blocks of other prompts, at the temperatures that are measured."""
    watched = Watched(None)
    for temperature in temperatures:
        run(engine, requests_of(engine, prompts, temperature, first_seed=10_000), watched)
    signal_BJ, verified_B, accepted_B = (np.array(column) for column in zip(*watched.observed, strict=True))
    drafts = drafter.num_drafts
    if drafter.confident:
        place_J = np.arange(drafts)
        judged_BJ = (verified_B[:, None] > place_J) & (accepted_B[:, None] >= place_J)
        place_BJ = np.broadcast_to(place_J, signal_BJ.shape)
        stood_BJ = accepted_B[:, None] > place_J
        return Confidence(fit_temperatures(place_BJ[judged_BJ], signal_BJ[judged_BJ], stood_BJ[judged_BJ], drafts))
    estimates = Margins(drafts)
    for first in range(0, len(signal_BJ), SEQUENCES):
        step = slice(first, first + SEQUENCES)
        estimates.observe(signal_BJ[step], verified_B[step], accepted_B[step])
    return estimates


def measure(folder: Path, way: str, drafter: str, prompts: list[str], others: list[str]) -> dict[str, object]:
    """Every temperature, and every table of costs."""
    engine = Engine(folder, drafter)
    if engine.drafter is None:
        raise ValueError(f"{folder}: the engine has no drafter")
    estimates = learned(engine, engine.drafter, others, WAYS[way])
    models = LoadedModels(engine.verifier, engine.drafter, engine.limits, engine.scheduler.pool, engine.scheduler.rings)
    costs = COSTS | {CPU: measure_costs(models)}
    runs = []
    for temperature in WAYS[way]:
        requests = [
            request
            for at in range(ROUNDS[way])
            for request in requests_of(engine, prompts, temperature, first_seed=1_000 * at)
        ]
        fixed, expected = run(engine, requests, Watched(None))
        runs.append({"temperature": temperature, "verified": FIXED} | fixed.summary(costs))
        for name, table in costs.items():
            console.print(f"{drafter}, {way}, temperature {temperature:g}: {name}")
            tally, answers = run(engine, requests, Watched(AdaptiveVerification(copy.deepcopy(estimates), table)))
            if way == "greedy" and answers != expected:
                raise AssertionError(f"{engine.drafter_name}, {name}: another text than with fixed blocks")
            change = interval(_change, tally.by_prompt(len(prompts)), fixed.by_prompt(len(prompts)))
            runs.append({"temperature": temperature, "verified": name} | tally.summary(costs) | {"interval": change})
    learned_of = {
        "temperatures": getattr(estimates, "temperatures", None),
        "margins": estimates.weights_J2.tolist() if isinstance(estimates, Margins) else None,
    }
    return {"learned": learned_of, "measured costs": asdict(costs[CPU]), "runs": runs}


def _change(mine_DC: np.ndarray, fixed_DC: np.ndarray) -> np.ndarray:
    """Of tokens a step, beside fixed blocks."""
    return (mine_DC[:, 0] / mine_DC[:, 1]) / (fixed_DC[:, 0] / fixed_DC[:, 1]) - 1


@click.command()
@click.option("--workers", default=1, show_default=True, help="Processes; with more, this CPU's step times are rough.")
def main(workers: int) -> None:
    """Measure and write the report."""
    prompts, others = prompts_of()
    config = {
        "sequences at once": SEQUENCES,
        "new tokens": NEW_TOKENS,
        "prompts": len(prompts),
        "other prompts": len(others),
        "costs": {name: asdict(table) for name, table in COSTS.items()},
    }
    result = made_by(("glmspec", "torch", "tensorrt-rtx", "numpy"), **config) | {"drafters": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for way in WAYS:
            build_tiny(Path(scratch) / way, BuildOptions(max_num_seqs=SEQUENCES, mtp=True, draft_sampling=way))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            futures = {
                (name, way): pool.submit(measure, Path(scratch) / way, way, name, prompts, others)
                for way in WAYS
                for name in DRAFTERS[way]
            }
            for (name, way), future in futures.items():
                result["drafters"].setdefault(name, {})[way] = future.result()
    write("adaptive", result, report)
    quote(SPECULATION, "of whole blocks,", sentence(result), " ([`benchmarks/adaptive.md`]")


def changes(chosen: dict, fixed: dict) -> tuple[float, float]:
    """Of drafts a token and of tokens a step, of a run beside that of fixed blocks."""
    drafts, tokens = (chosen[key] / fixed[key] - 1 for key in ("drafts a token", "tokens a step"))
    return drafts, tokens


def lines_of(runs: list[dict]) -> str:
    """Lines of a table: fixed blocks, then every run beside them."""
    fixed, lines = runs[0], []
    for run in runs:
        name, drafts, tokens, speed = run["verified"], "", "", ""
        if run is not fixed:
            speed = f"{run['modelled tokens/s'][name] / fixed['modelled tokens/s'][name]:.2f}"
            edges = " to ".join(f"{edge:+.1%}" for edge in run["interval"])
            drafts, tokens = (f"{change:+.1%}" for change in changes(run, fixed))
            tokens += f" ({edges})"
        lines.append(
            f"| {name} | {run['drafts a token']:.2f} | {drafts} | {run['rows a token']:.2f} "
            f"| {run['tokens a step']:.2f} | {tokens} | {run['acceptance rate']:.1%} | {speed} |"
        )
    return "\n".join(lines)


def meeting(runs: list[dict]) -> dict[str, str]:
    """The lines of a table that do what is required, and their changes."""
    lines = {}
    for run in runs[1:]:
        drafts, tokens = changes(run, runs[0])
        if drafts <= -FEWER_DRAFTS and tokens >= -FEWER_TOKENS:
            lines[run["verified"]] = f"{run['verified']} ({drafts:+.1%}, {tokens:+.1%})"
    return lines


def tables_of(result: dict) -> list[tuple[str, list[dict]]]:
    """Every table's title and runs."""
    tables = []
    for name, ways in result["drafters"].items():
        for way, of in ways.items():
            for temperature in WAYS[way]:
                title = f"{name}, temperature {temperature:g}" + (", drawn drafts" if way == "probabilistic" else "")
                tables.append((title, [run for run in of["runs"] if run["temperature"] == temperature]))
    return tables


def sentence(result: dict) -> str:
    """What `docs/speculation.md` says of it."""
    parts = []
    for name in result["drafters"]:
        tables = [runs for title, runs in tables_of(result) if title.split(",")[0] == name]
        pairs = [changes(run, table[0]) for table in tables for run in table if run["verified"] == QUOTED]
        drafts, tokens = ([-100 * pair[at] for pair in pairs] for at in (0, 1))
        parts.append(
            f"{name} verifies {min(drafts):.0f} to {max(drafts):.0f} % fewer drafts for every token at "
            f"{min(tokens):.1f} to {max(tokens):.1f} % fewer tokens a step"
        )
    return "; ".join(parts)


HEAD = """| costs | drafts a token | change | rows a token | tokens a step | change | acceptance rate | speed |
|---|---|---|---|---|---|---|---|"""


def report(result: dict) -> str:
    """The page people read."""
    config = result["config"]
    shown, met, always = [], [], {}
    for title, runs in tables_of(result):
        fixed = runs[0]
        best = 1 - fixed["counts"]["accepted"] / fixed["counts"]["drafts"]
        shown.append(f"{title} (foreknowledge would save {best:.0%} of the drafts):\n\n{HEAD}\n{lines_of(runs)}\n")
        lines = meeting(runs)
        met.append(f"- {title}: {', '.join(lines.values()) or 'no line'}")
        name = title.split(",")[0]
        always[name] = always.get(name, lines.keys()) & lines.keys()
    newline = "\n"
    meets = "; ".join(f"{name} {', '.join(sorted(lines)) or 'nowhere'}" for name, lines in always.items())
    return f"""# Adaptive verification, tiny models

{origin("benchmark_adaptive.py", result)}

The {config["prompts"]} prompts of `assets/prompts.jsonl`, {config["sequences at once"]} at once, up to
{config["new tokens"]} new tokens each, blocks of 8 drafts (mtp: 3). The calibration of the confidence head (dspark) and
the chances by margin (dflash2, mtp) were learned beforehand of {config["other prompts"]} other held-out prompts.
Drafts a token are verified drafts for every token emitted; rows are drafts and anchors. A step is counted once for
every sequence in it. Foreknowledge would verify what stands and nothing else: no choice can save more at no loss.

Drafts, rows, steps and tokens are those of real runs. Drafts are the drafter's best, and the text is the same in all
lines of a table; or, where it says so, drawn and verified in the standard way, over {ROUNDS["probabilistic"]} seeds a
prompt: texts differ then. In brackets is the middle 95 % of the change over drawn sets of prompts. Times are not real:
a GPU that is bound by rows is modelled. A verifier run takes 2 ms up to {FEW_ROWS} rows (anchors alone) and then so
much more for every row as the line says, a drafter run 0.5 ms and 0.02 ms a block. Speed is modelled tokens a second,
in units of those of fixed blocks under the same costs. The last line is chosen, and reckoned, by the table that was
measured on this CPU when the engine was loaded.

Required of a setting that is bound by its budget: at least {FEWER_DRAFTS:.0%} fewer drafts a token at no more than
{FEWER_TOKENS:.0%} fewer tokens a step. What meets it in every table of a drafter: {meets}. At 0.025 ms a row
{MAX_ROWS} rows, which are {SEQUENCES} whole blocks and their anchors, take 5.2 ms, of which 3.2 ms are due to the
drafts. Where foreknowledge would save less than {FEWER_DRAFTS:.0%}, as of mtp's short blocks, no choice can meet it.
Table by table, with the changes of drafts a token and of tokens a step:

{newline.join(met)}

{newline.join(shown)}"""


if __name__ == "__main__":
    main()
