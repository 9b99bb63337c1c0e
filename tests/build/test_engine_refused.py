"""Engines that are refused before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.models import GOLDENS, edit_checkpoint

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert.conversion import plan_conversion
from glmspec.core.errors import GlmspecError
from glmspec.core.progress import Progress
from glmspec.models.configs.kinds import parse_config
from glmspec.models.registry import model_of
from glmspec.runtime.engine import Engine

CHECKPOINTS = GOLDENS / "checkpoints"

VERIFIER, SMALL = CHECKPOINTS / "verifier", CHECKPOINTS / "dspark_redvocab"


def build(out: Path, verifier: Path = VERIFIER, drafters=(SMALL,), target: str = "cpu", **options) -> Path:
    build_engines(verifier, drafters, TARGETS[target], BuildOptions(**options), out, Progress())
    return out


def record(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The golden verifier and one drafter."""
    return build(tmp_path_factory.mktemp("small") / "engines")


@pytest.fixture
def copied(small, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(small, tmp_path / "engines"))


def assert_refused(home: Path, verifier: Path, drafters, expected: list[str], **options) -> None:
    """Named, and not a file left beside the inputs."""
    before = sorted(home.rglob("*"))
    with pytest.raises(GlmspecError) as caught:
        build(home / "out" / "engines", verifier, drafters, **options)
    for text in expected:
        assert text in str(caught.value)
    assert sorted(home.rglob("*")) == before


def without(name: str, source: Path = VERIFIER):
    return lambda home: edit_checkpoint(source, home / "edited", drop=(name,))


def with_tensor(name: str, *shape: int, source: Path = VERIFIER):
    return lambda home: edit_checkpoint(source, home / "edited", add={name: torch.ones(shape)})


def with_config(source: Path = VERIFIER, **config):
    return lambda home: edit_checkpoint(source, home / "edited", config=config)


def with_block(source: Path = SMALL, **changes):
    block = record(source)["transformer_layer_config"] | changes
    return with_config(source, transformer_layer_config=block)


def same(folder: Path):
    return lambda home: folder


EXTRA, TAPS = "model.layers.0.extra.weight", "aux_hidden_state_layer_ids"

O_PROJ = "model.layers.3.self_attn.o_proj.weight"

REFUSED = {
    "missing tensor": (without(O_PROJ), same(SMALL), [O_PROJ, "missing"]),
    "surplus tensor": (with_tensor(EXTRA, 4), same(SMALL), [EXTRA, "surplus"]),
    "wrong shape": (with_tensor(O_PROJ, 64, 65), same(SMALL), [O_PROJ, "[64, 65]", "[64, 64]"]),
    "missing drafter tensor": (same(VERIFIER), without("fc.weight", SMALL), ["fc.weight", "missing"]),
    "tap beyond the layers": (same(VERIFIER), with_config(SMALL, **{TAPS: [7]}), [TAPS, "[7]", "6"]),
    "a drafter as the verifier": (same(CHECKPOINTS / "dspark"), same(SMALL), ["--verifier", "found a drafter"]),
    "a verifier as the drafter": (same(VERIFIER), same(VERIFIER), ["found a verifier, expected a drafter"]),
    "swapped": (same(SMALL), same(VERIFIER), ["--verifier", "found a drafter"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_writing(tmp_path, case):
    verifier, drafter, expected = REFUSED[case]
    assert_refused(tmp_path, verifier(tmp_path), (drafter(tmp_path),), expected)


def test_a_drafter_of_another_size_is_refused(tmp_path):
    """Its own tensors fit its config; it is the verifier it does not fit."""
    other = edit_checkpoint(VERIFIER, tmp_path / "v", config={"vocab_size": 90}, add={
        "lm_head.weight": torch.zeros(90, 64), "model.embed_tokens.weight": torch.zeros(90, 64),
    })  # fmt: skip
    assert_refused(tmp_path, other, (SMALL,), ["vocab_size", "found 96", "verifier's 90", "dspark_redvocab"])


def test_a_drafter_of_another_width_is_refused(tmp_path):
    drafter = with_block(hidden_size=128)(tmp_path)
    config = parse_config(record(drafter), str(drafter))
    specs = model_of(config).weight_specs("float32")
    tensors = {s.name: torch.zeros(s.dims, dtype=torch.int64 if s.name == "d2t" else torch.float32) for s in specs}
    save_file(tensors, drafter / "model.safetensors")
    assert_refused(tmp_path, VERIFIER, (drafter,), ["hidden_size", "found 128", "verifier's 64"])


def test_the_most_a_verifier_can_do_is_the_most_an_engine_may(tmp_path):
    assert_refused(
        tmp_path, VERIFIER, (), ["--max-model-len", "513", "512", "max_position_embeddings"], max_model_len=513
    )


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"max_num_seqs": 8, "max_num_batched_tokens": 31}, ["max_num_batched_tokens", "31", "32"]),
        ({"max_num_batched_tokens": 4}, ["max_num_batched_tokens"]),
    ],
)
def test_a_step_must_hold_a_block_of_every_sequence(tmp_path, options, expected):
    assert_refused(tmp_path, VERIFIER, (SMALL,), expected, **options)


def test_topk_beyond_tensorrt_s_is_refused(tmp_path):
    """Case H54. Below the limit it may be configured as large as one likes: it is clamped to the length."""
    config = {"index_topk": 4096, "max_position_embeddings": 8192}
    verifier = edit_checkpoint(VERIFIER, tmp_path / "v", config=config)
    assert_refused(tmp_path, verifier, (), ["index_topk", "4096", "3840"], max_model_len=4096)
    build(tmp_path / "fits", verifier, (), max_model_len=1024)


@pytest.mark.parametrize("content", ["notes.txt", "config.json"])
def test_a_foreign_output_folder_is_left_alone(tmp_path, content):
    (tmp_path / "out" / "engines").mkdir(parents=True)
    (tmp_path / "out" / "engines" / content).write_text('{"model_type": "llama"}')
    assert_refused(tmp_path, VERIFIER, (), [str(tmp_path / "out" / "engines"), "not a folder that glmspec wrote"])


def test_a_folder_without_a_config_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path, tmp_path / "empty", (), [str(tmp_path / "empty" / "config.json"), "no such file"])


def test_a_converted_checkpoint_without_its_weights_is_refused(tmp_path):
    folder = plan_conversion(VERIFIER).write(tmp_path / "ck").folder
    (folder / "rank0.safetensors").unlink()
    assert_refused(tmp_path, folder, (), ["rank0.safetensors", "missing"])


def test_an_input_is_not_replaced_by_the_output(tmp_path):
    folder = plan_conversion(VERIFIER).write(tmp_path / "ck").folder
    with pytest.raises(GlmspecError):
        build(folder, folder, ())
    assert (folder / "rank0.safetensors").exists()


def test_a_directory_rebuilt_from_its_own_checkpoints_keeps_them(copied):
    checkpoint = copied / "checkpoints" / "verifier"
    try:
        build(copied, checkpoint, ())
    except GlmspecError:
        assert (checkpoint / "rank0.safetensors").exists()
    else:
        Engine(copied)
