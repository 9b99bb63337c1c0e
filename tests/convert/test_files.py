"""Writing: whole files and folders or none, never over somebody else's; and safetensors files written as a stream."""

from __future__ import annotations

import json
import os
from hashlib import sha256 as digest
from pathlib import Path

import pytest

from glmspec.build.errors import GlmspecError
from glmspec.convert.files import (
    CHECKPOINT,
    ENGINES,
    producer,
    sha256,
    write_bytes,
    write_json,
)
from glmspec.convert.folders import new_folder, refuse_to_replace

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
