"""Where a checkpoint folder came from, by what downloading left: `hf download --local-dir` keeps a note beside every
file, the hub's cache keeps everything in its names.

    FOLDER/.cache/huggingface/download/FILE.metadata            commit, digest, time
    models--ORG--NAME/snapshots/COMMIT/FILE -> ../../blobs/DIGEST

Digests of weights are taken over without reading 700 GB again, unless the file changed after the download: then, and
where there is none of 64 digits (SHA-256), it is hashed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from glmspec.core.files import sha256

_CHANGED = 1.0  # seconds by which a file may be newer than what was noted of it
_COMMIT, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Download:
    """What is known of a file without reading it. repo: "org/name"."""

    repo: str | None = None
    revision: str | None = None
    sha256: str | None = None


def source_record(
    folder: Path,
    paths: list[Path],
    advance: Callable[[int], None] = lambda size: None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The folder's name, the repository and its revision, the digest of every file of weights. paths: of those.
    advance: called with the bytes hashed since, `hashed_size` in all. known: digests of files, by name."""
    origins = {path: downloaded(path) for path in paths}
    repos, revisions = ({getattr(origin, key) for origin in origins.values()} for key in ("repo", "revision"))
    return {
        "folder": name_of(folder),
        "repo": repos.pop() if len(repos) == 1 else None,
        "revision": revisions.pop() if len(revisions) == 1 else None,
        "files": {p.name: origin.sha256 or known.get(p.name) or sha256(p, advance) for p, origin in origins.items()},
    }


def hashed_size(paths: list[Path], known: Mapping[str, str]) -> int:
    """Bytes of the files whose digest nothing tells, nor is among the known ones."""
    return sum(path.stat().st_size for path in paths if not downloaded(path).sha256 and path.name not in known)


def mixed_revisions(paths: list[Path]) -> list[str]:
    """A note where files of weights are of several revisions, as when a download was updated in part."""
    by_revision: dict[str, str] = {}
    for path in paths:
        if revision := downloaded(path).revision:
            by_revision.setdefault(revision, path.name)
    if len(by_revision) < 2:
        return []
    listed = ", ".join(f"{name} of {revision[:12]}" for revision, name in by_revision.items())
    return [f"files of several revisions: {listed}. Download the folder again if they do not belong together"]


def name_of(folder: Path) -> str:
    """What a folder is called: for a snapshot in the hub's cache, what its repository is called."""
    place = folder.resolve()
    repo = _repo(place)
    return repo.rpartition("/")[2] if repo else place.name


def downloaded(path: Path) -> Download:
    """What is known of a file."""
    place = path.parent.resolve()
    note = place / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    if (repo := _repo(place)) and path.is_symlink():
        return Download(repo, place.name, _whole(path.resolve().name, path.lstat().st_mtime, path))
    if not note.exists():
        return Download()
    lines = [*note.read_text(encoding="utf-8").splitlines(), "", ""]
    return Download(None, lines[0] or None, _whole(lines[1].strip('"'), note.stat().st_mtime, path))


def _repo(place: Path) -> str | None:
    """The repository of a snapshot's folder."""
    home = place.parent.parent.name
    if not (_COMMIT.fullmatch(place.name) and place.parent.name == "snapshots" and home.startswith("models--")):
        return None
    return home.removeprefix("models--").replace("--", "/")


def _whole(digest: str, noted: float, path: Path) -> str | None:
    """A SHA-256 that was noted then, unless the file changed afterwards."""
    return digest if _SHA256.fullmatch(digest) and noted >= path.stat().st_mtime - _CHANGED else None
