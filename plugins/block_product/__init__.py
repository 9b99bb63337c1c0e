"""Products of dense layers with FP8 weights under block scales: y = x W^T, as GLM-5.3's FP8 checkpoint has them.

Activations come rounded in blocks of 1 x 128 (`quantize_blocks`; layers with the same input share that). TensorRT has
no product of such blocks: its layers dequantize the weight each step and multiply in the compute dtype. The plugins
multiply codes, 128 columns at a time, and scale each partial sum in float32; few rows are divided among programs by
columns too, or most multiprocessors would idle.

Legend: N rows, C columns, R rows of the weight, Z blocks of 128 columns, B blocks of the weight's rows, S splits of the
blocks of columns.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch

from glmspec.core.dtypes import FP8
from glmspec.network import ops
from glmspec.network.formats import BLOCK
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.rounding import values_of_blocks
from glmspec.plugins.spec import Compute, Float32, Op, Plugin, Rule, Runs, Use, cdiv, inputs_of

Codes = Annotated[torch.Tensor, FP8]
_PROGRAMS = 128  # for few rows: most of the 148 multiprocessors of a B200; more would write more partial sums


def reference(
    x_NC: Compute, code_NC: Codes, step_NZ: Float32, weight_RC: Codes, scale_BZ: Float32, *, prompts: int
) -> torch.Tensor:
    """[N, R] in x's dtype: the numbers that code and step, weight and scale stand for, multiplied in float32. x: tells
    its dtype. prompts: 1 where steps hold many rows, which decides how plugins tile them; no result depends on it."""
    x = code_NC.float() * step_NZ.repeat_interleave(BLOCK, 1)[:, : code_NC.shape[1]]
    return torch.matmul(x, values_of_blocks(weight_RC, scale_BZ).T).to(x_NC.dtype)


@lowers("block_product")
def native(
    x_NC: Tensor, code_NC: Tensor, step_NZ: Tensor, weight_RC: Tensor, scale_BZ: Tensor, *, prompts: int
) -> Tensor:
    """See `reference`; multiplied in x's dtype."""
    rounded_NC = ops.dequantize(code_NC, step_NZ, x_NC.dtype, (1, BLOCK))
    plain_RC = ops.dequantize(weight_RC, scale_BZ, x_NC.dtype, (BLOCK, BLOCK))
    return ops.matmul(rounded_NC, plain_RC, transpose_b=True)


def plugged(run: Runs, x_NC, code_NC, step_NZ, weight_RC, scale_BZ, *, prompts) -> tuple:
    """One launch for prompts, two for blocks: see `reference`."""
    given = x_NC, code_NC, step_NZ, weight_RC, scale_BZ
    if prompts:
        return run(PRODUCT, *given)
    (part_SNR,) = run(PRODUCT_SPLIT, *given)
    return run(PRODUCT_SUM, x_NC, part_SNR)


_PRODUCT: dict[str, Any] = dict(
    op="block_product",
    inputs=inputs_of(reference),
    scalars=("N",),
)
PRODUCT = Plugin(
    name="block_product",
    function="product_kernel",
    outputs={"out_NR": "T"},
    grid=(lambda R: cdiv(R, 128), lambda N, TILE: cdiv(N, TILE)),
    tiles={"": {"TILE": 32, "BLOCK": 128, "WARPS": 8, "STAGES": 2}},
    **_PRODUCT,
)
PRODUCT_SPLIT = Plugin(
    name="block_product_split",
    function="split_kernel",
    outputs={"out_SNR": "float32"},
    sizes={"S": lambda R, Z: min(cdiv(Z, 3), cdiv(_PROGRAMS, cdiv(R, 128)))},
    grid=(lambda R: cdiv(R, 128), lambda N, TILE: cdiv(N, TILE), "S"),
    tiles={"": {"TILE": 16, "BLOCK": 128, "WARPS": 4, "STAGES": 2}},
    **_PRODUCT,
)
PRODUCT_SUM = Plugin(
    name="block_product_sum",
    op="block_product",
    function="sum_kernel",
    inputs={"x_NC": "T", "part_SNR": "float32"},
    outputs={"out_NR": "T"},
    scalars=("N",),
    grid=("N", lambda R, COLUMNS: cdiv(R, COLUMNS)),
    tiles={"": {"COLUMNS": 512, "WARPS": 4}},
)
_REAL: dict[str, Rule] = {
    "N": lambda batch: 9 * batch,
    "C": 6144,
    "R": 2048,
    "Z": lambda C: cdiv(C, BLOCK),
    "B": lambda R: cdiv(R, BLOCK),
}
OP = Op(
    name="block_product",
    outputs={"out_NR": "T"},
    reference=reference,
    plugged=plugged,
    plugins=(PRODUCT, PRODUCT_SPLIT, PRODUCT_SUM),
    tolerance={"float32": 1e-5, "float16": 4e-3, "bfloat16": 1e-2},
    real=_REAL,
    uses={
        "": Use({"prompts": 0}),
        "prompts": Use({"prompts": 1}),
        "latents": Use({"prompts": 0}, sizes={"R": 576}),
        "out of attention": Use({"prompts": 0}, sizes={"C": 2048, "R": 6144}),
        "a dense layer": Use({"prompts": 0}, sizes={"C": 1536, "R": 6144}),
    },
    run_time="N",
)
