"""What of a checkpoint is left out, and what a drafter's tensors are called."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import GOLDENS, edit_checkpoint

from glmspec.convert.conversion import Conversion, plan_conversion
from glmspec.convert.hf import plan_hf
from glmspec.core.errors import CheckpointError, ConfigError

CHECKPOINTS = GOLDENS / "checkpoints"

VERIFIER, DSPARK, REDUCED = (CHECKPOINTS / name for name in ("verifier", "dspark", "dspark_redvocab"))

FP8 = torch.float8_e4m3fn


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


# -- what is left out -------------------------------------------------------------------------------


def fp8_linear(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones(rows, columns).to(FP8),
        f"{name.removesuffix('weight')}weight_scale_inv": torch.full((1, 1), 0.5),
    }


def test_scales_are_used(tmp_path):
    used = fp8_linear("model.layers.5.self_attn.q_a_proj.weight", 32, 64)
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", add=used))
    consumed = {name for weight in conversion.plan.weights for name in weight.names}
    assert consumed == tensors_of(VERIFIER).keys() | used.keys()
    assert torch.equal(made(conversion)["model.layers.5.self_attn.q_a_proj.weight"], torch.full((32, 64), 0.5))


def test_decoder_layers_cut_off_by_the_config_are_not_mtp(tmp_path):
    """Case A3."""
    five = {"mlp_layer_types": None, "indexer_types": None, "num_hidden_layers": 5}
    refused(edit_checkpoint(VERIFIER, tmp_path / "v", config=five), "model.layers.5.", "surplus")
    counted = five | {"num_nextn_predict_layers": 1}
    refused(edit_checkpoint(VERIFIER, tmp_path / "w", config=counted), "tensor model.layers.5.eh_proj.weight: missing")


def test_indexers_of_sharing_layers_are_reported(tmp_path):
    """Case A2: not wanted where the layer reuses another's choice."""
    source = tensors_of(VERIFIER)
    extra = {
        name.replace("layers.2.", f"layers.{layer}."): tensor.clone()
        for layer in (3, 5)
        for name, tensor in source.items()
        if "layers.2.self_attn.indexer." in name
    }
    assert len(extra) == 10
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", add=extra))
    assert conversion.plan.left_out == {"indexer of a layer that shares another's top-k": sorted(extra)}


def test_without_a_config_key_every_layer_needs_its_indexer(tmp_path):
    """Case A2, third config: nothing but the tensors says so; where they are missing they are named."""
    none = dict.fromkeys(("indexer_types", "index_topk_freq", "index_skip_topk_offset"))
    refused(edit_checkpoint(VERIFIER, tmp_path / "few", config=none), "model.layers.3.self_attn.indexer.wk.weight")
    source = tensors_of(VERIFIER)
    extra = {
        name.replace("layers.2.", f"layers.{layer}."): tensor.clone()
        for layer in (3, 4, 5)
        for name, tensor in source.items()
        if "layers.2.self_attn.indexer." in name
    }
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "all", config=none, add=extra))
    assert conversion.config.indexer_types == ("full",) * 6 and not conversion.plan.left_out


def test_the_three_indexer_configs_of_case_a2(tmp_path):
    explicit = {"index_topk_freq": None, "index_skip_topk_offset": None}
    short = {"indexer_types": None}
    plans = [
        plan_conversion(edit_checkpoint(VERIFIER, tmp_path / name, config=config)).plan
        for name, config in (("explicit", explicit), ("short", short))
    ]
    assert [one.names for one in plans[0].weights] == [one.names for one in plans[1].weights]


def test_cache_scales_are_reported(tmp_path):
    """Case B17: they describe expanded K and V, not the latents that are cached."""
    extra = {
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_proj.v_scale": torch.tensor(4.0),
        "model.layers.5.self_attn.k_proj.k_scale": torch.tensor(1.0),
    }
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", add=extra))
    (names,) = conversion.plan.left_out.values()
    assert names == sorted(extra) and "K/V scale" in next(iter(conversion.plan.left_out))


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.k_scale",
        "self_attn.q_scale",
        "self_attn.prob_scale",
        "self_attn.k_zero_point",
        "self_attn.attn.v_scale",
        "self_attn.mla_attn.k_scale",
        "mla_attn.mla_attn.v_scale",
        "self_attn.kv_scale",
        "self_attn.kv_cache_scale",
        "self_attn.k_cache_scale",
        "self_attn.kv_cache_scaling_factor",
        "self_attn.k_proj.output_scale",
        "self_attn.kv_b_proj.output_scale",
        "self_attn.prob_output_scale",
        "self_attn.v_proj.v_bias",
    ],
)
def test_cache_scales_in_every_spelling(tmp_path, name):
    """Also beyond the last layer: they make no multi-token-prediction module appear."""
    extra = {f"model.layers.{layer}.{name}": torch.tensor(0.5) for layer in (0, 6)}
    config = {"num_nextn_predict_layers": 1}
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", config=config, add=extra))
    assert conversion.plan.left_out == {"K/V scale of a cache format that is not used": sorted(extra)}
    assert not conversion.mtp
    assert plan_hf(conversion).left_out == conversion.plan.left_out


@pytest.mark.parametrize("name", ["mlp.down_proj.output_scale", "self_attn.o_proj.k_scales", "self_attn.w_scale"])
def test_what_is_no_cache_scale_is_surplus(tmp_path, name):
    refused(
        edit_checkpoint(VERIFIER, tmp_path / "v", add={f"model.layers.0.{name}": torch.tensor(0.5)}), name, "surplus"
    )


def test_a_scale_that_a_quantized_weight_does_not_use_is_surplus(tmp_path):
    """It is no left-over: it says something of the weight's values."""
    name = "model.layers.0.self_attn.q_a_proj"
    add = fp8_linear(f"{name}.weight", 32, 64) | {f"{name}.input_global_scale": torch.tensor(2.0)}
    refused(edit_checkpoint(VERIFIER, tmp_path / "v", add=add), f"{name}.input_global_scale", "surplus")


def test_rotary_frequencies_are_reported(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", add={name: torch.ones(8)}))
    assert list(conversion.plan.left_out.values()) == [[name]]


def test_lists_of_unquantized_modules_do_not_decide(tmp_path):
    """Case A5: `indexers_proj` names nothing; the tensors say what is quantized."""
    config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["indexers_proj", "q_a_proj"]}}
    add = fp8_linear("model.layers.0.self_attn.q_a_proj.weight", 32, 64)
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", config=config, add=add))
    name = "model.layers.0.self_attn.q_a_proj.weight"
    (weight,) = (weight for weight in conversion.plan.weights if weight.name == name)
    assert set(weight.names) == set(add) and torch.equal(made(conversion)[name], torch.full((32, 64), 0.5))


def test_left_over_scales_are_reported(tmp_path):
    extra = {"lm_head.weight_scale": torch.tensor(1.0), "lm_head.input_scale": torch.tensor(1.0)}
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", add=extra))
    assert sorted(name for names in conversion.plan.left_out.values() for name in names) == sorted(extra)


# -- a drafter's tensors ----------------------------------------------------------------------------


def test_a_drafter_without_embedding_and_head_shares_the_verifier_s():
    names = {weight.name for weight in plan_conversion(DSPARK).plan.weights}
    assert not names & {"embed_tokens.weight", "lm_head.weight"}


def test_a_drafter_s_own_embedding_and_head_are_kept(tmp_path):
    """Case A7: decided by the tensors' presence, one by one, never by sizes."""
    own = {"embed_tokens.weight": torch.full((96, 64), 2.0), "lm_head.weight": torch.full((96, 64), 3.0)}
    found = made(plan_conversion(edit_checkpoint(DSPARK, tmp_path / "both", add=own)))
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    head = {"lm_head.weight": own["lm_head.weight"]}
    found = made(plan_conversion(edit_checkpoint(DSPARK, tmp_path / "head", add=head)))
    assert "lm_head.weight" in found and "embed_tokens.weight" not in found


def test_a_reduced_vocabulary_keeps_its_head_and_map():
    source, found = tensors_of(REDUCED), made(plan_conversion(REDUCED))
    assert torch.equal(found["lm_head.weight"], source["lm_head.weight"]) and found["lm_head.weight"].shape == (48, 64)
    assert found["d2t"].dtype == torch.int32 and torch.equal(found["d2t"].long(), source["d2t"])


def test_a_reduced_vocabulary_without_a_head_is_refused(tmp_path):
    folder = edit_checkpoint(REDUCED, tmp_path / "d", drop=["lm_head.weight"])
    refused(folder, "lm_head.weight", "missing", "[48, 64]", "reduced draft vocabulary")


def test_a_reduced_vocabulary_without_a_map_is_refused(tmp_path):
    refused(edit_checkpoint(REDUCED, tmp_path / "d", drop=["d2t"]), "d2t", "missing")


@pytest.mark.parametrize("length", [47, 96])
def test_a_map_of_a_wrong_length_is_refused(tmp_path, length):
    folder = edit_checkpoint(REDUCED, tmp_path / "d", add={"d2t": torch.zeros(length, dtype=torch.int64)})
    refused(folder, "d2t", f"[{length}]", "[48]")


def test_a_head_of_a_wrong_vocabulary_is_refused(tmp_path):
    folder = edit_checkpoint(REDUCED, tmp_path / "d", add={"lm_head.weight": torch.zeros(96, 64)})
    refused(folder, "lm_head.weight", "[96, 64]", "[48, 64]")


@pytest.mark.parametrize("at", [0, 17, 47])
def test_a_map_that_disagrees_with_its_mask_is_refused(tmp_path, at):
    offsets = tensors_of(REDUCED)["d2t"]
    offsets[at] += 1
    refused(edit_checkpoint(REDUCED, tmp_path / "d", add={"d2t": offsets}), "d2t", "t2d")


def test_a_map_that_reaches_a_token_twice_is_refused(tmp_path):
    offsets = tensors_of(REDUCED)["d2t"]
    offsets[5] = offsets[6] + 1
    refused(edit_checkpoint(REDUCED, tmp_path / "d", add={"d2t": offsets}), "d2t", "t2d")


def test_the_mask_may_be_absent(tmp_path):
    folder = edit_checkpoint(REDUCED, tmp_path / "d", drop=["t2d"])
    assert "d2t" in made(plan_conversion(folder)) and not plan_conversion(folder).plan.left_out


@pytest.mark.parametrize("offset", [96, -1])
def test_a_map_out_of_the_vocabulary_is_refused(tmp_path, offset):
    offsets = tensors_of(REDUCED)["d2t"]
    offsets[0] = offset
    refused(edit_checkpoint(REDUCED, tmp_path / "d", drop=["t2d"], add={"d2t": offsets}), "d2t")


def test_a_surplus_drafter_tensor_is_named(tmp_path):
    folder = edit_checkpoint(DSPARK, tmp_path / "d", add={"layers.3.mlp.up_proj.weight": torch.zeros(128, 64)})
    refused(folder, "layers.3.mlp.up_proj.weight", "surplus")


def test_heads_a_config_denies_are_surplus(tmp_path):
    """Case A10: a Markov or confidence head is never dropped silently."""
    config = {"markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False}
    refused(edit_checkpoint(DSPARK, tmp_path / "d", config=config), "markov_head.markov_w1", "confidence_head")


@pytest.mark.parametrize("name", ["markov_head.markov_w2.weight", "confidence_head.proj.bias"])
def test_heads_a_config_promises_are_needed(tmp_path, name):
    refused(edit_checkpoint(DSPARK, tmp_path / "d", drop=[name]), name, "missing")


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: f"model.{name}",
        lambda name: name.replace("confidence_head.proj.", "confidence_head."),
        lambda name: name if "head" in name else f"model.{name}",
    ],
)
def test_drafter_tensors_under_other_spellings_are_found(tmp_path, spell):
    source = tensors_of(DSPARK)
    folder = edit_checkpoint(
        DSPARK, tmp_path / "d", drop=list(source), add={spell(name): tensor for name, tensor in source.items()}
    )
    found, expected = made(plan_conversion(folder)), made(plan_conversion(DSPARK))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_drafter_of_another_format_is_refused_by_name(tmp_path):
    folder = edit_checkpoint(DSPARK, tmp_path / "d", config={"architectures": ["Eagle3DraftModel"]})
    with pytest.raises(ConfigError, match="Eagle3DraftModel"):
        plan_conversion(folder)
