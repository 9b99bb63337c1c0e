"""One verifier in every dialect that is about: the same weights come out, and the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.dialects import (
    AUTO,
    BF16,
    DIALECTS,
    EXPERT,
    FP8,
    NVFP4,
    in_dialect,
    published_verifier,
    tensors_of,
)
from support.models import LIMITS, edit_checkpoint, mtp_tensors

from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.hf import write_hf
from glmspec.convert.recipe import read_recipe
from glmspec.convert.writer import Run
from glmspec.core.errors import CheckpointError, ConfigError
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return published_verifier(tmp_path_factory.mktemp("hub"))


def logits(checkpoint) -> torch.Tensor:
    model = Model(model_of(checkpoint.config), LIMITS, NetworkConfig(compute="float32"), [checkpoint.load()])
    ids = [3, 17, 41, 8, 96, 5, 60, 22, 9, 77, 31, 50, 2, 4, 88, 71, 19, 40, 6, 13]
    return model.run(pack_rows([Rows(Span([1, 2, 3], 0, 20), ids, 20)], LIMITS, 2))["logits"]


def recipe(tmp_path, text: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return read_recipe(path)


# -- what dialects mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_means_the_same(folder, tmp_path, dialect):
    """auto changes no value: bit-equal weights and logits, against the same numbers stored plainly."""
    source, meaning = in_dialect(folder, tmp_path, dialect)
    found = plan_conversion(source, AUTO).write(tmp_path / "a")
    expected = plan_conversion(meaning, AUTO).write(tmp_path / "b")
    found.check()
    weights = expected.load()
    for name, values in found.load().items():
        assert torch.equal(values.float(), weights[name].float()), name
    assert torch.equal(logits(found), logits(expected))
    assert weights.keys() == found.load().keys() and "model.layers.6.mlp.experts.down_proj" in weights
    assert found.record["mtp"] and found.record["left_out"] == {}
    algo = {"fp8": "FP8_BLOCK_SCALES", "fused": None}.get(dialect, "NVFP4")
    assert found.record["quantization"]["quant_algo"] == algo


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_activation_scales_are_taken_over(folder, tmp_path, dialect):
    """compressed-tensors writes 1 / scale (50 for 0.02)."""
    source, _ = in_dialect(folder, tmp_path, dialect)
    plan_conversion(source, AUTO).write(tmp_path / "ck")
    held = load_file(tmp_path / "ck" / "rank0.safetensors")
    for name, shape in ((f"{EXPERT}.gate_up_proj_input_scale", (6, 2)), (f"{EXPERT}.down_proj_input_scale", (6,))):
        torch.testing.assert_close(held[name], torch.full(shape, 0.02))


def test_fp8_with_a_scale_a_row_becomes_float32(folder, tmp_path):
    """No network has such scales; float32 loses nothing, and a recipe may choose another format."""
    name = "model.layers.0.self_attn.o_proj.weight"
    codes, scale = (tensors_of(folder)[name] * 50).to(torch.float8_e4m3fn), torch.rand(64, 1) + 0.1
    source = edit_checkpoint(folder, tmp_path / "hf", add={name: codes, f"{name}_scale": scale})
    checkpoint = plan_conversion(source, AUTO).write(tmp_path / "ck")
    assert checkpoint.record["quantization"]["formats"][name] == "float32"
    assert torch.equal(checkpoint.load()[name], codes.float() * scale)
    assert plan_conversion(source, FP8).write(tmp_path / "fp8").record["quantization"]["formats"][name] == "fp8_block"


def test_quantized_weights_are_kept_bit_for_bit(folder, tmp_path):
    source, _ = in_dialect(folder, tmp_path, "modelopt")
    plan_conversion(source, AUTO).write(tmp_path / "ck")
    held = load_file(tmp_path / "ck" / "rank0.safetensors")
    given = {}
    for path in source.glob("*.safetensors"):
        given |= load_file(path)
    up = f"{EXPERT}.3.up_proj"
    assert torch.equal(held[f"{EXPERT}.gate_up_proj"][3, 32:], given[f"{up}.weight"])
    scale = held[f"{EXPERT}.gate_up_proj_scale"][3, 32:]
    assert torch.equal(scale.view(torch.uint8), given[f"{up}.weight_scale"].view(torch.uint8))
    assert held[f"{EXPERT}.gate_up_proj_scale_2"][3, 1] == given[f"{up}.weight_scale_2"]
    assert held[f"{EXPERT}.gate_up_proj_input_scale"].unique().tolist() == [pytest.approx(0.02)]


def test_quantizing_from_fp8_blocks_costs_what_is_stated(folder, tmp_path):
    """FP8 blocks, then NVFP4: 0.0985 relative error of a gaussian, against the bfloat16 weights."""
    source, _ = in_dialect(folder, tmp_path, "fp8")
    found = plan_conversion(source, NVFP4).write(tmp_path / "ck").load()
    expected = plan_conversion(folder, AUTO).write(tmp_path / "whole").load()
    for name in (f"{EXPERT}.gate_up_proj", f"{EXPERT}.down_proj"):
        error = (found[name] - expected[name].float()).norm() / expected[name].float().norm()
        assert 0.08 < error < 0.11, (name, error)


def test_gate_and_up_share_one_scale(folder, tmp_path):
    source = tensors_of(folder)
    plan_conversion(folder, NVFP4).write(tmp_path / "ck")
    held = load_file(tmp_path / "ck" / "rank0.safetensors")
    for expert in range(6):
        pair = [source[f"{EXPERT}.{expert}.{kind}_proj.weight"].float().abs().max() for kind in ("gate", "up")]
        assert held[f"{EXPERT}.gate_up_proj_scale_2"][expert].tolist() == [float(max(pair) / 2688)] * 2


def test_what_a_recipe_leaves_alone(folder, tmp_path):
    for options, formats in ((NVFP4, {"nvfp4"}), (FP8, {"fp8_block"}), (BF16, set())):
        found = plan_conversion(folder, options).plan.weights
        chosen = {weight.name: weight.format for weight in found if weight.format not in ("bfloat16", "float32")}
        assert set(chosen.values()) == formats
        assert not any(
            k in name for name in chosen for k in ("norm", "mlp.gate.", "w_u", "embed", "lm_head", "weights_proj")
        )
        if options is NVFP4:
            assert all(".mlp.experts." in name for name in chosen) and len(chosen) == 8


# -- recipes ----------------------------------------------------------------------------------------


def test_a_recipe_file(folder, tmp_path):
    rules = """
    - {modules: "model.layers.3.*experts*", format: auto}
    - {modules: "*.mlp.experts.*", format: nvfp4}
    - {modules: "*.o_proj", format: fp8}
    """
    weights = plan_conversion(folder, ConvertOptions(recipe(tmp_path, rules))).plan.weights
    found = {weight.name: weight.format for weight in weights}
    assert found[f"{EXPERT}.gate_up_proj"] == "nvfp4"
    assert found["model.layers.3.mlp.experts.gate_up_proj"] == "bfloat16"
    assert found["model.layers.0.self_attn.o_proj.weight"] == "fp8"
    assert found["model.layers.0.self_attn.q_a_proj.weight"] == "bfloat16"


@pytest.mark.parametrize(
    "text, expected",
    [
        ('- {modules: "*", format: int4}', "rule 1: format: found 'int4'"),
        ("- {modules: 3, format: nvfp4}", "rule 1: modules: found 3"),
        ("- {module: x, format: nvfp4}", "expected the keys modules and format"),
        ("modules: x", "expected a list of rules"),
        ("[]", "expected a list of rules"),
        ("- [", "not readable"),
    ],
)
def test_a_bad_recipe_is_refused(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, text)
    assert expected in str(caught.value) and "recipe.yaml" in str(caught.value)


def test_a_rule_that_matches_nothing_is_refused(folder, tmp_path):
    """A misspelled pattern would leave a model unquantized, silently. The router may not be quantized."""
    for pattern in ("*.mlp.expert.*", "*.mlp.gate", "*norm*"):
        with pytest.raises(ConfigError, match="match no quantizable module"):
            plan_conversion(folder, ConvertOptions(recipe(tmp_path, f'- {{modules: "{pattern}", format: nvfp4}}')))


def test_a_rule_for_the_mtp_module_alone(folder, tmp_path):
    add = mtp_tensors(tensors_of(folder), like=3, layer=6)
    source = edit_checkpoint(folder, tmp_path / "hf", config={"num_nextn_predict_layers": 1}, add=add)
    options = ConvertOptions(recipe(tmp_path, '- {modules: "model.layers.6.*", format: nvfp4}'))
    write_hf(plan_conversion(source, options), tmp_path / "out", Run())
    name = "model.layers.6.mlp.experts.0.gate_proj.weight"
    assert load_file(tmp_path / "out" / "model.safetensors")[name].dtype == torch.uint8
    formats = plan_conversion(source, options).write(tmp_path / "ck").record["quantization"]["formats"]
    assert formats["model.layers.6.mlp.experts.gate_up_proj"] == "nvfp4"
    assert formats["model.layers.6.eh_proj.weight"] == formats["model.layers.3.mlp.experts.gate_up_proj"] == "bfloat16"


def test_experts_of_a_layer_have_one_format(folder, tmp_path):
    rules = '- {modules: "*.mlp.experts.1.*", format: nvfp4}'
    with pytest.raises(CheckpointError, match=r"experts\.0\.\w+ would be bfloat16 and .*experts\.1\.\w+ nvfp4"):
        plan_conversion(folder, ConvertOptions(recipe(tmp_path, rules)))


def test_weights_that_are_not_finite_are_not_quantized(folder, tmp_path):
    name = f"{EXPERT}.4.up_proj.weight"
    spoiled = tensors_of(folder)[name].clone()
    spoiled[3, 7] = float("nan")
    source = edit_checkpoint(folder, tmp_path / "hf", add={name: spoiled})
    with pytest.raises(CheckpointError, match=rf"tensor {name}: holds values that are not finite"):
        plan_conversion(source, NVFP4).write(tmp_path / "ck")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


# -- Hugging Face out -------------------------------------------------------------------------------


def test_hf_out_loads_in_transformers(folder, tmp_path):
    """A plain checkpoint comes out as it went in, fused experts one by one."""
    from transformers import GlmMoeDsaForCausalLM

    source, meaning = in_dialect(folder, tmp_path, "fused")
    write_hf(plan_conversion(source, BF16), tmp_path / "out", Run())
    assert load_file(tmp_path / "out" / "model.safetensors").keys() >= tensors_of(folder).keys()
    model = GlmMoeDsaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = GlmMoeDsaForCausalLM.from_pretrained(meaning, dtype=torch.float32)
    ids = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("options", [NVFP4, FP8], ids=["nvfp4", "fp8"])
def test_hf_out_converts_to_the_same_weights(folder, tmp_path, options):
    """Quantized on the way out, then taken as it is, equals quantized directly."""
    write_hf(plan_conversion(folder, options), tmp_path / "hf", Run())
    found = plan_conversion(tmp_path / "hf", AUTO).write(tmp_path / "a")
    expected = plan_conversion(folder, options).write(tmp_path / "b")
    assert found.record["quantization"]["formats"] == expected.record["quantization"]["formats"]
    for name, values in expected.load().items():
        assert torch.equal(found.load()[name], values), name


def test_hf_out_describes_itself(folder, tmp_path):
    source, _ = in_dialect(folder, tmp_path, "fp8")
    write_hf(plan_conversion(source, NVFP4), tmp_path / "hf", Run())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"][f"{EXPERT}.0.up_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert config["quantized_layers"]["model.layers.0.self_attn.o_proj"] == {"quant_algo": "FP8_PB_WO"}
    assert "lm_head" in config["ignore"] and "model.layers.2.mlp.gate" in config["ignore"]
    held = load_file(tmp_path / "hf" / "model.safetensors")
    assert held[f"{EXPERT}.0.up_proj.weight_scale"].dtype == torch.float8_e4m3fn
    assert held[f"{EXPERT}.0.up_proj.weight_scale_2"].shape == ()
    assert "model.layers.6.eh_proj.weight" in held  # the MTP module stays
    pair = [held[f"{EXPERT}.0.{kind}_proj.weight_scale_2"] for kind in ("gate", "up")]
    assert torch.equal(*pair)


def test_hf_out_of_a_mixture_spells_blocks_as_modelopt_does(folder, tmp_path):
    """FP8_PB_WO: `weight_scale` [rows / 128, 1, columns / 128, 1], and it is read again as it was."""
    source, _ = in_dialect(folder, tmp_path, "fp8")
    write_hf(plan_conversion(source, NVFP4), tmp_path / "hf", Run())
    held = load_file(tmp_path / "hf" / "model.safetensors")
    given = {}
    for path in source.glob("*.safetensors"):
        given |= load_file(path)
    assert not any(name.endswith("scale_inv") for name in held)
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        scale = given[f"{name}_scale_inv"]
        assert torch.equal(held[f"{name}_scale"], scale[:, None, :, None])
        assert torch.equal(held[name].view(torch.uint8), given[name].view(torch.uint8))
    found = plan_conversion(tmp_path / "hf", AUTO).write(tmp_path / "a")
    expected = plan_conversion(source, NVFP4).write(tmp_path / "b")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert found.record["quantization"]["formats"][name] == "fp8_block"
    assert torch.equal(found.load()[name], expected.load()[name])


def test_hf_out_of_all_fp8_reads_as_native_fp8(folder, tmp_path):
    write_hf(plan_conversion(folder, FP8), tmp_path / "hf", Run())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])


def test_nothing_else_is_left_out_of_hf_out(folder, tmp_path):
    extra = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5), "lm_head.weight_scale": torch.tensor(1.0)}
    source = edit_checkpoint(folder, tmp_path / "hf", add=extra)
    write_hf(plan_conversion(source, AUTO), tmp_path / "out", Run())
    record = json.loads((tmp_path / "out" / "glmspec.json").read_text())
    assert [why.split()[0] for why in record["left_out"]] == ["scale", "K/V"]
    assert sorted(name for names in record["left_out"].values() for name in names) == sorted(extra)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors_of(folder).keys()
