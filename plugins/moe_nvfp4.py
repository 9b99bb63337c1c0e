"""`moe` with NVFP4 weights: e2m1 codes, an e4m3 scale for every 16 columns, a float32 scale an expert (of gate and up:
one each). Codes lie two a byte where plugins read them, and one by one where layers do: TensorRT has no plugin of FP4.

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate (first) and up, C stored
columns of codes of gate and up, H of down, S and Z groups of their columns.
"""

from __future__ import annotations

from typing import Annotated

import torch

from glmspec.core.dtypes import FP8
from glmspec.network.formats import GROUP
from glmspec.network.graph import Tensor
from glmspec.plugins import experts, experts_nvfp4, moe, moe_scaled
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, Op, Rule, Use

Codes = Annotated[torch.Tensor, "int8"]
Groups = Annotated[torch.Tensor, FP8]


def reference(
    x_ND: Compute,
    expert_NA: Int32,
    weight_NA: Float32,
    gate_up_EFC: Codes,
    down_EDH: Codes,
    groups_EFS: Groups,
    down_groups_EDZ: Groups,
    scale_E2: Float32,
    down_scale_E: Float32,
    input_E2: Float32 | None = None,
    middle_E: Float32 | None = None,
    *,
    prompts: int,
) -> torch.Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype. Codes: two a byte.
    input, middle: scales of x and of the input of `down`, both or none."""
    codes, groups, scales = (gate_up_EFC, down_EDH), (groups_EFS, down_groups_EDZ), (scale_E2, down_scale_E)
    return moe_scaled.reference(x_ND, expert_NA, weight_NA, codes, groups, *scales, input_E2, middle_E, "nvfp4")


@lowers("moe_nvfp4")
def native(
    x_ND: Tensor,
    expert_NA: Tensor,
    weight_NA: Tensor,
    gate_up_EFC: Tensor,
    down_EDH: Tensor,
    groups_EFS: Tensor,
    down_groups_EDZ: Tensor,
    scale_E2: Tensor,
    down_scale_E: Tensor,
    input_E2: Tensor | None = None,
    middle_E: Tensor | None = None,
    *,
    prompts: int,
) -> Tensor:
    """See `reference`. Codes: FP4, one by one."""
    codes, groups, scales = (gate_up_EFC, down_EDH), (groups_EFS, down_groups_EDZ), (scale_E2, down_scale_E)
    return moe_scaled.native(x_ND, expert_NA, weight_NA, codes, groups, *scales, input_E2, middle_E, "nvfp4")


_REAL: dict[str, Rule] = {
    "C": lambda D: D // 2,
    "H": lambda G: G // 2,
    "S": lambda D: D // GROUP,
    "Z": lambda G: G // GROUP,
}
OP = Op(
    name="moe_nvfp4",
    reference=reference,
    plugged=experts_nvfp4.chain,
    plugins=(experts.ROUTE, *experts_nvfp4.PLUGINS, experts.SUM),
    real={**moe.REAL, **_REAL},
    uses={
        "": Use({"prompts": 0}, ("input_E2", "middle_E")),
        "prompts": Use({"prompts": 1}, ("input_E2", "middle_E")),
        "weights only": moe.BLOCKS,
        "weights only, prompts": moe.PROMPTS,
    },
    **moe.COMMON,
)
