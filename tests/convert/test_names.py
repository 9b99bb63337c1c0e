"""The name map: every weight from the right tensors, every tensor accounted for, every disagreement named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import GOLDENS, edit_checkpoint

from glmspec.convert.conversion import Conversion, plan_conversion
from glmspec.core.errors import CheckpointError

CHECKPOINTS = GOLDENS / "checkpoints"

VERIFIER, DSPARK, REDUCED = (CHECKPOINTS / name for name in ("verifier", "dspark", "dspark_redvocab"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def made(conversion: Conversion) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return conversion.write(Path(folder) / "checkpoint").load()


def refused(folder: Path, *expected: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(folder)
    for text in (str(folder), *expected):
        assert text in str(caught.value)
    return str(caught.value)


# -- accounting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verifier", "dspark", "dflash2", "dspark_redvocab"])
def test_every_tensor_is_used_or_left_out_by_name(name):
    conversion = plan_conversion(CHECKPOINTS / name)
    used = {name for weight in conversion.plan.weights for name in weight.names}
    left = {name for names in conversion.plan.left_out.values() for name in names}
    assert not used & left
    assert used | left == tensors_of(CHECKPOINTS / name).keys()
    assert left == ({"t2d"} if name == "dspark_redvocab" else set())


LINEARS = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(6)]

MANY = [*LINEARS, *(name.replace("o_proj", "q_a_proj") for name in LINEARS)]


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_missing_tensors_are_all_named(tmp_path, count):
    """Up to eight, and how many more there are."""
    message = refused(edit_checkpoint(VERIFIER, tmp_path / "v", drop=MANY[:count]), "missing")
    named = [name for name in MANY if name in message]
    assert len(named) == min(count, 8) and set(named) <= set(MANY[:count])
    assert ("and 3 more" in message) == (count == 11)


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_surplus_tensors_are_all_named(tmp_path, count):
    names = [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(4, 4 + count)]
    folder = edit_checkpoint(VERIFIER, tmp_path / "v", add={name: torch.zeros(32, 64) for name in names})
    message = refused(folder, "surplus")
    assert sum(name in message for name in names) == min(count, 8)
    assert ("and 3 more" in message) == (count == 11)


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_misshapen_tensors_are_all_named(tmp_path, count):
    names = MANY[:count]
    folder = edit_checkpoint(VERIFIER, tmp_path / "v", add={name: torch.zeros(3, 5) for name in names})
    message = refused(folder, "found shape [3, 5]", "expected [")
    assert sum(name in message for name in names) == min(count, 8)
    assert ("and 3 more" in message) == (count == 11)


def test_a_transposed_tensor_is_misshapen(tmp_path):
    name = "model.layers.0.mlp.gate_proj.weight"
    folder = edit_checkpoint(VERIFIER, tmp_path / "v", add={name: torch.zeros(64, 128)})
    refused(folder, name, "found shape [64, 128]", "expected [128, 64]")


def test_a_config_with_other_sizes_than_the_tensors_is_refused(tmp_path):
    refused(edit_checkpoint(VERIFIER, tmp_path / "v", config={"n_routed_experts": 5}), "experts.4.", "missing")
    refused(
        edit_checkpoint(VERIFIER, tmp_path / "w", config={"n_routed_experts": 3}),
        "mlp.gate.weight",
        "[4, 64]",
        "[3, 64]",
    )
    refused(
        edit_checkpoint(VERIFIER, tmp_path / "x", config={"qk_nope_head_dim": 8}), "kv_b_proj", "[128, 32]", "[96, 32]"
    )


# -- a verifier's tensors ---------------------------------------------------------------------------


def test_keys_and_values_of_kv_b_are_split_per_head():
    """kv_b_proj is [heads * (nope + value), rank]: of each head's rows the first absorb keys, the others values."""
    source, found = tensors_of(VERIFIER), made(plan_conversion(VERIFIER))
    heads, nope, value, rank = 4, 16, 16, 32
    for layer in range(6):
        kv_b = source[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        w_uk = found[f"model.layers.{layer}.self_attn.w_uk"]
        w_uv = found[f"model.layers.{layer}.self_attn.w_uv"]
        assert w_uk.shape == (heads, nope, rank) and w_uv.shape == (heads, rank, value)
        for head in range(heads):
            first = head * (nope + value)
            assert torch.equal(w_uk[head], kv_b[first : first + nope])
            assert torch.equal(w_uv[head], kv_b[first + nope : first + nope + value].T)


def test_split_with_values_wider_than_keys(tmp_path):
    """As in GLM-5.3, where a value has 256 columns and a key 192: the halves cannot be mistaken for each other."""
    heads, nope, value = 4, 16, 24
    names = [f"model.layers.{layer}.self_attn" for layer in range(6)]
    kv_b = torch.randn(heads * (nope + value), 32, generator=torch.Generator().manual_seed(1))
    add = {f"{name}.kv_b_proj.weight": kv_b for name in names}
    add |= {f"{name}.o_proj.weight": torch.zeros(64, heads * value) for name in names}
    add = {name: tensor.clone() for name, tensor in add.items()}  # save_file wants no shared memory
    found = made(plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", config={"v_head_dim": value}, add=add)))
    assert torch.equal(found["model.layers.2.self_attn.w_uk"][3], kv_b[3 * 40 : 3 * 40 + 16])
    assert torch.equal(found["model.layers.2.self_attn.w_uv"][3], kv_b[3 * 40 + 16 : 4 * 40].T)


def test_a_kv_b_that_does_not_split_is_named(tmp_path):
    name = "model.layers.5.self_attn.kv_b_proj.weight"
    folder = edit_checkpoint(VERIFIER, tmp_path / "v", add={name: torch.zeros(127, 32)})
    refused(folder, name, "[127, 32]", "[128, 32]")


def fused(layers=range(1, 6)) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Names of the golden verifier's per-expert tensors, and the 3-D tensors of transformers' live model."""
    source, drop, add = tensors_of(VERIFIER), [], {}
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        per = {k: [f"{prefix}.{e}.{k}_proj.weight" for e in range(4)] for k in ("gate", "up", "down")}
        drop += [name for names in per.values() for name in names]
        gate_up = [torch.cat([source[g], source[u]]) for g, u in zip(per["gate"], per["up"], strict=True)]
        add[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        add[f"{prefix}.down_proj"] = torch.stack([source[name] for name in per["down"]])
    return drop, add


def test_fused_experts_equal_experts_one_by_one(tmp_path):
    """Gate rows come before up rows; layers may differ in how they are stored."""
    expected = made(plan_conversion(VERIFIER))
    for name, layers in (("all", range(1, 6)), ("some", (2, 4))):
        drop, add = fused(layers)
        found = made(plan_conversion(edit_checkpoint(VERIFIER, tmp_path / name, drop=drop, add=add)))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    first = tensors_of(VERIFIER)["model.layers.1.mlp.experts.2.gate_proj.weight"]
    assert torch.equal(expected["model.layers.1.mlp.experts.gate_up_proj"][2, :32], first)


def test_experts_stored_both_ways_are_refused(tmp_path):
    _, add = fused((3,))
    refused(edit_checkpoint(VERIFIER, tmp_path / "v", add=add), "model.layers.3.mlp.experts.0.", "surplus")


def test_a_misshapen_expert_is_named(tmp_path):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    refused(edit_checkpoint(VERIFIER, tmp_path / "v", add={name: torch.zeros(31, 64)}), name, "[31, 64]", "[32, 64]")


def test_a_misshapen_first_expert_is_named(tmp_path):
    name = "model.layers.2.mlp.experts.0.gate_proj.weight"
    message = refused(edit_checkpoint(VERIFIER, tmp_path / "v", add={name: torch.zeros(31, 64)}), "[31, 64]")
    assert f"tensor {name}" in message


def test_missing_experts_of_a_layer_are_all_named(tmp_path):
    names = [f"model.layers.2.mlp.experts.{expert}.gate_proj.weight" for expert in (1, 3)]
    refused(edit_checkpoint(VERIFIER, tmp_path / "v", drop=names), *names)


def test_a_missing_tensor_is_named_once(tmp_path):
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    assert refused(edit_checkpoint(VERIFIER, tmp_path / "v", drop=[name]), name).count(name) == 1


def test_the_router_stays_float32(tmp_path):
    """Whatever a checkpoint keeps them in, the rest keeps its own precision."""
    halved = {name: tensor.bfloat16() for name, tensor in tensors_of(VERIFIER).items()}
    folder = edit_checkpoint(VERIFIER, tmp_path / "v", add=halved)
    dtypes = {weight.name: weight.format for weight in plan_conversion(folder).plan.weights}
    wide = {name for name, dtype in dtypes.items() if dtype == "float32"}
    ends = ("mlp.gate.weight", "e_score_correction_bias", "indexer.weights_proj.weight")
    assert wide == {name for name in dtypes if name.endswith(ends)} and wide
    assert set(dtypes.values()) == {"float32", "bfloat16"}
