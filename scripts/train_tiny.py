"""Train the tiny verifier and its two drafters, check them, and write assets/.

python scripts/train_tiny.py --out assets        # the shipped models, about 42 minutes on two quiet cores
python scripts/train_tiny.py --out DIR --smoke   # the whole pipeline in half a minute, hardly trained
"""

from __future__ import annotations

import json
import os
import random
import time
import warnings
from pathlib import Path

import click

# Threads that wait without spinning: on a machine shared with others, spinning costs a factor of five.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tiny import evaluate, export, parity, report
from tiny.attention import VerifierConfig
from tiny.corpus import Prompt, held_out_prompts
from tiny.drafter import DFLASH2, DSPARK, Drafter
from tiny.tokenizer import check_tokenizer
from tiny.train_drafter import train_drafters
from tiny.train_verifier import train_verifier
from tiny.verifier import Router, Verifier

VERIFIER, FOLDERS = "tiny-verifier", {"dspark": "tiny-dspark", "dflash2": "tiny-dflash2"}


class Board:
    """Progress bars, one per phase, and the time each phase took."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.tasks, self.seconds = progress, {}, {}

    def __call__(self, phase: str, done: int, total: int, numbers: dict[str, float]) -> None:
        """Note the progress of a phase."""
        if phase not in self.tasks:
            self.tasks[phase] = (self.progress.add_task(phase, total=total, numbers=""), time.monotonic())
            if not self.progress.console.is_terminal:  # bars show up at the end only
                self.progress.console.print(f"{phase}: {total}")
        task, start = self.tasks[phase]
        self.progress.update(task, completed=done, numbers=" ".join(f"{n} {v:.3f}" for n, v in numbers.items()))
        self.seconds[phase] = round(time.monotonic() - start, 1)


def train_all(out: Path, scale: float, board: Board) -> dict[str, float]:
    """Train and export; everything after the verifier works on its BF16-rounded weights as shipped."""
    verifier = Verifier(VerifierConfig())
    losses = train_verifier(verifier, scale, board)
    export.save_verifier(verifier, out / VERIFIER)
    verifier = export.load_verifier(out / VERIFIER)
    drafters = [Drafter(DSPARK), Drafter(DFLASH2)]
    train_drafters(verifier, drafters, scale, board)
    for drafter in drafters:
        export.save_drafter(drafter, out / FOLDERS[drafter.config.algorithm], VERIFIER)
    return losses


def check_all(out: Path, prompts: list[Prompt], losses: dict, board: Board, smoke: bool) -> dict[str, object]:
    """Load what was written and measure it. smoke: on little text."""
    verifier = export.load_verifier(out / VERIFIER)
    drafters = {name: export.load_drafter(out / folder) for name, folder in FOLDERS.items()}
    texts = [prompt.prompt for prompt in prompts]
    check_tokenizer(
        out / VERIFIER,
        [*texts, "naïve café, 漢字, 🎉\t\x00 end ", " <think></think> x"],
        [prompt.messages for prompt in prompts if prompt.messages],
    )
    numbers: dict[str, object] = {"parameters": report.parameter_counts(verifier, drafters)}
    longest = sorted(texts, key=len)[-12:]
    numbers["parity"] = parity.compare_with_transformers(verifier, out / VERIFIER, longest)
    numbers["parity"]["decoding_vs_prefill"] = parity.compare_decoding(verifier, longest[-1])
    numbers["parity"]["smallest_margin_over_padding"] = parity.padding_margin(verifier, longest)
    acceptance, plain = evaluate.evaluate_all(
        verifier, drafters, prompts, board, max_new=24 if smoke else evaluate.MAX_NEW
    )
    for name, row in acceptance.items():
        row["drafts"] = drafters[name].config.speculative_tokens if name in drafters else 3
    numbers["acceptance"] = acceptance
    numbers["held_out"] = losses
    numbers["answers_right"] = {} if smoke else evaluate.answer_accuracy(verifier, 25)
    biases = [m.e_score_correction_bias for m in verifier.modules() if isinstance(m, Router)]
    numbers["balance"] = {"largest_router_bias": max(bias.abs().max().item() for bias in biases)}
    numbers["dflash2_convolutions"] = report.convolution_numbers(drafters["dflash2"])
    numbers["dspark_confidence"] = acceptance["dspark"]["confidence"]
    numbers["samples"] = report.samples(prompts, plain)
    return numbers


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write.")
@click.option("--smoke", is_flag=True, help="A few steps of everything: proves the pipeline, trains nothing useful.")
@click.option("--scale", default=1.0, show_default=True, help="Multiplies all step counts.")
@click.option("--threads", default=2, show_default=True, help="CPU threads.")
def main(out: Path, smoke: bool, scale: float, threads: int) -> None:
    """Train the tiny models, check them and write them to OUT."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    random.seed(0)
    started, console = time.monotonic(), Console()
    out.mkdir(parents=True, exist_ok=True)
    prompts = held_out_prompts(60)
    lines = [json.dumps(prompt.record(), ensure_ascii=False) for prompt in prompts]
    (out / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    columns = (TextColumn("{task.description:28}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[numbers]}"), console=console) as progress:
        board = Board(progress)
        losses = train_all(out, 0.001 if smoke else scale, board)
        numbers = check_all(out, prompts[:2] if smoke else prompts, losses, board, smoke)
    numbers["seconds"] = {**board.seconds, "total": round(time.monotonic() - started, 1)}
    numbers["bytes"] = {folder: report.folder_bytes(out / folder) for folder in (VERIFIER, *FOLDERS.values())}
    report.write_report(out, numbers, VerifierConfig().index_topk)
    report.show(console, numbers)


if __name__ == "__main__":
    main()
