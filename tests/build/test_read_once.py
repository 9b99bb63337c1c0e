"""Every byte is hashed once a command, whoever shares it: at 700 GB a second reading is half an hour."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.hashed import Hashed, assert_once
from support.models import ASSETS

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.build.verify import verify_folder
from glmspec.convert.checkpoint import read_checkpoint
from glmspec.convert.command import convert_folder, options_of
from glmspec.convert.conversion import plan_conversion
from glmspec.convert.settings import ConvertSettings
from glmspec.convert.source import SINGLE
from glmspec.convert.weights import open_weights
from glmspec.core.fields import read_json
from glmspec.core.files import sha256
from glmspec.core.progress import Progress
from glmspec.triton_repo.repository import write_repository

OPTIONS = BuildOptions(max_model_len=64, max_num_seqs=2, mtp=True, draft_sampling="probabilistic", plugins="off")
WEIGHTS = ("verifier/rank0.safetensors", "dspark/rank0.safetensors")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A verifier with an MTP module, a drafter, and an engine directory of both: its eight models use two checkpoints,
    the verifier's being that of its MTP module and of the acceptance networks too."""
    home = tmp_path_factory.mktemp("once")
    for name in ("verifier", "dspark"):
        plan_conversion(ASSETS / f"tiny-{name}").write(home / name)
    build(home / "verifier", home / "dspark", home / "engines")
    return home


def build(verifier: Path, drafter: Path, out: Path) -> None:
    build_engines(verifier, [drafter], TARGETS["cpu"], OPTIONS, out, Progress(), check=False)


@pytest.fixture
def hashed(monkeypatch) -> Hashed:
    return Hashed(monkeypatch)


def test_verify_reads_engines_once_and_tells_of_each_checkpoint_once(home, hashed):
    lines = verify_folder(home / "engines", Progress()).splitlines()
    assert_once(hashed.take(), *WEIGHTS)
    assert len(lines) == 3 == len(set(lines))


def test_verify_reads_a_repository_once(home, tmp_path, hashed):
    write_repository(home / "engines", tmp_path / "repo", None, None)
    hashed.take()
    lines = verify_folder(tmp_path / "repo", Progress()).splitlines()
    assert_once(hashed.take(), *WEIGHTS)
    assert len(lines) == 4 == len(set(lines))


def test_engine_reads_converted_checkpoints_once(home, tmp_path, hashed):
    build(home / "verifier", home / "dspark", tmp_path / "engines")
    assert_once(hashed.take(), *WEIGHTS)


def test_engine_reads_hugging_face_folders_once(tmp_path, hashed):
    build(ASSETS / "tiny-verifier", ASSETS / "tiny-dspark", tmp_path / "engines")
    sources = [f"tiny-{name}/model.safetensors" for name in ("verifier", "dspark")]
    written = [f"{name}/.rank0.safetensors.partial" for name in ("verifier", "dspark")]
    assert_once(hashed.take(), *sources, *written)


def test_convert_hashes_a_source_that_it_compares_once(tmp_path, hashed):
    source = ASSETS / "tiny-dspark"
    expected = sha256(source / SINGLE)
    settings = ConvertSettings(source=source, output=tmp_path / "ck", expect_sha256=expected)
    convert_folder(settings, tmp_path / "ck", options_of(settings), Progress())
    assert read_checkpoint(tmp_path / "ck").record["source"]["files"] == {SINGLE: expected}
    assert hashed.take()[f"tiny-dspark/{SINGLE}"] == 1


def test_the_record_of_a_converted_checkpoint_is_read_once(home, monkeypatch):
    readings: list[Path] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("glmspec.") and getattr(module, "read_json", None) is read_json:
            monkeypatch.setattr(module, "read_json", lambda path: readings.append(path) or read_json(path))
    open_weights(home / "verifier")
    assert readings == [home / "verifier" / "config.json"]
