"""What takes long to make is made once a run, by whichever test process needs it first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Shared:
    """A folder of the whole run (pytest-xdist's processes have their own folders inside), with what was made there.

    Nobody may change what another made: whoever wants to, copies it.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        base = factory.getbasetemp()
        self.home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
        self.home.mkdir(exist_ok=True)
        self._seen: dict[Path, dict[str, tuple[int, int]]] = {}

    def folder(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder `name`, filled by `make` if it is not there. make: gets a place where nothing is yet."""
        out, ready = self.home / name, self.home / f"{name}.ready"
        with self._locked(name):
            if not ready.exists():
                make(out)
                ready.touch()
        self._seen.setdefault(out, _files(out))
        return out

    def check(self) -> None:
        """Raise where a test changed what is shared."""
        for folder, files in self._seen.items():
            changed = dict(files.items() ^ _files(folder).items())
            assert not changed, f"{folder}: a test changed {sorted(changed)}, which all tests share; copy it first"

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with open(self.home / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of every file."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}
