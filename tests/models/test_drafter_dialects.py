"""Drafters as z-lab and DeepSpec publish them: the same drafter as in speculators' format, or a named refusal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.models import GOLDENS

from glmspec.core.errors import ConfigError
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.drafter_dialects import WINDOW_ANCHORED, WINDOW_RELATIVE

WHERE = "DIR/config.json"
DRAFTING = ("block_size", "mask_token_id", "target_layer_ids")


def golden(name: str) -> dict:
    return json.loads((GOLDENS / "checkpoints" / name / "config.json").read_text())


def flat(name: str, architecture: str) -> dict:
    """A golden's layers at the top level, taps one lower."""
    values = golden(name)
    extra = {
        key: values[key] for key in values if key.startswith(("markov", "confidence", "enable", "conv", "selector"))
    }
    return {
        **values["transformer_layer_config"],
        **extra,
        "architectures": [architecture],
        "model_type": "qwen3",
        "block_size": values["block_size"],
        "mask_token_id": values["mask_token_id"],
        "target_layer_ids": [one - 1 for one in values["aux_hidden_state_layer_ids"]],
    }


def z_lab(name: str, architecture: str, nested: tuple[str, ...] = DRAFTING) -> dict:
    values = flat(name, architecture)
    return {**values, "dflash_config": {key: values.pop(key) for key in nested}, "num_target_layers": 6}


def read(values: dict, **changes) -> DrafterConfig:
    return DrafterConfig.from_hf({**values, **changes}, WHERE)


def refused(values: dict, *expected: str, **changes) -> None:
    with pytest.raises(ConfigError) as caught:
        read(values, **changes)
    assert all(text in str(caught.value) for text in (WHERE, *expected)), caught.value


def test_deepspec_s_dspark_is_speculators_dspark():
    """But for the window convention, which is each format's own."""
    found = read(flat("dspark", "Qwen3DSparkModel"))
    expected = DrafterConfig.from_hf(golden("dspark"), WHERE)
    assert (found.window, expected.window) == (WINDOW_RELATIVE, WINDOW_ANCHORED)
    assert replace(found, window=expected.window) == expected
    assert found.num_drafts == found.block_size  # DSpark drafts from the anchor too


@pytest.mark.parametrize("nested", [DRAFTING, ("mask_token_id", "target_layer_ids"), ("target_layer_ids",)])
def test_z_lab_s_dflash2_is_speculators_dflash2(nested):
    found = read(z_lab("dflash2", "DFlash2DraftModel", nested))
    expected = DrafterConfig.from_hf(golden("dflash2"), WHERE)
    assert replace(found, window=expected.window) == expected


def test_z_lab_s_dflash_is_the_block_alone():
    found = read(z_lab("dflash2", "DFlashDraftModel"))
    assert (found.kind, found.num_drafts, found.first_draft_row) == ("dflash", 7, 1)
    assert found.markov is found.confidence is found.convolution is found.selector is None
    assert found.sliding_window_non_causal


def test_dspark_in_a_dflash_config():
    values = z_lab("dspark", "DSparkDraftModel")
    assert read(values) == read(flat("dspark", "Qwen3DSparkModel"))


def test_speculators_dflash():
    values = golden("dflash2") | {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"}
    found = DrafterConfig.from_hf(values, WHERE)
    assert (found.kind, found.num_drafts, found.window) == ("dflash", 7, WINDOW_ANCHORED)


def test_taps_are_one_apart():
    """Case A6: [0, 2] of z-lab is [1, 3] of speculators; DeepSpec's -1 is the embedding."""
    assert read(flat("dspark", "Qwen3DSparkModel"), target_layer_ids=[0, 2]).taps == (1, 3)
    assert read(flat("dspark", "Qwen3DSparkModel"), target_layer_ids=[-1, 2]).taps == (0, 3)
    assert DrafterConfig.from_hf(golden("dspark") | {"aux_hidden_state_layer_ids": [1, 3]}, WHERE).taps == (1, 3)


@pytest.mark.parametrize("ids", [[-2, 1], [2, 1], [1, 1], [], None])
def test_wrong_taps_are_refused(ids):
    refused(flat("dspark", "Qwen3DSparkModel"), "target_layer_ids", target_layer_ids=ids)


@pytest.mark.parametrize("key", [*DRAFTING, "vocab_size", "head_dim", "max_position_embeddings", "num_hidden_layers"])
def test_nothing_is_guessed(key):
    """Case A6, A9: neither taps nor mask token nor sizes have a default."""
    values = flat("dspark", "Qwen3DSparkModel")
    del values[key]
    refused(values, key, "no such key")


@pytest.mark.parametrize("key, value", [("block_size", 5), ("mask_token_id", 3), ("target_layer_ids", [0, 1])])
def test_two_places_that_disagree_are_refused(key, value):
    values = z_lab("dflash2", "DFlash2DraftModel")
    refused(values, "dflash_config", key, "agreement with the top level's", **{key: value})


def test_a_dflash_with_a_markov_head_is_refused():
    refused(z_lab("dspark", "DFlashDraftModel"), "markov_rank", "with a Markov head it is DSpark")


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DFlash2DraftModel"])
def test_of_z_lab_s_only_dspark_samples_from_the_anchor(name):
    refused(z_lab("dflash2", name), "sample_from_anchor", sample_from_anchor=True)


def test_layers_without_types_are_full_attention():
    values = flat("dspark", "Qwen3DSparkModel")
    del values["layer_types"]
    assert read(values, use_sliding_window=False).layer_types == ("full_attention",) * 3
    refused(values, "use_sliding_window", use_sliding_window=True)


def test_deepspec_s_class_in_speculators_format_is_refused():
    values = golden("dspark") | {"architectures": ["Qwen3DSparkModel"]}
    refused(values, "architectures", "Qwen3DSparkModel")


@pytest.mark.parametrize(
    "theta", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}]
)
def test_both_spellings_of_the_rotary_base(theta):
    values = flat("dspark", "Qwen3DSparkModel")
    del values["rope_parameters"]
    assert read(values, **theta).rope_theta == 1e6
