"""Where a folder came from: by names in the hub's cache, by notes of a download; not believed of a changed file."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest
from support.models import GOLDENS

from glmspec.convert import origin
from glmspec.convert.conversion import plan_conversion

DRAFTER = GOLDENS / "checkpoints" / "dspark"
COMMIT = "0123456789abcdef" * 2 + "01234567"


def snapshot(home: Path, digest: str | None = None) -> Path:
    """The golden drafter as the hub's client keeps it. digest: what the blob of the weights is called."""
    root = home / "models--some-org--a-drafter"
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (root / "blobs").mkdir()
    for path in DRAFTER.iterdir():
        name = sha256(path.read_bytes()).hexdigest() if path.suffix == ".safetensors" else "b" * 40
        name = digest if digest and path.suffix == ".safetensors" else name
        (root / "blobs" / name).write_bytes(path.read_bytes())
        (folder / path.name).symlink_to(f"../../blobs/{name}")
    return folder


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that were hashed to tell where weights came from."""
    seen: list[str] = []
    real = origin.sha256
    monkeypatch.setattr(origin, "sha256", lambda path, *rest: seen.append(path.name) or real(path, *rest))
    return seen


def record(folder: Path, out: Path) -> dict:
    return plan_conversion(folder).write(out).record["source"]


@pytest.mark.parametrize("linked", [False, True])
def test_a_snapshot_tells_repository_revision_and_digests(tmp_path, hashed, linked):
    folder = snapshot(tmp_path)
    if linked:
        (tmp_path / "link").symlink_to(folder)
    found = record(tmp_path / "link" if linked else folder, tmp_path / "ck")
    digest = sha256((DRAFTER / "model.safetensors").read_bytes()).hexdigest()
    assert found == {
        "folder": "a-drafter",
        "repo": "some-org/a-drafter",
        "revision": COMMIT,
        "files": {"model.safetensors": digest},
    }
    assert hashed == []


def test_a_blob_that_changed_after_it_was_linked_is_hashed(tmp_path, hashed):
    folder = snapshot(tmp_path, "d" * 64)
    assert record(folder, tmp_path / "a")["files"] == {"model.safetensors": "d" * 64}
    blob = (folder / "model.safetensors").resolve()
    os.utime(blob, (blob.stat().st_atime, blob.stat().st_mtime + 60))
    digest = sha256(blob.read_bytes()).hexdigest()
    assert record(folder, tmp_path / "b")["files"] == {"model.safetensors": digest}
    assert hashed == ["model.safetensors"]


@pytest.mark.parametrize("name", ["e" * 40, "some-etag"])
def test_a_blob_without_a_sha256_for_a_name_is_hashed(tmp_path, hashed, name):
    found = record(snapshot(tmp_path, name), tmp_path / "ck")
    assert found["files"] == {"model.safetensors": sha256((DRAFTER / "model.safetensors").read_bytes()).hexdigest()}
    assert (found["revision"], hashed) == (COMMIT, ["model.safetensors"])


def test_a_folder_that_only_looks_like_a_snapshot(tmp_path):
    folder = tmp_path / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for path in DRAFTER.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    found = record(folder, tmp_path / "ck")
    assert (found["folder"], found["repo"], found["revision"]) == (COMMIT, None, None)


def test_files_of_several_revisions_are_noted(tmp_path):
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    notes = tmp_path / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for path, commit in zip(paths, "ab", strict=True):
        path.write_bytes(b"x")
        (notes / f"{path.name}.metadata").write_text(f"{commit * 40}\n{'d' * 64}\n1.0\n")
    assert "a.safetensors of aaaaaaaaaaaa, b.safetensors of bbbbbbbbbbbb" in origin.mixed_revisions(paths)[0]
    assert origin.source_record(tmp_path, paths)["revision"] is None
    assert origin.mixed_revisions(paths[:1]) == []
