"""Verifiers and drafters of sizes that nobody publishes: the numbers of transformers, or the same op by op and layer by
layer."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drafters import LIMITS as DRAFTER_LIMITS
from support.drafters import PAGES, RINGS, Converted, load
from support.models import LIMITS, features_as_taps, load_verifier, random_verifier, stable_topk

from glmspec.build.deployment import open_deployment
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.errors import ConfigError
from glmspec.models.configs.drafter import Convolution, DrafterConfig, MarkovHeadConfig, Selector
from glmspec.models.registry import checkpoint_specs, model_of
from glmspec.runtime.pack import Anchor, Rows, pack_blocks, pack_rows
from glmspec.runtime.pages import Span

FEW = dict(num_hidden_layers=3, indexer_types=["full", "shared", "full"], first_k_dense_replace=1)
# transformers' own experts want hidden and expert sizes that are multiples of 16 bytes, and two experts.
VERIFIERS: dict[str, dict[str, Any]] = {
    "odd": dict(
        kv_lora_rank=31, index_head_dim=17, q_lora_rank=47, qk_nope_head_dim=23, v_head_dim=19, intermediate_size=95,
        num_attention_heads=3, num_key_value_heads=3, vocab_size=101,
    ),
    "least": dict(
        kv_lora_rank=1, index_head_dim=3, q_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=2, v_head_dim=1,
        intermediate_size=1, num_attention_heads=1, num_key_value_heads=1, index_n_heads=1, index_topk=1,
    ),
    "all experts": dict(num_experts_per_tok=6, n_shared_experts=2, index_head_dim=8),
    "two experts": dict(n_routed_experts=2, num_experts_per_tok=1, kv_lora_rank=2),
}  # fmt: skip
PROMPT = torch.randint(2, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(folder: Path, home: Path, regions: bool) -> torch.Tensor:
    model = load_verifier(folder, home, regions=regions, lowest_wins=regions)
    least = LIMITS.least_pages(model.config.index_topk)
    return model.run(pack_rows([Rows(Span([5, 2, 9, 14, 3], 0, 40), PROMPT, 40)], LIMITS, least))["logits"]


@pytest.mark.parametrize("sizes", VERIFIERS.values(), ids=VERIFIERS)
def test_a_verifier_equals_transformers(tmp_path, sizes):
    oracle = random_verifier(tmp_path / "hf", seed=3, **FEW, **sizes)
    with torch.no_grad(), stable_topk():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    for regions in (True, False):
        found = logits(tmp_path / "hf", tmp_path / f"regions {regions}", regions)
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_one_expert_is_always_chosen(tmp_path):
    """transformers cannot run it."""
    random_verifier(tmp_path / "hf", seed=3, **FEW, n_routed_experts=1, num_experts_per_tok=1)
    ops, layers = (logits(tmp_path / "hf", tmp_path / f"regions {regions}", regions) for regions in (True, False))
    torch.testing.assert_close(ops, layers, rtol=1e-4, atol=1e-4)


def test_tensorrt_s_odd_latents_are_refused_by_key(tmp_path):
    """tensorrt_rtx compiles them in float32 alone."""
    random_verifier(tmp_path / "hf", seed=3, **FEW, kv_lora_rank=31)
    for target, dtype in (("b200", None), ("rtx-pro-6000", "bfloat16")):
        with pytest.raises(ConfigError, match="kv_lora_rank: found 31, expected an even number"):
            open_deployment(tmp_path / "hf", [], TARGETS[target], BuildOptions(compute=dtype))
    for target, dtype in (("b200", "float32"), ("cpu", None), ("cpu", "bfloat16")):
        assert open_deployment(tmp_path / "hf", [], TARGETS[target], BuildOptions(compute=dtype))


# -- drafters -------------------------------------------------------------------------------------

LEAST = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=2, intermediate_size=1, block_size=2)
ODD = dict(num_attention_heads=3, num_key_value_heads=1, hidden_size=33, intermediate_size=35)
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark, least": ("dspark", {**LEAST, "sliding_window": 1, "markov": MarkovHeadConfig(rank=1)}),
    "dspark gated, odd": ("dspark gated", {**ODD, "vocab_size": 67, "draft_vocab_size": 67}),
    "dspark rnn, rank 1": ("dspark rnn", {"markov": MarkovHeadConfig(rank=1, type="rnn"), "taps": (0,)}),
    "dspark, one token": ("dspark, fewer tokens", {"draft_vocab_size": 1, "block_size": 1}),
    "dflash, odd": ("dflash", {**ODD, "sliding_window": 1, "window": "relative"}),
    "dflash2, least": (
        "dflash2",
        {**LEAST, "convolution": Convolution(taps=1, group=1), "selector": Selector(rank=1, top_k=1)},
    ),
    "dflash2, a group of all": ("dflash2", {**ODD, "convolution": Convolution(taps=5, group=33)}),
    "dflash2, all candidates": ("dflash2", {"selector": Selector(rank=1, top_k=64)}),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    return Converted(tmp_path_factory.mktemp("drafters"))


def random_weights(config: DrafterConfig) -> dict[str, torch.Tensor]:
    made = {}
    for spec in checkpoint_specs(config, 0):
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        drawn = torch.randn(tuple(spec.dims), generator=generator) * (spec.dims[-1] ** -0.5 if spec.dims else 1)
        made[spec.name] = torch.zeros(spec.dims, dtype=torch.int32) if spec.dtype == "int32" else drawn
    return made


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name, changes", DRAFTERS.values(), ids=DRAFTERS)
def test_a_drafter_s_ops_equal_its_layers(converted, name, changes, sampled):
    config = replace(converted(name)[0], **changes)
    features = torch.randn(24, len(config.taps) * config.hidden_size, generator=torch.Generator().manual_seed(5))
    positions = [3, 9, 17]
    kept = [Span(PAGES[at], 0, positions[at], RINGS[at]) for at in range(3)]
    blocks = [Anchor(PAGES[at], 3 + at, positions[at], RINGS[at]) for at in range(3)]
    rows = [row for span in kept for row in range(span.count)]
    inputs = pack_blocks(rows, kept, blocks, DRAFTER_LIMITS) | features_as_taps(config, features)
    if sampled:
        drawn = torch.rand(3, config.num_drafts, generator=torch.Generator().manual_seed(9))
        inputs |= {"draft_temperature": torch.tensor([0.0, 1.0, 0.7]), "draft_uniform": drawn}
    tree = model_of(config, sampled=sampled)
    ops, layers = (load(tree, random_weights(config), regions=regions).run(inputs) for regions in (True, False))
    assert ops.keys() == layers.keys()
    for key, tensor in ops.items():
        torch.testing.assert_close(tensor, layers[key], rtol=1e-4, atol=1e-4)
        assert tensor.double().isfinite().all() or key == "margin"
