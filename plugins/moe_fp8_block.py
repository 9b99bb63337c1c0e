"""`moe` with FP8 weights under block scales: e4m3 codes, a float32 scale for every 128 x 128, as GLM-5.3's FP8
checkpoint has them. Activations, x and the input of `down`, are rounded in blocks of 1 x 128. Each of gate and up may
end in a partial block.

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate (first) and up, R and K
blocks of their rows and columns, S and L blocks of down's.
"""

from __future__ import annotations

from typing import Annotated

import torch

from glmspec.core.dtypes import FP8
from glmspec.network import ops
from glmspec.network.formats import BLOCK
from glmspec.network.graph import Tensor
from glmspec.plugins import experts, experts_fp8, moe, rounding
from glmspec.plugins.lowering import lowers
from glmspec.plugins.quantize_blocks import QUANTIZE_BLOCKS
from glmspec.plugins.spec import Compute, Float32, Int32, Op, Rule, cdiv

Codes = Annotated[torch.Tensor, FP8]


def reference(
    x_ND: Compute,
    expert_NA: Int32,
    weight_NA: Float32,
    gate_up_EFD: Codes,
    down_EDG: Codes,
    scale_ERK: Float32,
    down_scale_ESL: Float32,
    *,
    prompts: int,
) -> torch.Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype."""
    halves = zip(gate_up_EFD.chunk(2, 1), scale_ERK.chunk(2, 1), strict=True)
    plain_EFD = torch.cat([rounding.values_of_blocks(*half) for half in halves], 1)
    plain_EDG = rounding.values_of_blocks(down_EDG, down_scale_ESL)

    def narrow(product: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return product.to(x_ND.dtype)

    steps = moe.Steps(narrow, narrow, lambda hidden, *_: rounding.blocks_reference(hidden.float()), narrow)
    rounded_ND = rounding.blocks_reference(x_ND.float())
    return moe.chosen(rounded_ND, expert_NA, weight_NA, plain_EFD, plain_EDG, steps)


@lowers("moe_fp8_block")
def native(
    x_ND: Tensor,
    expert_NA: Tensor,
    weight_NA: Tensor,
    gate_up_EFD: Tensor,
    down_EDG: Tensor,
    scale_ERK: Tensor,
    down_scale_ESL: Tensor,
    *,
    prompts: int,
) -> Tensor:
    """See `reference`. TensorRT multiplies the dequantized weights in the compute dtype."""
    (experts, rows, columns), blocks = gate_up_EFD.shape, scale_ERK.shape
    compute, by = x_ND.dtype, (1, BLOCK, BLOCK)
    # Gate and up may each end in a partial block: apart, each begins with a whole one.
    halves = ops.reshape(gate_up_EFD, (2 * experts, rows // 2, columns))
    scales = ops.reshape(scale_ERK, (2 * experts, blocks[1] // 2, blocks[2]))
    plain_EFD = ops.reshape(ops.dequantize(halves, scales, compute, by), (experts, rows, columns))
    plain_EDG = ops.dequantize(down_EDG, down_scale_ESL, compute, by)
    steps = moe.Steps(middle=rounding.blocks)
    return moe.every(rounding.blocks(x_ND), expert_NA, weight_NA, plain_EFD, plain_EDG, steps)


_PLUGINS = (QUANTIZE_BLOCKS, experts_fp8.GATE_UP_BLOCKS, experts_fp8.DOWN_BLOCKS)
_REAL: dict[str, Rule] = {
    "R": lambda G: 2 * cdiv(G, BLOCK),
    "K": lambda D: cdiv(D, BLOCK),
    "S": "K",
    "L": lambda G: cdiv(G, BLOCK),
}
OP = Op(
    name="moe_fp8_block",
    reference=reference,
    plugged=experts_fp8.fp8_block,
    plugins=(experts.ROUTE, *_PLUGINS, experts.SUM),
    real={**moe.REAL, **_REAL},
    uses={"": moe.BLOCKS, "prompts": moe.PROMPTS},
    **moe.COMMON,
)
