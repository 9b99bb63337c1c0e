"""What configs declare about quantization: understood, harmless, or refused by name; and held against the tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import GOLDENS, edit_checkpoint, random_verifier, write_checkpoint

from glmspec.convert.conversion import plan_conversion
from glmspec.convert.declared import declared
from glmspec.convert.formats import convert, plain
from glmspec.convert.implied import ImpliedSource
from glmspec.convert.scheme import DYNAMIC, NONE, STATIC, UNSAID
from glmspec.core.errors import CheckpointError, ConfigError

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DOWN = "model.layers.0.mlp.down_proj"
MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def compressed(weights: dict | None = None, **changes) -> dict:
    """A quantization_config of compressed-tensors: FP8 blocks, unless said otherwise."""
    blocks = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": blocks | (weights or {}), "input_activations": inputs}
    whole = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group | changes.pop("group", {})}}
    return whole | {"format": "float-quantized", "ignore": ["lm_head"]} | changes


def transformed(*turns: tuple[str, bool], target: str = "re:.*o_proj$") -> dict:
    apply = [{"targets": [target], "location": at, "inverse": inverse} for at, inverse in turns]
    return compressed(transform_config={"config_groups": {"R9": {"type": "hadamard", "apply": apply}}})


def quark(weight: dict, **changes) -> dict:
    scheme = {"weight": {"dtype": "fp8_e4m3", "is_dynamic": False} | weight, "input_tensors": None}
    return {"quant_method": "quark", "global_quant_config": scheme, "exclude": ["lm_head"]} | changes


def read(tmp_path: Path, config: dict | None, hf_quant: dict | None = None):
    if hf_quant is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    return declared(tmp_path, {"quantization_config": config} if config is not None else {})


# A tensor's spec as Quark 0.12 writes it, whole.
QUARK = {
    **{"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_channel", "ch_axis": 0, "group_size": None},
    **{"block_size": None, "symmetric": True, "round_method": "half_even", "scale_type": "float", "scale_format": None},
    **{"scale_calculation_mode": None, "mx_element_dtype": None, "observer_cls": "PerChannelMinMaxObserver"},
    **{"is_scale_quant": False, "enable_buffer_reuse": False, "max_input_numel": 4194304},
}


@pytest.mark.parametrize("place", ["global", "layers"])
def test_quark_s_configs_as_published_are_understood(tmp_path, place):
    """Global specs are empty where each layer has its own; outputs are quantized only for the cache."""
    whole = {"weight": QUARK, "input_tensors": QUARK | {"is_dynamic": True, "ch_axis": 1}, "output_tensors": None}
    empty = {"weight": {}, "input_tensors": {}, "output_tensors": None, "bias": None, "target_device": None}
    layers = {f"*{name}": whole | {"output_tensors": QUARK} for name in ("v_proj", "kv_b_proj", "kv_a_proj_with_mqa")}
    parts = [whole, layers] if place == "global" else [empty, {"*mlp*": whole, **layers}]
    config = {"quant_method": "quark", "global_quant_config": parts[0], "layer_quant_config": parts[1]}
    found = read(tmp_path, config | {"kv_cache_post_rope": False, "algo_config": None, "layer_type_quant_config": {}})
    (scheme,) = found.of(DOWN)
    assert (scheme.formats, scheme.activations) == (("fp8_rows",), DYNAMIC)
    assert [one.formats for one in found.of("model.layers.0.self_attn.kv_b_proj")] == [("fp8_rows",)]
    for target, spec in (("*o_proj", whole | {"output_tensors": QUARK}), ("*mlp*", empty | {"input_tensors": QUARK})):
        with pytest.raises(ConfigError, match=r"(output|input)_tensors.*not supported"):
            read(tmp_path, config | {"layer_quant_config": {target: spec}})


def test_block_scales_agree_whatever_is_said_of_activations(tmp_path):
    """FP8_PB_WO says weights only, and so do its groups; blocks are served one way."""
    group = {"targets": ["Linear"], "weights": compressed()["config_groups"]["group_0"]["weights"]}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "config_groups": {"group_0": group}}
    assert read(tmp_path, config).formats(DOWN) == ("fp8_block",)
    with pytest.raises(ConfigError, match="contradicts"):
        read(tmp_path, config | {"quant_algo": "FP8"})


GROUP_4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "block_structure": None}


@pytest.mark.parametrize(
    "config, formats, activations",
    [
        (BLOCKS | {"activation_scheme": "dynamic", "fmt": "e4m3"}, ("fp8_block",), DYNAMIC),
        (
            {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
            ("fp8", "fp8_rows"),
            STATIC,
        ),
        (compressed(), ("fp8_block",), DYNAMIC),
        (compressed({"strategy": "channel", "block_structure": None}), ("fp8_rows",), DYNAMIC),
        (
            compressed({"strategy": "tensor", "block_structure": None}, group={"input_activations": None}),
            ("fp8",),
            NONE,
        ),
        (compressed(GROUP_4, group={"input_activations": GROUP_4 | {"dynamic": "local"}}), ("nvfp4",), STATIC),
        ({"quant_method": "fp8"}, ("fp8_block", "fp8", "fp8_rows"), UNSAID),  # blocks by transformers' default
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, ("fp8_block",), DYNAMIC),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, ("fp8_rows",), DYNAMIC),
        ({"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4", "group_size": 16}, ("nvfp4",), NONE),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, ("fp8",), STATIC),
        (quark({"qscheme": "per_block", "block_size": [128, 128]}), ("fp8_block",), NONE),
        (quark({"qscheme": "per_channel", "ch_axis": 0}), ("fp8_rows",), NONE),
    ],
)
def test_what_is_understood(tmp_path, config, formats, activations):
    (scheme,) = read(tmp_path, config).of(DOWN)
    assert (scheme.formats, scheme.activations) == (formats, activations)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
        compressed(group={"targets": ["re:.*self_attn$"], "weights": None}),
    ],
)
def test_what_declares_nothing(tmp_path, config):
    """Caches and attention in FP8 leave the weights as they are."""
    assert not read(tmp_path, config).schemes


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("quant_method", "bitsandbytes")),
        ({"quant_method": "awq", "bits": 4}, ("quant_method", "awq")),
        ({"quant_method": "mxfp4"}, ("quant_method", "mxfp4")),
        ({"load_in_8bit": True}, ("quant_method", "no such key")),
        (BLOCKS | {"weight_block_size": [64, 64]}, ("weight_block_size", "[64, 64]", "[128, 128]")),
        (BLOCKS | {"fmt": "e5m2"}, ("fmt", "e5m2", "not supported")),
        (BLOCKS | {"expert_dtype": "fp4"}, ("expert_dtype", "fp4")),
        (BLOCKS | {"scale_fmt": "log"}, ("scale_fmt", "log")),
        (BLOCKS | {"activation_scheme": "static"}, ("activation_scheme", "static")),
        (BLOCKS | {"online_hadamard": True}, ("online_hadamard", "may change what is computed")),
        (quark({"qscheme": "per_tensor", "is_scale_quant": True}), ("is_scale_quant", "may change what is computed")),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"},
            ("quant_algo", "W4A8_NVFP4_FP8", "not supported"),
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ("group_size", "32", "16")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "pre_quant_scale": True}, ("pre_quant_scale", "AWQ")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "rotate": True}, ("rotate", "may change")),
        (
            compressed({"type": "int", "num_bits": 4}, format="pack-quantized"),
            ("INT4 (pack-quantized) is not supported",),
        ),
        (compressed({"type": "int"}, format="int-quantized"), ("INT8 (int-quantized) is not supported",)),
        (compressed(GROUP_4 | {"group_size": 32, "strategy": "group"}), ("MXFP4 is not supported",)),
        (compressed({"block_structure": [64, 128]}), ("block_structure", "[64, 128]")),
        (compressed({"symmetric": False}), ("symmetric", "zero points")),
        (compressed({"actorder": "group"}), ("actorder", "permutation")),
        (compressed({"rounding": "up"}), ("weights: rounding", "may change")),
        (compressed(group={"output_activations": {"num_bits": 8}}), ("output_activations", "not supported")),
        (compressed(group={"input_activations": {"num_bits": 8, "type": "int"}}), ("int activations of 8 bits",)),
        (compressed(format="marlin-24"), ("marlin-24",)),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), ("sparsity_config: format", "sparse")),
        (quark({"dtype": "fp4", "qscheme": "per_group"}), ("fp4 (per_group) is not supported",)),
        (quark({"qscheme": "per_block", "block_size": [32, 32]}), ("block_size", "[32, 32]")),
        (quark({"qscheme": "per_tensor"}, algo_config=[{"name": "rotation", "r4": True}]), ("algo_config", "rotation")),
    ],
)
def test_what_is_refused_by_name(tmp_path, config, expected):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    for text in (str(tmp_path), "config.json: quantization_config", *expected):
        assert text in str(caught.value)


@pytest.mark.parametrize("key", ["compression_config", "quantization"])
def test_older_and_other_names_of_the_section(tmp_path, key):
    assert declared(tmp_path, {key: BLOCKS}).formats(DOWN) == ("fp8_block",)
    with pytest.raises(ConfigError, match=rf"config\.json: {key}: quant_method: found no such key"):
        declared(tmp_path, {key: {"group_size": 64, "bits": 4}})  # as MLX writes it


@pytest.mark.parametrize("location", ["input", "output", "q_attn", "k_cache", "somewhere"])
def test_online_rotations_are_refused(tmp_path, location):
    """No tensor shows them, and without them every answer is wrong."""
    with pytest.raises(ConfigError, match=rf"R9: a hadamard transform at {location} of re:\.\*o_proj\$"):
        read(tmp_path, transformed(("weight_input", True), (location, False)))


def test_rotations_of_weights_that_cancel_pass(tmp_path):
    assert "R9" in read(tmp_path, transformed(("weight_output", False), ("weight_input", True))).notes[0]
    with pytest.raises(ConfigError, match=r"R9.*o_proj.*no inverse"):
        read(tmp_path, transformed(("weight_input", True)))


# -- two places -------------------------------------------------------------------------------------


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


@pytest.mark.parametrize("algo", ["FP8", None, "W4A16_NVFP4"])
def test_two_places_that_contradict_each_other_are_refused(tmp_path, algo):
    with pytest.raises(ConfigError, match="contradict"):
        read(tmp_path, MODELOPT, {"quantization": {"quant_algo": algo}})


@pytest.mark.parametrize("config", [MODELOPT, None, {"quant_method": "modelopt", "ignore": ["lm_head"]}])
def test_two_places_that_agree(tmp_path, config):
    """One that names no algorithm says nothing against the other."""
    found = read(tmp_path, config, {"producer": {"name": "x"}, "quantization": {"quant_algo": "NVFP4"}})
    assert found.formats(DOWN) == ("nvfp4",)


def test_places_that_list_modules_more_and_less_finely_agree(tmp_path):
    """A module of the second file that the first does not list by this name follows any of the first's schemes."""
    listed = {f"model.layers.3.mlp.experts.{at}.{kind}_proj": {"quant_algo": "NVFP4"} for at in (0, 1) for kind in "ud"}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    whole = {"model.layers.3.mlp.experts": {"quant_algo": "NVFP4"}}
    second = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": whole}}
    assert read(tmp_path, config, second).formats(next(iter(listed))) == ("nvfp4",)
    whole["model.layers.3.mlp.experts"] = {"quant_algo": "FP8"}
    with pytest.raises(ConfigError, match="contradicts"):
        read(tmp_path, config, second)


def test_an_unknown_key_of_the_second_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization: rotation: found 'R4'"):
        read(tmp_path, None, {"quantization": {"quant_algo": "NVFP4", "rotation": "R4"}})


# -- against the tensors ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> Path:
    """A random verifier whose MLPs are FP8 with block scales, and which declares nothing."""
    home = tmp_path_factory.mktemp("declared")
    random_verifier(home / "plain", seed=5)
    tensors = load_file(home / "plain" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(MLP)]:
        made = convert(plain("bfloat16", tensors[name]), "fp8_block")
        tensors |= {name: made.tensor().clone(), f"{name}_scale_inv": made.tensor("scale_inv").clone()}
    return write_checkpoint(home / "hf", tensors, json.loads((home / "plain" / "config.json").read_text()))


def saying(blocks: Path, out: Path, config: dict | None, add: dict | None = None, spell: str = "_scale_inv") -> Path:
    """The same, with a declaration, and its scales under another name."""
    held = load_file(blocks / "model.safetensors")
    scales = {name: tensor for name, tensor in held.items() if name.endswith("_scale_inv")}
    renamed = {name.replace("_scale_inv", spell): tensor for name, tensor in scales.items()}
    changes = {"quantization_config": config} if config else {}
    return edit_checkpoint(blocks, out, config=changes, drop=scales, add=renamed | (add or {}))


@pytest.mark.parametrize(
    "config, said",
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "fp8", "weight_block_size": None}, "FP8 with one scale"),
        (compressed({"strategy": "channel", "block_structure": None}), "FP8 with a scale a row"),
    ],
)
def test_a_declaration_that_the_tensors_contradict_is_refused(blocks, tmp_path, config, said):
    name = f"{DOWN}.weight"
    wide = {name: torch.ones(64, 256).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 2)}  # blocks only
    source = saying(blocks, tmp_path / "hf", config, wide)
    with pytest.raises(CheckpointError, match=rf"tensor {name}.*128x128.*config\.json.*declares {said}"):
        plan_conversion(source)


def test_a_module_is_held_against_its_own_scheme(blocks, tmp_path):
    """Not against another's: a listed one may not follow what is declared elsewhere, one that is not listed may."""
    up = DOWN.replace("down", "up")
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    for algo in ("FP8_PB_WO", "NVFP4"):
        layers = {DOWN: {"quant_algo": algo}, up: {"quant_algo": "FP8_PB_WO"}}
        source = saying(blocks, tmp_path / algo, config | {"quantized_layers": layers})
        if algo == "FP8_PB_WO":
            plan_conversion(source)
            continue
        with pytest.raises(CheckpointError, match=rf"tensor {DOWN}\.weight: found FP8.*declares NVFP4"):
            plan_conversion(source)


def test_lists_of_plain_modules_do_not_decide(blocks, tmp_path):
    """Case A5: published configs misname modules."""
    config = BLOCKS | {"modules_to_not_convert": ["indexers_proj", DOWN]}
    plan = plan_conversion(saying(blocks, tmp_path / "hf", config)).plan
    assert {one.format for one in plan.weights if one.name == f"{DOWN}.weight"} == {"fp8_block"}


def test_nothing_declared_leaves_the_tensors_to_decide(blocks):
    assert "fp8_block" in {one.format for one in plan_conversion(blocks).plan.weights}


@pytest.mark.parametrize(
    "spell, config", [("_scale", compressed()), ("_scale", quark({"qscheme": "per_block"})), ("_scale_inv", BLOCKS)]
)
def test_every_spelling_of_block_scales_is_the_same(blocks, tmp_path, spell, config):
    """The tiny matrices are a block each: one number, which the declaration makes a block's."""
    found = plan_conversion(saying(blocks, tmp_path / "hf", config, spell=spell)).write(tmp_path / "a")
    expected = plan_conversion(blocks).write(tmp_path / "b")
    assert found.record["quantization"] == expected.record["quantization"]
    assert (tmp_path / "a" / "rank0.safetensors").read_bytes() == (tmp_path / "b" / "rank0.safetensors").read_bytes()


def one_scale(blocks: Path, inputs: bool) -> dict[str, torch.Tensor]:
    held = load_file(blocks / "model.safetensors")
    made = {}
    for name in [name for name in held if name.endswith("_scale_inv")]:
        made[name.replace("_scale_inv", "_scale")] = torch.tensor(0.5)
        if inputs:
            made[name.replace("weight_scale_inv", "input_scale")] = torch.tensor(0.25)
    return made


PER_TENSOR = {"strategy": "tensor", "block_structure": None}


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "float", "dynamic": True}])
def test_stored_scales_of_activations_that_are_declared_to_have_none_are_refused(blocks, tmp_path, activations):
    config = compressed(PER_TENSOR, group={"input_activations": activations})
    source = saying(blocks, tmp_path / "hf", config, one_scale(blocks, True), "_scale")
    with pytest.raises(CheckpointError, match=r"input_scale: found a stored scale of activations"):
        plan_conversion(source)


@pytest.mark.parametrize("dynamic", [False, True])
def test_declared_activations_without_scales_are_noted(blocks, tmp_path, dynamic):
    config = compressed(PER_TENSOR, group={"input_activations": {"num_bits": 8, "type": "float", "dynamic": dynamic}})
    source = saying(blocks, tmp_path / "hf", config, one_scale(blocks, False), "_scale")
    assert "they stay unquantized" in plan_conversion(source).write(tmp_path / "ck").record["notes"][0]


def test_blocks_that_are_declared_weight_only_are_noted(blocks, tmp_path):
    source = saying(blocks, tmp_path / "hf", compressed(group={"input_activations": None}))
    assert "rounded to FP8 all the same" in plan_conversion(source).source.notes[0]


def test_a_drafter_s_declaration_counts_too(tmp_path):
    drafter = GOLDENS / "checkpoints" / "dspark"
    for config in (transformed(("input", False)), {"quant_method": "gptq", "bits": 4}):
        folder = edit_checkpoint(
            drafter, tmp_path / str(config["quant_method"]), config={"quantization_config": config}
        )
        with pytest.raises(ConfigError, match="quantization_config"):
            plan_conversion(folder)
    folder = edit_checkpoint(drafter, tmp_path / "claims", config={"quantization_config": BLOCKS})
    with pytest.raises(CheckpointError, match="no weight has scales"):
        plan_conversion(folder)


# -- a config without weights -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, field, dtype",
    [
        (MODELOPT, "weight_scale_2", "U8"),
        (compressed(), "weight_scale_inv", "F8_E4M3"),
        (quark({"qscheme": "per_tensor"}), "weight_scale", "F8_E4M3"),
        (None, "", "BF16"),
    ],
)
def test_a_config_alone_is_planned_by_its_declaration(blocks, tmp_path, config, field, dtype):
    values = json.loads((blocks / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    source = ImpliedSource(tmp_path)
    assert source.tensors[f"{DOWN}.weight"].dtype == dtype and (not field or f"{DOWN}.{field}" in source)
    assert source.tensors["lm_head.weight"].dtype == "BF16"


def test_a_listed_module_is_imagined_plain(blocks, tmp_path):
    for ignore in ([DOWN], ["re:.*layers.0.mlp.*"], ["model.layers.0*"], ["model.layers.0"]):
        values = json.loads((blocks / "config.json").read_text()) | {
            "quantization_config": MODELOPT | {"ignore": ignore}
        }
        (tmp_path / "config.json").write_text(json.dumps(values))
        source = ImpliedSource(tmp_path)
        assert source.tensors[f"{DOWN}.weight"].dtype == "BF16"
        assert source.tensors["model.layers.1.mlp.down_proj.weight"].dtype == "U8"
