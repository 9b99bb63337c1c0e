"""Files beside the weights: what travels, what stays behind and why, what a user is told of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import ASSETS, GOLDENS, edit_checkpoint, write_checkpoint

from glmspec.convert.beside import TEXT, file_kind, matching, survey
from glmspec.convert.conversion import plan_conversion
from glmspec.convert.recipe import read_recipe
from glmspec.convert.source import Source
from glmspec.core.errors import CheckpointError

DRAFTER = GOLDENS / "checkpoints" / "dspark"
TENSORS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b.weight": torch.ones(2, 5)}
INDEX = "model.safetensors.index.json"
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def drafter(tmp_path) -> Path:
    return edit_checkpoint(DRAFTER, tmp_path / "hf", config={"auto_map": None})


def notes(folder: Path) -> str:
    return "\n".join(Source(folder).notes)


@pytest.mark.parametrize(
    "name",
    [
        *("optimizer.pt", "scheduler.pt", "rng_state_3.pth", "training_args.bin", "trainer_state.json"),
        *("optimizer.safetensors", "global_step500/", "events.out.tfevents.1.host", "README.md", "figures/"),
        *("benchmark.png", ".gitattributes", ".cache/", "original/", "preprocessor_config.json", "model-q4.gguf"),
    ],
)
def test_what_is_known_to_be_harmless_has_a_reason_and_no_note(drafter, name):
    if name.endswith("/"):
        (drafter / name).mkdir()
    else:
        (drafter / name).write_bytes(b"x")
    source = Source(drafter)
    assert source.notes == [] and source.beside.left == {name: file_kind(name).why}
    record = plan_conversion(drafter).write(drafter.parent / "ck").record
    assert record["beside"] == source.beside.left


@pytest.mark.parametrize("name", ["embeddings.pt", "head_scales.npy", "routing/"])
def test_what_is_not_known_is_noted(drafter, name):
    (drafter / name).mkdir() if name.endswith("/") else (drafter / name).write_bytes(b"x")
    assert f"not known here and left alone, check that none changes results: {name}" in notes(drafter)


def test_pickled_weights_and_code_are_noted(drafter):
    (drafter / "pytorch_model.bin").write_bytes(b"x")
    (drafter / "modeling_x.py").write_text("raise SystemExit")
    assert "pickled weights, which are never read: pytorch_model.bin" in notes(drafter)
    assert "modeling_x.py" not in notes(drafter)  # nothing asks for it
    values = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(values | {"auto_map": {"AutoModel": "modeling_x.X"}}))
    assert "code that config.json names is never run" in notes(drafter)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.gguf", "adapter_model.safetensors"])
def test_a_folder_with_other_weights_only_says_so(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}.*not read"):
        Source(tmp_path)


def test_text_files_and_their_folders_travel(tmp_path):
    folder = shutil.copytree(ASSETS / "tiny-verifier", tmp_path / "hf")
    for name in ("additional_chat_templates/tools.jinja", "chat_template.json", "added_tokens.json", "merges.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"chat_template": "x"}')
    checkpoint = plan_conversion(folder).write(tmp_path / "ck")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "chat_template.json"):
        assert (tmp_path / "ck" / name).read_bytes() == (folder / name).read_bytes()
    assert (tmp_path / "ck" / "additional_chat_templates" / "tools.jinja").exists()
    assert "additional_chat_templates/tools.jinja" in checkpoint.record["files"]  # under a digest
    assert survey(folder, {}, ["model.safetensors"]).left == {}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_byte_order_mark_is_no_part_of_json(tmp_path, name):
    folder = shutil.copytree(ASSETS / "tiny-verifier", tmp_path / "hf")
    plain = (folder / name).read_bytes()
    (folder / name).write_bytes(BOM + plain)
    checkpoint = plan_conversion(folder).write(tmp_path / "ck")
    assert checkpoint.end_tokens == plan_conversion(ASSETS / "tiny-verifier").end_tokens
    if name != "config.json":
        assert (tmp_path / "ck" / name).read_bytes() == plain


def test_a_byte_order_mark_in_a_recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(BOM + b"- {modules: '*', format: nvfp4}\n")
    assert read_recipe(tmp_path / "recipe.yaml").format("model.layers.0.mlp.up_proj", "bfloat16") == "nvfp4"


def test_a_byte_order_mark_in_an_index(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", TENSORS, shards=2)
    (folder / INDEX).write_bytes(BOM + (folder / INDEX).read_bytes())
    assert Source(folder).tensors.keys() == TENSORS.keys()


@pytest.mark.parametrize("name", ["model.safetensors", "model-fp8.safetensors", "consolidated.safetensors"])
def test_a_second_set_that_says_otherwise_is_refused(tmp_path, name):
    folder = write_checkpoint(tmp_path / "hf", TENSORS, shards=2)
    changed = TENSORS["b.weight"].clone()
    changed[1, 4] = 7
    save_file(TENSORS | {"b.weight": changed}, folder / name)
    with pytest.raises(CheckpointError, match=rf"two sets of weights, {INDEX} and {name}: they differ in b\.weight"):
        Source(folder)
    save_file(TENSORS, folder / name)  # the same
    assert Source(folder).notes == [f"files of weights that are not used were left alone: {name}"]


@pytest.mark.parametrize("at", [0, -1])
def test_copies_of_a_large_tensor_are_compared_at_both_ends(tmp_path, at):
    large = torch.zeros(1 << 17)
    folder = write_checkpoint(tmp_path / "hf", {"large": large})
    changed = large.clone()
    changed[at] = 1
    save_file({"large": changed}, folder / "model-other.safetensors")
    with pytest.raises(CheckpointError, match="they differ in large"):
        Source(folder)


def test_a_second_set_beside_one_file_and_in_another_type_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", TENSORS)
    save_file({name: tensor.bfloat16() for name, tensor in TENSORS.items()}, folder / "model-bf16.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors and model-bf16\.safetensors: they differ in a\.w"):
        Source(folder)


def test_a_second_set_under_other_names_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", TENSORS)
    save_file({f"layers.{name}": tensor for name, tensor in TENSORS.items()}, folder / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors: their tensors have other names"):
        Source(folder)


def test_an_adapter_beside_the_weights_is_refused(drafter):
    (drafter / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: an adapter"):
        Source(drafter)


def test_what_a_training_job_left_is_no_second_set(drafter):
    held = load_file(drafter / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in held.items()}, drafter / "optimizer.safetensors")
    assert Source(drafter).notes == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    from glmspec.convert.tokenizer import load_tokenizer

    folder = shutil.copytree(ASSETS / "tiny-verifier", tmp_path / "hf")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n")
    with pytest.raises(CheckpointError, match="a pointer of Git LFS"):
        (Source if name == "model.safetensors" else load_tokenizer)(folder)


def test_a_star_stays_in_its_folder(tmp_path):
    for name in ("a.tiktoken", "additional_chat_templates/b.tiktoken", "additional_chat_templates/c.jinja"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert matching(tmp_path, TEXT) == ("a.tiktoken", "additional_chat_templates/c.jinja")
