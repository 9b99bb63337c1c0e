"""What `generate` is asked for, as one value. Imports nothing heavy, so that the command line can make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The prompts, and where answers go. source: a file of JSON lines; prompts: texts instead; neither: lines typed on
    the terminal. output: a file of JSON lines; None shows answers on a terminal and writes JSON lines elsewhere.
    resume: go on with the answers that an interrupted run kept for it. statistics: a JSON file for the counters of all
    answers. settings: of every prompt that has none of its own. chat: texts are a user's, for the chat template."""

    source: Path | None
    prompts: tuple[str, ...]
    chat: bool = False
    output: Path | None
    resume: bool = False
    statistics: Path | None
    settings: Mapping[str, Any]
