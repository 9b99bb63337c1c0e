"""Writing so that nothing is lost: temporary name, fsync, rename; and hashing what is there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glmspec.build.errors import GlmspecError

PRODUCER = "glmspec"
_CHUNK = 1 << 22


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file, or nothing."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, keys in their order."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name; it takes its place when the block ends without an error.

    An older folder of ours at `path` is replaced then. Raises `GlmspecError` when something else is there.
    """
    refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _sync(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_foreign(path: Path) -> None:
    """Raise `GlmspecError` when `path` holds something that glmspec did not write."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        ours = json.loads((path / "config.json").read_text(encoding="utf-8"))["producer"]["name"] == PRODUCER
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise GlmspecError(f"{path}: exists and is not a folder that glmspec wrote. Choose another output folder.")


def producer() -> dict[str, str]:
    """Who writes: kept in every config.json of ours."""
    from importlib.metadata import version

    return {"name": PRODUCER, "version": version("glmspec")}


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
