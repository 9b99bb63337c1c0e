"""Records that hold their own digest, so that one changed character of a config.json of ours is found.

What a file decides is under the digest that the record beside it keeps (`files`, `parts`); the record itself is under
its own, the key "sha256": of its JSON without that key, whatever the white space.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from glmspec.core.errors import CheckpointError
from glmspec.core.fields import Fields, read_json
from glmspec.core.files import produced, sha256, write_json

SEAL = "sha256"
HASHED_AT_LOAD = 1 << 30  # bytes of weights up to which they are hashed again when they are opened
MANIFEST = "glmspec.json"  # the record of a checkpoint whose config.json is Hugging Face's
Shape = Mapping[str, Any]  # what a key must hold: a type, several, or the shape of an object
_NAMES = {str: "a text", int: "an integer", bool: "true or false", list: "a list", dict: "an object", NoneType: "null"}


def write_sealed(path: Path, record: dict[str, Any]) -> None:
    """Write a record with its own digest."""
    write_json(path, {**record, SEAL: seal_of(record)})


def seal_of(record: dict[str, Any]) -> str:
    """The digest of a record without the one that it holds."""
    text = json.dumps({key: value for key, value in record.items() if key != SEAL}, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def open_sealed(path: Path, shape: Shape, again: str) -> dict[str, Any]:
    """A record as it was written. again: what to do about another. Raises `CheckpointError` for one that changed, or
    that an earlier version wrote, and `ConfigError` naming a key that is not of `shape`."""
    return check_sealed(read_json(path), path, shape, again)


def check_sealed(record: dict[str, Any], path: Path, shape: Shape, again: str) -> dict[str, Any]:
    """A record that was read from `path`, checked as `open_sealed` says."""
    if SEAL not in record:
        raise CheckpointError(
            f"{path}: found no {SEAL} of its own: written by an earlier version of glmspec, or damaged. {again}"
        )
    if record[SEAL] != seal_of(record):
        raise CheckpointError(f"{path}: changed since it was written. {again}")
    check_shape(Fields(record, str(path)), shape)
    return record


def check_shape(fields: Fields, shape: Shape) -> None:
    """Raise `ConfigError` naming the first key that is not of `shape`."""
    for key, wanted in shape.items():
        if isinstance(wanted, Mapping):
            check_shape(fields.section(key), wanted)
            continue
        types = wanted if isinstance(wanted, tuple) else (wanted,)
        if key not in fields.values or type(fields.values[key]) not in types:
            fields.fail(key, " or ".join(_NAMES[kind] for kind in types))


def open_manifest(folder: Path) -> dict[str, Any]:
    """The record of a Hugging Face checkpoint of ours, its small files compared with it."""
    record = open_sealed(folder / MANIFEST, {"parts": dict, "files": dict}, "Convert the checkpoint again.")
    check_files(folder, record["files"], f"Convert again, or delete {MANIFEST} if the change is yours.")
    return record


def kind_of(folder: Path) -> str | None:
    """What a folder of ours says that it is, None for one that is not ours."""
    return produced(read_json(folder / "config.json"))


def digests(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """The digest of every file, by its place in the folder."""
    return {str(path.relative_to(folder)): sha256(path) for path in sorted(paths)}


def check_files(folder: Path, files: Mapping[str, str], again: str) -> None:
    """Compare files with what `digests` found of them. Raises `CheckpointError` naming the first at fault."""
    for name, digest in files.items():
        check_digest(folder / name, digest, again)


def check_digest(path: Path, digest: str, again: str, advance: Callable[[int], None] = lambda size: None) -> None:
    """Raise `CheckpointError` for a file that is gone or not what was written. again: what to do then. advance: called
    with the bytes read since."""
    if not path.is_file() or sha256(path, advance) != digest:
        fault = "changed since it was written" if path.exists() else "missing"
        raise CheckpointError(f"{path}: {fault}. {again}")


def check_written(folder: Path, record: dict[str, Any], again: str) -> None:
    """Compare what a record lists with what is there, in moments: small files by digest, weights by size and, when all
    are small, by digest. Raises `CheckpointError` naming the first at fault."""
    check_files(folder, record["files"], again)
    parts = record["parts"]
    small = sum(part["size"] for part in parts.values()) <= HASHED_AT_LOAD
    for name, part in parts.items():
        path = folder / name
        if path.is_file() and (size := path.stat().st_size) != part["size"]:
            raise CheckpointError(
                f"{path}: changed since it was written: found {size:,} bytes, expected {part['size']:,}. {again}"
            )
        if small or not path.is_file():
            check_digest(path, part["sha256"], again)
