"""Writing so that nothing is lost: temporary name, fsync, rename; and hashing what is there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glmspec.build.errors import GlmspecError

PRODUCER = "glmspec"
CHECKPOINT, ENGINES, MODEL_ENGINE, REPOSITORY = "checkpoint", "engine directory", "engine", "model repository"
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
def new_folder(path: Path, kind: str, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """A folder to fill under a temporary name; it takes its place when the block ends without an error.

    An older folder of ours of the same `kind` at `path` is replaced then. Raises `GlmspecError` when something
    else is there, or when one of the `inputs` lies in it.
    """
    refuse_to_replace(path, kind, inputs)
    path = path.resolve()  # so that "..", "." and links name the folder itself
    temporary, aside = (path.with_name(f".{path.name}.{what}-{os.getpid()}") for what in ("partial", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise GlmspecError(f"{path}: cannot be written ({error}).") from None
    try:
        yield temporary
        _sync(temporary)
        if path.exists():
            path.rename(aside)
        try:
            temporary.rename(path)
        except BaseException:
            if aside.exists():
                aside.rename(path)
            raise
        _sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_to_replace(path: Path, kind: str, inputs: Iterable[Path] = ()) -> None:
    """Raise `GlmspecError` when `path` holds something other than a folder of ours of this kind, or an input."""
    place = path.resolve()
    for one in inputs:
        if place == one.resolve() or place in one.resolve().parents:
            raise GlmspecError(f"{path}: the output would replace its own input {one}. Choose another output folder.")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))["producer"]
        found = (found["name"], found["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found is None or found[0] != PRODUCER:
        raise GlmspecError(f"{path}: exists and is not a folder that glmspec wrote. Choose another output folder.")
    if found[1] != kind:
        raise GlmspecError(
            f"{path}: exists and is a glmspec {found[1]}, which this {kind} would replace. Choose another output."
        )


def producer(kind: str) -> dict[str, str]:
    """Who wrote a folder and what it is: kept in every config.json of ours."""
    from importlib.metadata import version

    return {"name": PRODUCER, "version": version("glmspec"), "kind": kind}


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
