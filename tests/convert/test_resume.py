"""A conversion may die at any moment: what is whole is kept, and going on gives the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from support.models import edit_checkpoint, random_verifier

from glmspec.convert import writer
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES
from glmspec.convert.writer import Run
from glmspec.core import folders
from glmspec.core.errors import CheckpointError, GlmspecError
from glmspec.network.shards import Mapping

OPTIONS = ConvertOptions(RECIPES["nvfp4"], Mapping(2, 1))
POINTS = 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Many parts of a tiny checkpoint."""
    monkeypatch.setattr(writer, "PART_BYTES", 30_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "hf"
    random_verifier(folder, seed=1)
    return folder


def convert(folder: Path, out: Path, *, resume: bool = False, workers: int = 2, advance=lambda size: None) -> None:
    plan_conversion(folder, OPTIONS).write(out, Run(workers, resume, advance))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def die_after(folder: Path, out: Path, resume: bool, tasks: int, delay_s: float) -> None:
    """Convert in a process of its own that kills itself: after so many tasks, then a little later."""
    count = 0

    def advance(size: int) -> None:
        nonlocal count
        count += 1
        if count == tasks:
            threading.Thread(target=lambda: (time.sleep(delay_s), os.kill(os.getpid(), signal.SIGKILL))).start()

    convert(folder, out, resume=resume, workers=1, advance=advance)


def test_killed_at_random_and_resumed(folder, tmp_path):
    """Each run is killed a few tasks further, anywhere: in a task, while a part is hashed, between rename and note."""
    convert(folder, tmp_path / "whole")
    expected, rng = contents(tmp_path / "whole"), random.Random(7)
    tasks = sum(len(weight.tasks) for weight in plan_conversion(folder, OPTIONS).plan.weights)
    assert len(expected) > 20
    kept = set()
    for point in range(POINTS):
        out = tmp_path / f"out{point}"
        for resume in (False, True):
            unfinished = tmp_path / f".out{point}.unfinished"
            if resume and not unfinished.exists():
                break  # finished before the blow
            process = multiprocessing.get_context("fork").Process(
                target=die_after, args=(folder, out, resume, rng.randrange(1, tasks), rng.random() * 0.004)
            )
            process.start()
            process.join(60)
            assert process.exitcode in (0, -signal.SIGKILL)
        kept.add(sum(path.suffix == ".safetensors" for path in unfinished.iterdir()) if unfinished.exists() else -1)
        if unfinished.exists():
            convert(folder, out, resume=True)
        assert contents(out) == expected
        assert not unfinished.exists()
    assert len(kept) >= 5  # the blows fell in different places


def interrupt(folder: Path, out: Path, after: int = 12) -> Path:
    count = 0

    def advance(size: int) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(folder, out, workers=1, advance=advance)
    unfinished = out.with_name(f".{out.name}.unfinished")
    assert any(unfinished.glob("*.safetensors")) and not out.exists()
    return unfinished


def test_whole_parts_are_not_made_again(folder, tmp_path):
    unfinished = interrupt(folder, tmp_path / "ck")
    before = {path.name: path.stat().st_mtime_ns for path in unfinished.glob("*.safetensors")}
    journal = {json.loads(line).get("file") for line in (unfinished / writer.JOURNAL).read_text().splitlines()}
    read: list[int] = []
    convert(folder, tmp_path / "ck", resume=True, advance=read.append)
    assert sum(read) == plan_conversion(folder, OPTIONS).size  # so that a bar ends where it should
    kept = [name for name in before if name in journal]
    assert kept and all((tmp_path / "ck" / name).stat().st_mtime_ns == before[name] for name in kept)


def test_an_interrupted_run_is_neither_lost_nor_taken_for_a_new_one(folder, tmp_path):
    unfinished = interrupt(folder, tmp_path / "ck")
    with pytest.raises(GlmspecError, match=r"left by an interrupted run\. Go on with --resume, or delete it"):
        convert(folder, tmp_path / "ck")
    assert any(unfinished.glob("*.safetensors"))
    shutil.rmtree(unfinished)
    convert(folder, tmp_path / "ck")


def test_resuming_needs_a_run_to_resume(folder, tmp_path):
    with pytest.raises(GlmspecError, match="there is no interrupted run to go on with"):
        convert(folder, tmp_path / "ck", resume=True)


@pytest.mark.parametrize("change", ["source", "options"])
def test_resuming_with_something_else_is_refused(folder, tmp_path, change):
    interrupt(folder, tmp_path / "ck")
    other, options = folder, OPTIONS
    if change == "source":
        other = edit_checkpoint(folder, tmp_path / "other", config={"routed_scaling_factor": 2.0})
    else:
        options = ConvertOptions(RECIPES["nvfp4"], Mapping(2, 2))
    with pytest.raises(CheckpointError, match="left by a conversion of other files or with other options"):
        plan_conversion(other, options).write(tmp_path / "ck", Run(resume=True))
    if change == "options":  # the mistake costs nothing
        convert(folder, tmp_path / "ck", resume=True)


def test_a_wrong_resume_loses_nothing_even_before_the_first_part(folder, tmp_path):
    unfinished = tmp_path / ".ck.unfinished"
    process = multiprocessing.get_context("fork").Process(
        target=die_after, args=(folder, tmp_path / "ck", False, 1, 0.0)
    )
    process.start()
    process.join(60)
    assert unfinished.exists()
    with pytest.raises(CheckpointError, match="with other options"):
        plan_conversion(folder, ConvertOptions(RECIPES["auto"])).write(tmp_path / "ck", Run(resume=True))
    assert unfinished.exists()
    convert(folder, tmp_path / "ck", resume=True)


def test_a_part_cut_short_is_made_again(folder, tmp_path):
    convert(folder, tmp_path / "whole")
    unfinished = interrupt(folder, tmp_path / "ck")
    part = next(unfinished.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-10])
    convert(folder, tmp_path / "ck", resume=True)
    assert contents(tmp_path / "ck") == contents(tmp_path / "whole")


def test_a_part_that_changed_is_made_again(folder, tmp_path):
    convert(folder, tmp_path / "whole")
    unfinished = interrupt(folder, tmp_path / "ck")
    part = next(unfinished.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    convert(folder, tmp_path / "ck", resume=True)
    assert contents(tmp_path / "ck") == contents(tmp_path / "whole")


def test_an_empty_journal_is_a_new_one(folder, tmp_path):
    convert(folder, tmp_path / "whole")
    (interrupt(folder, tmp_path / "ck") / writer.JOURNAL).write_bytes(b"")
    convert(folder, tmp_path / "ck", resume=True)
    assert contents(tmp_path / "ck") == contents(tmp_path / "whole")


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_never_share_a_folder(folder, tmp_path, resume):
    """The second one is told of the first, and touches nothing."""
    told = []

    def meanwhile(size: int) -> None:
        if not told:
            with pytest.raises(GlmspecError, match="another run is writing it") as caught:
                convert(folder, tmp_path / "ck", resume=resume)
            told.append(caught)

    convert(folder, tmp_path / "ck", workers=1, advance=meanwhile)
    convert(folder, tmp_path / "whole")
    assert told and contents(tmp_path / "ck") == contents(tmp_path / "whole")


def test_a_disk_that_fills_up_is_one_message(folder, tmp_path, monkeypatch):
    def full(descriptor: int, data, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(GlmspecError, match=r"cannot be written .*No space left on device"):
        convert(folder, tmp_path / "ck")
    assert list(tmp_path.iterdir()) == []


def test_a_journal_whose_last_line_is_torn_is_read(folder, tmp_path):
    convert(folder, tmp_path / "whole")
    unfinished = interrupt(folder, tmp_path / "ck")
    journal = unfinished / writer.JOURNAL
    journal.write_bytes(journal.read_bytes()[:-7])
    convert(folder, tmp_path / "ck", resume=True)
    assert contents(tmp_path / "ck") == contents(tmp_path / "whole")


def test_a_disk_too_small_is_said_before_anything_is_written(folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(GlmspecError, match=r"needs 1\.\d MB and its disk has 100\.0 kB left"):
        convert(folder, tmp_path / "ck")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_nothing(folder, tmp_path, workers):
    convert(folder, tmp_path / "one", workers=1)
    convert(folder, tmp_path / "more", workers=workers)
    assert contents(tmp_path / "one") == contents(tmp_path / "more")


def test_a_task_that_fails_stops_the_run(folder, tmp_path):
    """With other tasks waiting behind it; the message is the task's own."""

    def fail(size: int) -> None:
        raise CheckpointError("tensor x: spoiled")

    with pytest.raises(CheckpointError, match="tensor x: spoiled"):
        convert(folder, tmp_path / "ck", workers=3, advance=fail)
