"""Drafters as training jobs save them: the verifier's own inside, names behind wrappers, maps of nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import GOLDENS, edit_checkpoint

from glmspec.convert.conversion import plan_conversion
from glmspec.core.errors import CheckpointError

DSPARK, DFLASH2, REDUCED = (GOLDENS / "checkpoints" / name for name in ("dspark", "dflash2", "dspark_redvocab"))
HEAD, NORM = torch.full((96, 64), 3.0), torch.ones(64)


def weights(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    return plan_conversion(folder).write(out).load()


def renamed(source: Path, out: Path, rename, add: dict | None = None) -> Path:
    """The checkpoint with every tensor under another name."""
    tensors = load_file(source / "model.safetensors")
    moved = {rename(name): tensor for name, tensor in tensors.items()}
    return edit_checkpoint(source, out, drop=list(tensors), add={**moved, **(add or {})})


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """No two in one memory, which safetensors refuses."""
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def assert_same(folder: Path, source: Path, home: Path) -> None:
    found, expected = weights(folder, home / "found"), weights(source, home / "expected")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def refused(folder: Path, *expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(folder)
    assert all(text in str(caught.value) for text in (str(folder), *expected)), caught.value


# -- the verifier's own tensors -------------------------------------------------------------------

OWNED = [
    {"verifier_lm_head.weight": HEAD, "verifier_norm.weight": NORM},
    {"verifier.lm_head.weight": HEAD, "verifier.model.norm.weight": NORM, "verifier.embed_tokens.weight": HEAD},
    {"teacher_lm_head.weight": HEAD, "target_lm_head.weight": HEAD, "target_embed_tokens.weight": HEAD},
    {"target_model.model.layers.0.mlp.down_proj.weight": HEAD.T, "target_model.lm_head.weight": HEAD},
    {"module.verifier.model.layers.0.mlp.gate.e_score_correction_bias": NORM},
]


@pytest.mark.parametrize("add", OWNED, ids=lambda add: next(iter(add)))
@pytest.mark.parametrize("source", [DSPARK, REDUCED], ids=["shared head", "own head"])
def test_the_verifier_s_own_are_left_out(tmp_path, source, add):
    folder = edit_checkpoint(source, tmp_path / "d", add=apart(add))
    left = plan_conversion(folder).plan.left_out
    assert sorted(add) == next(names for reason, names in left.items() if "verifier's own" in reason)
    assert_same(folder, source, tmp_path)


def test_a_verifier_s_head_is_no_head_of_the_drafter(tmp_path):
    head = {"verifier_lm_head.weight": torch.zeros(48, 64)}
    refused(edit_checkpoint(REDUCED, tmp_path / "d", drop=["lm_head.weight"], add=head), "lm_head.weight: missing")


def test_a_head_and_a_verifier_s_head_are_told_apart(tmp_path):
    own, theirs = torch.full((96, 64), 2.0), {"verifier_lm_head.weight": HEAD}
    folder = edit_checkpoint(DSPARK, tmp_path / "d", add={"lm_head.weight": own, **theirs})
    assert torch.equal(weights(folder, tmp_path / "out")["lm_head.weight"], own)


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("target_norm.weight", NORM),  # may be trained
        ("target_proj.weight", HEAD),
        ("verifier_norm.weight", torch.ones(192)),  # of the features, not of the verifier's stream
        ("verifier_fc.weight", HEAD),
        ("ema.norm.weight", NORM),
    ],
)
def test_what_may_be_a_drafter_s_own_is_surplus(tmp_path, name, tensor):
    refused(edit_checkpoint(DSPARK, tmp_path / "d", add={name: tensor}), name, "surplus")


# -- wrappers -------------------------------------------------------------------------------------

WRAPPERS = {
    "module.": lambda name: f"module.{name}",
    "draft_model.": lambda name: f"draft_model.{name}",
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "module, then model, heads outside": lambda name: f"module.{name if 'head' in name else f'model.{name}'}",
    "model.draft.": lambda name: f"model.draft.{name}",
    "inside a layer": lambda name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "inside and outside": lambda name: f"model._orig_mod.{name}".replace("self_attn.", "self_attn._fsdp_wrapped."),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("source", [DSPARK, DFLASH2, REDUCED], ids=lambda path: path.name)
def test_wrappers_before_names_are_taken_off(tmp_path, source, wrap):
    folder = renamed(source, tmp_path / "d", wrap)
    assert any("wrappers" in note for note in plan_conversion(folder).plan.notes)
    assert_same(folder, source, tmp_path)


def test_a_plain_drafter_has_no_note_of_wrappers(tmp_path):
    assert not plan_conversion(DSPARK).plan.notes
    assert not plan_conversion(renamed(DSPARK, tmp_path / "d", lambda name: f"model.{name}")).plan.notes


def test_a_verifier_beside_a_wrapped_drafter(tmp_path):
    """What is left out has no say in what stands before every name."""
    add = {"verifier_lm_head.weight": HEAD, "module.verifier_norm.weight": NORM}
    folder = renamed(DSPARK, tmp_path / "d", lambda name: f"module.{name}", add)
    assert_same(folder, DSPARK, tmp_path)


def test_a_tensor_under_two_names_is_refused(tmp_path):
    fc = {"_orig_mod.fc.weight": load_file(DSPARK / "model.safetensors")["fc.weight"]}
    refused(edit_checkpoint(DSPARK, tmp_path / "d", add=fc), "_orig_mod.fc.weight and fc.weight", "expected it once")


def test_two_drafters_in_one_file_are_refused(tmp_path):
    tensors = load_file(DSPARK / "model.safetensors")
    both = {f"draft.{name}": tensor for name, tensor in tensors.items()}
    refused(edit_checkpoint(DSPARK, tmp_path / "d", add=both), "surplus", "draft.fc.weight")


# -- maps and buffers -----------------------------------------------------------------------------

IDENTITY = {"d2t": torch.zeros(96, dtype=torch.int64), "t2d": torch.ones(96, dtype=torch.bool)}


@pytest.mark.parametrize("names", [["d2t"], ["t2d"], ["d2t", "t2d"]], ids=str)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_map_of_everything_to_itself_is_left_out(tmp_path, names, prefix):
    folder = renamed(
        DSPARK, tmp_path / "d", lambda name: prefix + name, {prefix + name: IDENTITY[name] for name in names}
    )
    assert [prefix + name for name in names] in plan_conversion(folder).plan.left_out.values()
    assert_same(folder, DSPARK, tmp_path)


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("d2t", torch.arange(96) == 5),
        ("d2t", torch.zeros(48, dtype=torch.int64)),
        ("t2d", torch.arange(96) != 5),
        ("t2d", torch.ones(97, dtype=torch.bool)),
    ],
)
def test_a_map_of_fewer_tokens_contradicts_a_whole_vocabulary(tmp_path, name, tensor):
    tensor = tensor.long() if name == "d2t" else tensor
    refused(edit_checkpoint(DSPARK, tmp_path / "d", add={name: tensor}), f"tensor {name}", "draft_vocab_size")


def test_rotary_frequencies_are_left_out(tmp_path):
    add = {"rotary_emb.inv_freq": torch.ones(8), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert_same(edit_checkpoint(DSPARK, tmp_path / "d", add=add), DSPARK, tmp_path)
