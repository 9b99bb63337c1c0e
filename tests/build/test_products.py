"""Stage "products": the operands of every quantized product, read from compiled networks."""

from __future__ import annotations

import pytest
from support.forms import FORMS, SIZES, conversion
from support.models import random_verifier
from support.validation import check, told

from glmspec.build.kernel_list import kernels_of
from glmspec.core.errors import NetworkError
from glmspec.models.layers import quantized
from glmspec.network import ops
from glmspec.network.formats import GROUP
from glmspec.network.shards import Mapping
from glmspec.plugins import moe, moe_scaled, rounding

STAGES = ("config", "layers", "memory", "build", "products")
SCALED = {"NVFP4 weights and activations": "fp4 x fp4", "FP8 weights and activations": "fp8 x fp8"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A converted checkpoint of every form, made when it is asked for."""
    home, written = tmp_path_factory.mktemp("products"), {}
    random_verifier(home / "hf", seed=4, **SIZES)

    def of(name: str):
        if name not in written:
            written[name] = home / str(len(written))
            conversion(home / "hf", name, Mapping()).write(written[name])
        return written[name]

    return of


def outcome(folder):
    return check(folder, *STAGES, target="rtx-pro-6000", max_num_seqs=2)


@pytest.mark.parametrize("name", FORMS)
def test_products_of_every_form(checkpoints, name):
    """Where activations have scales too, every product is of codes; elsewhere the cost is told."""
    report = outcome(checkpoints(name))
    assert report.ok, told(report)
    numbers, facts = report.outcomes[-1].numbers, "\n".join(report.outcomes[-1].facts)
    types = {key.removeprefix("products "): count for key, count in numbers.items() if key.startswith("products ")}
    if name in SCALED:
        assert set(types) == {SCALED[name]} and types[SCALED[name]] >= 4
        assert "dequantized each step" not in facts
    else:
        assert ("dequantized each step" in facts) == bool(types.get("bfloat16 x bfloat16"))
    assert "verifier, sparse, shared indexer: " in facts and "verifier, dense, full indexer: " in facts
    assert 0 < numbers["verifier, sparse, shared indexer: written"] < 20e6


def _block_shape(codes, step=None):
    one = codes.net.constant(1.0, "float32")
    if step is None:
        return ops.dequantize(codes, one, "float32")
    wide = ops.dequantize(step, one, "float32")
    return ops.dequantize(codes, wide, "float32", (1,) * (codes.rank - 1) + (GROUP,))


def _scale_of_the_checkpoint(x_NC, fields, format):
    """As it was: the scalar scales are inputs of the quantize and dequantize layers."""
    codes, scale = ops.quantize(ops.cast(x_NC, "float32"), fields["input_scale"]), fields["input_scale"]
    values = ops.dequantize(codes, scale, x_NC.dtype)
    return ops.matmul(values, ops.dequantize(fields[""], fields["scale"], x_NC.dtype), transpose_b=True)


def _cast_between(codes, step=None, original=rounding.unscaled):
    narrow = ops.cast(original(codes, step), "bfloat16")
    return ops.cast(ops.relu(narrow) + narrow - ops.relu(narrow), "float32")


def _transposed(codes, step=None, original=rounding.unscaled):
    values = original(codes, step)
    turned = (0, 2, 1) if values.rank == 3 else (1, 0)
    return ops.transpose(ops.relu(ops.transpose(values, turned)), turned)


def _halves_apart(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, steps, original=moe.every):
    """The weight of gate, and that of up: each a slice of dequantized experts."""
    width = down_EDG.shape[2]
    halves = [ops.narrow(gate_up_EFD, 1, at, width) for at in (0, width)]
    return original(x_ND, expert_NA, weight_NA, ops.concat([half * 1.5 for half in halves], 1), down_EDG, steps)


REGRESSIONS = {
    "block_shape": ("NVFP4 weights and activations", rounding, "unscaled", _block_shape),
    "a scalar scale as an input": ("FP8 weights and activations", quantized, "_folded", _scale_of_the_checkpoint),
    "a cast between": ("FP8 weights and activations", rounding, "unscaled", _cast_between),
    "a transposed dequantized weight": ("FP8 weights and activations", rounding, "unscaled", _transposed),
    "slices of experts": ("NVFP4 weights and activations", moe_scaled.moe, "every", _halves_apart),
}


@pytest.mark.parametrize("what", REGRESSIONS)
def test_a_product_that_leaves_its_codes_is_found(checkpoints, monkeypatch, what):
    name, module, function, planted = REGRESSIONS[what]
    folder = checkpoints(name)
    monkeypatch.setattr(module, function, planted)
    report = outcome(folder)
    assert [one.stage for one in report.outcomes if one.faults] == ["products"], told(report)
    faults = report.outcomes[-1].faults
    assert all("matmul" in fault.where for fault in faults)
    assert all(
        "multiplies bf" in fault.message or "multiplies" in fault.message or "writes" in fault.message
        for fault in faults
    )


@pytest.mark.parametrize(
    "lines, text",
    [
        ([], "found none"),
        (["Name: x, LayerType: gemm, Inputs: "], "cannot read"),
        (
            [
                "Name: x, LayerType: gemm, Inputs: [ { Name: a, Dimensions: [2], Datatype: INT3 }], Constants: [], "
                "Outputs: [], TacticName: "
            ],
            "found data type INT3",
        ),
    ],
)  # fmt: skip
def test_a_list_of_kernels_that_cannot_be_read(lines, text):
    with pytest.raises(NetworkError, match=text):
        kernels_of(lines)
