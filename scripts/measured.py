"""What the benchmarks share: the prompts, what they ran on, intervals, and pages that say where a number comes from.

Legend: D draws of a bootstrap, P prompts, C columns of counts.
"""

from __future__ import annotations

import json
import platform
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
ASSETS, OUT = ROOT / "assets", ROOT / "docs" / "benchmarks"
SPECULATION = ROOT / "docs" / "speculation.md"
DRAWS = 2000  # of a bootstrap

console = Console(highlight=False)


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt and its kind of text."""

    text: str
    kind: str


def prompts() -> list[Prompt]:
    """The held-out prompts, of every kind."""
    lines = (ASSETS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt(record["prompt"], record["kind"]) for record in map(json.loads, lines)]


def interval(pooled: Callable[..., np.ndarray], *counts_PC: ArrayLike) -> list[float]:
    """The middle 95 % of a pooled number over drawn sets of prompts: a bootstrap, of the same draws every time.
    counts_PC: what each prompt adds, all its seeds together, a row a prompt. pooled: the number, of sums [draws, C]."""
    columns_PC = [np.asarray(counts, dtype=float) for counts in counts_PC]
    size = len(columns_PC[0])
    taken_DP = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), DRAWS)
    drawn_D = pooled(*(taken_DP @ columns for columns in columns_PC))
    return [float(edge) for edge in np.percentile(drawn_D, [2.5, 97.5])]


def length(counts_DC: np.ndarray) -> np.ndarray:
    """Tokens a speculative step, of columns accepted drafts and steps."""
    return 1 + counts_DC[..., 0] / counts_DC[..., 1]


def made_by(packages: Sequence[str], **config: object) -> dict[str, Any]:
    """When, on what, with which versions and settings."""
    versions = {name: version(name) for name in packages}
    return {"date": date.today().isoformat(), "machine": machine(), "versions": versions, "config": config}


def machine() -> dict[str, object]:
    """What this ran on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(names),
        "python": platform.python_version(),
    }


def origin(script: str, result: dict[str, Any]) -> str:
    """The first lines of a page."""
    where = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"Written by `scripts/{script}` on {result['date']}: {where['cpu']}, {where['cores']} cores,\n"
        f"Python {where['python']}; {versions}."
    )


def spread(edges: Sequence[float], digits: int = 2) -> str:
    """An interval as it is printed."""
    return f"{edges[0]:.{digits}f} to {edges[1]:.{digits}f}"


def quote(page: Path, before: str, sentence: str, after: str) -> None:
    """Put a sentence between two fixed texts of a paragraph, whose lines are filled anew."""
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")
    for at, paragraph in enumerate(paragraphs):
        head, quoted, tail = " ".join(paragraph.split()).partition(before)
        if quoted:
            line = f"{head}{before} {sentence}{tail[tail.index(after) :]}"
            paragraphs[at] = textwrap.fill(line, 140, break_long_words=False, break_on_hyphens=False)
    page.write_text("\n\n".join(paragraphs), encoding="utf-8")


def write(name: str, result: dict[str, Any], report: Callable[[dict[str, Any]], str]) -> None:
    """The numbers, and the page that shows them."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    (OUT / f"{name}.md").write_text(report(result), encoding="utf-8")
    console.print(report(result), markup=False)
