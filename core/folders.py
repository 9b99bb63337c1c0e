"""Output folders: whole ones or none, never over somebody else's.

A folder is made beside its place, under a hidden name, and renamed when it is whole. Where that cannot be (its place is
a mount point or a lower layer of an overlay, or the folder above may not be written), an empty place is filled from a
hidden folder inside it, config.json last. A locked file keeps two runs apart, on one machine or two containers; the
hidden names are the same in every run, so that what a killed one left is found by the next.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from glmspec.core.errors import GlmspecError, unwritable_text
from glmspec.core.files import PARTIAL, opened_alone, produced, sync_folder, write_json
from glmspec.core.units import size_text

_UNFINISHED, _REPLACED, _LOCK = "unfinished", "replaced", "lock"
_MOVING = ".moving"
_NOBODYS = {f".{_UNFINISHED}", f".{PARTIAL}", f".{_LOCK}", "lost+found"}  # what an empty place may hold


@contextmanager
def new_folder(path: Path, kind: str, inputs: Iterable[Path] = ()) -> Iterator[Path]:
    """A folder to fill under a hidden name; it takes its place when the block ends without an error.

    An older folder of ours of the same `kind` at `path` is replaced then. Raises `GlmspecError` when something
    else is there, when one of the `inputs` lies in it, when another run writes it, and when it cannot take its place:
    all before the block runs.
    """
    with _place(path, kind, inputs) as place:
        work = place.hidden(PARTIAL)
        shutil.rmtree(work, ignore_errors=True)  # a killed run's
        try:
            with _told(place.path, work):
                work.mkdir()
                yield work
                place.take(work, kind)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def resumable_folder(
    path: Path, kind: str, inputs: Iterable[Path] = (), resume: bool = False, needed: int = 0
) -> Iterator[Path]:
    """Like `new_folder`, but weights that the block left in it when it failed are kept for a later run. resume: go on
    in the folder an interrupted run left. needed: bytes that will be written in all. Raises `GlmspecError` for an
    interrupted run that is neither resumed nor deleted, and for too full a disk."""
    with _place(path, kind, inputs) as place:
        work = place.hidden(_UNFINISHED)
        if resume and not work.exists():
            raise GlmspecError(f"{work}: --resume: there is no interrupted run to go on with.")
        if not resume and _has_weights(work):
            raise GlmspecError(f"{work}: left by an interrupted run. Go on with --resume, or delete it.")
        if not resume:
            shutil.rmtree(work, ignore_errors=True)
        kept = ""
        try:
            with _told(place.path, work):
                work.mkdir(exist_ok=True)
                _check_room(place.path, work, needed)
                try:
                    yield work
                    place.take(work, kind)
                finally:
                    kept = " What is whole is kept: go on with --resume." if _has_weights(work) else ""
        except BaseException as error:
            if not kept and not resume:  # nothing worth going on from, and nothing of an earlier run
                shutil.rmtree(work, ignore_errors=True)
            if kept and isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"{path}:{kept}") from None
            if kept and isinstance(error, _Unwritable):
                raise _Unwritable(f"{error}{kept}") from error
            raise


class _Unwritable(GlmspecError):
    """A folder that could not be written."""


@contextmanager
def _told(path: Path, work: Path) -> Iterator[None]:
    """An `OSError` about the output is told of its final place; one about something else is the CLI's to tell."""
    try:
        yield
    except OSError as error:
        if error.filename is None or any(str(work) in str(name) for name in (error.filename, error.filename2)):
            raise _Unwritable(unwritable_text(path, error)) from error
        raise


def _has_weights(work: Path) -> bool:
    return any(work.rglob("*.safetensors"))


def _check_room(path: Path, work: Path, needed: int) -> None:
    """Raise `GlmspecError` when the disk on which the bytes will lie is too full for those that are not there yet."""
    for begun in work.rglob(f"*.{PARTIAL}"):
        begun.unlink()  # made again, and larger than the room it would leave
    there = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    free = shutil.disk_usage(work).free
    if needed - there > free:
        raise GlmspecError(
            f"{path}: needs {size_text(needed - there)} and its disk has {size_text(free)} left. Make room."
        )


@dataclass(frozen=True)
class _Place:
    """Where an output is made. path: its own place, no links in it. home: the folder that holds the hidden names, the
    one above `path` or `path` itself."""

    path: Path
    home: Path

    def hidden(self, what: str) -> Path:
        """A name that every run for this output uses."""
        return self.home / (f".{what}" if self.home == self.path else f".{self.path.name}.{what}")

    def take(self, work: Path, kind: str) -> None:
        """Put a finished folder in its place; an older one is set aside first and comes back when that fails."""
        sync_folder(work)
        if self.home == self.path:
            self._move_up(work)
            return
        refuse_to_replace(self.path, kind)  # what came meanwhile
        aside = self.hidden(_REPLACED)
        if self.path.exists():
            self.path.rename(aside)
        try:
            work.rename(self.path)
        except BaseException:
            if aside.exists():
                aside.rename(self.path)
            raise
        sync_folder(self.home)
        shutil.rmtree(aside, ignore_errors=True)

    def _move_up(self, work: Path) -> None:
        names = sorted(os.listdir(work), key=lambda name: name == "config.json")  # last: it makes the folder whole
        write_json(work / _MOVING, names)
        try:
            for name in names:
                (work / name).rename(self.path / name)
        except BaseException:
            self.recover()
            raise
        sync_folder(self.path)
        (work / _MOVING).unlink()
        work.rmdir()

    def recover(self) -> None:
        """Take back what a run that was killed while it took its place had moved. Raises `GlmspecError` for something
        else where it would set an older output aside."""
        aside = self.hidden(_REPLACED)
        if self.home != self.path and aside.exists():
            if _maker(aside) is None:
                raise GlmspecError(
                    f"{aside}: in the way, and not (or no longer) a whole folder that glmspec wrote. Delete it if "
                    "it is the rest of an older output, else move it away."
                )
            if self.path.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(self.path)
        for work in (self.path / f".{_UNFINISHED}", self.path / f".{PARTIAL}"):
            for name in reversed(_moved(work)):
                (self.path / name).rename(work / name)
            (work / _MOVING).unlink(missing_ok=True)


@contextmanager
def _place(path: Path, kind: str, inputs: Iterable[Path]) -> Iterator[_Place]:
    """Hold the place of an output. Folders above it that are missing are made, and unmade when the block fails."""
    inputs = list(inputs)
    refuse_to_replace(path, kind, inputs)
    path = path.resolve()  # so that "..", "." and links name the folder itself
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            place = _Place(path, _home(path, kind))
            lock = place.hidden(_LOCK)
        except OSError as error:
            raise GlmspecError(unwritable_text(path, error)) from None
        with _locked(lock, path):
            place.recover()
            refuse_to_replace(path, kind, inputs)
            yield place
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _locked(lock: Path, path: Path) -> Iterator[None]:
    """Keep other runs from an output."""
    with ExitStack() as held:
        try:
            held.enter_context(opened_alone(lock, wait=False))
        except BlockingIOError:
            raise GlmspecError(f"{path}: another run is writing it. Wait for it, or choose another output.") from None
        except OSError as error:
            raise GlmspecError(unwritable_text(path, error)) from None
        held.callback(lock.unlink, missing_ok=True)  # before it is let go
        yield


def _home(path: Path, kind: str) -> Path:
    """The folder in which an output can be made. Raises `GlmspecError` where it could not take its place."""
    if (path / f".{_UNFINISHED}").is_dir():
        return path
    why = _immovable(path)
    if why is None:
        return path.parent
    if not path.is_dir():
        raise why
    if _held(path):
        article = "an" if kind[0] in "aeiou" else "a"
        raise GlmspecError(
            f"{path}: holds {article} {kind}, and cannot be replaced ({why.strerror}): it is a mount point or a layer, "
            "or the folder above it may not be written. Empty it, or choose another output folder."
        )
    return path


def _immovable(path: Path) -> OSError | None:
    """Why a folder made beside `path` could not take its place, if so: nothing is ever renamed to a folder that is not
    empty, and the system says so only when there is no other reason."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
            (Path(beside) / "full").touch()
            if path.exists():
                os.rename(path, beside)
    except OSError as error:
        return None if error.errno in (errno.ENOTEMPTY, errno.EEXIST) else error
    return None


def _held(path: Path) -> set[str]:
    """The names in a folder that are no run's and nobody's."""
    mine = {name for work in (f".{_UNFINISHED}", f".{PARTIAL}") for name in _moved(path / work)}
    return set(os.listdir(path)) - _NOBODYS - mine


def _moved(work: Path) -> list[str]:
    """What a killed run had moved up out of its hidden folder."""
    try:
        names = json.loads((work / _MOVING).read_text(encoding="utf-8"))
    except OSError:
        return []
    return [name for name in names if (work.parent / name).exists() and not (work / name).exists()]


def refuse_to_replace(path: Path, kind: str, inputs: Iterable[Path] = ()) -> None:
    """Raise `GlmspecError` when `path` holds something other than a folder of ours of this kind, or an input."""
    place = path.resolve()
    for source in inputs:
        if place == source.resolve() or place in source.resolve().parents:
            raise GlmspecError(
                f"{path}: the output would replace its own input {source}. Choose another output folder."
            )
        if source.resolve() in place.parents:
            raise GlmspecError(f"{path}: lies inside its own input {source}. Choose another output folder.")
    if not path.exists() or (path.is_dir() and not _held(path)):
        return
    kind_there = _maker(path)
    if kind_there is None:
        raise GlmspecError(f"{path}: exists and is not a folder that glmspec wrote. Choose another output folder.")
    if kind_there != kind:
        raise GlmspecError(
            f"{path}: exists and is a glmspec {kind_there}, which this {kind} would replace. Choose another output."
        )


def _maker(path: Path) -> str | None:
    """The kind of a folder of ours."""
    try:
        return produced(json.loads((path / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None
