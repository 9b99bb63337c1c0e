"""Configs read from other people's JSON: the published GLM-5.3, its shorthands, and every contradiction by name."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from support.models import DATA, GOLDENS

from glmspec.core.errors import ConfigError
from glmspec.core.fields import read_json
from glmspec.models.configs.drafter import Convolution, DrafterConfig, MarkovHeadConfig, Scaling, Selector
from glmspec.models.configs.kinds import parse_config
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.network.limits import EngineLimits

GLM = json.loads((DATA / "glm-5.3-config.json").read_text())
WHERE = "DIR/config.json"
FULL_LAYERS = {0, 1, 2, *range(6, 75, 4)}


def verifier(base: dict = GLM, drop: tuple[str, ...] = (), **changes) -> VerifierConfig:
    values = {key: value for key, value in {**base, **changes}.items() if key not in drop}
    return VerifierConfig.from_hf(values, WHERE)


def golden(name: str) -> dict:
    return json.loads((GOLDENS / "checkpoints" / name / "config.json").read_text())


def drafter(name: str = "dspark", drop: tuple[str, ...] = (), **changes) -> DrafterConfig:
    """A golden drafter's config with changes; `layer__x` is key x of transformer_layer_config,
    `speculative_tokens` the default proposal method's."""
    values = copy.deepcopy(golden(name))
    block = values["transformer_layer_config"]
    for key, value in changes.items():
        if key.startswith("layer__"):
            block[key.removeprefix("layer__")] = value
        elif key == "speculative_tokens":
            values["speculators_config"]["proposal_methods"][0][key] = value
        else:
            values[key] = value
    for key in drop:
        del (block if key.startswith("layer__") else values)[key.removeprefix("layer__")]
    return DrafterConfig.from_hf(values, WHERE)


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


# -- drafters -----------------------------------------------------------------------------------


def test_golden_drafters():
    dspark, dflash2, reduced = drafter("dspark"), drafter("dflash2"), drafter("dspark_redvocab")
    assert (dspark.kind, dspark.taps, dspark.num_drafts, dspark.first_draft_row) == ("dspark", (2, 3, 5), 8, 0)
    assert dspark.markov == MarkovHeadConfig(rank=8) and dspark.confidence.with_markov
    assert dspark.convolution is None and dspark.selector is None
    assert (dflash2.kind, dflash2.num_drafts, dflash2.first_draft_row) == ("dflash2", 7, 1)
    assert dflash2.convolution == Convolution(taps=2, group=16) and dflash2.selector == Selector(rank=8, top_k=4)
    assert dflash2.markov is None and dflash2.confidence is None
    assert dflash2.layer_types[-1] == "full_attention" and dflash2.sliding_window == 12
    assert (reduced.num_drafts, reduced.reduced_vocabulary, reduced.draft_vocab_size) == (3, True, 48)
    assert reduced.sliding_window is None and not dspark.reduced_vocabulary


@pytest.mark.parametrize("token", [96, -1, None, "95", True])
def test_a_wrong_mask_token_is_refused(token):
    """Case A9."""
    refused(lambda: drafter(mask_token_id=token), "mask_token_id", repr(token))


def test_an_absent_mask_token_is_not_guessed():
    """Case A9: never the padding or end token instead."""
    refused(lambda: drafter(drop=("mask_token_id",), pad_token_id=0, eos_token_id=1), "mask_token_id", "no such key")


def test_a_nested_mask_token_counts():
    """Case A9."""
    assert drafter(drop=("mask_token_id",), dflash_config={"mask_token_id": 94}).mask_token_id == 94
    assert drafter(dflash_config={"mask_token_id": 95}).mask_token_id == 95


def test_two_different_mask_tokens_are_refused():
    refused(lambda: drafter(dflash_config={"mask_token_id": 94}), "mask_token_id", "94", "95")


def test_markov_rank_0_is_a_drafter_without_markov_head():
    """Case A10."""
    config = drafter(markov_rank=0, confidence_head_with_markov=False)
    assert config.markov is None and not config.confidence.with_markov
    assert drafter(markov_rank=0, enable_confidence_head=False).confidence is None


def test_confidence_over_a_markov_head_of_rank_0_is_refused():
    """Case A10."""
    refused(lambda: drafter(markov_rank=0), "confidence_head_with_markov", "markov_rank is 0")


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_markov_heads(head):
    assert drafter(markov_head_type=head).markov == MarkovHeadConfig(rank=8, type=head)


@pytest.mark.parametrize("head", ["lstm", "Gated", None])
def test_unknown_markov_heads_are_refused(head):
    refused(lambda: drafter(markov_head_type=head), "markov_head_type", repr(head))


@pytest.mark.parametrize(
    "name, anchor, tokens, drafts",
    [
        ("dspark", True, 4, 4),
        ("dspark", True, 3, None),
        ("dspark", False, 3, 3),
        ("dspark", False, 4, None),
        ("dspark", "missing", 4, 4),  # the published DSpark samples from the anchor
        ("dspark", "missing", 3, None),
        ("dflash2", False, 3, 3),
        ("dflash2", False, 4, None),
        ("dflash2", "missing", 3, 3),  # the published DFlash2 does not
        ("dflash2", "missing", 4, None),
    ],
)
def test_drafts_of_a_block(name, anchor, tokens, drafts):
    """Case A11: what a block of 4 rows drafts; a mismatch names both sides instead of being guessed."""
    changes = {"block_size": 4, "speculative_tokens": tokens}
    drop = ("sample_from_anchor",) if anchor == "missing" else ()
    if anchor != "missing":
        changes["sample_from_anchor"] = anchor
    if drafts is None:
        refused(lambda: drafter(name, drop, **changes), "speculative_tokens", f"found {tokens}", "sample_from_anchor")
    else:
        assert drafter(name, drop, **changes).num_drafts == drafts


def test_every_kind_may_draft_from_the_anchor():
    config = drafter("dflash2", sample_from_anchor=True, speculative_tokens=8)
    assert (config.num_drafts, config.first_draft_row) == (8, 0)


@pytest.mark.parametrize("anchor, drafts, rows", [(True, 8, 8), (True, 1, 1), (False, 7, 8), (False, 1, 2)])
def test_fewer_drafts_are_fewer_rows(anchor, drafts, rows):
    config = drafter(sample_from_anchor=anchor, speculative_tokens=8 if anchor else 7)
    chosen = config.chosen(None, drafts)
    assert (chosen.block_size, chosen.num_drafts, chosen.window) == (rows, drafts, config.window)
    assert config.chosen(None, None) == config
    assert config.chosen("relative", None) == replace(config, window="relative")


@pytest.mark.parametrize("taps", [[3, 2, 5], [2, 2, 5], [-1, 2], [], None, "2", [2.0], [True, 2]])
def test_wrong_taps_are_refused(taps):
    refused(lambda: drafter(aux_hidden_state_layer_ids=taps), "aux_hidden_state_layer_ids")


def test_the_embedding_may_be_tapped():
    assert drafter(aux_hidden_state_layer_ids=[0, 6]).taps == (0, 6)


def test_absent_taps_are_not_guessed():
    """Case A6."""
    refused(lambda: drafter(drop=("aux_hidden_state_layer_ids",)), "aux_hidden_state_layer_ids", "no such key")


@pytest.mark.parametrize(
    "name, changes, expected",
    [
        ("dflash2", {"conv_group_size": 24}, ("conv_group_size", "hidden_size (64)")),
        ("dflash2", {"conv_kernel_size": 0}, ("conv_kernel_size",)),
        ("dflash2", {"conv_kernel_size": 9}, ("conv_kernel_size", "block_size (8)")),
        ("dflash2", {"selector_top_k": 97}, ("selector_top_k", "draft_vocab_size (96)")),
        ("dflash2", {"selector_rank": None}, ("selector_rank",)),
        ("dspark", {"draft_vocab_size": 97}, ("draft_vocab_size", "97", "vocab_size (96)")),
        ("dspark", {"layer__sliding_window": None}, ("transformer_layer_config", "sliding_window", "None")),
        ("dspark", {"layer__layer_types": ["full_attention"] * 2}, ("layer_types", "3 entries")),
        ("dspark", {"layer__layer_types": ["chunked_attention"] * 3}, ("layer_types", "chunked_attention")),
        ("dspark", {"layer__num_key_value_heads": 3}, ("num_attention_heads", "num_key_value_heads (3)")),
        ("dspark", {"layer__head_dim": 15}, ("head_dim", "even")),
        ("dspark", {"layer__rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ("rope_type", "yarn")),
        ("dspark", {"target_hidden_size": 128}, ("target_hidden_size", "hidden_size (64)")),
        ("dspark", {"block_size": 1}, ("block_size", "at least 2")),
        ("dspark", {"block_size": "8"}, ("block_size", "'8'")),
        ("dspark", {"sliding_window_non_causal": 0}, ("sliding_window_non_causal", "true or false")),
        ("dspark", {"transformer_layer_config": []}, ("transformer_layer_config", "an object")),
        ("dspark", {"speculators_model_type": "dflash2"}, ("speculators_model_type", "'dflash2'", "'dspark'")),
        ("dspark", {"architectures": ["EagleDraftModel"]}, ("architectures", "EagleDraftModel")),
        ("dspark", {"speculators_config": {"proposal_methods": []}}, ("default_proposal_method",)),
        ("dspark", {"layer__rms_norm_eps": "1e-6"}, ("rms_norm_eps",)),
    ],
)
def test_wrong_drafter_fields_are_refused(name, changes, expected):
    refused(lambda: drafter(name, **changes), *expected)


def test_full_attention_needs_no_window():
    assert drafter("dspark_redvocab", drop=("layer__sliding_window",)).sliding_window is None


def test_a_sliding_layer_without_a_window_is_refused():
    refused(lambda: drafter(drop=("layer__sliding_window",)), "sliding_window", "no such key")


REQUIRED_OF_DRAFTERS = {
    "dspark": [
        "architectures", "speculators_model_type", "draft_vocab_size", "block_size", "mask_token_id", "markov_rank",
        "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", "sliding_window_non_causal",
        "transformer_layer_config", "speculators_config", "layer__num_hidden_layers", "layer__vocab_size",
        "layer__hidden_size", "layer__intermediate_size", "layer__num_attention_heads", "layer__num_key_value_heads",
        "layer__head_dim", "layer__layer_types", "layer__rms_norm_eps", "layer__rope_parameters",
        "layer__max_position_embeddings",
    ],
    "dflash2": ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"],
}  # fmt: skip


@pytest.mark.parametrize("name, key", [(name, key) for name, keys in REQUIRED_OF_DRAFTERS.items() for key in keys])
def test_a_missing_drafter_key_is_named(name, key):
    refused(lambda: drafter(name, drop=(key,)), key.removeprefix("layer__"))


def test_what_a_drafter_network_cannot_do_is_refused():
    refused(lambda: drafter("dflash2", layer__hidden_act="gelu"), "hidden_act")


SCALING = {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}


def test_scaling():
    assert drafter("dflash2").scaling == drafter("dflash2", output_multiplier=None).scaling == Scaling(1.0, 1.0, None)
    assert drafter("dflash2", **SCALING).scaling == Scaling(8.0, 0.5, 30.0)
    assert drafter("dflash2", final_logit_softcapping=30).scaling.cap == 30.0
    assert drafter("dflash2", dflash_config=SCALING).scaling == Scaling(8.0, 0.5, 30.0)


@pytest.mark.parametrize("key", SCALING)
def test_wrong_scaling_is_refused(key):
    """Zero too, and a key among the layers', where no published drafter reads it."""
    for value in (0, -1.0, float("nan"), float("inf"), True, "2"):
        refused(lambda value=value: drafter("dflash2", **{key: value}), key, repr(value), "a positive number")
    refused(lambda: drafter("dflash2", **{f"layer__{key}": 2.0}), "transformer_layer_config", key, "top level")
    assert drafter("dflash2", **{f"layer__{key}": None}).scaling == Scaling()


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
