"""Counts how often each file is hashed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from glmspec.core import files


class Hashed:
    """Times that each file was hashed since the last `take`, by its folder's and its own name. A file that is renamed
    stays the same one, under its first name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self._names: dict[tuple[int, int], str] = {}
        self._sha256 = files.sha256
        for name, module in list(sys.modules.items()):
            if name.startswith("glmspec.") and getattr(module, "sha256", None) is self._sha256:
                monkeypatch.setattr(module, "sha256", self._counted)

    def _counted(self, path: Path, *advance: Callable[[int], None]) -> str:
        stat = path.stat()
        file = (stat.st_dev, stat.st_ino)
        self._counts[file] += 1
        self._names.setdefault(file, f"{path.parent.name}/{path.name}")
        return self._sha256(path, *advance)

    def take(self) -> dict[str, int]:
        """The counts, which begin again."""
        counts = {self._names[file]: count for file, count in self._counts.items()}
        self._counts.clear()
        return counts


def assert_once(counts: dict[str, int], *weights: str) -> None:
    """Every file once, these files of weights among them and no others."""
    again = {name: count for name, count in counts.items() if count > 1}
    assert not again, f"hashed more than once: {again}"
    assert {name for name in counts if name.endswith((".safetensors", ".partial"))} == set(weights)
