"""Engines of the tiny models in assets/, and requests for them: what the benchmarks of speculation share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from measured import ASSETS

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.progress import Progress
from glmspec.runtime.engine import Engine

BLOCK_DRAFTERS = ("dspark", "dflash2")


def build_tiny(out: Path, options: BuildOptions) -> Path:
    """Write an engine directory of the tiny verifier and its block drafters, for the CPU, to `out`; returns `out`."""
    drafters = [ASSETS / f"tiny-{name}" for name in BLOCK_DRAFTERS]
    build_engines(ASSETS / "tiny-verifier", drafters, TARGETS["cpu"], options, out, Progress(), check=False)
    return out


def prompt_ids(engine: Engine, texts: Iterable[str]) -> list[tuple[int, ...]]:
    """The token ids of each text. Raises `ValueError` for an engine without a tokenizer."""
    if engine.tokenizer is None:
        raise ValueError("the engine has no tokenizer")
    return [tuple(engine.tokenizer.encode(text)) for text in texts]
