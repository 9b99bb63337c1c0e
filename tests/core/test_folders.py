"""Output folders where renaming is not possible, where another run is, and after one that was killed."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from glmspec.core import folders
from glmspec.core.errors import GlmspecError
from glmspec.core.files import CHECKPOINT, REPOSITORY, producer, write_json
from glmspec.core.folders import new_folder, resumable_folder

MAKERS = {"new": new_folder, "resumable": resumable_folder}
RENAME, MKDIR = os.rename, os.mkdir


def fill(folder: Path, text: str = "one", kind: str = CHECKPOINT) -> None:
    (folder / "part.safetensors").write_text(text)
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "file").write_text(text)
    write_json(folder / "config.json", {"producer": producer(kind)})


def make(maker: str, out: Path, text: str = "one", kind: str = CHECKPOINT, **options) -> None:
    with MAKERS[maker](out, kind, **options) as folder:
        fill(folder, text, kind)


def whole(out: Path, text: str = "one") -> bool:
    return (
        sorted(os.listdir(out)) == ["config.json", "part.safetensors", "sub"]
        and (out / "part.safetensors").read_text() == (out / "sub" / "file").read_text() == text
    )


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@contextmanager
def fixed(out: Path, why: str):
    """`out` is a folder that cannot be renamed, or nothing can be made beside it."""
    code = getattr(errno, why)

    def rename(source, target, **options):
        if Path(source) == out or Path(target) == out:
            raise OSError(code, os.strerror(code), str(source))
        return RENAME(source, target, **options)

    def mkdir(path, *rest, **options):
        if Path(path).parent == out.parent:
            raise OSError(code, os.strerror(code), str(path))
        return MKDIR(path, *rest, **options)

    out.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename) if why in ("EBUSY", "EXDEV") else patch.setattr(os, "mkdir", mkdir)
        yield


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("why", ["EBUSY", "EXDEV", "EROFS", "EACCES"])
@pytest.mark.parametrize("holds", [(), ("lost+found",)])
def test_an_empty_place_that_cannot_be_renamed_is_filled_in_place(out, maker, why, holds):
    with fixed(out, why):
        for name in holds:
            MKDIR(out / name)
        with MAKERS[maker](out, CHECKPOINT) as folder:
            fill(folder)
            assert not (out / "config.json").exists()  # nothing that could be taken for whole
    for name in holds:
        (out / name).rmdir()
    assert whole(out) and os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("why", ["EBUSY", "EXDEV", "EROFS"])
def test_a_full_place_that_cannot_be_renamed_is_refused_before_any_work(out, maker, why):
    make(maker, out)
    with (
        fixed(out, why),
        pytest.raises(GlmspecError, match=f"^{out}: holds a checkpoint, and cannot be replaced"),
        MAKERS[maker](out, CHECKPOINT),
    ):
        pytest.fail("worked")
    assert whole(out) and os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_place_that_cannot_be_made_is_refused_before_any_work(out, maker):
    out.mkdir()
    with (
        fixed(out / "other", "EROFS"),
        pytest.raises(
            GlmspecError, match=r"out/new: cannot be written \(Read-only file system\). Choose another place.$"
        ),
        MAKERS[maker](out / "new", CHECKPOINT),
    ):
        pytest.fail("worked")


def test_an_older_folder_is_in_its_place_while_a_new_one_is_made(out):
    """What is asked of the system beforehand does not disturb whoever reads it."""
    make("new", out)
    before = out.stat().st_ino
    with new_folder(out, CHECKPOINT) as folder:
        assert whole(out) and out.stat().st_ino == before
        fill(folder, "two")
    assert whole(out, "two")


def die_moving(out: Path, moved: int, error: BaseException | None) -> None:
    """Make a folder, and die when so many entries were moved up: by a signal, or with an error."""
    left, rename = moved, os.rename

    def die(source, target):
        nonlocal left
        if Path(source).parent.name == ".unfinished" and Path(target).parent == out:
            left -= 1
            if left < 0 and error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            if left < 0:
                raise error
        return rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", die)
        make("resumable", out)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("moved", range(3))
def test_a_run_that_dies_while_it_moves_up_is_gone_on_with(out, moved, killed):
    with fixed(out, "EBUSY"):
        if killed:
            process = in_process(die_moving, out, moved, None)
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
        else:
            with pytest.raises(KeyboardInterrupt, match="kept: go on with --resume"):
                die_moving(out, moved, KeyboardInterrupt())
        assert not (out / "config.json").exists()
        with pytest.raises(GlmspecError, match="left by an interrupted run"):
            make("resumable", out)
        with resumable_folder(out, CHECKPOINT, resume=True) as folder:
            assert whole(folder)
    assert whole(out)


def test_a_refused_fsync_is_no_fault_and_a_failed_one_is(out, monkeypatch):
    for code, works in ((errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)):

        def refuse(descriptor, code=code):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            if works:
                make("new", out)
                assert whole(out)
            else:
                with pytest.raises(GlmspecError, match=f"^{out}: cannot be written"):
                    make("new", out, "two")
    assert whole(out) and os.listdir(out.parent) == ["out"]


# -- other runs -------------------------------------------------------------------------------------


def in_process(work, *arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def hold(maker: str, out: Path, ready, go) -> None:
    with MAKERS[maker](out, CHECKPOINT) as folder:
        fill(folder)
        ready.set()
        go.wait(60)


def die_inside(maker: str, out: Path) -> None:
    with MAKERS[maker](out, CHECKPOINT) as folder:
        (folder / "begun").write_text("x")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("second", MAKERS)
@pytest.mark.parametrize("first", MAKERS)
def test_two_runs_for_one_output_never_meet(out, first, second):
    """Whatever their process ids are: in two containers they are the same."""
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    process = in_process(hold, first, out, ready, go)
    assert ready.wait(60)
    with pytest.raises(GlmspecError, match=f"^{out}: another run is writing it"):
        make(second, out, "two")
    go.set()
    process.join(60)
    assert process.exitcode == 0 and whole(out) and os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("mounted", [False, True])
def test_what_a_killed_run_left_goes(out, maker, mounted):
    with fixed(out if mounted else out.parent / "other", "EBUSY"):
        process = in_process(die_inside, maker, out)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        make(maker, out)
    assert whole(out)
    assert {name for name in os.listdir(out.parent) if name != "other"} == {"out"}


def test_a_run_killed_between_its_two_renames_loses_no_older_folder(out):
    make("new", out)
    out.rename(out.with_name(".out.replaced"))
    with pytest.raises(ValueError), new_folder(out, CHECKPOINT):
        raise ValueError
    assert whole(out) and os.listdir(out.parent) == ["out"]
    out.rename(out.with_name(".out.replaced"))  # it is of a kind that another command may not replace
    with pytest.raises(GlmspecError, match="is a glmspec checkpoint, which this model repository would replace"):
        make("new", out, kind=REPOSITORY)
    assert whole(out)


@pytest.mark.parametrize("maker", MAKERS)
def test_an_older_folder_comes_back_when_the_new_one_cannot_take_its_place(out, maker, monkeypatch):
    make(maker, out)

    def rename(source, target, **options):
        if Path(target) == out and whole(Path(source), "two"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        return RENAME(source, target, **options)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises((GlmspecError, OSError)):
        make(maker, out, "two")
    assert whole(out)


def test_a_folder_that_comes_meanwhile_is_not_replaced(out):
    with pytest.raises(GlmspecError, match="not a folder that glmspec wrote"), new_folder(out, CHECKPOINT) as folder:
        fill(folder)
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    assert os.listdir(out) == ["notes.txt"]


@pytest.mark.parametrize("place", ["out", "a/b/out"])
def test_folders_above_are_made_and_unmade(tmp_path, place):
    with pytest.raises(ValueError), new_folder(tmp_path / place, CHECKPOINT):
        raise ValueError
    assert os.listdir(tmp_path) == []


def test_room_is_that_of_the_disk_on_which_the_bytes_will_lie(out, monkeypatch):
    asked = []
    usage = folders.shutil.disk_usage(out.parent)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: asked.append(path) or usage._replace(free=1000))
    with fixed(out, "EBUSY"), pytest.raises(GlmspecError, match=f"^{out}: needs 2.0 kB and its disk has 1.0 kB left"):
        make("resumable", out, needed=2000)
    assert [path.parent for path in asked] == [out] and os.listdir(out) == []


def test_what_is_there_needs_no_room_again(out, monkeypatch):
    with pytest.raises(ValueError), resumable_folder(out, CHECKPOINT, needed=2000) as folder:
        fill(folder, "x" * 800)
        raise ValueError
    usage = folders.shutil.disk_usage(out.parent)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    make("resumable", out, needed=2000, resume=True)
    assert whole(out)


def test_an_interrupt_says_how_to_go_on(out):
    for error, says in ((KeyboardInterrupt, str(out)), (OSError(errno.ENOSPC, "full"), f"{out}: cannot be written")):
        there = out.with_name(".out.unfinished").exists()
        with (
            pytest.raises((KeyboardInterrupt, GlmspecError), match=f"^{says}.*whole is kept: go on with --resume"),
            resumable_folder(out, CHECKPOINT, resume=there) as folder,
        ):
            fill(folder)
            raise error


def test_a_lock_outlives_no_process(out):
    """Killed while it held the lock, and its lock file left behind."""
    process = in_process(die_inside, "new", out)
    process.join(60)
    assert out.with_name(".out.lock").exists()
    make("new", out)
    assert os.listdir(out.parent) == ["out"]


def test_mounts_of_this_machine(tmp_path):
    """The same with the real thing, where this process may mount."""
    script = """
set -e
cd "$0"; mkdir low up work over full; mkdir low/out
mount -t tmpfs none full
mount -t overlay none -o lowerdir=low,upperdir=up,workdir=work over 2>/dev/null || mkdir over/out
exec "$@"
"""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from core.test_folders import make, whole\n"
        "for out in map(Path, ('full', 'over/out')):\n"
        "    make('resumable', out); assert whole(out), out\n"
        "print('done')"
    )
    command = ["unshare", "-m", "sh", "-c", script, str(tmp_path), sys.executable, "-c", code]
    able = shutil.which("unshare") and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
    if able:
        found = subprocess.run([*command, str(Path(__file__).parents[1])], capture_output=True, text=True)
        assert found.stdout == "done\n", found.stderr
    with fixed(tmp_path / "out", "EBUSY"):
        make("resumable", tmp_path / "out")
    assert whole(tmp_path / "out") and json.loads((tmp_path / "out" / "config.json").read_text())["producer"]


def test_somebody_s_folder_under_a_hidden_name_stays(out):
    """`.OUT.replaced` is removed only when it is an older output; anything else there is told before any work."""
    with new_folder(out, CHECKPOINT) as work:
        write_json(work / "config.json", {"producer": producer(CHECKPOINT)})
    theirs = out.with_name(f".{out.name}.replaced") / "letter"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with pytest.raises(GlmspecError, match=r"\.out\.replaced: in the way"), new_folder(out, CHECKPOINT):
        pytest.fail("work that would be lost")
    assert theirs.read_text() == "mine" and (out / "config.json").exists()
