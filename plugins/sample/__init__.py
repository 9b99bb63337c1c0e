"""A token drawn for every row from its law: logits, temperature, top-k, top-p, min-p and one uniform number to a token.

The law is `sampling_law`'s and the draw is `draw`'s.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from glmspec.build.network.graph import Tensor
from glmspec.plugins import draw, sampling_law
from glmspec.plugins.spec import Op


def reference(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    u_R: torch.Tensor,
) -> torch.Tensor:
    """int32 [R]. temperature, top_p, min_p: float32 [R]; top_k: int32 [R], see `sampling_law`. u: float32 in [0, 1)."""
    return draw.reference(sampling_law.reference(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R), u_R)


def native(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, u_R: Tensor
) -> Tensor:
    """int32 [R]: see `reference`."""
    inputs = [logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, u_R]
    with logits_RV.net.region("sample", inputs, {}) as outputs:
        if not outputs:
            outputs.append(draw.native(sampling_law.native(*inputs[:5]), u_R))
    return outputs[0]


OP = Op(
    name="sample",
    inputs={
        "logits_RV": "T",
        "temperature_R": "float32",
        "top_k_R": "int32",
        "top_p_R": "float32",
        "min_p_R": "float32",
        "u_R": "float32",
    },
    outputs={"token_R": "int32"},
    reference=reference,
    native="to come",
)
