"""The end report: training_report.json, assets/README.md and a table on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from .corpus import KINDS, Prompt
from .drafter import Drafter
from .export import write_json
from .tokenizer import decode
from .verifier import Verifier


def parameter_counts(verifier: Verifier, drafters: dict[str, Drafter]) -> dict[str, int]:
    """Parameters of every shipped part."""
    mtp = sum(param.numel() for param in verifier.mtp.parameters())
    counts = {"verifier_without_mtp": sum(p.numel() for p in verifier.parameters()) - mtp, "verifier_mtp": mtp}
    return counts | {name: sum(p.numel() for p in drafter.parameters()) for name, drafter in drafters.items()}


def convolution_numbers(drafter: Drafter) -> dict[str, float]:
    """How far DFlash2's trained kernels are from the identity (which would prove nothing in a test)."""
    bases = [layer.attention_conv.base_kernel for layer in drafter.draft_layers]
    bases += [layer.mlp_conv.base_kernel for layer in drafter.draft_layers]
    projections = [layer.attention_conv.kernel_projection.weight for layer in drafter.draft_layers]
    off = sum(base[:, 1:].abs().mean().item() for base in bases) / len(bases)
    first = sum((base[:, 0] - 1).abs().mean().item() for base in bases) / len(bases)
    projection = sum(weight.abs().mean().item() for weight in projections) / len(projections)
    return {
        "mean_abs_later_taps": round(off, 4),
        "mean_abs_first_tap_minus_one": round(first, 4),
        "mean_abs_kernel_projection": round(projection, 4),
    }


def samples(prompts: list[Prompt], plain: list[list[int]], count: int = 8) -> list[dict[str, str]]:
    """A few prompts with their greedy continuations."""
    chosen = range(0, len(prompts), max(1, len(prompts) // count))
    return [{"prompt": prompts[i].prompt, "greedy": decode(plain[i]), "kind": prompts[i].kind} for i in chosen][:count]


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def show(console: Console, numbers: dict) -> None:
    """The final table."""
    table = Table(title="Speculative greedy decoding on held-out prompts")
    for column in ("drafter", "length", "rate", *KINDS, "same as plain"):
        table.add_column(column, justify="right")
    for name, row in numbers["acceptance"].items():
        table.add_row(
            name,
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['draft_acceptance_rate']:.2f}",
            *(f"{row['by_kind'][kind]:.2f}" for kind in KINDS),
            f"{row['same_as_plain']}/{row['prompts']}",
        )
    console.print(table)
    facts = Table(title="Checks")
    facts.add_column("what")
    facts.add_column("value", justify="right")
    for section in ("parity", "held_out", "answers_right", "parameters", "seconds"):
        for name, value in numbers[section].items():
            facts.add_row(f"{section}: {name}", f"{value:.3g}" if isinstance(value, float) else f"{value:,}")
    console.print(facts)


README = """\
# Tiny trained models

Real, trained, GLM-5.3-shaped checkpoints small enough to ship: for tests, demos and CPU benchmarks of speculation.
Made by `python scripts/train_tiny.py --out assets` (seeded, CPU only); numbers below come from that run.

| folder | what | parameters | format |
|---|---|---|---|
| `tiny-verifier` | GlmMoeDsaForCausalLM: 7 layers, MLA, DSA with index_topk {topk}, 8 experts; plus one MTP module | \
{verifier:,} + {mtp:,} (MTP) | Hugging Face, BF16 (router and indexer head weights F32) |
| `tiny-dspark` | DSparkDraftModel: {dspark_drafts} drafts a step, Markov and confidence heads | {dspark:,} | \
speculators, BF16 |
| `tiny-dflash2` | DFlash2DraftModel: {dflash2_drafts} drafts a step, convolutions, candidate selector | {dflash2:,} | \
speculators, BF16 |

The tokenizer is byte-level: id b is byte b, special tokens are ids 256 to 265, ids up to 287 are padding rows that are
never predicted. The drafters share the verifier's embedding and lm_head. `prompts.jsonl` holds {prompts} prompts whose
contents were never trained on (`prompt`, `kind`, `form`; chats also carry `messages`). `training_report.json` holds
every number below and more.

The corpus is generated: Python-like functions, worked arithmetic, templated stories, tables in markdown, CSV and JSON;
as raw text and as chats. One content in eight is held out. The verifier learned with dense attention first, then its
indexer learned to match the attention, then both went on with the real sparse selection; the MTP module learned along.
The drafters learned the verifier's own greedy tokens, on corpus text where it agrees with them and on its own text.

## Speculative greedy decoding, {prompts} held-out prompts, up to 96 new tokens

{acceptance}

`length` is 1 + accepted/steps, counters pooled over prompts. Share of steps that accept at least k drafts:

{positions}

## Other numbers

{others}

## Samples (greedy)

{samples}
"""


def markdown_table(header: list[str], rows: list[list[object]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def write_readme(path: Path, numbers: dict, topk: int) -> None:
    """The README of assets/, from the numbers."""
    acceptance = numbers["acceptance"]
    header = ["drafter", "drafts", "length", "tokens/step", *KINDS, "chat", "text", "same text as plain"]
    rows = [
        [
            name,
            row["drafts"],
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            *(f"{row['by_kind'][kind]:.2f}" for kind in KINDS),
            *(f"{row['by_form'][form]:.2f}" for form in ("chat", "text")),
            f"{row['same_as_plain']}/{row['prompts']}",
        ]
        for name, row in acceptance.items()
    ]
    depths = [
        [name, *(f"{share:.2f}" for share in row["per_position"][: row["drafts"]]), *[""] * (8 - row["drafts"])]
        for name, row in acceptance.items()
    ]
    others = [
        [f"{section}: {name}", f"{value:.3g}" if isinstance(value, float) else value]
        for section in ("parity", "held_out", "answers_right", "balance", "dflash2_convolutions", "dspark_confidence")
        for name, value in numbers[section].items()
    ]
    shown = "\n\n".join(f"```text\n{s['prompt']}⟶{s['greedy']}\n```" for s in numbers["samples"])
    counts = numbers["parameters"]
    path.write_text(
        README.format(
            topk=topk,
            verifier=counts["verifier_without_mtp"],
            mtp=counts["verifier_mtp"],
            dspark=counts["dspark"],
            dflash2=counts["dflash2"],
            dspark_drafts=acceptance["dspark"]["drafts"],
            dflash2_drafts=acceptance["dflash2"]["drafts"],
            prompts=acceptance["dspark"]["prompts"],
            acceptance=markdown_table(header, rows),
            positions=markdown_table(["drafter", *map(str, range(1, 9))], depths),
            others=markdown_table(["what", "value"], others),
            samples=shown,
        )
    )


def write_report(folder: Path, numbers: dict, topk: int) -> None:
    """Write training_report.json and README.md."""
    write_json(folder / "training_report.json", numbers)
    write_readme(folder / "README.md", numbers, topk)
