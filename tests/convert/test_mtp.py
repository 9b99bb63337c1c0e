"""The MTP module in a conversion: there when the tensors are, whole or refused, in the recipe's formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import ASSETS, GOLDENS, edit_checkpoint, mtp_tensors

from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.hf import write_hf
from glmspec.convert.recipe import RECIPES
from glmspec.convert.writer import Run
from glmspec.core.errors import CheckpointError
from glmspec.network.shards import Mapping

VERIFIER, TINY = GOLDENS / "checkpoints" / "verifier", ASSETS / "tiny-verifier"
COUNTED = {"num_nextn_predict_layers": 1}
LAYER = "model.layers.6."


@pytest.fixture(scope="module")
def module() -> dict[str, torch.Tensor]:
    """An MTP module for the golden verifier, which has six layers and none."""
    return mtp_tensors(load_file(VERIFIER / "model.safetensors"), like=2, layer=6)


def with_module(out: Path, module: dict[str, torch.Tensor], count: int | None = 1, **more) -> Path:
    config = {} if count is None else {"num_nextn_predict_layers": count}
    return edit_checkpoint(VERIFIER, out, config=config, add=module | more)


@pytest.mark.parametrize("count", [1, None], ids=["counted", "known by its tensors"])
def test_a_module_that_is_there_is_converted(tmp_path, module, count):
    conversion = plan_conversion(with_module(tmp_path / "v", module, count))
    assert {name for weight in conversion.plan.weights for name in weight.names} >= module.keys()
    assert conversion.plan.left_out == {} and conversion.plan.notes == ()
    checkpoint = conversion.write(tmp_path / "ck")
    checkpoint.check()
    assert checkpoint.mtp and checkpoint.record["mtp"] is True
    held, plain = checkpoint.load(), plan_conversion(VERIFIER).write(tmp_path / "plain").load()
    for name, values in plain.items():  # the verifier's own are what they were
        assert torch.equal(held[name], values), name
    own = held.keys() - plain.keys()
    assert all(name.startswith(LAYER) for name in own)
    for name in own & module.keys():
        assert torch.equal(held[name], module[name]), name
    experts = [module[f"{LAYER}mlp.experts.1.{kind}_proj.weight"] for kind in ("gate", "up")]
    assert torch.equal(held[f"{LAYER}mlp.experts.gate_up_proj"][1], torch.cat(experts))
    heads = module[f"{LAYER}self_attn.kv_b_proj.weight"].view(4, 32, 32)  # heads, nope and value, compressed
    assert torch.equal(held[f"{LAYER}self_attn.w_uk"], heads[:, :16])
    assert torch.equal(held[f"{LAYER}self_attn.w_uv"], heads[:, 16:].transpose(1, 2))


def test_a_module_that_is_not_there_is_noted(tmp_path):
    """Some releases drop its tensors and keep the count."""
    scale = {f"{LAYER}self_attn.k_proj.k_scale": torch.ones(1)}  # describes a cache, and is no piece of a module
    conversion = plan_conversion(edit_checkpoint(VERIFIER, tmp_path / "v", config=COUNTED, add=scale))
    assert not conversion.plan.mtp
    (note,) = conversion.plan.notes
    assert "no multi-token-prediction module" in note and "model.layers.6." in note
    checkpoint = conversion.write(tmp_path / "ck")
    checkpoint.check()
    assert checkpoint.record["mtp"] is False and note in checkpoint.record["notes"]
    assert not any(weight.name.startswith(LAYER) for weight in checkpoint.weights())


def test_without_a_count_nothing_is_noted(tmp_path):
    assert plan_conversion(VERIFIER).plan.notes == ()


def test_modules_beyond_the_first_are_left_out(tmp_path, module):
    second = {name.replace("layers.6.", "layers.7."): tensor.clone() for name, tensor in module.items()}
    for count in (2, 1):  # counted, and known by its eh_proj alone
        held = {n: t for n, t in second.items() if count == 2 or ".eh_proj." in n}
        plan = plan_conversion(with_module(tmp_path / str(count), module, count, **held)).plan
        ((reason, names),) = plan.left_out.items()
        assert plan.mtp and "beyond the first" in reason and names == sorted(held)


def test_copies_of_the_embedding_and_the_head_are_left_out(tmp_path, module):
    names = [f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight"]
    copies = {name: torch.zeros(96, 64) for name in names}
    plan = plan_conversion(with_module(tmp_path / "v", module, **copies)).plan
    ((reason, found),) = plan.left_out.items()
    assert "which shares the verifier's" in reason and found == names


@pytest.mark.parametrize("name", ["eh_proj.weight", "shared_head.norm.weight", "self_attn.indexer.wk.weight",
                                  "mlp.experts.3.up_proj.weight", "self_attn.kv_b_proj.weight"])  # fmt: skip
def test_half_a_module_is_refused(tmp_path, module, name):
    """Left out silently it would cost its drafts."""
    rest = {key: tensor for key, tensor in module.items() if key != LAYER + name}
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(with_module(tmp_path / "v", rest))
    assert f"tensor {LAYER}{name}: missing" in str(caught.value)
    assert "give it whole, or drop all of its tensors" in str(caught.value)


def test_another_tensor_s_absence_gives_no_advice_about_the_module(tmp_path, module):
    folder = with_module(tmp_path / "v", module)
    with pytest.raises(CheckpointError) as caught:
        plan_conversion(edit_checkpoint(folder, tmp_path / "w", drop=["model.norm.weight"]))
    assert str(caught.value) == f"{tmp_path / 'w'}: tensor model.norm.weight: missing."


def test_a_surplus_tensor_of_the_module_is_named(tmp_path, module):
    name = f"{LAYER}self_attn.q_proj.weight"
    with pytest.raises(CheckpointError, match=rf"surplus.*{name}"):
        plan_conversion(with_module(tmp_path / "v", module, **{name: torch.zeros(4, 4)}))


def test_formats_follow_the_recipe(tmp_path):
    """Experts as those of other layers; eh_proj, norms and router as they were."""
    for recipe, experts, attention in (("nvfp4", "nvfp4", "bfloat16"), ("fp8", "fp8_block", "fp8_block")):
        checkpoint = plan_conversion(TINY, ConvertOptions(RECIPES[recipe])).write(tmp_path / recipe)
        checkpoint.check()
        formats = {name.removeprefix("model.layers.7."): format
                   for name, format in checkpoint.record["quantization"]["formats"].items()
                   if name.startswith("model.layers.7.")}  # fmt: skip
        assert formats["mlp.experts.gate_up_proj"] == formats["mlp.experts.down_proj"] == experts
        assert formats["self_attn.q_b_proj.weight"] == attention
        for name in ("eh_proj.weight", "enorm.weight", "shared_head.norm.weight", "self_attn.w_uk"):
            assert formats[name] == "bfloat16"
        assert formats["mlp.gate.weight"] == "float32"
        assert set(checkpoint.net_config("bfloat16").formats.values()) == {experts}
        assert "model.layers.7.mlp.experts.down_proj" in checkpoint.net_config("bfloat16").formats


@pytest.mark.parametrize("recipe", ["auto", "nvfp4"])
@pytest.mark.parametrize("tp, ep", [(2, 1), (4, 1), (4, 2)])
def test_shards_put_together_are_the_whole(tmp_path, recipe, tp, ep):
    """Where each rank's part belongs, said once more by hand."""
    whole = plan_conversion(TINY, ConvertOptions(RECIPES[recipe])).write(tmp_path / "one").tensors(0)
    parts = plan_conversion(TINY, ConvertOptions(RECIPES[recipe], Mapping(tp, ep))).write(tmp_path / "many")
    parts.check()
    ranks = [parts.tensors(rank) for rank in range(tp)]
    layer = "model.layers.7."
    names = [name for name in whole if name.startswith(layer)]
    assert len(names) == (26 if recipe == "auto" else 30)
    for name in names:
        found, short = [rank[name] for rank in ranks], name.removeprefix(layer)
        if short.endswith("_scale_2") or (short.startswith("mlp.experts.") and ep == tp):
            joined = torch.cat(found[:ep])  # an expert's; ranks of a group hold the same
        elif short.startswith("mlp.experts.gate_up_proj"):
            groups = [_gate_up([one.view(torch.uint8) for one in found[group::ep]]) for group in range(ep)]
            joined = torch.cat(groups).view(whole[name].dtype)
        elif short.startswith("mlp.experts.down_proj"):
            joined = torch.cat([torch.cat(found[group::ep], 2) for group in range(ep)])
        elif short in ("self_attn.w_uk", "self_attn.w_uv", "self_attn.q_b_proj.weight",
                       "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"):  # fmt: skip
            joined = torch.cat(found)
        elif short in ("self_attn.o_proj.weight", "mlp.shared_experts.down_proj.weight"):
            joined = torch.cat(found, 1)
        else:
            joined = found[0]
            assert all(torch.equal(one, joined) for one in found)
        assert torch.equal(joined.view(torch.uint8), whole[name].view(torch.uint8)), name


def _gate_up(parts: list[torch.Tensor]) -> torch.Tensor:
    """[experts, 2 * rows, ...] of ranks that each hold some gate rows, then the same up rows."""
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([torch.cat([half[at] for half in halves], 1) for at in (0, 1)], 1)


def test_hugging_face_s_layout_keeps_it(tmp_path):
    write_hf(plan_conversion(TINY), tmp_path / "out", Run())
    found, expected = (load_file(home / "model.safetensors") for home in (tmp_path / "out", TINY))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
