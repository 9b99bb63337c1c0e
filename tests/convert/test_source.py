"""Checkpoint folders as they are found: one file or shards, whole or broken in every way that can be named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models import write_checkpoint

from glmspec.convert.source import Source
from glmspec.core.errors import CheckpointError, GlmspecError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c.bias": torch.arange(7, dtype=torch.int64),
    "d.weight": torch.ones(8, 2).to(torch.float8_e4m3fn),
    "e.mask": torch.tensor([True, False]),
}
INDEX = "model.safetensors.index.json"
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "sharded", TENSORS, {"model_type": "x"}, shards=3)


@pytest.fixture
def single(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "single", TENSORS, {"model_type": "x"})


def refused(folder: Path, *expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Source(folder)
    for text in expected:
        assert text in str(caught.value)


def edit_index(folder: Path, change) -> None:
    values = json.loads((folder / INDEX).read_text())
    change(values["weight_map"])
    (folder / INDEX).write_text(json.dumps(values))


def test_one_file_and_shards_read_alike(single, sharded):
    for folder in (single, sharded):
        source = Source(folder)
        assert source.config == {"model_type": "x"} and source.notes == []
        assert source.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert name in source
            assert source.tensors[name].shape == tuple(tensor.shape)
            assert torch.equal(source.read(name).view(torch.uint8), tensor.view(torch.uint8))
    assert {n: i.dtype for n, i in Source(single).tensors.items()} == {
        "a.weight": "F32", "b.weight": "BF16", "c.bias": "I64", "d.weight": "F8_E4M3", "e.mask": "BOOL",
    }  # fmt: skip
    assert [path.name for path in Source(single).files] == ["model.safetensors"]
    assert [path.name for path in Source(sharded).files][:1] == [FIRST] and len(Source(sharded).files) == 3


def test_an_unknown_name_is_not_in_it(single):
    assert "a.weigh" not in Source(single)


def test_missing_shards_are_all_named(sharded):
    (sharded / FIRST).unlink()
    (sharded / LAST).unlink()
    refused(sharded, str(sharded / INDEX), FIRST, LAST, "named in the index")


def test_a_tensor_its_shard_lacks_is_named(sharded):
    edit_index(sharded, lambda weight_map: weight_map.update({"f.weight": FIRST}))
    refused(sharded, str(sharded / FIRST), "f.weight", "the index says")


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_file_cut_short_is_named(single, sharded, keep):
    for path in (single / "model.safetensors", sharded / FIRST):
        path.write_bytes(path.read_bytes()[:keep])
        refused(path.parent, str(path), "not a whole safetensors file")


def test_a_file_of_something_else_is_named(single):
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n")
    refused(single, str(single / "model.safetensors"), "not a whole safetensors file")


def test_a_stray_shard_is_noted_and_left_alone(sharded):
    save_file({"a.weight": torch.zeros(3, 4), "stray.weight": torch.zeros(1)}, sharded / "model-00004.safetensors")
    source = Source(sharded)
    assert source.tensors.keys() == TENSORS.keys()
    assert torch.equal(source.read("a.weight"), TENSORS["a.weight"])
    assert len(source.notes) == 1 and "model-00004.safetensors" in source.notes[0]


def test_the_index_goes_before_a_single_file(sharded):
    save_file({"a.weight": torch.zeros(3, 4)}, sharded / "model.safetensors")
    source = Source(sharded)
    assert torch.equal(source.read("a.weight"), TENSORS["a.weight"])
    assert "model.safetensors" in source.notes[0]


def test_the_index_says_which_copy_is_read(sharded):
    save_file({"a.weight": torch.zeros(3, 4), "c.bias": TENSORS["c.bias"]}, sharded / LAST)
    assert torch.equal(Source(sharded).read("a.weight"), TENSORS["a.weight"])


def test_a_folder_without_tensors_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    refused(tmp_path, str(tmp_path), "model.safetensors", INDEX)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map_is_named(sharded, index):
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, str(sharded / INDEX), "weight_map")


def test_a_broken_index_is_named(sharded):
    (sharded / INDEX).write_text("{")
    with pytest.raises(GlmspecError, match=INDEX):
        Source(sharded)


def test_an_index_of_wrong_types_is_named(sharded):
    edit_index(sharded, lambda weight_map: weight_map.update({"a.weight": 1}))
    refused(sharded, INDEX, "a.weight")


def test_a_tensor_the_index_does_not_name_is_noted(sharded):
    edit_index(sharded, lambda weight_map: weight_map.pop("d.weight"))  # a.weight keeps its shard in use
    source = Source(sharded)
    assert "d.weight" not in source and any("d.weight" in note for note in source.notes)
