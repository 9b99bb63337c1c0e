"""Writing: whole files and folders or none, never over somebody else's; and safetensors files written as a stream."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from hashlib import sha256 as digest
from pathlib import Path

import pytest

from glmspec.core.errors import GlmspecError, os_error_text
from glmspec.core.files import (
    CHECKPOINT,
    ENGINES,
    check_output,
    producer,
    sha256,
    write_bytes,
    write_json,
    write_output,
)
from glmspec.core.folders import new_folder, refuse_to_replace
from glmspec.core.units import size_text

# -- files --------------------------------------------------------------------------------------


def test_an_output_inside_its_input_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(GlmspecError, match="lies inside its own input"):
        refuse_to_replace(tmp_path / "in" / "out", CHECKPOINT, [tmp_path / "in"])


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "file"
    for data in (b"first", b"", b"second"):
        write_bytes(path, data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def test_an_unfinished_file_does_not_replace_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


FIXED = {"mounted": errno.EBUSY, "of another layer": errno.EXDEV}


@pytest.mark.parametrize("why", FIXED)
@pytest.mark.parametrize("data", [b"longer than before", b"short", b""])
def test_a_file_that_cannot_be_replaced_is_written_into(tmp_path, monkeypatch, why, data):
    path = tmp_path / "file"
    path.write_bytes(b"before, it was")
    inode, rename = path.stat().st_ino, os.rename

    def refuse(source, target):
        if Path(target) == path:
            raise OSError(FIXED[why], os.strerror(FIXED[why]))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    write_output(path, data)
    assert path.read_bytes() == data and path.stat().st_ino == inode
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(OSError) as caught:
        (path.unlink(), write_output(path, data))
    assert caught.value.filename == str(path) and os.listdir(tmp_path) == []


@pytest.mark.parametrize("why", ["EROFS", "EACCES"])
def test_a_file_in_a_folder_that_may_not_be_written(tmp_path, monkeypatch, why):
    """Mounted by itself below a read-only root, say."""
    path, opened = tmp_path / "file", os.open
    code = getattr(errno, why)

    def refuse(name, flags, *rest, **options):
        made = flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE
        if (Path(name).parent == tmp_path and Path(name) != path and made) or (Path(name) == tmp_path and made):
            raise OSError(code, os.strerror(code), str(name))
        return opened(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(GlmspecError, match=f"^--x {path}: cannot be written"):
        check_output(path, "--x")
    monkeypatch.setattr(os, "open", opened)
    path.write_bytes(b"before")
    monkeypatch.setattr(os, "open", refuse)
    check_output(path)
    write_output(path, b"after")
    assert path.read_bytes() == b"after"


@pytest.mark.parametrize("what", ["folder", "no folder above", "file above"])
def test_what_cannot_be_an_output_is_named(tmp_path, what):
    (tmp_path / "file").touch()
    path = {"folder": tmp_path, "no folder above": tmp_path / "no" / "x", "file above": tmp_path / "file" / "x"}[what]
    with pytest.raises(GlmspecError, match=f"^{path}: cannot be written .* folder"):
        check_output(path)


def test_a_pipe_is_written_into(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_output(tmp_path / "pipe")
    write_output(tmp_path / "pipe", b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_full_disk_is_told_of_the_file_and_loses_nothing(tmp_path, monkeypatch):
    write_bytes(tmp_path / "file", b"old")
    write, left = os.write, [3]

    def full(descriptor, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] = 0
        return write(descriptor, data[:3])

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(os, "write", full)
        write_bytes(tmp_path / "file", b"new one")
    text = os_error_text(caught.value)
    assert text.startswith(f"{tmp_path / 'file'}: No space left on device. Make room")
    assert (tmp_path / "file").read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def write_many(folder: Path, text: str) -> None:
    for number in range(200):
        write_json(folder / f"{number}", {"by": text * 1000})


def test_two_writers_lose_nothing(tmp_path):
    """Each file is whole and one of theirs, no write fails, and nothing is left."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(tmp_path, text)) for text in "ab"]
    for one in writers:
        one.start()
    for one in writers:
        one.join(120)
    assert [one.exitcode for one in writers] == [0, 0]
    assert sorted(os.listdir(tmp_path), key=int) == [str(number) for number in range(200)]
    assert {json.loads(path.read_text())["by"] for path in tmp_path.iterdir()} <= {"a" * 1000, "b" * 1000}


def test_what_a_killed_writer_left_is_taken_over(tmp_path):
    (tmp_path / ".file.partial").write_bytes(b"half of something longer")
    write_bytes(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB"),
        (12_345_678, "12.3 MB"), (476_000_000_000, "476.0 GB"), (1_510_000_000_000, "1,510.0 GB"),
    ],
)  # fmt: skip
def test_sizes_are_readable(count, text):
    assert size_text(count) == text


def test_json_keeps_its_order(tmp_path):
    write_json(tmp_path / "a.json", {"b": 1, "a": [True, None]})
    assert list(json.loads((tmp_path / "a.json").read_text())) == ["b", "a"]
    assert (tmp_path / "a.json").read_text().endswith("}\n")


@pytest.mark.parametrize("size", [0, 1, (1 << 22) - 1, 1 << 22, (1 << 22) + 1])
def test_sha256_of_files_around_the_chunk_size(tmp_path, size):
    data = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    assert sha256(tmp_path / "file") == digest(data[:size]).hexdigest()


# -- folders ------------------------------------------------------------------------------------


def fill(path: Path, content: str) -> None:
    with new_folder(path, CHECKPOINT) as folder:
        write_json(folder / "config.json", {"producer": producer(CHECKPOINT), "content": content})
        (folder / content).write_text(content)


def test_a_new_folder_appears_whole(tmp_path):
    with new_folder(tmp_path / "a" / "b", CHECKPOINT) as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert os.listdir(tmp_path / "a") == ["b"] and os.listdir(tmp_path / "a" / "b") == ["x"]


def test_an_older_folder_of_ours_is_replaced(tmp_path):
    fill(tmp_path / "out", "one")
    fill(tmp_path / "out", "two")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "two"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_of_ours_of_another_kind_is_not_replaced(tmp_path):
    """An engine directory may hold the only converted weights there are."""
    fill(tmp_path / "out", "one")
    with pytest.raises(GlmspecError, match="is a glmspec checkpoint, which this engine directory"):
        refuse_to_replace(tmp_path / "out", ENGINES)
    assert (tmp_path / "out" / "one").exists()


@pytest.mark.parametrize("inside", ["", "sub", "sub/deeper"])
def test_an_output_does_not_replace_its_input(tmp_path, inside):
    fill(tmp_path / "out", "one")
    with pytest.raises(GlmspecError, match="would replace its own input"):
        refuse_to_replace(tmp_path / "out", CHECKPOINT, [tmp_path / "other", tmp_path / "out" / inside])
    assert (tmp_path / "out" / "one").exists()


@pytest.mark.parametrize("error", [ValueError, GlmspecError, KeyboardInterrupt])
def test_an_error_inside_leaves_nothing(tmp_path, error):
    with pytest.raises(error), new_folder(tmp_path / "out", CHECKPOINT) as folder:
        (folder / "x").write_text("x")
        raise error("stop")
    assert os.listdir(tmp_path) == []


def test_an_error_inside_keeps_the_older_folder(tmp_path):
    fill(tmp_path / "out", "one")
    with pytest.raises(ValueError), new_folder(tmp_path / "out", CHECKPOINT) as folder:
        (folder / "x").write_text("x")
        raise ValueError
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "one"]
    assert os.listdir(tmp_path) == ["out"]


def test_an_interrupted_replacement_keeps_the_older_folder(tmp_path, monkeypatch):
    """The old folder steps aside and comes back when the new one cannot take its place."""
    fill(tmp_path / "out", "one")
    rename = Path.rename

    def fail(self, target):
        if self.name == ".out.partial":
            raise OSError(5, "no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(GlmspecError, match=r"out: cannot be written \(no\)"):
        fill(tmp_path / "out", "two")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "one"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_named_by_dots_or_a_link(tmp_path, monkeypatch):
    """`-o .`, `-o ..` and a link mean the folder itself, and nothing around it."""
    fill(tmp_path / "home" / "out", "one")
    (tmp_path / "home" / "out" / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home" / "out")
    monkeypatch.chdir(tmp_path / "home" / "out" / "sub")
    fill(Path(".."), "two")
    assert sorted(os.listdir(tmp_path / "home" / "out")) == ["config.json", "two"]
    fill(tmp_path / "link", "three")
    assert sorted(os.listdir(tmp_path / "home" / "out")) == ["config.json", "three"]
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    fill(Path("."), "four")
    assert sorted(os.listdir(tmp_path / "empty")) == ["config.json", "four"]


FOREIGN = {
    "no config": {"notes.txt": "mine"},
    "a model's config": {"config.json": '{"model_type": "llama"}'},
    "another producer": {"config.json": '{"producer": {"name": "modelopt"}}'},
    "an odd producer": {"config.json": '{"producer": "glmspec"}'},
    "not JSON": {"config.json": "{"},
    "a list": {"config.json": "[]"},
    "not text": {"config.json": "\xff"},
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_folder_is_not_replaced(tmp_path, case):
    out = tmp_path / "out"
    out.mkdir()
    for name, text in FOREIGN[case].items():
        (out / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(GlmspecError, match="not a folder that glmspec wrote") as caught:
        fill(out, "one")
    assert str(out) in str(caught.value)
    assert {path.name: path.read_bytes().decode("latin-1") for path in out.iterdir()} == FOREIGN[case]
    assert os.listdir(tmp_path) == ["out"]


def test_a_file_in_the_way_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(GlmspecError, match="not a folder that glmspec wrote"):
        fill(tmp_path / "out", "one")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("below", ["ck", "a/ck"])
def test_a_file_above_is_named(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(GlmspecError, match="file"):
        fill(tmp_path / "file" / below, "one")


def test_an_empty_or_absent_folder_is_nobody_s(tmp_path):
    refuse_to_replace(tmp_path / "absent", CHECKPOINT)
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "one")
    assert (tmp_path / "out" / "one").exists()


def test_the_producer_has_a_version():
    assert producer(CHECKPOINT)["name"] == "glmspec" and producer(CHECKPOINT)["version"][0].isdigit()
