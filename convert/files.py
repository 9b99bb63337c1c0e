"""Writing so that nothing is lost: temporary name, fsync, rename; and hashing what is there."""

from __future__ import annotations

import fcntl
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
CHECKPOINT, HF_CHECKPOINT = "checkpoint", "Hugging Face checkpoint"
ENGINES, MODEL_ENGINE, REPOSITORY = "engine directory", "engine", "model repository"
BUNDLE, KERNELS = "engine bundle", "kernel folder"
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
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """JSON as we write it."""
    return (json.dumps(value, indent=2) + "\n").encode()


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
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    _make(temporary, path)
    try:
        yield temporary
        _take_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def resumable_folder(
    path: Path, kind: str, inputs: Iterable[Path] = (), resume: bool = False, needed: int = 0
) -> Iterator[Path]:
    """Like `new_folder`, under a temporary name that a later run finds again; whatever the block leaves in it when it
    fails is kept. resume: go on in the folder an interrupted run left. needed: bytes that will be written in all.
    Raises `GlmspecError` for an interrupted run that is neither resumed nor deleted, and for too full a disk."""
    refuse_to_replace(path, kind, inputs)
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.unfinished")
    if temporary.exists() and not resume:
        os.close(_lock(temporary))  # held by a run that goes on: then this is said
        raise GlmspecError(f"{temporary}: left by an interrupted run. Go on with --resume, or delete it.")
    if resume and not temporary.exists():
        raise GlmspecError(f"{temporary}: --resume: there is no interrupted run to go on with.")
    if not resume:
        _make(temporary, path)
    lock = _lock(temporary)
    there = sum(file.stat().st_size for file in temporary.iterdir() if not file.name.endswith(".partial"))
    free = shutil.disk_usage(temporary).free
    if needed - there > free:
        if not resume:
            temporary.rmdir()
        raise GlmspecError(
            f"{path}: needs {(needed - there) / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB left. Make room."
        )
    try:
        yield temporary
        _take_place(temporary, path)
    except BaseException as error:
        whole = any(temporary.glob("*.safetensors"))
        if not whole and not resume:  # nothing worth going on from, and nothing of an earlier run
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            kept = " What is whole is kept: go on with --resume." if whole else ""
            raise GlmspecError(f"{path}: cannot be written ({error}).{kept}") from error
        raise
    finally:
        os.close(lock)


def _lock(folder: Path) -> int:
    """Hold a folder while this process lives, or until the descriptor is closed. Raises when another one does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise GlmspecError(f"{folder}: another run is writing it. Wait for it, or choose another output.") from None
    return descriptor


def _make(temporary: Path, path: Path) -> None:
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise GlmspecError(f"{path}: cannot be written ({error}).") from None


def _take_place(temporary: Path, path: Path) -> None:
    """Rename a finished folder; an older one is set aside first and comes back when that fails."""
    aside = path.with_name(f".{path.name}.old-{os.getpid()}")
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


def refuse_to_replace(path: Path, kind: str, inputs: Iterable[Path] = ()) -> None:
    """Raise `GlmspecError` when `path` holds something other than a folder of ours of this kind, or an input."""
    place = path.resolve()
    for one in inputs:
        if place == one.resolve() or place in one.resolve().parents:
            raise GlmspecError(f"{path}: the output would replace its own input {one}. Choose another output folder.")
        if one.resolve() in place.parents:
            raise GlmspecError(f"{path}: lies inside its own input {one}. Choose another output folder.")
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
