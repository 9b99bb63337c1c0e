"""Engine directories that are refused when they are loaded."""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.models import GOLDENS, edit_checkpoint
from support.records import rewrite as rewrite_file

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert.conversion import plan_conversion
from glmspec.core.errors import GlmspecError
from glmspec.core.progress import Progress
from glmspec.runtime.engine import Engine

CHECKPOINTS = GOLDENS / "checkpoints"

VERIFIER, SMALL = CHECKPOINTS / "verifier", CHECKPOINTS / "dspark_redvocab"


def build(out: Path, verifier: Path = VERIFIER, drafters=(SMALL,), target: str = "cpu", **options) -> Path:
    build_engines(verifier, drafters, TARGETS[target], BuildOptions(**options), out, Progress())
    return out


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The golden verifier and one drafter."""
    return build(tmp_path_factory.mktemp("small") / "engines")


@pytest.fixture
def copied(small, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(small, tmp_path / "engines"))


def refused_at_load(folder: Path, *expected: str, **options) -> None:
    with pytest.raises(GlmspecError) as caught:
        Engine(folder, **options)
    for text in expected:
        assert text in str(caught.value)


def rewrite(folder: Path, change) -> None:
    """Edit a record as if it had been written so."""
    rewrite_file(folder / "config.json", change)


def resign(engines: Path, name: str) -> None:
    """Make the directory agree with an edited model config."""
    path = engines / name / "config.json"
    rewrite(engines, lambda values: values["files"].update({f"{name}/config.json": digest(path)}))


@pytest.mark.parametrize("name", ["verifier", "dspark"])
def test_an_edited_model_config_is_refused(copied, name):
    rewrite(copied / name, lambda values: values["build_config"].update(max_num_seqs=99))
    refused_at_load(copied, f"{name}/config.json", "changed since")


@pytest.mark.parametrize("name", ["verifier", "dspark"])
def test_another_network_hash_is_refused(copied, name):
    rewrite(copied / name, lambda values: values["networks"]["context"].update(sha256="0" * 64))
    resign(copied, name)
    refused_at_load(copied, "network 000000000000", "Build the engine directory again")


@pytest.mark.parametrize("name, source", [("verifier", VERIFIER), ("dspark", SMALL)])
def test_other_weights_are_refused(copied, tmp_path, name, source):
    tensors = load_file(source / "model.safetensors")
    key = "model.norm.weight" if name == "verifier" else "norm.weight"
    other = edit_checkpoint(source, tmp_path / "other", add={key: tensors[key] + 1})
    shutil.rmtree(copied / "checkpoints" / name)
    plan_conversion(other).write(copied / "checkpoints" / name)
    refused_at_load(copied, f"checkpoints/{name}", "not the checkpoint")


def test_weights_cut_short_are_refused(copied):
    path = copied / "checkpoints" / "verifier" / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused_at_load(copied, "rank0.safetensors")


def test_missing_weights_are_refused(copied):
    (copied / "checkpoints" / "verifier" / "rank0.safetensors").unlink()
    refused_at_load(copied, "rank0.safetensors", "missing")


def test_a_missing_model_config_is_named(copied):
    (copied / "dspark" / "config.json").unlink()
    refused_at_load(copied, "dspark/config.json")


def test_edited_limits_are_refused(copied):
    rewrite(copied, lambda values: values["limits"].update(max_num_seqs=99, max_num_batched_tokens=4096))
    refused_at_load(copied, "limits")


def test_what_is_no_engine_directory_is_refused(tmp_path):
    refused_at_load(VERIFIER, str(VERIFIER), "not an engine directory")
    refused_at_load(tmp_path, "no such file")


def test_an_engine_for_a_gpu_is_not_run_here(copied):
    rewrite(copied, lambda values: values.update(target="b200"))
    refused_at_load(copied, "b200", "--target cpu")


def test_an_unknown_drafter_is_refused_with_the_names_there_are(small):
    refused_at_load(small, "'dflash2'", "It has: dspark", drafter="dflash2")


@pytest.mark.parametrize("chosen, name", [(None, "dspark"), ("dspark-2", "dspark-2"), ("dspark_redvocab", "dspark-2")])
def test_a_drafter_is_chosen_by_name_or_by_its_folder_s(golden_engines, chosen, name):
    assert Engine(golden_engines, chosen).drafter_name == name


def test_without_speculation_no_drafter_is_loaded(small):
    engine = Engine(small, speculate=False)
    assert engine.drafter is None and engine.drafter_name is None


def test_a_name_goes_before_a_folder_s(golden_engines, tmp_path):
    engines = Path(shutil.copytree(golden_engines, tmp_path / "engines"))
    rewrite(engines, lambda values: values["drafters"][0].update(source="dflash2"))
    assert Engine(engines, "dflash2").drafter_name == "dflash2"
