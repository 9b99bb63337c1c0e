"""Logits changed at named places: biases, penalties and forbidden tokens, before anything is drawn.

    z -> repeat(z + before) + after,   repeat(z) = z / factor where z > 0, z * factor elsewhere

Legend: R rows, V vocabulary, E entries.
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, Op


def reference(
    logits_RV: Compute,
    place_E2: Int32,
    before_E: Float32,
    factor_E: Float32,
    after_E: Float32,
) -> torch.Tensor:
    """float32 [R, V]. place: int32 [E, 2], row and token, every pair once; before, factor (> 0), after: float32 [E]."""
    row_E, token_E = place_E2.long().unbind(1)
    made_RV = logits_RV.to(torch.float32, copy=True)
    z_E = made_RV[row_E, token_E] + before_E
    made_RV[row_E, token_E] = torch.where(z_E > 0, z_E / factor_E, z_E * factor_E) + after_E
    return made_RV


@lowers("adjust")
def native(logits_RV: Tensor, place_E2: Tensor, before_E: Tensor, factor_E: Tensor, after_E: Tensor) -> Tensor:
    """float32 [R, V]. place: int32 [E, 2], row and token, every pair once; before, factor (> 0), after: float32 [E]."""
    logits_RV = ops.cast(logits_RV, "float32")
    z_E = ops.gather_nd(logits_RV, place_E2) + before_E
    z_E = ops.select(z_E > 0.0, z_E / factor_E, z_E * factor_E) + after_E
    return ops.scatter_nd(logits_RV, place_E2, z_E)


OP = Op(
    name="adjust",
    outputs={"adjusted_RV": "float32"},
    reference=reference,
    native="a cast and a scatter of a few entries: at worst the scatter copies the float32 logits once too often: "
    "11 MB for 9 rows of 154,880, 2.3 us on an H200, in steps that sample. Not to copy takes an output that is its "
    "input's memory, which TensorRT only previews",
)
