"""Routed experts whose weights are FP8 or NVFP4 under one scale an expert, with or without scales of activations.

With scales of activations both products are of codes: x / its scale, rounded, times the weights' codes, times both
scales after, in float32 (`rounding.py` says why). All experts and both halves share the largest scale of x: a smaller
one would saturate what another expert was calibrated for.

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate (first) and up, H halves
(gate, up).
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import moe, rounding


def reference(
    x_ND: torch.Tensor,
    expert_NA: torch.Tensor,
    weight_NA: torch.Tensor,
    codes: tuple[torch.Tensor, torch.Tensor],
    groups: tuple[torch.Tensor, torch.Tensor] | tuple[None, None],
    scale_EH: torch.Tensor,
    down_scale_E: torch.Tensor,
    input_EH: torch.Tensor | None,
    middle_E: torch.Tensor | None,
    format: str,
) -> torch.Tensor:
    """[N, D] in x's dtype. codes, groups: of gate and up and of down; NVFP4's have scales of 16 columns."""
    dtype = x_ND.dtype
    if input_EH is None or middle_E is None:
        rows_EF1 = scale_EH.repeat_interleave(codes[0].shape[1] // 2, 1).unsqueeze(2)
        plain = [
            rounding.values_of(code) * scale if group is None else rounding.values_of(code, group.float() * scale)
            for code, group, scale in zip(codes, groups, (rows_EF1, down_scale_E.view(-1, 1, 1)), strict=True)
        ]
        return moe.chosen(x_ND, expert_NA, weight_NA, plain[0].to(dtype), plain[1].to(dtype), moe.PLAIN)
    gate_up_EFD, down_EDG = (rounding.values_of(*both) for both in zip(codes, groups, strict=True))
    input_1 = input_EH.max()
    steps = moe.Steps(
        gate=lambda product, expert: (product * input_1 * _of(scale_EH[:, 0], expert)).to(dtype),
        up=lambda product, expert: (product * input_1 * _of(scale_EH[:, 1], expert)).to(dtype),
        middle=lambda hidden, expert: rounding.reference(hidden, _of(middle_E, expert), format=format),
        out=lambda product, expert: (product * _of(middle_E, expert) * _of(down_scale_E, expert)).to(dtype),
    )
    x_ND = rounding.reference(x_ND, input_1, format=format)
    return moe.chosen(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, steps)


def _of(scale_E: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """The scales of some experts, for a value [..., rows, columns] of each."""
    return scale_E[expert][..., None, None]


def native(
    x_ND: Tensor,
    expert_NA: Tensor,
    weight_NA: Tensor,
    codes: tuple[Tensor, Tensor],
    groups: tuple[Tensor, Tensor] | tuple[None, None],
    scale_EH: Tensor,
    down_scale_E: Tensor,
    input_EH: Tensor | None,
    middle_E: Tensor | None,
    format: str,
) -> Tensor:
    """See `reference`."""
    dtype = x_ND.dtype
    if input_EH is None or middle_E is None:
        gate_up_EFD, down_EDG = (
            _dequantized(code, group, scale, dtype)
            for code, group, scale in zip(codes, groups, (scale_EH, down_scale_E), strict=True)
        )
        return moe.every(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, moe.PLAIN)
    gate_up_EFD, down_EDG = (rounding.unscaled(*both) for both in zip(codes, groups, strict=True))
    input_1 = ops.reduce(ops.reshape(input_EH, (-1,)), "MAX", 0, keep=False)
    gate_E11, up_E11 = (ops.reshape(ops.narrow(scale_EH, 1, half, 1), (-1, 1, 1)) for half in (0, 1))
    middle_E11, down_E11 = (ops.reshape(scale, (-1, 1, 1)) for scale in (middle_E, down_scale_E))
    steps = moe.Steps(
        gate=lambda product: ops.cast(product * input_1 * gate_E11, dtype),
        up=lambda product: ops.cast(product * input_1 * up_E11, dtype),
        middle=lambda hidden: rounding.native(hidden, middle_E, format=format),
        out=lambda product: ops.cast(product * middle_E11 * down_E11, dtype),
    )
    x_ND = rounding.native(x_ND, input_1, format=format)
    return moe.every(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, steps)


def _dequantized(codes: Tensor, groups: Tensor | None, scale: Tensor, dtype: str) -> Tensor:
    """Weights [E, rows, columns] under a scale for each expert, or for each half of one."""
    coded = codes if groups is None else groups
    halves = scale.shape[1] if scale.rank == 2 else 1
    scale_EH1 = ops.reshape(scale, (coded.shape[0], halves, 1))
    plain = ops.dequantize(coded, scale_EH1, dtype, (1, coded.shape[1] // halves, coded.shape[2]))
    return plain if groups is None else ops.dequantize(codes, plain, dtype, (1, 1, codes.shape[2] // coded.shape[2]))
