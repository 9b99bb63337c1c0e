"""Drafter configs: what their keys mean, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from support.models import GOLDENS

from glmspec.core.errors import ConfigError
from glmspec.models.configs.drafter import Convolution, DrafterConfig, MarkovHeadConfig, Scaling, Selector

WHERE = "DIR/config.json"


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
