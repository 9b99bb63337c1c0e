"""Quantized weights against decoders written here, element by element, from the published formulas."""

from __future__ import annotations

import math

import pytest
import torch
from support.models import write_checkpoint
from support.stored import NAME, keep, noise, refused, values

from glmspec.convert.source import Source
from glmspec.convert.storage import check_formats, stored
from glmspec.core.errors import CheckpointError

FP8 = torch.float8_e4m3fn


# -- plain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_weight_is_itself(tmp_path, dtype):
    tensor = noise(3, 5).to(dtype)
    found = keep(tmp_path, {NAME: tensor})
    assert (found.names, found.shape, found.format) == ((NAME,), (3, 5), str(dtype).removeprefix("torch."))
    assert found.read().tensor().dtype == dtype and torch.equal(found.read().tensor(), tensor)


def test_a_missing_weight_is_named(tmp_path):
    refused(tmp_path, {"other.weight": noise(1)}, str(tmp_path / "folder"), NAME, "missing")


@pytest.mark.parametrize(
    "dtype, found", [(torch.int64, "I64"), (torch.float64, "F64"), (torch.uint8, "U8"), (FP8, "F8_E4M3")]
)
def test_a_dtype_that_needs_more_is_named(tmp_path, dtype, found):
    refused(tmp_path, {NAME: torch.ones(16, 16).to(dtype)}, NAME, f"found {found}", "expected BF16")


# -- FP8, 128 x 128 blocks ------------------------------------------------------------------------


def fp8_blocks(rows: int, columns: int, seed: int = 0) -> dict[str, torch.Tensor]:
    scale = noise(math.ceil(rows / 128), math.ceil(columns / 128), seed=seed + 1).exp()
    return {NAME: (noise(rows, columns, seed=seed) * 100).to(FP8), "layer.proj.weight_scale_inv": scale}


@pytest.mark.parametrize(
    "rows, columns",
    [(576, 300), (448, 128), (160, 256), (192, 256), (128, 128), (256, 384), (1, 1), (129, 257), (127, 5)],
)
def test_fp8_blocks_equal_a_plain_loop(tmp_path, rows, columns):
    """Partial last blocks too: kv_a_proj_with_mqa has 576 rows, kv_b_proj 448 a head (case B12)."""
    tensors = fp8_blocks(rows, columns)
    weight, scale = tensors.values()
    expected = torch.full((rows, columns), float("nan"))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            expected[block] = weight[block].float() * scale[i, j].item()
    found = keep(tmp_path, tensors)
    assert (found.shape, found.format) == ((rows, columns), "fp8_block")
    assert set(found.names) == set(tensors)
    assert torch.equal(values(found), expected)


@pytest.mark.parametrize("shape", [(4, 3), (5, 2), (3, 5), (5, 3, 1), (576, 300), (1,)])
def test_a_block_scale_that_does_not_cover_the_weight_is_refused(tmp_path, shape):
    tensors = fp8_blocks(576, 300) | {"layer.proj.weight_scale_inv": torch.ones(shape)}
    refused(tmp_path, tensors, "layer.proj.weight_scale_inv", str(list(shape)), "[5, 3]")


def test_block_scales_of_something_that_is_no_matrix_are_refused(tmp_path):
    tensors = {NAME: torch.ones(128).to(FP8), "layer.proj.weight_scale_inv": torch.ones(1)}
    refused(tmp_path, tensors, NAME)


@pytest.mark.parametrize("rows, columns", [(576, 300), (130, 5), (5, 257), (64, 64)])
@pytest.mark.parametrize("four", [False, True], ids=["2-D", "4-D"])
def test_block_scales_under_another_name(tmp_path, rows, columns, four):
    """compressed-tensors and Quark: `weight_scale` like a grid; ModelOpt's FP8_PB_WO: four dimensions."""
    weight, scale = fp8_blocks(rows, columns).values()
    expected = values(keep(tmp_path / "a", fp8_blocks(rows, columns)))
    tensors = {NAME: weight, "layer.proj.weight_scale": scale[:, None, :, None].contiguous() if four else scale}
    found = keep(tmp_path / "b", tensors)
    assert (found.format, set(found.names)) == ("fp8_block", set(tensors))
    assert torch.equal(values(found), expected)


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_block_scales_of_fused_experts_under_both_names(tmp_path, suffix):
    weight, scale = (noise(3, 128, 200) * 100).to(FP8), noise(3, 1, 2, seed=9).exp()
    name = "model.layers.2.mlp.experts.down_proj"
    found = keep(tmp_path, {name: weight, f"{name}{suffix}": scale}, name)
    assert found.format == "fp8_block"
    assert torch.equal(values(found), weight.float() * scale.repeat_interleave(128, 2)[:, :, :200])


@pytest.mark.parametrize(
    "config, suffix, shape, format",
    [
        ({}, "weight_scale", (1, 1), "fp8_block"),
        ({}, "weight_scale", (1,), "fp8"),
        ({}, "weight_scale_inv", (1, 1), "fp8_block"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", (1, 1), "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", (1, 1), "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", (), "fp8"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", (64, 1), "fp8_rows"),
    ],
)
def test_what_the_shape_leaves_open_is_declared(tmp_path, config, suffix, shape, format):
    """One number may scale a small weight or its one block; without a declaration a matrix is a block's."""
    tensors = {NAME: (noise(64, 64) * 100).to(FP8), f"layer.proj.{suffix}": torch.full(shape, 0.5)}
    folder = write_checkpoint(tmp_path, tensors, {"quantization_config": config})
    found = stored(Source(folder), NAME)
    assert found.format == format and torch.equal(values(found), tensors[NAME].float() * 0.5)


def test_two_scales_of_one_weight_are_refused(tmp_path):
    """Which one counts is anybody's guess."""
    refused(tmp_path, fp8_blocks(64, 64) | {"layer.proj.weight_scale": torch.ones(1, 1)}, NAME, "weight_scale_inv'")
    refused(tmp_path / "b", fp8_blocks(64, 64) | {"layer.proj.weight_scale_2": torch.ones(())}, NAME, "weight_scale_2")


# -- formats that are not read --------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors, what",
    [
        ({"weight": torch.ones(64, 64).char(), "weight_scale": torch.ones(64, 1)}, "INT8"),
        ({"weight": torch.ones(64, 32).byte(), "weight_scale": torch.ones(64, 2)}, "INT4"),
        ({"weight": torch.ones(64, 32).byte(), "weight_scale": torch.ones(64, 2).byte()}, "MXFP4"),
        ({"weight_packed": torch.ones(64, 8).int(), "weight_scale": torch.ones(64, 2)}, "INT4 (pack-quantized)"),
        ({"weight_packed": torch.ones(64, 32).byte(), "weight_scale": torch.ones(64, 2).byte()}, "MXFP4"),
        ({"weight": torch.ones(64, 64).to(torch.float8_e5m2), "weight_scale": torch.ones(1)}, "FP8 in e5m2"),
        ({"weight": torch.ones(64, 96).to(FP8), "weight_scale": torch.ones(64, 3).byte()}, "MXFP8"),
    ],
)
def test_a_format_that_is_not_supported_is_named(tmp_path, tensors, what):
    refused(tmp_path, {f"layer.proj.{k}": tensor for k, tensor in tensors.items()}, NAME, what, "is not supported")


@pytest.mark.parametrize(
    "suffix, what",
    [
        ("qweight", "INT4 (GPTQ or AWQ)"),
        ("weight_zero_point", "zero points"),
        ("weight_g_idx", "g_idx"),
        ("weight.absmax", "bitsandbytes"),
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("pre_quant_scale", "AWQ"),
        ("svdquant_lora_a", "SVDQuant"),
        ("bitmask", "sparse"),
        ("R4_input.weight", "rotation"),
        ("U_q_attn.perm", "rotation"),
    ],
)
def test_a_tensor_of_such_a_format_is_named(tmp_path, suffix, what):
    folder = write_checkpoint(tmp_path, {NAME.replace("proj", "o_proj"): noise(2), f"layer.o_proj.{suffix}": noise(2)})
    with pytest.raises(CheckpointError) as caught:
        check_formats(Source(folder))
    for text in (str(folder), f"layer.o_proj.{suffix}", what, "is not supported"):
        assert text in str(caught.value)


# -- FP8, one scale -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_with_one_scale(tmp_path, shape):
    tensors = {NAME: (noise(5, 7) * 100).to(FP8), "layer.proj.weight_scale": torch.full(shape, 0.37)}
    found = keep(tmp_path, tensors)
    assert set(found.names) == set(tensors) and found.format == "fp8"
    assert torch.equal(values(found), tensors[NAME].float() * torch.tensor(0.37))


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_fp8_with_a_scale_a_row(tmp_path, shape):
    scale = noise(5).exp()
    tensors = {NAME: (noise(5, 7) * 100).to(FP8), "layer.proj.weight_scale": scale.reshape(shape)}
    expected = torch.stack([tensors[NAME][row].float() * scale[row] for row in range(5)])
    assert torch.equal(values(keep(tmp_path, tensors)), expected)


@pytest.mark.parametrize("shape", [(3,), (7,), (1, 5), (5, 7)])
def test_a_single_scale_of_a_wrong_shape_is_refused(tmp_path, shape):
    tensors = {NAME: (noise(5, 7) * 100).to(FP8), "layer.proj.weight_scale": torch.ones(shape)}
    refused(tmp_path, tensors, "layer.proj.weight_scale", str(list(shape)))


def test_an_activation_scale_is_consumed(tmp_path):
    tensors = {
        NAME: (noise(5, 7) * 100).to(FP8),
        "layer.proj.weight_scale": torch.tensor(2.0),
        "layer.proj.input_scale": torch.tensor([0.25, 0.5]),  # of several the largest, which cuts none off
    }
    found = keep(tmp_path, tensors)
    assert set(found.names) == set(tensors) and found.input_scale() == 0.5
    assert torch.equal(values(found), tensors[NAME].float() * 2)
