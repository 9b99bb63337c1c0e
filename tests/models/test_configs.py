"""Configs read from other people's JSON: the published GLM-5.3, its shorthands, and every contradiction by name."""

from __future__ import annotations

import json

import pytest
from support.models import DATA

from glmspec.core.errors import ConfigError
from glmspec.core.fields import read_json
from glmspec.models.configs.kinds import parse_config
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.network.limits import EngineLimits

GLM = json.loads((DATA / "glm-5.3-config.json").read_text())

WHERE = "DIR/config.json"

FULL_LAYERS = {0, 1, 2, *range(6, 75, 4)}


def verifier(base: dict = GLM, drop: tuple[str, ...] = (), **changes) -> VerifierConfig:
    values = {key: value for key, value in {**base, **changes}.items() if key not in drop}
    return VerifierConfig.from_hf(values, WHERE)


def refused(make, *expected: str) -> None:
    """`make` raises a ConfigError that names the file and every expected text."""
    with pytest.raises(ConfigError) as caught:
        make()
    for text in (WHERE, *expected):
        assert text in str(caught.value)


# -- the verifier -------------------------------------------------------------------------------


def test_published_glm_5_3():
    config = verifier()
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (78, 6144, 154_880)
    assert (config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank) == (64, 2048, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (192, 64, 256)
    assert (config.latent_dim, config.qk_head_dim, config.softmax_scale) == (576, 256, 256**-0.5)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (256, 8, 1)
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (32, 128, 2048)
    assert (config.rope_theta, config.rope_interleave, config.indexer_rope_interleave) == (8e6, True, True)
    assert (config.rms_norm_eps, config.routed_scaling_factor, config.norm_topk_prob) == (1e-5, 2.5, True)
    assert (config.max_position_embeddings, config.num_nextn_predict_layers) == (1_048_576, 1)
    assert config.eos_token_ids == (154_820, 154_827, 154_829)


def test_published_full_indexer_layers():
    types = verifier().indexer_types
    assert {at for at, kind in enumerate(types) if kind == "full"} == FULL_LAYERS
    assert len(FULL_LAYERS) == 21


EIGHT = {**GLM, "num_hidden_layers": 8}

LISTED = ["full"] * 3 + ["shared"] * 3 + ["full", "shared"]

SHORTHAND = ("index_topk_freq", "index_skip_topk_offset")


def test_indexer_types_and_their_shorthands_agree():
    """Case A2: the list, the frequency and offset, and the pattern say the same; none of them is all full."""
    explicit = verifier(EIGHT, drop=SHORTHAND, indexer_types=LISTED)
    pattern = verifier(EIGHT, drop=SHORTHAND, index_topk_pattern="FFFSSSFS")
    assert explicit.indexer_types == tuple(LISTED)
    assert verifier(EIGHT).indexer_types == explicit.indexer_types == pattern.indexer_types
    assert verifier(EIGHT, indexer_types=LISTED) == explicit
    assert verifier(EIGHT, drop=SHORTHAND).indexer_types == ("full",) * 8


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"indexer_types": ["full"] * 8}, "indexer_types"),  # against frequency and offset
        ({"indexer_types": LISTED[:7]}, "indexer_types"),
        ({"indexer_types": ["Full", *LISTED[1:]]}, "indexer_types"),
        ({"index_topk_pattern": "FFFSSSF"}, "index_topk_pattern"),
        ({"index_topk_pattern": "FFFSSSFX"}, "index_topk_pattern"),
        ({"index_skip_topk_offset": None}, "index_skip_topk_offset"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
        ({"mlp_layer_types": ["sparse"] * 8}, "mlp_layer_types"),  # against first_k_dense_replace
        ({"mlp_layer_types": ["dense"] * 7}, "mlp_layer_types"),
        ({"rope_theta": 10_000}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 8e6}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"index_head_dim": 32}, "index_head_dim"),
        ({"eos_token_id": 154_880}, "eos_token_id"),
        ({"eos_token_id": [1, 154_880]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
    ],
)
def test_contradictions_are_refused(changes, key):
    refused(lambda: verifier(EIGHT, **changes), key, "expected")


def test_key_value_heads_other_than_the_heads_are_refused():
    refused(lambda: verifier(EIGHT, num_key_value_heads=8), "num_key_value_heads", "num_attention_heads (64)")


def test_wrong_key_value_heads_are_shown():
    refused(lambda: verifier(EIGHT, num_key_value_heads=8), "num_key_value_heads", "found 8")


def test_the_first_layer_cannot_share():
    types = ["shared", *LISTED[1:]]
    refused(lambda: verifier(EIGHT, drop=SHORTHAND, indexer_types=types), "indexer_types", '"full"')


def test_rope_base_may_be_said_twice():
    assert verifier(rope_theta=8_000_000).rope_theta == 8e6


def test_rope_base_of_an_older_config():
    """Before `rope_parameters` there was `rope_theta`; nothing is guessed, and no scaling is dropped."""
    old = ("rope_parameters",)
    assert verifier(drop=old, rope_theta=1e6, rope_scaling=None).rope_theta == 1e6
    refused(lambda: verifier(drop=old), "rope_theta", "no such key")
    refused(lambda: verifier(drop=old, rope_theta=1e6, rope_scaling={"type": "yarn"}), "rope_scaling", "yarn")


def test_end_tokens_may_be_left_to_other_files():
    assert verifier(drop=("eos_token_id",)).eos_token_ids == verifier(eos_token_id=None).eos_token_ids == ()
    assert verifier(eos_token_id=0).eos_token_ids == (0,)


def test_interleaving_is_read_not_assumed():
    config = verifier(rope_interleave=False, indexer_rope_interleave=False)
    assert (config.rope_interleave, config.indexer_rope_interleave) == (False, False)


REQUIRED = [
    key
    for key in GLM
    if key
    not in {  # implied by others, defaulted by the published class, or not read
        "dtype", "head_dim", "qk_head_dim", "moe_router_dtype", "moe_layer_freq", "pad_token_id",
        "index_share_for_mtp_iteration", "num_key_value_heads", "n_group", "topk_group", "scoring_func",
        "topk_method", "index_topk_freq", "indexer_rope_interleave", "rope_interleave",
        "num_nextn_predict_layers", "tie_word_embeddings", "attention_bias", "rope_parameters", "eos_token_id",
    }
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
    refused(lambda: verifier(drop=(key,)), key, "no such key", "expected")


@pytest.mark.parametrize("key", ["hidden_size", "index_topk", "max_position_embeddings", "num_hidden_layers"])
@pytest.mark.parametrize("value", ["64", 64.0, True, 0, -1, None, [64]])
def test_a_size_of_a_wrong_type_or_range_is_refused(key, value):
    refused(lambda: verifier(**{key: value}), key, repr(value), "an integer of at least 1")


@pytest.mark.parametrize(
    "key, value",
    [
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("routed_scaling_factor", True),
        ("norm_topk_prob", 1),
        ("rope_interleave", "true"),
        ("num_nextn_predict_layers", -1),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("n_group", 8),
        ("topk_group", 4),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("tie_word_embeddings", True),
        ("rope_parameters", 8_000_000),
    ],
)
def test_what_the_network_cannot_do_is_refused(key, value):
    refused(lambda: verifier(**{key: value}), key, repr(value))


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"},
    ],
)
def test_other_architectures_are_refused_by_name(values):
    refused(lambda: parse_config({**values, "hidden_size": 64}, WHERE), values["architectures"][0])
    refused(lambda: VerifierConfig.from_hf({**GLM, **values}, WHERE), values["architectures"][0])


def test_glm5_next_under_a_known_class_name_is_refused():
    refused(lambda: verifier(model_type="glm5_next"), "model_type", "glm5_next")


@pytest.mark.parametrize(
    "text, expected",
    [(None, "no such file"), ("{", "JSON"), ("[1]", "list"), ("\xff", "JSON")],
)
def test_an_unreadable_config_is_named(tmp_path, text, expected):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=expected) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


# -- limits -------------------------------------------------------------------------------------

LIMITS = dict(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64, page_size=8, segment_rows=12, block_rows=9)


@pytest.mark.parametrize("key", LIMITS)
def test_limits_are_positive(key):
    with pytest.raises(ConfigError, match=f"{key}: found 0"):
        EngineLimits(**{**LIMITS, key: 0})


def test_every_sequence_has_room_for_a_block():
    assert EngineLimits(**{**LIMITS, "max_num_batched_tokens": 36}).max_num_batched_tokens == 36
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: found 35, expected at least 36"):
        EngineLimits(**{**LIMITS, "max_num_batched_tokens": 35})


def test_sizes_that_follow_from_limits():
    limits = EngineLimits(**LIMITS)
    assert (limits.pages_per_sequence, limits.num_pages, limits.table_positions) == (13, 4 * 13 + 1, 109)


def test_topk_is_clamped_to_the_pages_and_refused_above_what_tensorrt_takes():
    """Case H54."""
    long = EngineLimits(**{**LIMITS, "max_model_len": 8192})
    assert EngineLimits(**LIMITS).index_topk(2048) == 13 * 8
    assert (long.index_topk(2048), long.index_topk(3840)) == (2048, 3840)
    with pytest.raises(ConfigError, match="index_topk: found 4096, expected at most 3840"):
        long.index_topk(4096)


@pytest.mark.parametrize("k", [0, 1, 8, 9, 104])
def test_ranges_are_ordered_and_page_tables_hold_k_rows(k):
    for ranges in EngineLimits(**LIMITS).profiles(k).values():
        assert all(least <= typical <= most for least, typical, most in ranges.values())
        assert ranges["M"][0] * 8 >= k
        assert ranges["M"][0] == max(1, -(-k // 8))
