"""The whole way once: convert, build engines, write the Triton repository, serve, stream, measure.

`scripts/quickstart` makes an environment and runs it; in one that is there: python scripts/quickstart.py [--keep].
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from glmspec.core.errors import GlmspecError
from glmspec.runtime.generate import stats_table
from glmspec.runtime.stats import SpecStats
from glmspec.triton_repo.client import Client
from glmspec.triton_repo.launcher import Ports, Server

ROOT = Path(__file__).resolve().parent.parent
ASSETS, OUT = ROOT / "assets", ROOT / "out" / "quickstart"
DRAFTERS = ("tiny-dspark", "tiny-dflash2")
QUESTION = "Write a function for the total price of all books."
MEASURED_PROMPTS = 12
MAX_TOKENS = 96
STEP_MARK = "⎸"  # between steps where colours cannot show them

console = Console(highlight=False)


@click.command()
@click.option("--keep", is_flag=True, help="Leave the server running and print its address.")
def main(keep: bool) -> None:
    """Run the quickstart."""
    start = time.perf_counter()
    OUT.mkdir(parents=True, exist_ok=True)
    build()
    server = Server(OUT / "repo", Ports.choose(), OUT / "tritonserver.log")
    try:
        with console.status("Starting tritonserver"):
            server.start()
        console.print(f"[bold]Serving[/bold]  {server.ports.describe()}", soft_wrap=True)
        client = Client(f"{server.ports.host}:{server.ports.grpc}")
        show_stream(client)
        measure(client)
    except GlmspecError as error:
        server.stop()
        raise click.ClickException(str(error)) from None
    except BaseException:
        server.stop()
        raise
    if keep:
        console.print(f"The server keeps running (stop it with: kill {server.pid})")
        console.print(f"  {server.ports.describe()}", soft_wrap=True)
    else:
        server.stop()
    console.print(f"Done in {time.perf_counter() - start:.0f} s. Files are in {OUT.relative_to(ROOT)}/")


def build() -> None:
    """The four commands a user would type."""
    for name in ("tiny-verifier", *DRAFTERS):
        run("convert", ASSETS / name, "-o", OUT / "checkpoints" / name)
    checkpoints = OUT / "checkpoints"
    drafters = [part for name in DRAFTERS for part in ("--drafter", checkpoints / name)]
    run("engine", "--verifier", checkpoints / "tiny-verifier", *drafters, "--target", "cpu", "-o", OUT / "engines")
    run("repo", OUT / "engines", "-o", OUT / "repo")


def run(*arguments: object) -> None:
    """Show and run one glmspec-build command; stop here when it fails."""
    words = [str(word.relative_to(ROOT) if isinstance(word, Path) else word) for word in arguments]
    console.print(f"[bold]$ glmspec-build {' '.join(words)}[/bold]", soft_wrap=True)
    done = subprocess.run(["glmspec-build", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)


def show_stream(client: Client) -> None:
    """Stream one chat answer; steps alternate in colour, and their token counts follow."""
    console.print(f"\n[bold]Question[/bold] {QUESTION}\n[bold]Answer[/bold]   ", end="")
    steps = []
    for chunk in client.stream(messages=[{"role": "user", "content": QUESTION}], max_tokens=2 * MAX_TOKENS):
        if steps and not console.is_terminal:
            console.print(STEP_MARK, end="")
        console.print(chunk.text, style="green" if len(steps) % 2 else "cyan", end="", markup=False, soft_wrap=True)
        steps.append(len(chunk.tokens))
    console.print(f"\n{sum(steps)} tokens in {len(steps)} steps: {' '.join(map(str, steps))}\n")


def measure(client: Client) -> None:
    """Tokens per second with speculation and without, over the same held-out prompts, and the acceptance."""
    lines = (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[:: max(1, len(lines) // MEASURED_PROMPTS)]]
    speeds, texts, stats = {}, {}, []
    with console.status("Measuring"):
        for speculate in (False, True):
            start = time.perf_counter()
            answers = [
                list(client.stream(text=prompt, max_tokens=MAX_TOKENS, speculate=speculate)) for prompt in prompts
            ]
            tokens = sum(len(chunk.tokens) for answer in answers for chunk in answer)
            speeds[speculate] = tokens / (time.perf_counter() - start)
            texts[speculate] = ["".join(chunk.text for chunk in answer) for answer in answers]
            stats = [answer[-1].stats for answer in answers]  # the speculated ones' in the end
    console.print(f"{len(prompts)} held-out prompts, one at a time, greedy:")
    console.print(table(pooled(stats), speeds))
    if texts[True] != texts[False]:
        raise click.ClickException("the speculated answers differ from the plain ones: this is a bug")
    console.print("Every speculated answer equals the plain one.")


def pooled(parts: list[SpecStats]) -> SpecStats:
    """Counters of all requests together."""
    total = SpecStats(parts[0].num_spec_tokens)
    for part in parts:
        total.add(part)
    return total


def table(stats: SpecStats, speeds: dict[bool, float]) -> Table:
    """The numbers people compare."""
    comparison = stats_table(stats, DRAFTERS[0])
    comparison.add_row("tokens/s with speculation", f"{speeds[True]:.0f}")
    comparison.add_row("tokens/s without", f"{speeds[False]:.0f}")
    comparison.add_row("ratio", f"{speeds[True] / speeds[False]:.2f}")
    return comparison


if __name__ == "__main__":
    main()
