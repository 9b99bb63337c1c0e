"""What is known to compile, between runs of `validate --cache`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from glmspec.core.files import write_json


class Known:
    """One small file for each thing that compiled, by a digest of all that decides whether it does. folder: None to
    remember nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, digest: str, keys: set[str]) -> dict | None:
        """What was recorded; None when it is unknown or the record is damaged. keys: that it must have."""
        path = self._path(digest)
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path else None
            return found if found and keys <= found.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def keep(self, digest: str, found: dict) -> None:
        """Record a success."""
        if path := self._path(digest):
            with suppress(OSError):  # a full disk costs the next run time, and this one nothing
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, found)

    def _path(self, digest: str) -> Path | None:
        return self._folder / f"{digest}.json" if self._folder else None
