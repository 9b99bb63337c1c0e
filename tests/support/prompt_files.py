"""Files of prompts, and `generate` run on them."""

from __future__ import annotations

import json
from pathlib import Path

from glmspec.core.progress import Progress
from glmspec.runtime import generate
from glmspec.runtime.engine import Engine
from glmspec.runtime.options import GenerateOptions

PROMPTS = ["def add(a, b):\n", "Count: 1, 2, 3,", "| a | b |\n", "Once upon a time " * 9, "naïve 中文", "x"]


class Files:
    """Input and output path in a folder; `write` fills the input."""

    def __init__(self, folder: Path) -> None:
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: object) -> None:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        self.source.write_text(text, encoding="utf-8")

    def read(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]


def run(engines, files, max_tokens=12, speculate=True, drafter=None, statistics=None, resume=False, **settings) -> None:
    settings = {"max_tokens": max_tokens, **settings}
    places = {"source": files.source, "output": files.output, "statistics": statistics}
    options = GenerateOptions(**places, prompts=(), resume=resume, settings=settings)
    generate.generate(lambda: Engine(engines, drafter, speculate), options, Progress())


def prompts(files, count: int = 7) -> None:
    """Answers of different lengths: later prompts end first."""
    files.write(*({"prompt": f"{at}: {PROMPTS[at % 6]}", "max_tokens": 3 * (count - at)} for at in range(count)))
