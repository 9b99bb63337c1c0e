"""Keys that say nothing, and keys that say something nobody reads: null and defaults spelled out change nothing, known
ones are harmless, and every other is refused by name."""

from __future__ import annotations

import copy
import json

import pytest
from support.models import ASSETS, DATA, GOLDENS, VERIFIER_CONFIG

from glmspec.core.errors import ConfigError
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.verifier import VerifierConfig

WHERE = "DIR/config.json"
GLM = json.loads((DATA / "glm-5.3-config.json").read_text())
NAMES = ("verifier", "dspark", "dflash2", "dspark_redvocab")
GOLDEN = {name: json.loads((GOLDENS / "checkpoints" / name / "config.json").read_text()) for name in NAMES}
Z_LAB = {
    **GOLDEN["dflash2"]["transformer_layer_config"],
    "architectures": ["DFlashDraftModel"],
    "block_size": 8,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 3]},
}
TINY = json.loads((ASSETS / "tiny-verifier" / "config.json").read_text())


def read(values: dict) -> VerifierConfig | DrafterConfig:
    verifier = values["architectures"] == ["GlmMoeDsaForCausalLM"]
    return (VerifierConfig if verifier else DrafterConfig).from_hf(values, WHERE)


def changed(values: dict, changes: dict, drop: tuple[str, ...] = ()) -> dict:
    """With changes; a key `a.b` is b of the object a."""
    values = copy.deepcopy(values)
    for key in (*changes, *drop):
        *path, last = key.split(".")
        place = values
        for part in path:
            place = place[part]
        place.pop(last, None)
        if key in changes:
            place[last] = changes[key]
    return values


def refused(values: dict, *expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(values)
    assert all(text in str(caught.value) for text in (WHERE, *expected)), caught.value


# -- null -------------------------------------------------------------------------------------------

OPTIONAL = [
    "attention_bias", "eos_token_id", "first_k_dense_replace", "index_share_for_mtp_iteration", "index_topk_freq",
    "index_topk_pattern", "indexer_rope_interleave", "is_causal", "layer_types", "mlp_bias", "mlp_layer_types",
    "moe_layer_freq", "moe_router_dtype", "n_group", "num_experts", "num_key_value_heads", "num_nextn_predict_layers",
    "partial_rotary_factor", "quantization_config", "rope_interleave", "rope_scaling", "rope_theta", "scoring_func",
    "tie_word_embeddings", "topk_group", "topk_method",
]  # fmt: skip


@pytest.mark.parametrize("key", OPTIONAL)
@pytest.mark.parametrize("values", [GLM, TINY], ids=["published", "tiny"])
def test_null_of_a_verifier_is_absent(values, key):
    """Whatever that means: the same config, or the same refusal (of the only key that says a thing)."""
    null, absent = changed(values, {key: None}), changed(values, {}, (key,))
    try:
        expected = read(absent)
    except ConfigError:
        refused(null, key)
    else:
        assert read(null) == expected


OPTIONAL_OF_DRAFTERS = [
    "sample_from_anchor", "target_hidden_size", "tie_word_embeddings", "input_embedding_scale", "dflash_config",
    "transformer_layer_config.attention_bias", "transformer_layer_config.hidden_act",
    "transformer_layer_config.use_sliding_window", "transformer_layer_config.partial_rotary_factor",
    "transformer_layer_config.rope_theta", "transformer_layer_config.rope_parameters.rope_type",
    "transformer_layer_config.rope_parameters.type",
]  # fmt: skip


@pytest.mark.parametrize("key", OPTIONAL_OF_DRAFTERS)
@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_null_of_a_drafter_is_absent(name, key):
    assert read(changed(GOLDEN[name], {key: None})) == read(changed(GOLDEN[name], {}, (key,))) == read(GOLDEN[name])


@pytest.mark.parametrize("key", ["draft_vocab_size", "sliding_window_non_causal", "layer_types", "sliding_window"])
def test_null_in_z_lab_s_format_is_absent(key):
    full = changed(Z_LAB, {"layer_types": ["full_attention"] * 5, "use_sliding_window": None})
    assert read(changed(full, {key: None})) == read(changed(full, {}, (key,))) == read(full)


def test_null_in_one_of_two_places_leaves_it_to_the_other():
    assert read(changed(Z_LAB, {"mask_token_id": None})) == read(Z_LAB)
    moved = changed(Z_LAB, {"mask_token_id": 95, "dflash_config.mask_token_id": None})
    assert read(moved) == read(Z_LAB)


@pytest.mark.parametrize("mark", ["speculators_config", "transformer_layer_config", "speculators_model_type"])
def test_a_format_s_mark_that_is_null_is_no_mark(mark):
    assert read(changed(Z_LAB, {mark: None})) == read(Z_LAB)


@pytest.mark.parametrize("key", ["hidden_size", "index_topk", "hidden_act", "n_shared_experts", "rms_norm_eps"])
def test_null_of_a_required_key_is_an_error(key):
    refused(changed(GLM, {key: None}), key, "found None")


# -- defaults spelled out ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, drop",
    [
        ({"rope_parameters": {"rope_theta": 8e6}}, ()),
        ({"rope_parameters": {"rope_theta": 8e6, "rope_type": None}}, ()),
        ({"rope_parameters": {"rope_theta": 8e6, "type": "default"}}, ()),
        ({"rope_parameters": {"rope_theta": 8e6, "partial_rotary_factor": None}}, ()),
        ({"rope_parameters": {"rope_theta": 8e6, "partial_rotary_factor": 1.0, "factor": 1.0}}, ()),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 8e6}, ()),
        ({"rope_parameters": {"full_attention": {"rope_theta": 8e6}, "sliding_attention": {"rope_theta": 8e6}}}, ()),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 8e6}}, ()),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 8e6}, ("rope_parameters",)),
        ({"rope_scaling": {}, "partial_rotary_factor": 1}, ()),
        ({"moe_layer_freq": 1, "moe_router_dtype": "float32", "mlp_bias": False, "is_causal": True}, ()),
        ({"num_experts": 256, "num_local_experts": 256, "per_layer_config": {}, "logit_scale": 1.0}, ()),
        ({"layer_types": ["indexed_attention"] * 78}, ()),
    ],
)
def test_defaults_spelled_out_change_nothing(changes, drop):
    assert read(changed(GLM, changes, drop)) == read(GLM)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e4}}, ("rope_theta", "8000000.0")),
        ({"rope_scaling": {"factor": 4.0, "type": "linear"}}, ("rope_scaling", "type", "linear")),
        ({"rope_parameters": {"rope_theta": 8e6, "factor": 4.0}}, ("rope_parameters", "factor", "4.0")),
        ({"rope_parameters": {"a": {"rope_theta": 8e6}, "b": {"rope_theta": 1e4}}}, ("rope_theta", "agreement")),
        ({"rope_parameters": {"rope_theta": 8e6, "partial_rotary_factor": 0.5}}, ("partial_rotary_factor", "0.5")),
        ({"num_local_experts": 8}, ("num_local_experts", "n_routed_experts (256)")),
        ({"layer_types": ["sliding_attention"] * 78}, ("layer_types", "indexed_attention")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq", "found 2")),
        ({"moe_router_dtype": "bfloat16"}, ("moe_router_dtype", "bfloat16")),
    ],
)
def test_what_is_no_default_is_refused(changes, expected):
    refused(changed(GLM, changes), *expected)


def test_an_offset_counts_only_where_layers_share():
    """1 is the published default of the frequency, 0 and no offset at all mean nothing beside it or beside a list."""
    full, shorthand = ("full",) * 78, ("index_topk_freq", "index_skip_topk_offset")
    assert read(changed(GLM, {"index_topk_freq": 1, "index_skip_topk_offset": 0})).indexer_types == full
    assert read(changed(GLM, {"index_skip_topk_offset": 0}, shorthand[:1])).indexer_types == full
    listed = {"indexer_types": list(read(GLM).indexer_types)}
    for drop in (shorthand, shorthand[1:]):
        assert read(changed(GLM, listed, drop)) == read(GLM)
    assert read(changed(GLM, {**listed, "index_topk_freq": 1, "index_skip_topk_offset": 0})) == read(GLM)
    assert read(changed(GLM, {"index_topk_pattern": listed["indexer_types"]}, shorthand)) == read(GLM)
    refused(changed(GLM, {"index_skip_topk_offset": 0}), "first entry")


def test_a_pattern_and_a_frequency_must_agree():
    refused(changed(GLM, {"index_topk_pattern": "F" * 78}), "index_topk_pattern", "index_topk_freq")


# -- keys that nobody reads -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value",
    [
        ("torch_dtype", "float32"),
        ("_name_or_path", "org/model"),
        ("attention_dropout", 0.1),
        ("classifier_dropout", 0.1),
        ("router_aux_loss_coef", 0.001),
        ("mtp_loss_scaling_factor", 0.1),
        ("unsloth_version", "2026.1"),
        ("target_model_type", "glm_moe_dsa"),
        ("target_text_model_type", "glm_moe_dsa"),
        ("target_num_hidden_layers", 78),
        ("attention_backend", "sdpa"),
        ("unk_token_id", 3),
        ("ep_size", 8),
        ("temperature", 0.6),
        ("qk_norm", False),
        ("swiglu_limit", None),
        ("tied_layers", []),
        ("residual_multiplier", 1.0),
        ("z_loss", 0.0),
    ],
)
@pytest.mark.parametrize("values", [GLM, Z_LAB], ids=["verifier", "drafter"])
def test_harmless_keys_pass(values, key, value):
    if values is Z_LAB and key == "qk_norm":
        refused(changed(values, {key: value}), "qk_norm", "True")  # every drafter's queries and keys are normed
    else:
        assert read(changed(values, {key: value})) == read(values)


UNKNOWN = [
    ("attn_logit_softcapping", 50.0), ("swiglu_limit", 7.0), ("residual_multiplier", 0.22),
    ("embedding_multiplier", 12), ("logit_scale", 0.0625), ("sandwich_norm", True), ("sinks", 4),
    ("hidden_activation", "gelu"), ("use_residual_scale", True),
    ("per_layer_config", {"3": {"rope_theta": 1e4}}), ("use_qk_norm_of_my_own", True), ("rope_interleaved_by", [1]),
]  # fmt: skip


@pytest.mark.parametrize("key, value", UNKNOWN)
@pytest.mark.parametrize("values", [GLM, Z_LAB, GOLDEN["dspark"]], ids=["verifier", "z-lab", "speculators"])
def test_unknown_keys_are_refused_by_name(values, key, value):
    refused(changed(values, {key: value}), f"{key}: found {value!r}", "remove it from the config")


@pytest.mark.parametrize("place", ["dflash_config", "rope_parameters"])
def test_unknown_keys_inside_z_lab_s_objects_are_refused(place):
    refused(changed(Z_LAB, {f"{place}.strange": 2}), "strange", "found 2")


@pytest.mark.parametrize("place", ["transformer_layer_config", "speculators_config"])
def test_unknown_keys_inside_speculators_objects_are_refused(place):
    refused(changed(GOLDEN["dspark"], {f"{place}.strange": 2}), place, "strange", "found 2")


def test_keys_of_the_layers_may_be_said_at_the_top_too():
    values = GOLDEN["dspark"]
    layers = {key: values["transformer_layer_config"][key] for key in ("layer_types", "hidden_size", "sliding_window")}
    assert read({**values, **layers}) == read(values)
    refused({**values, "hidden_size": 65}, "hidden_size: found 65")
    refused({**values, "layer_types": ["full_attention"] * 3}, "layer_types")


@pytest.mark.parametrize(
    "key, value",
    [
        ("projector_type", "domino"),
        ("shift_label", True),
        ("causal", True),
        ("is_causal", True),
        ("attention_mode", "mla"),
        ("conv_kernel_conditioning", "source"),
        ("use_aux_hidden_state", False),
        ("qk_norm", False),
        ("mlp_bias", True),
        ("target_vocab_size", 128),
        ("swa_window_size", 4096),
        ("use_sliding_window", False),  # with sliding layers
        ("use_swa", False),
        ("attention_sink_bias", True),
        ("dflash_query_causal", True),
        ("eagle_aux_hidden_state_layer_ids", [0, 3]),  # counted from one
    ],
)
def test_variants_of_drafters_that_no_tensor_shows_are_refused(key, value):
    refused(changed(Z_LAB, {key: value}), f"{key}: found {value!r}")
    if key not in ("qk_norm", "mlp_bias", "use_sliding_window"):
        refused(changed(Z_LAB, {f"dflash_config.{key}": value}), f"{key}: found {value!r}")


def test_configs_as_published_classes_save_them_pass():
    """Every key of `PretrainedConfig` included."""
    from transformers import GlmMoeDsaConfig, Qwen3Config

    saved = json.loads(GlmMoeDsaConfig(**VERIFIER_CONFIG).to_json_string(use_diff=False))
    assert read({**saved, "architectures": ["GlmMoeDsaForCausalLM"]}).hidden_size == 64
    values = copy.deepcopy(GOLDEN["dspark"])
    layers = Qwen3Config(**values["transformer_layer_config"])
    values["transformer_layer_config"] = json.loads(layers.to_json_string(use_diff=False))
    domino = {"projector_type": "dflash", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024}
    trained = {
        "lambda_base_start": 1.0,
        "auf": False,
        "shift_label": False,
        "loss_decay_gamma": 4.0,
        "num_anchors": 256,
    }
    assert read({**values, **domino, **trained}) == read(GOLDEN["dspark"])


def test_keys_that_exporters_of_drafters_add_pass():
    told = {"eagle_aux_hidden_state_layer_ids": [1, 4], "use_swa": True, "swa_window_size": 12, "has_lm_head": False}
    more = {"has_embed_tokens": True, "attention_sink_bias": False, "projector_type": "dflash", "causal": False}
    assert read(changed(Z_LAB, {f"dflash_config.{key}": value for key, value in {**told, **more}.items()})) == read(
        Z_LAB
    )
    assert read({**Z_LAB, **told, **more}) == read(Z_LAB)


def test_a_head_of_another_kind_is_left_to_the_tensors():
    assert read({**Z_LAB, "selector_rank": 8, "conv_kernel_size": 2}) == read(Z_LAB)


# -- sizes that no network can have ---------------------------------------------------------------


def test_more_candidates_than_tensorrt_takes_are_refused():
    sizes = {"vocab_size": 5000, "architectures": ["DFlash2DraftModel"], "selector_rank": 8}
    values = {**Z_LAB, **sizes, "conv_kernel_size": 2, "conv_group_size": 16}
    assert read({**values, "selector_top_k": 3840}).selector.top_k == 3840
    refused({**values, "selector_top_k": 3841}, "selector_top_k: found 3841", "3840")
    refused(changed(GLM, {"n_routed_experts": 5000, "num_experts_per_tok": 3841}), "num_experts_per_tok", "3840")
    layers = "transformer_layer_config.vocab_size"
    markov = read(changed(GOLDEN["dspark"], {layers: 5000, "draft_vocab_size": 5000}))
    assert markov.chosen(None, None, 3840).markov.top_k == 3840
    with pytest.raises(ConfigError, match=r"--markov-top-k: found 3841.*expected 1 to 3840"):
        markov.chosen(None, None, 3841)
