"""An engine build that dies while it converts loses no part that was whole; so does a bundle's."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
from support.cli import done, refused
from support.models import GOLDENS, edit_checkpoint

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert import writer
from glmspec.core import folders
from glmspec.core.errors import CheckpointError, GlmspecError
from glmspec.core.progress import Progress
from glmspec.runtime.engine import Engine

VERIFIER, DRAFTER = GOLDENS / "checkpoints" / "verifier", GOLDENS / "checkpoints" / "dspark_redvocab"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Many parts of a tiny checkpoint."""
    monkeypatch.setattr(writer, "PART_BYTES", 100_000)


def build(out: Path, verifier: Path = VERIFIER, drafters=(DRAFTER,), target: str = "cpu", **flags) -> str | None:
    return build_engines(verifier, drafters, TARGETS[target], BuildOptions(), out, Progress(), check=False, **flags)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def die_at(monkeypatch: pytest.MonkeyPatch, part: int, how) -> None:
    """The build ends when so many parts are whole."""
    add, left = writer.Journal.add, part

    def counted(self, *values) -> None:
        nonlocal left
        add(self, *values)
        left -= 1
        if not left:
            how()

    monkeypatch.setattr(writer.Journal, "add", counted)


def killed_at(out: Path, part: int, flags: dict) -> None:
    die_at(pytest.MonkeyPatch(), part, lambda: os.kill(os.getpid(), signal.SIGKILL))
    build(out, **flags)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> dict[str, int]:
    """How many a build writes, by member."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "PART_BYTES", 100_000)
        out = tmp_path_factory.mktemp("whole") / "e"
        build(out)
    checkpoints = out / "checkpoints"
    return {one.name: len(list(one.glob("*.safetensors"))) for one in checkpoints.iterdir()}


@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.parametrize("where", ["verifier", "dspark"])
def test_conversions_are_gone_on_with(tmp_path, monkeypatch, parts, how, where):
    """In the first member, and in the second, when the first is whole."""
    build(tmp_path / "whole")
    out, unfinished = tmp_path / "e", tmp_path / ".e.unfinished"
    point = 3 if where == "verifier" else parts["verifier"] + 2
    if how == "killed":
        process = multiprocessing.get_context("fork").Process(target=killed_at, args=(out, point, {}))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match=f"^{out}: .*go on with --resume"):
            die_at(patch, point, interrupt)
            build(out)
    assert not out.exists()
    before = {path: path.stat().st_mtime_ns for path in unfinished.rglob("*.safetensors")}
    assert len(before) >= point
    with pytest.raises(GlmspecError, match=r"left by an interrupted run\. Go on with --resume, or delete it"):
        build(out)
    build(out, resume=True)
    moved = {out / path.relative_to(unfinished): time for path, time in before.items()}
    assert sum(path.stat().st_mtime_ns == time for path, time in moved.items()) >= point  # not written again
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["e", "whole"]
    Engine(out)


def test_a_bundle_s_conversions_are_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr("glmspec.build.bundle._write_kernels", lambda *_: False)
    out = tmp_path / "b"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        die_at(patch, 3, interrupt)
        build(out, target="b200")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".b.unfinished").rglob("*.safetensors")}
    assert "a bundle with all that needs no GPU" in build(out, target="b200", resume=True)
    after = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert len(before) >= 3 and sum(after[name] == time for name, time in before.items()) >= 3
    assert os.listdir(tmp_path) == ["b"]


def test_another_verifier_is_not_mixed_in(tmp_path, monkeypatch):
    other = edit_checkpoint(VERIFIER, tmp_path / "other", config={"routed_scaling_factor": 2.0})
    for point in (3, 1000):  # begun, and whole
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            die_at(patch, point, interrupt)
            if point == 1000:
                patch.setattr("glmspec.build.engine_writer._write_member", lambda *_: interrupt())
            build(tmp_path / "e", drafters=())
        with pytest.raises(CheckpointError, match="left by a conversion of other files or with other options"):
            build(tmp_path / "e", other, drafters=(), resume=True)
        assert any((tmp_path / ".e.unfinished").rglob("*.safetensors"))
        shutil.rmtree(tmp_path / ".e.unfinished")


def test_room_for_all_members_is_asked_before_any_work(tmp_path, monkeypatch):
    build(tmp_path / "one", drafters=())
    needed = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    monkeypatch.setattr("glmspec.build.engine.greatest_steps", lambda *_: pytest.fail("worked"))
    with pytest.raises(GlmspecError, match=rf"^{tmp_path / 'e'}: needs .* [kM]B and its disk has .* [kM]B left"):
        build(tmp_path / "e")
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize("layout", ["trtllm", "hf"])
def test_converting_again_is_nothing_to_do(tmp_path, layout):
    source = Path(shutil.copytree(VERIFIER, tmp_path / "source"))
    command = ("convert", source, "-o", tmp_path / "ck", "--format", layout)
    done(*command)
    before = {path: path.stat().st_ino for path in (tmp_path / "ck").iterdir()}

    def written(*more) -> bool:
        """Whether it was written again."""
        nonlocal before
        said = done(*command, *more).stderr
        after = {path: path.stat().st_ino for path in (tmp_path / "ck").iterdir()}
        same, before = after == before, after
        assert same == ("nothing to do" in said)
        return not same

    assert not written() and not written("--workers", 1)
    os.utime(source / "model.safetensors")
    assert written() and not written()
    assert written("--quant", "fp8") and written() and not written()
    path = source / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, 2]}))
    assert written() and not written()
    part = next((tmp_path / "ck").glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert written()
    next((tmp_path / "ck").glob("*.safetensors")).unlink()
    assert written()


def test_an_engine_with_nothing_to_resume_says_so(tmp_path):
    arguments = ("engine", "--verifier", VERIFIER, "--target", "cpu", "-o", tmp_path / "e", "--no-validate", "--resume")
    assert "there is no interrupted run to go on with" in refused(1, *arguments)
    assert os.listdir(tmp_path) == []
