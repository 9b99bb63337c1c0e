"""Records of ours edited for tests: as a damage, or as if glmspec itself had written something else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from glmspec.core.files import sha256, write_json
from glmspec.core.sealed import write_sealed


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a record and give it the digest of what it now says."""
    values = json.loads(path.read_text())
    change(values)
    write_sealed(path, values)


def rewrite_model(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the record of a model of an engine directory, or of a bundle; the directory's own then has its digest."""
    path = folder / name / "config.json"
    values = json.loads(path.read_text())
    change(values)
    write_json(path, values)
    rewrite(folder / "config.json", lambda outer: outer["files"].update({f"{name}/config.json": sha256(path)}))


def flips(path: Path, count: int) -> Iterator[tuple[int, bytes]]:
    """Copies of a file's bytes, each with one that differs; white space between a record's words stays as it is. Places
    are drawn by the file's name, and one of them is a digit where there is any."""
    data, draw = path.read_bytes(), random.Random(path.name)
    seen = [at for at, byte in enumerate(data) if not chr(byte).isspace()] or range(len(data))
    digits = [at for at in seen if chr(data[at]).isdigit()]
    for at in [*draw.sample(seen, min(count, len(seen))), *draw.sample(digits, min(count, len(digits)))]:
        old = data[at]
        new = ord(str((int(chr(old)) + 1) % 10)) if chr(old).isdigit() and old < 128 else old ^ 1
        yield at, data[:at] + bytes([new]) + data[at + 1 :]
