"""What `convert` is asked for, as one value. Imports nothing heavy, so that the command line can make it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """source: a Hugging Face checkpoint, of a dry run also its config.json. output: None of a dry run. recipe: a file
    of rules in place of `quant`. tp, ep: None for 1. layout: "trtllm" or "hf". workers: None for the cores there are.
    device: cpu or cuda. expect_sha256: of the source's weights."""

    source: Path
    output: Path | None
    quant: str = "auto"
    recipe: Path | None = None
    calibration: Path | None = None
    tp: int | None = None
    ep: int | None = None
    layout: str = "trtllm"
    workers: int | None = None
    device: str = "cpu"
    resume: bool = False
    expect_sha256: str | None = None
    dry_run: bool = False

    @property
    def hf(self) -> bool:
        """Whether a Hugging Face checkpoint is written."""
        return self.layout == "hf"
