"""Scales in every dialect: of activations, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.dialects import AUTO, BF16, EXPERT, NVFP4, fp8_hub, in_dialect, modelopt, published_verifier, tensors_of
from support.models import edit_checkpoint

from glmspec.convert.calibration import read_calibration
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.hf import write_hf
from glmspec.convert.recipe import RECIPES, read_recipe
from glmspec.convert.writer import Run
from glmspec.core.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return published_verifier(tmp_path_factory.mktemp("hub"))


def recipe(tmp_path, text: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return read_recipe(path)


# -- activation scales ------------------------------------------------------------------------------


def test_an_expert_that_saw_no_token_takes_its_layer_s_largest_scale(folder, tmp_path):
    """Case B14: reported, finite, and never zero."""
    source, _ = in_dialect(folder, tmp_path, "modelopt")
    shard = next(p for p in source.glob("*.safetensors") if f"{EXPERT}.3.down_proj.input_scale" in load_file(p))
    tensors = load_file(shard)
    del tensors[f"{EXPERT}.3.down_proj.input_scale"]
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"][f"{EXPERT}.3.down_proj.input_scale"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors, shard)
    checkpoint = plan_conversion(source, AUTO).write(tmp_path / "ck")
    held = load_file(tmp_path / "ck" / "rank0.safetensors")
    assert held[f"{EXPERT}.down_proj_input_scale"].tolist() == [pytest.approx(0.02)] * 6
    assert f"{EXPERT}.3.down_proj" in checkpoint.record["notes"][0]


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1.0])
def test_an_activation_scale_that_is_none_is_refused(folder, tmp_path, bad):
    name = f"{EXPERT}.3.down_proj"
    tensors, _ = modelopt(f"{name}.weight", tensors_of(folder)[f"{name}.weight"])
    others = {}
    for expert in (0, 1, 2, 4, 5):
        key = f"{EXPERT}.{expert}.down_proj.weight"
        others |= modelopt(key, tensors_of(folder)[key])[0]
    spoiled = others | tensors | {f"{name}.input_scale": torch.tensor(bad)}
    with pytest.raises(CheckpointError, match=rf"{name}\.input_scale: found .*, expected above 0"):
        plan_conversion(edit_checkpoint(folder, tmp_path / "hf", add=spoiled))


def test_without_any_activation_scale_a_weight_has_none(folder, tmp_path):
    """Weight-only NVFP4: said and recorded, and no tensor is made up."""
    checkpoint = plan_conversion(folder, NVFP4).write(tmp_path / "ck")
    assert f"activations stay unquantized (give --calibration for some): {EXPERT}.gate_up_proj" in str(
        checkpoint.record
    )
    assert checkpoint.record["quantization"]["inputs"] == []
    assert not any("input_scale" in name for name in load_file(tmp_path / "ck" / "rank0.safetensors"))


@pytest.mark.parametrize("kind", ["json", "safetensors"])
def test_calibrated_scales(folder, tmp_path, kind):
    """amax / (6 * 448); a gate and its up see the same input, and one that is missing takes the largest."""
    values = {f"{EXPERT}.{e}.{k}_proj": float(1 + e) for e in range(5) for k in ("gate", "up")}
    values[f"{EXPERT}.2.up_proj"] = 40.0
    path = tmp_path / f"amax.{kind}"
    if kind == "json":
        path.write_text(json.dumps(values))
    else:
        save_file({f"{module}.input_quantizer._amax": torch.tensor(amax) for module, amax in values.items()}, path)
    options = ConvertOptions(RECIPES["nvfp4"], activations=read_calibration(path))
    checkpoint = plan_conversion(folder, options).write(tmp_path / "ck")
    held = load_file(tmp_path / "ck" / "rank0.safetensors")[f"{EXPERT}.gate_up_proj_input_scale"]
    expected = [[n / 2688] * 2 for n in (1.0, 2.0, 40.0, 4.0, 5.0, 40.0)]
    torch.testing.assert_close(held, torch.tensor(expected))
    assert checkpoint.record["quantization"]["inputs"] == [f"{EXPERT}.gate_up_proj"]
    write_hf(plan_conversion(folder, options), tmp_path / "hf", Run())
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for expert in range(6):
        for half, kind in enumerate(("gate", "up")):
            assert tensors[f"{EXPERT}.{expert}.{kind}_proj.input_scale"] == held[expert, half]
    config = json.loads((tmp_path / "hf" / "hf_quant_config.json").read_text())["quantization"]
    assert config["quantized_layers"][f"{EXPERT}.5.up_proj"]["quant_algo"] == "NVFP4"
    assert config["quantized_layers"][f"{EXPERT}.5.down_proj"]["quant_algo"] == "W4A16_NVFP4"
    assert "lm_head" in config["exclude_modules"]
    assert f"{EXPERT}.5.gate_proj" in checkpoint.record["notes"][0]


@pytest.mark.parametrize("content", ['{"a": 0}', '{"a": "x"}', '{"a": true}', '{"a": -1}', "{}", "[1]"])
def test_a_bad_calibration_is_refused(tmp_path, content):
    path = tmp_path / "amax.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_calibration(path)


def test_a_calibration_of_another_model_is_refused(folder, tmp_path):
    path = tmp_path / "amax.json"
    path.write_text(json.dumps({f"{EXPERT}.0.gate_proj": 1.0, "model.layers.99.mlp.experts.0.gate_proj": 1.0}))
    with pytest.raises(ConfigError, match=r"layers\.99\..*the checkpoint has no such module"):
        plan_conversion(folder, ConvertOptions(RECIPES["nvfp4"], activations=read_calibration(path)))


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_a_config_that_claims_what_the_tensors_lack_is_refused(folder, tmp_path, where):
    """Case A5: the half of a download that holds no quantized file."""
    claim = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    source = edit_checkpoint(folder, tmp_path / "hf", config=claim if where == "config.json" else {})
    if where != "config.json":
        (source / where).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match="says that it is quantized, and no weight has scales"):
        plan_conversion(source)


# -- scales that are wrong --------------------------------------------------------------------------

NOT_FINITE = "weight: holds values or scales that are not finite"


@pytest.mark.parametrize(
    "field, bad", [("weight_scale_2", 0.0), ("weight_scale_2", float("nan")), ("weight_scale", None)]
)
def test_scales_that_are_none_are_refused(folder, tmp_path, field, bad):
    """Not copied on as they are."""
    source, _ = in_dialect(folder, tmp_path, "modelopt")
    name = f"{EXPERT}.3.up_proj.{field}"
    path = next(p for p in source.glob("*.safetensors") if name in load_file(p))
    tensors = load_file(path)
    if bad is None:  # a group scale of NaN
        bits = tensors[name].view(torch.uint8).clone()
        bits[5, 1] = 0x7F
        tensors[name] = bits.view(torch.float8_e4m3fn)
    else:
        tensors[name] = torch.tensor(bad)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"{EXPERT}\.3\.up_proj\.{NOT_FINITE}"):
        plan_conversion(source, AUTO).write(tmp_path / "ck")


@pytest.mark.parametrize("options", [AUTO, BF16], ids=["auto", "bf16"])
def test_a_nan_code_of_fp8_is_refused(folder, tmp_path, options):
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors, _ = fp8_hub(name, tensors_of(folder)[name])
    bits = tensors[name].view(torch.uint8).clone()
    bits[3, 4] = 0xFF
    source = edit_checkpoint(folder, tmp_path / "hf", add=tensors | {name: bits.view(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=rf"o_proj\.{NOT_FINITE}"):
        plan_conversion(source, options).write(tmp_path / "ck")


def test_what_engines_fuse_shares_one_scale(folder, tmp_path):
    """Dense and shared experts' gate and up, and the projections that read one input."""
    plan_conversion(folder, ConvertOptions(recipe(tmp_path, '- {modules: "*", format: nvfp4}'))).write(tmp_path / "ck")
    held, attention = load_file(tmp_path / "ck" / "rank0.safetensors"), "model.layers.0.self_attn"
    for group in (
        ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"),
        ("model.layers.3.mlp.shared_experts.gate_proj", "model.layers.3.mlp.shared_experts.up_proj"),
        (f"{attention}.q_a_proj", f"{attention}.kv_a_proj_with_mqa", f"{attention}.indexer.wk"),
        (f"{attention}.q_b_proj", f"{attention}.indexer.wq_b"),
    ):
        largest = max(tensors_of(folder)[f"{module}.weight"].float().abs().max() for module in group)
        scales = [held[f"{module}.weight_scale_2"].item() for module in group]
        assert scales == [float(largest / 2688)] * len(group), group


def test_fused_fp8_experts_whose_halves_share_blocks_become_float32(folder, tmp_path):
    """An up half that begins inside a block has no grid of its own: dequantized, and nothing is lost."""
    drop = [name for name in tensors_of(folder) if ".mlp.experts." in name]
    add, meant = {}, {}
    for layer in range(2, 6):
        prefix = f"model.layers.{layer}.mlp"
        codes = (torch.randn(6, 128, 64, generator=torch.Generator().manual_seed(layer)) * 50).to(torch.float8_e4m3fn)
        scale = torch.rand(6, 1, 1) + 0.1
        add |= {f"{prefix}.experts.gate_up_proj": codes, f"{prefix}.experts.gate_up_proj_scale_inv": scale}
        add[f"{prefix}.experts.down_proj"] = torch.zeros(6, 64, 64).bfloat16()
        add |= {
            f"{prefix}.shared_experts.{k}_proj.weight": torch.zeros(64, 64).bfloat16() for k in ("gate", "up", "down")
        }
        meant[f"{prefix}.experts.gate_up_proj"] = codes.float() * scale
    checkpoint = edit_checkpoint(folder, tmp_path / "hf", config={"moe_intermediate_size": 64}, drop=drop, add=add)
    found = plan_conversion(checkpoint, AUTO).write(tmp_path / "ck")
    for name, expected in meant.items():
        assert found.record["quantization"]["formats"][name] == "float32"
        assert torch.equal(found.load()[name], expected)
