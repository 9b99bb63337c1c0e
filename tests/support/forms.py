"""A small verifier in every number format."""

from __future__ import annotations

from pathlib import Path

from glmspec.convert.calibration import Activations
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES, Recipe, Rule
from glmspec.network.shards import Mapping
from support.models import calibrated

SIZES = dict(
    num_hidden_layers=3,
    indexer_types=["full", "shared", "full"],
    first_k_dense_replace=1,
    hidden_size=128,
    q_lora_rank=64,
    num_attention_heads=16,
    num_key_value_heads=16,
    v_head_dim=32,
    qk_nope_head_dim=24,
    intermediate_size=512,
    moe_intermediate_size=512,
    n_routed_experts=4,
    vocab_size=101,
)
EVERYTHING = Rule("*", "fp8")
MIXED = (Rule("*.mlp.experts.*", "nvfp4"), Rule("*.self_attn.o_proj", "fp8"), Rule("*", "fp8_block"))
FORMS = {
    "FP8 blocks": (RECIPES["fp8"], False),
    "NVFP4 weights": (RECIPES["nvfp4"], False),
    "NVFP4 weights and activations": (RECIPES["nvfp4"], True),
    "FP8 weights": (Recipe("fp8", (EVERYTHING,), "bfloat16"), False),
    "FP8 weights and activations": (Recipe("fp8", (EVERYTHING,), "bfloat16"), True),
    "mixed": (Recipe("mixed", MIXED, "bfloat16"), True),
}


def conversion(folder: Path, name: str, mapping: Mapping):
    """The conversion of a checkpoint to a form."""
    recipe, rounds = FORMS[name]
    return plan_conversion(
        folder, ConvertOptions(recipe, mapping, calibrated(folder, 8.0) if rounds else Activations())
    )
