"""Writing files so that nothing is lost: temporary name, fsync, rename; and hashing what is there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from glmspec.core.errors import GlmspecError

PRODUCER = "glmspec"
CHECKPOINT, HF_CHECKPOINT = "checkpoint", "Hugging Face checkpoint"
ENGINES, MODEL_ENGINE, REPOSITORY = "engine directory", "engine", "model repository"
BUNDLE, KERNELS = "engine bundle", "kernel folder"
PARTIAL = "partial"  # how the name of what is being written ends
_CHUNK = 1 << 22
_UNSYNCED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}  # of file systems that refuse fsync
_UNLOCKED = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}  # and of those without locks
_FIXED = {errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}  # a file that only its bytes can change


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file, or nothing; of several writers the last one stays. A file that cannot be replaced (mounted by
    itself, or in a folder that may not be written) is written into. An `OSError` names `path`."""
    temporary = path.with_name(f".{path.name}.{PARTIAL}")
    with naming(path):
        try:
            with opened_alone(temporary, wait=True) as descriptor:
                try:
                    os.ftruncate(descriptor, 0)  # a killed writer's
                    write_all(descriptor, data)
                    temporary.rename(path)
                except BaseException:
                    temporary.unlink(missing_ok=True)
                    raise
        except OSError as error:
            if error.errno not in _FIXED or not os.access(path, os.W_OK):
                raise
            with path.open("r+b" if path.is_file() else "wb") as file:
                write_all(file.fileno(), data)
                file.truncate(len(data))


def write_all(descriptor: int, data: Any) -> None:
    """Write bytes at the start of an open file, and sync them."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    sync(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, keys in their order."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """JSON as we write it."""
    return (json.dumps(value, indent=2) + "\n").encode()


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user named: through a link, not in its place; a pipe or a device is written into."""
    if path.exists() and not path.is_file():
        with naming(path), path.open("wb") as file:
            file.write(data)
    else:
        write_bytes(path.resolve(), data)


def check_output(path: Path, option: str = "") -> None:
    """Raise `GlmspecError` unless `write_output` will find `path` writable: before the work whose result goes there.
    option: that names it."""
    place, named = path.resolve(), f"{option} {path}".lstrip()
    try:
        if path.is_dir() or not (path.exists() or place.parent.is_dir()):
            wrong = f"{path} is a folder" if path.is_dir() else f"{place.parent} is not a folder"
            raise GlmspecError(f"{named}: cannot be written ({wrong}). Name a file in a folder that is there.")
        if path.exists() and os.access(path, os.W_OK):
            return
        with tempfile.TemporaryFile(dir=place.parent):
            pass
    except OSError as error:
        raise GlmspecError(f"{named}: cannot be written ({error.strerror}). Choose another place.") from None


def is_fixed(path: Path) -> bool:
    """Whether a file is there that can be written into, and not replaced: mounted by itself, or in a folder that may
    not be written."""
    if not (path.is_file() and os.access(path, os.W_OK)):
        return False
    if not os.access(path.parent, os.W_OK):
        return True
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    name = str(path)
    for odd in "\\ \t\n":  # as the kernel writes them
        name = name.replace(odd, f"\\{ord(odd):03o}")
    return any(line.split(" ")[4] == name for line in mounts.splitlines())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An `OSError` of the block names `path`, and no temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def sync(descriptor: int) -> None:
    """fsync, where the file system has it."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCED:
            raise


def sync_folder(folder: Path) -> None:
    """`sync` of a folder's entries."""
    with suppress(PermissionError):  # one that may be written and not read
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def sha256(path: Path, advance: Callable[[int], None] = lambda size: None) -> str:
    """Hex digest of a file. advance: called with the bytes read since."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


@contextmanager
def opened_alone(path: Path, *, wait: bool) -> Iterator[int]:
    """A file of this name, made if need be, that no other process has opened so. Raises `BlockingIOError` when another
    has, or waits for it. The lock is the file's: who renames or removes it leaves the name to the next."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                if error.errno not in _UNLOCKED:
                    raise
            try:
                mine = os.path.samestat(os.fstat(descriptor), path.stat())
            except FileNotFoundError:
                mine = False
            if mine:
                yield descriptor
                return
        finally:
            os.close(descriptor)


def producer(kind: str) -> dict[str, str]:
    """Who wrote a folder and what it is: kept in every config.json of ours."""
    from importlib.metadata import version

    return {"name": PRODUCER, "version": version("glmspec"), "kind": kind}


def produced(record: Any) -> str | None:
    """The kind of folder that a config.json of ours says it is of, None for any other JSON."""
    producer = record.get("producer") if isinstance(record, dict) else None
    kind = producer.get("kind") if isinstance(producer, dict) and producer.get("name") == PRODUCER else None
    return kind if isinstance(kind, str) else None
