"""Quantization against ModelOpt itself, byte for byte, and dequantization against plain loops."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from glmspec.convert import formats, on_device, quantize
from glmspec.convert.formats import Matrix, amax, convert, plain, to_float32
from glmspec.core.errors import MissingCapability

DTYPES = ["float32", "bfloat16"]


def modelopt() -> SimpleNamespace:
    """ModelOpt, which takes seconds to import: not when tests are collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from modelopt.torch.export.quant_utils import to_quantized_weight
        from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    return SimpleNamespace(quantized=to_quantized_weight, FP8=FP8QTensor, NVFP4=NVFP4QTensor)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_zero_groups() -> torch.Tensor:
    weight = noise(32, 64, seed=1)
    weight[3], weight[5, :16], weight[6, 48:] = 0, 0, -0.0
    return weight


def with_an_outlier() -> torch.Tensor:
    weight = noise(32, 64, seed=2)
    weight[7, 7] = 3e4
    return weight


WEIGHTS = {
    "gaussian": noise(48, 256),
    "tiny": noise(32, 64, seed=3) * 1e-30,
    "huge": noise(32, 64, seed=4) * 1e35,
    "subnormal": noise(32, 64, seed=5) * 1e-40,
    "zero groups": with_zero_groups(),
    "an outlier": with_an_outlier(),
    "forty powers of two": noise(32, 64, seed=6) * torch.exp2(torch.arange(-20, 20, 40 / 64).floor()),
    "on the ties": torch.randint(-24, 25, (64, 64), generator=torch.Generator().manual_seed(7)) / 4.0,
    "one value": torch.full((16, 32), -0.3),
    "a lone number": torch.zeros(16, 32).index_fill_(0, torch.tensor([4]), 1.0),
}


def assert_modelopt_s(found: Matrix, weight: torch.Tensor) -> None:
    """Codes and both scales are those of ModelOpt's NVFP4 of `weight`."""
    second = weight.abs().amax().float() / (6 * 448)
    made, scale, second = modelopt().NVFP4.quantize(weight.clone(), 16, None, second)
    assert found.fields["scale_2"].item() == second.item()
    assert np.array_equal(found.fields["scale"], scale.view(torch.uint8).numpy())
    assert np.array_equal(found.fields[""], made._quantized_data.view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_nvfp4_is_modelopt_s(name, dtype):
    weight = WEIGHTS[name].to(getattr(torch, dtype))
    block = plain(dtype, weight)
    assert_modelopt_s(convert(block, "nvfp4", amax(block)), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_nvfp4_on_a_device_is_the_kernel_s(name, dtype):
    """The path of --device cuda, here on torch's CPU device: the same bytes."""
    block = plain(dtype, WEIGHTS[name].to(getattr(torch, dtype)))
    expected = convert(block, "nvfp4", amax(block))
    packed, scales = on_device.to_nvfp4(block.tensor(), expected.fields["scale_2"][0, 0], "cpu")
    assert np.array_equal(packed, expected.fields[""]) and np.array_equal(scales, expected.fields["scale"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_named():
    with pytest.raises(MissingCapability, match="--device cuda: this machine has no CUDA GPU"):
        on_device.require("cuda")


@pytest.mark.parametrize("rows, columns", [(128, 128), (448, 256), (576, 304), (16, 16)])
def test_nvfp4_straight_from_fp8_blocks(rows, columns):
    """As ModelOpt would from the dequantized matrix; partial blocks and subnormal codes among them."""
    block = convert(plain("float32", noise(rows, columns) * torch.exp(4 * noise(rows, 1, seed=1))), "fp8_block")
    assert_modelopt_s(convert(block, "nvfp4", amax(block)), torch.from_numpy(to_float32(block)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_fp8_is_modelopt_s(name, dtype):
    """The quotient of a bfloat16 matrix and its one scale is rounded to bfloat16 first, there and here."""
    weight = WEIGHTS[name].to(getattr(torch, dtype))
    scale = weight.abs().amax().float() / 448
    expected = modelopt().quantized(weight.clone(), scale, "fp8")
    block = plain(dtype, weight)
    found = convert(block, "fp8", amax(block))
    assert found.fields["scale"].item() == scale.item()
    assert np.array_equal(found.fields[""], expected.view(torch.uint8).numpy())


BLOCKED = {str(shape): noise(*shape) for shape in ((128, 128), (256, 384), (576, 304), (448, 130))}


@pytest.mark.parametrize("name", [*BLOCKED, *WEIGHTS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_blocks_are_modelopt_s(dtype, name):
    weight = (BLOCKED | WEIGHTS)[name].to(getattr(torch, dtype))
    shape = weight.shape
    rows, columns = (-(-size // 128) for size in shape)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            scales[row, column] = part.abs().amax().float() / 448
    made, _ = modelopt().FP8.quantize(weight, scales, block_sizes={-1: 128, -2: 128})
    found = convert(plain(dtype, weight), "fp8_block")
    assert np.array_equal(found.fields["scale_inv"], scales.numpy())
    assert np.array_equal(found.fields[""], made._quantized_data.view(torch.uint8).numpy())


@pytest.mark.parametrize("format", ["nvfp4", "fp8", "fp8_block"])
def test_zeros_stay_zeros(format):
    """ModelOpt divides by zero here; a scale of 1 says the same and is finite."""
    found = convert(plain("bfloat16", torch.zeros(32, 32)), format, 0.0)
    assert np.array_equal(to_float32(found), np.zeros((32, 32)))
    scales = [found.tensor(suffix).float() for suffix in found.fields if suffix]
    assert all(bool((scale == 1).all()) for scale in scales)


@pytest.mark.parametrize("format, error", [("nvfp4", 0.095), ("fp8", 0.027), ("fp8_block", 0.026)])
def test_what_a_format_costs(format, error):
    weight = noise(512, 512)
    block = plain("float32", weight)
    found = torch.from_numpy(to_float32(convert(block, format, amax(block))))
    assert abs(float((found - weight).norm() / weight.norm()) - error) < 0.002


def test_every_code_of_fp8_and_nvfp4():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)
    block = Matrix("fp8_block", {"": codes, "scale_inv": np.ones((1, 2), np.float32)})
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert np.array_equal(to_float32(block)[0], expected.numpy(), equal_nan=True)
    assert np.isnan(amax(block))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    packed = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], np.uint8)
    one = np.array([[0x38]], np.uint8)  # e4m3 of 1
    block = Matrix("nvfp4", {"": packed, "scale": one, "scale_2": np.full((1, 1), 2.0, np.float32)})
    assert to_float32(block)[0].tolist() == [2 * v for v in values] + [-2 * v for v in values]


def test_scales_round_to_the_nearest_code_and_ties_to_the_even_one():
    """Every code, every midpoint between two, and the floats beside them, as torch casts them."""
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)])
    # A group whose only value v has the scale v / 6 / scale_2: with scale_2 = 1/6 of a power of two it is v itself.
    values = values[(values >= 2**-9) & (values <= 448)]
    matrix = torch.zeros(len(values), 16)
    matrix[:, 3] = values * 6
    packed, scales = np.empty((len(values), 8), np.uint8), np.empty((len(values), 1), np.uint8)
    quantize.fp4_from_float32(matrix.numpy(), np.float32(1), packed, scales)
    exact = (matrix[:, 3] / 6) == values
    assert exact.float().mean() > 0.9
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(scales[exact.numpy(), 0], expected[exact.numpy()])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", [*DTYPES, "float16"])
def test_values_that_are_not_finite_are_seen(format, bad):
    weight = noise(8, 32)
    weight[3, 5] = bad
    assert np.isnan(amax(plain(format, weight)))


def test_the_same_format_is_the_same_block():
    block = plain("bfloat16", noise(4, 16))
    assert convert(block, "bfloat16") is block
    assert formats.QUANTIZED == ("fp8_block", "fp8", "fp8_rows", "nvfp4")
