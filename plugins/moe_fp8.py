"""`moe` with FP8 weights: e4m3 codes, a scale an expert (of gate and up: one each).

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate (first) and up.
"""

from __future__ import annotations

from typing import Annotated

import torch

from glmspec.core.dtypes import FP8
from glmspec.network.graph import Tensor
from glmspec.plugins import experts, experts_fp8, moe, moe_scaled
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, Op, Use

Codes = Annotated[torch.Tensor, FP8]


def reference(
    x_ND: Compute,
    expert_NA: Int32,
    weight_NA: Float32,
    gate_up_EFD: Codes,
    down_EDG: Codes,
    scale_E2: Float32,
    down_scale_E: Float32,
    input_E2: Float32 | None = None,
    middle_E: Float32 | None = None,
    *,
    prompts: int,
) -> torch.Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype. input, middle: scales of x and
    of the input of `down`, both or none."""
    codes, scales = (gate_up_EFD, down_EDG), (scale_E2, down_scale_E)
    return moe_scaled.reference(x_ND, expert_NA, weight_NA, codes, (None, None), *scales, input_E2, middle_E, "fp8")


@lowers("moe_fp8")
def native(
    x_ND: Tensor,
    expert_NA: Tensor,
    weight_NA: Tensor,
    gate_up_EFD: Tensor,
    down_EDG: Tensor,
    scale_E2: Tensor,
    down_scale_E: Tensor,
    input_E2: Tensor | None = None,
    middle_E: Tensor | None = None,
    *,
    prompts: int,
) -> Tensor:
    """See `reference`."""
    codes, scales = (gate_up_EFD, down_EDG), (scale_E2, down_scale_E)
    return moe_scaled.native(x_ND, expert_NA, weight_NA, codes, (None, None), *scales, input_E2, middle_E, "fp8")


_PLUGINS = (experts_fp8.QUANTIZE, experts_fp8.GATE_UP_FP8, experts_fp8.DOWN_FP8)
_W8 = (experts_fp8.GATE_UP_W8, experts_fp8.DOWN_W8)
OP = Op(
    name="moe_fp8",
    reference=reference,
    plugged=experts_fp8.fp8,
    plugins=(experts.ROUTE, *_PLUGINS, *_W8, experts.SUM),
    real=moe.REAL,
    uses={
        "": Use({"prompts": 0}, ("input_E2", "middle_E")),
        "prompts": Use({"prompts": 1}, ("input_E2", "middle_E")),
        "weights only": moe.BLOCKS,
        "weights only, prompts": moe.PROMPTS,
    },
    **moe.COMMON,
)
