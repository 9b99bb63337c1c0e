"""What compiled once is remembered from run to run of `validate --cache`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from glmspec.core.files import write_json


class CompileCache:
    """One small file for each thing that compiled, by a digest of all that decides whether it does. folder: None to
    remember nothing. num_compiled, num_known: how many records were asked for that were new, and that were there."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.num_compiled = self.num_known = 0

    def record(self, identity: str, keys: Set[str], compile: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of what is called by this identity; `compile` gives one that is unknown or damaged, and nothing is
        kept when it raises. keys: that a record must have."""
        path = self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()}.json" if self._folder else None
        if path and (known := _read(path, keys)):
            self.num_known += 1
            return known
        record = compile()
        if path:
            with suppress(OSError):  # a full disk costs the next run time, and this one nothing
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, record)
        self.num_compiled += 1
        return record


def _read(path: Path, keys: Set[str]) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if keys <= record.keys() else None
    except (OSError, ValueError, AttributeError):
        return None
