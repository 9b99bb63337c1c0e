"""How NVFP4 weights are stored, the dtypes of scales, and rows of a weight."""

from __future__ import annotations

import math

import pytest
import torch
from support.models import write_checkpoint
from support.stored import NAME, keep, noise, refused, values

from glmspec.convert.formats import to_float32
from glmspec.convert.source import Source
from glmspec.convert.storage import stored

FP8 = torch.float8_e4m3fn

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


# -- NVFP4 ----------------------------------------------------------------------------------------


def nvfp4(codes: torch.Tensor, scale: torch.Tensor, second: float) -> dict[str, torch.Tensor]:
    """ModelOpt's layout: element 2 i in the low nibble of byte i, a float8 scale every 16 columns."""
    packed = torch.zeros(codes.shape[0], codes.shape[1] // 2, dtype=torch.uint8)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            packed[row, column // 2] += int(codes[row, column]) << (4 if column % 2 else 0)
    return {
        NAME: packed,
        "layer.proj.weight_scale": scale.to(FP8),
        "layer.proj.weight_scale_2": torch.tensor(second),
    }


def decoded(codes: torch.Tensor, scale: torch.Tensor, second: float) -> torch.Tensor:
    out = torch.empty(codes.shape)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            out[row, column] = FP4[codes[row, column]] * scale[row, column // 16].to(FP8).float() * second
    return out


def codes_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(3))


def test_nvfp4_nibbles_and_values(tmp_path):
    """Every code, in order: byte i is 0x10 * code(2 i + 1) + code(2 i)."""
    codes = torch.arange(16).reshape(1, 16)
    tensors = nvfp4(codes, torch.ones(1, 1), 1.0)
    assert tensors[NAME].tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    found = keep(tmp_path, tensors)
    assert (found.shape, found.format) == ((1, 16), "nvfp4")
    assert values(found).tolist() == [FP4]


@pytest.mark.parametrize("second", [0.5, 2.0**-9, 0.00123])
def test_nvfp4_equals_an_independent_decoder(tmp_path, second):
    codes, scale = codes_of(6, 64), noise(6, 4).exp()
    tensors = nvfp4(codes, scale, second)
    found = keep(tmp_path, tensors)
    assert set(found.names) == set(tensors)
    expected = decoded(codes, scale, second)
    torch.testing.assert_close(values(found), expected, rtol=1e-6, atol=0)
    assert math.log2(second) % 1 or torch.equal(values(found), expected)  # exact for a power of two


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """ModelOpt's formulas: codes, block scales and the scale over all."""
    second = weight.abs().max().item() / (6 * 448)
    blocks = weight.reshape(weight.shape[0], -1, 16)
    scale = (blocks.abs().amax(-1) / (6 * second)).clamp(2**-9, 448).to(FP8).float()
    ratio = blocks / (scale * second).unsqueeze(-1)
    magnitude = (ratio.abs().unsqueeze(-1) - torch.tensor(FP4[:8])).abs().argmin(-1)
    return (magnitude + 8 * (ratio < 0)).reshape(weight.shape), scale, second


def test_nvfp4_of_an_encoder_keeps_the_weight(tmp_path):
    """Gaussian weights lose 9.5 % in NVFP4; scales laid out wrongly would lose far more."""
    weight = noise(64, 256) * noise(64, 16, seed=5).exp().repeat_interleave(16, 1)
    error = (values(keep(tmp_path, nvfp4(*encode(weight)))) - weight).norm() / weight.norm()
    assert 0.05 < error < 0.12


@pytest.mark.parametrize("shape", [(6, 3), (4, 6), (6, 4, 1), (6, 8), (24,)])
def test_nvfp4_scales_that_do_not_cover_the_weight_are_refused(tmp_path, shape):
    tensors = nvfp4(codes_of(6, 64), torch.ones(6, 4), 1.0) | {"layer.proj.weight_scale": torch.ones(shape).to(FP8)}
    refused(tmp_path, tensors, "layer.proj.weight_scale", str(list(shape)), "[6, 4]")


@pytest.mark.parametrize("shape", [(4,), (3,), (6, 1)])
def test_nvfp4_with_several_outer_scales_is_refused(tmp_path, shape):
    tensors = nvfp4(codes_of(6, 64), torch.ones(6, 4), 1.0) | {"layer.proj.weight_scale_2": torch.ones(shape)}
    refused(tmp_path, tensors, "layer.proj.weight_scale_2", str(list(shape)))


def test_nvfp4_of_columns_that_are_no_whole_groups_is_refused(tmp_path):
    refused(tmp_path, nvfp4(codes_of(6, 24), torch.ones(6, 1), 1.0), NAME)


@pytest.mark.parametrize("lacking", ["weight_scale", "weight_scale_2"])
def test_nvfp4_without_one_of_its_scales_is_refused(tmp_path, lacking):
    tensors = nvfp4(codes_of(6, 64), torch.ones(6, 4), 1.0)
    del tensors[f"layer.proj.{lacking}"]
    refused(tmp_path, tensors, NAME, "found U8", "weight_scale_2")


def test_weight_only_nvfp4_needs_no_activation_scale(tmp_path):
    """Case B14: an expert that saw no calibration token lacks input_scale; its weights are whole."""
    tensors = nvfp4(codes_of(6, 64), torch.ones(6, 4), 0.25)
    without = values(keep(tmp_path / "a", tensors))
    given = keep(tmp_path / "b", tensors | {"layer.proj.input_scale": torch.tensor(0.0)})
    assert "layer.proj.input_scale" in given.names
    assert torch.equal(without, values(given)) and without.isfinite().all()


@pytest.mark.parametrize("reciprocal", [64.0, 37.5])
def test_compressed_tensors_nvfp4(tmp_path, reciprocal):
    codes, scale = codes_of(6, 64), noise(6, 4).exp()
    made = nvfp4(codes, scale, 1.0)
    tensors = {
        "layer.proj.weight_packed": made[NAME],
        "layer.proj.weight_scale": made["layer.proj.weight_scale"],
        "layer.proj.weight_global_scale": torch.tensor([reciprocal]),
        "layer.proj.input_global_scale": torch.tensor([8.0, 4.0]),
    }
    found = keep(tmp_path, tensors)
    assert set(found.names) == set(tensors) and found.format == "nvfp4" and found.input_scale() == 1 / 4
    torch.testing.assert_close(values(found), decoded(codes, scale, 1 / reciprocal), rtol=1e-6, atol=0)


# -- dtypes of scales -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "suffix, shape", [("weight_scale_inv", (1, 1)), ("weight_scale", ()), ("weight_scale", (5, 1))]
)
def test_scales_in_half_precision_are_read_as_numbers(tmp_path, suffix, shape, dtype):
    scale = torch.full(shape, 0.75).to(dtype)
    tensors = {NAME: (noise(5, 7) * 100).to(FP8), f"layer.proj.{suffix}": scale}
    assert torch.equal(values(keep(tmp_path, tensors)), tensors[NAME].float() * 0.75)


@pytest.mark.parametrize(
    "suffix, shape", [("weight_scale_inv", (2, 3)), ("weight_scale", (2, 1, 3, 1)), ("weight_scale", (130, 1))]
)
def test_scales_that_are_exponents_are_exact(tmp_path, suffix, shape):
    """E8M0: byte b is 2^(b - 127), down to a number that float32 has only denormal."""
    exponents = (torch.arange(math.prod(shape)) * 37 % 255).to(torch.uint8).reshape(shape)
    tensors = {NAME: torch.ones(130, 257).to(FP8), f"layer.proj.{suffix}": exponents.view(torch.float8_e8m0fnu)}
    found = values(keep(tmp_path, tensors))
    for row, column in ((0, 0), (129, 256), (3, 130)):
        at = exponents.flatten()[row] if shape[0] == 130 else exponents.reshape(2, 3)[row // 128, column // 128]
        assert found[row, column].item() == 2.0 ** (int(at) - 127)


def test_bytes_are_exponents_only_where_that_is_declared(tmp_path):
    tensors = {NAME: torch.ones(130, 257).to(FP8), "layer.proj.weight_scale_inv": torch.full((2, 3), 128).byte()}
    refused(tmp_path, tensors, "layer.proj.weight_scale_inv", "found U8", "expected F32")
    folder, config = tmp_path / "declared", {"quant_method": "fp8", "scale_fmt": "ue8m0"}
    found = stored(Source(write_checkpoint(folder, tensors, {"quantization_config": config})), NAME)
    assert torch.equal(values(found), torch.full((130, 257), 2.0))


def test_nvfp4_group_scales_of_another_dtype_are_refused(tmp_path):
    tensors = nvfp4(codes_of(6, 64), torch.ones(6, 4), 1.0) | {"layer.proj.weight_scale": torch.ones(6, 4)}
    refused(tmp_path, tensors, "layer.proj.weight_scale", "found F32", "expected F8_E4M3")


# -- rows of a weight -----------------------------------------------------------------------------


@pytest.mark.parametrize("first, rows", [(0, 128), (128, 128), (64, 64), (192, 64), (320, 10), (0, 384), (200, 100)])
def test_rows_of_fused_fp8_experts(tmp_path, first, rows):
    """Experts [3, 128, 200] with 128x128 blocks; an up half begins inside a block."""
    weight, scale = (noise(3, 128, 200) * 100).to(FP8), noise(3, 1, 2, seed=9).exp()
    found = keep(tmp_path, {NAME: weight, "layer.proj.weight_scale_inv": scale})
    meant = weight.float() * scale.repeat_interleave(128, 2)[:, :, :200]
    part = found.part(first, rows)
    assert (part.count, part.columns) == (rows, 200)
    assert torch.equal(torch.from_numpy(to_float32(part.read())), meant.reshape(384, 200)[first : first + rows])


def test_fused_fp8_experts_whose_blocks_run_across_are_refused(tmp_path):
    tensors = {NAME: torch.ones(3, 100, 64).to(FP8), "layer.proj.weight_scale_inv": torch.ones(3, 1, 1)}
    refused(tmp_path, tensors, "layer.proj.weight_scale_inv", "multiples of 128")


def test_rows_of_nvfp4(tmp_path):
    codes, scale = codes_of(6, 64), noise(6, 4).exp()
    found = keep(tmp_path, nvfp4(codes, scale, 0.5))
    part = torch.from_numpy(to_float32(found.part(2, 3).read()))
    assert torch.equal(part, values(found)[2:5])
