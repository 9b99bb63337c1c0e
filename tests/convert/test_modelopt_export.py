"""A checkpoint that ModelOpt quantized and exported: ours has the same bytes, and reads it."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import ASSETS

from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.hf import write_hf
from glmspec.convert.recipe import RECIPES
from glmspec.convert.writer import Run

VERIFIER = ASSETS / "tiny-verifier"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """The tiny verifier with NVFP4 experts, by ModelOpt on transformers' model (which has no MTP module)."""
    from transformers import GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    out = tmp_path_factory.mktemp("modelopt") / "hf"
    model = GlmMoeDsaForCausalLM.from_pretrained(VERIFIER, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ids = torch.tensor([list(b"Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13.")])
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as quantization
        from modelopt.torch.export import export_hf_checkpoint

        quantization.quantize(model, copy.deepcopy(quantization.NVFP4_EXPERTS_ONLY_CFG), lambda m: m(ids))
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=out)
    return out


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).contiguous().view(torch.uint8).tolist()


def test_the_same_bytes_as_modelopt_s_export(exported, tmp_path):
    """Every tensor: names, dtypes, shapes, packed codes, group scales, outer scales."""
    write_hf(plan_conversion(VERIFIER, ConvertOptions(RECIPES["nvfp4"])), tmp_path / "hf", Run())
    theirs, ours = load_file(exported / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    wanted = {name for name in theirs if not name.endswith("input_scale")}  # from calibration, which ours had none of
    assert wanted == {name for name in ours if ".layers.7." not in name}
    # The model was loaded in bfloat16; the shipped float32 of this one tensor is kept by ours.
    wanted -= {name for name in wanted if name.endswith("indexer.weights_proj.weight")}
    assert sum(name.endswith("weight_scale_2") for name in wanted) == 5 * 8 * 3
    for name in wanted:
        assert bits(ours[name]) == bits(theirs[name]), name


def test_modelopt_s_export_is_read(exported, tmp_path):
    """Its weights are those of quantizing directly, and its activation scales are taken over."""
    found = plan_conversion(exported).write(tmp_path / "a")
    expected = plan_conversion(VERIFIER, ConvertOptions(RECIPES["nvfp4"])).write(tmp_path / "b").load()
    assert found.record["quantization"]["quant_algo"] == "NVFP4"
    assert [note.split(":")[0] for note in found.record["notes"]] == ["no multi-token-prediction module"]
    for name, values in found.load().items():
        if name.endswith("indexer.weights_proj.weight"):
            continue  # see above
        assert torch.equal(values.float(), expected[name].to(values.dtype).float()), name
    held = load_file(tmp_path / "a" / "rank0.safetensors")
    theirs = load_file(exported / "model.safetensors")
    name = "model.layers.4.mlp.experts"
    assert held[f"{name}.down_proj_input_scale"][3] == theirs[f"{name}.3.down_proj.input_scale"]
    assert held[f"{name}.gate_up_proj_input_scale"].shape == (8, 2)


def test_our_description_is_modelopt_s(exported, tmp_path):
    """hf_quant_config.json: the same keys and algorithm, once activations have scales."""
    from glmspec.convert.calibration import Activations

    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(2, 8) for expert in range(8)]
    modules = {f"{expert}.{kind}_proj": 1.0 for expert in experts for kind in ("gate", "up", "down")}
    options = ConvertOptions(RECIPES["nvfp4"], activations=Activations(modules))
    write_hf(plan_conversion(VERIFIER, options), tmp_path / "hf", Run())
    theirs, ours = (json.loads((f / "hf_quant_config.json").read_text()) for f in (exported, tmp_path / "hf"))
    assert ours["producer"].keys() <= theirs["producer"].keys()
    for key in ("quant_algo", "group_size"):
        assert ours["quantization"].get(key) == theirs["quantization"][key]
