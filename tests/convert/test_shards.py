"""Dividing a verifier among ranks: every rank holds its slice, of values and of scales, and nothing else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models import random_verifier

from glmspec.convert import plan
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.formats import NUMPY, Matrix, to_float32
from glmspec.convert.recipe import RECIPES, Recipe, Rule
from glmspec.core.errors import ConfigError, GlmspecError
from glmspec.network.formats import FORMATS
from glmspec.network.shards import Layout, Mapping, Split

SIZES = dict(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    n_routed_experts=8,
    indexer_types=["full", "shared", "full"],
    first_k_dense_replace=1,
)
NVFP4 = RECIPES["nvfp4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "hf"
    random_verifier(folder, seed=3, **SIZES)
    return folder


def converted(folder: Path, out: Path, recipe: Recipe, tp: int = 1, ep: int = 1) -> Checkpoint:
    return plan_conversion(folder, ConvertOptions(recipe, Mapping(tp, ep))).write(out)


def shard(checkpoint: Checkpoint, rank: int, name: str) -> torch.Tensor:
    """One rank's part of a weight as float32, read without the code that wrote it."""
    tensors = load_file(checkpoint.folder / f"rank{rank}.safetensors")
    (weight,) = (one for one in checkpoint.weights() if one.name == name)
    layout, values = weight.layout, {}
    units, rows, columns = layout.box(rank)
    for suffix, field in FORMATS[weight.format].items():
        bits = tensors[weight.field_name(suffix)].reshape(-1).view(torch.uint8).numpy().view(NUMPY[field.dtype])
        values[suffix] = bits.reshape(len(units), *field.size(len(rows), len(columns)))
    blocks = [to_float32(Matrix(weight.format, {k: v[u] for k, v in values.items()})) for u in range(len(units))]
    return torch.from_numpy(np.stack(blocks))


def joined(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A weight put together again: ranks along the axis the published layout says, padding cut off."""
    tp, ep = checkpoint.mapping.tp, checkpoint.mapping.ep
    parts = [shard(checkpoint, rank, name) for rank in range(tp)]
    if ".experts." in name:  # ranks of a group split an expert's rows (gate, up) or columns (down)
        # TensorRT-LLM's mapping: moe_ep_rank = rank % ep, moe_tp_rank = rank // ep.
        axis = 2 if name.endswith("down_proj") else 1
        return torch.cat([torch.cat(parts[group::ep], axis) for group in range(ep)])
    if name.endswith(("w_uk", "w_uv")):
        return torch.cat(parts)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.cat(parts, 2)
    if name.endswith(
        ("q_b_proj.weight", "gate_proj.weight", "up_proj.weight", "embed_tokens.weight", "lm_head.weight")
    ):
        return torch.cat(parts, 1)
    assert all(torch.equal(one, parts[0]) for one in parts)
    return parts[0]


@pytest.mark.parametrize("recipe", ["auto", "nvfp4"])
@pytest.mark.parametrize("tp, ep", [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 4), (8, 8)])
def test_shards_are_slices(folder, tmp_path, recipe, tp, ep):
    whole = converted(folder, tmp_path / "one", RECIPES[recipe])
    parts = converted(folder, tmp_path / "many", RECIPES[recipe], tp, ep)
    parts.check()
    expected = whole.load()
    assert any(one.format == "nvfp4" for one in parts.weights()) == (recipe == "nvfp4")
    for name, values in expected.items():
        found = joined(parts, name)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            found = found[:, : values.shape[0]]
        assert torch.equal(found.reshape(-1), values.float().reshape(-1)), name


def test_fp8_blocks_are_divided_between_blocks(tmp_path):
    sizes = SIZES | dict(intermediate_size=512, moe_intermediate_size=256, v_head_dim=32, qk_nope_head_dim=56)
    random_verifier(tmp_path / "hf", seed=4, **sizes)
    recipe = Recipe("some", (Rule("*.mlp.*", "fp8_block"), Rule("*.o_proj", "fp8_block")))
    whole = converted(tmp_path / "hf", tmp_path / "one", recipe)
    parts = converted(tmp_path / "hf", tmp_path / "two", recipe, 2)
    parts.check()
    expected = whole.load()
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.down_proj.weight",
                 "model.layers.2.self_attn.o_proj.weight"):  # fmt: skip
        assert torch.equal(joined(parts, name).reshape(-1), expected[name].reshape(-1)), name


def test_a_rank_holds_its_share_and_no_more(folder, tmp_path):
    whole = converted(folder, tmp_path / "one", NVFP4)
    parts = converted(folder, tmp_path / "four", NVFP4, 4, 2)
    for rank in range(4):
        held = load_file(tmp_path / "four" / f"rank{rank}.safetensors")
        assert held["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 128, 32)
        assert held["model.layers.1.mlp.experts.gate_up_proj_scale"].shape == (4, 128, 4)
        assert held["model.layers.1.mlp.experts.gate_up_proj_scale_2"].shape == (4, 2)
        assert held["model.layers.1.mlp.experts.down_proj"].shape == (4, 64, 32)
        assert held["model.layers.0.self_attn.w_uk"].shape == (2, 24, 32)
        assert held["model.layers.0.self_attn.o_proj.weight"].shape == (64, 40)
        assert held["lm_head.weight"].shape == (25, 64)
        assert held["model.layers.1.mlp.gate.weight"].shape == (8, 64)
    assert whole.weights_sha256 != parts.weights_sha256


@pytest.mark.parametrize("tp", [3, 8])
def test_padded_rows_of_a_vocabulary_never_win(folder, tmp_path, tp):
    """100 rows are padded with copies of the last: they tie with it, and the lowest index wins."""
    split = RECIPES["auto"]
    random = random_verifier(tmp_path / "hf", seed=5, **(SIZES | dict(num_attention_heads=24, num_key_value_heads=24,
        intermediate_size=96, moe_intermediate_size=96, n_routed_experts=6)))  # fmt: skip
    del random
    head = joined(converted(tmp_path / "hf", tmp_path / "ck", split, tp), "lm_head.weight")[0]
    assert head.shape[0] % tp == 0 and head.shape[0] > 100
    assert torch.equal(head[100:], head[99:100].expand(head.shape[0] - 100, -1))
    hidden = torch.randn(64, 500, generator=torch.Generator().manual_seed(1))
    hidden[:, :100] = -20 * head[:100].T  # whose own row loses clearly, so that all logits may be negative
    logits = head @ hidden
    best = (logits == logits.amax(0)).to(torch.int8).argmax(0)  # lowest index among equals
    assert int(best.max()) < 100


@pytest.mark.parametrize(
    "tp, ep, recipe, expected",
    [
        (16, 1, "auto", ["w_uk: 8 heads do not divide by 16", "--tp 1, 2, 4, 8"]),
        (3, 1, "auto", ["do not divide by 3", "--tp 1, 2, 4, 8"]),
        (2, 1, "fp8", ["would cut a fp8_block", "block of 128", "--tp 1"]),
    ],
)
def test_an_illegal_size_names_the_weight_and_the_legal_ones(folder, tmp_path, tp, ep, recipe, expected):
    with pytest.raises(ConfigError) as caught:
        converted(folder, tmp_path / "ck", RECIPES[recipe], tp, ep)
    assert all(text in str(caught.value) for text in expected), caught.value
    assert not (tmp_path / "ck").exists()


def test_nvfp4_groups_are_never_cut(tmp_path):
    random_verifier(tmp_path / "hf", **(SIZES | dict(moe_intermediate_size=64)))
    with pytest.raises(ConfigError, match=r"down_proj: a rank's 8 columns would cut a nvfp4 scale block of 16"):
        converted(tmp_path / "hf", tmp_path / "ck", NVFP4, 8)


def test_experts_divide_by_groups(folder, tmp_path):
    with pytest.raises(ConfigError, match="--ep: found 3, expected a divisor of --tp"):
        Mapping(4, 3)
    random_verifier(tmp_path / "hf", **(SIZES | dict(n_routed_experts=6)))
    with pytest.raises(ConfigError, match="6 experts do not divide by 4"):
        converted(tmp_path / "hf", tmp_path / "ck", NVFP4, 4, 4)


def test_a_drafter_is_not_divided(tmp_path):
    from support.models import GOLDENS

    with pytest.raises(GlmspecError, match="a drafter is whole on every rank"):
        converted(GOLDENS / "checkpoints" / "dspark", tmp_path / "ck", RECIPES["auto"], 2)


def test_boxes_cover_a_weight_once():
    for split in (Split("rows"), Split("columns"), Split("heads"), Split("rows", experts=True)):
        for mapping in (Mapping(4, 1), Mapping(4, 2), Mapping(4, 4)):
            layout = Layout(8, 16, 32, split, mapping)
            seen = np.zeros((8, 16, 32), int)
            for rank in range(4):
                units, rows, columns = layout.box(rank)
                seen[np.ix_(units, rows, columns)] += 1
            assert (seen == 1).all()
    assert all(a.box(0) == b.box(3) for a, b in pairwise([Layout(1, 4, 4, Split(), Mapping(4))] * 2))


@pytest.mark.parametrize("recipe", ["auto", "fp8", "nvfp4"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_large_weights_go_in_chunks_of_rows(tmp_path, monkeypatch, recipe, tp):
    """Vocabulary, attention and MLP in pieces of 128 rows give the same bytes as whole."""
    wide = dict(vocab_size=500, intermediate_size=2048, moe_intermediate_size=1024, hidden_size=128, q_lora_rank=300)
    heads = dict(v_head_dim=128, qk_nope_head_dim=120, num_hidden_layers=2, indexer_types=["full", "shared"])
    random_verifier(tmp_path / "hf", seed=6, **(SIZES | wide | heads))
    whole = converted(tmp_path / "hf", tmp_path / "whole", RECIPES[recipe], tp)
    monkeypatch.setattr(plan, "_CHUNK", 1)
    planned = plan_conversion(tmp_path / "hf", ConvertOptions(RECIPES[recipe], Mapping(tp))).plan.weights
    tasks = {weight.name: len(weight.tasks) for weight in planned}
    assert tasks["model.embed_tokens.weight"] == 4 and tasks["model.layers.0.mlp.up_proj.weight"] == 16
    pieces = converted(tmp_path / "hf", tmp_path / "pieces", RECIPES[recipe], tp)
    assert pieces.weights_sha256 == whole.weights_sha256
