"""DFlash2's grouped dynamic causal convolution along the rows of a block.

y[i] = sum over taps t of (base[t] + delta[i, t, group of the column]) * x[i - t], zero before the
block's start. delta is computed per row from the sublayer's input, by the caller.

Legend: B blocks, R rows of a block, T taps, D columns, U groups of D / U columns.
"""

from __future__ import annotations

import torch

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.plugins.spec import Op


def reference(x_BRD: torch.Tensor, base_TD: torch.Tensor, delta_BRTU: torch.Tensor) -> torch.Tensor:
    """x [B, R, D], base [T, D], delta [B, R, T, U] -> [B, R, D]."""
    columns = x_BRD.shape[2]
    taps, groups = delta_BRTU.shape[2:]
    kernel_BRTD = base_TD + delta_BRTU.repeat_interleave(columns // groups, -1)
    padded = torch.nn.functional.pad(x_BRD, (0, 0, taps - 1, 0))
    windows_BRDT = padded.unfold(1, taps, 1).flip(-1)  # tap t of row i is x[i - t]
    return (kernel_BRTD * windows_BRDT.transpose(2, 3)).sum(2)


def native(x_BRD: Tensor, base_TD: Tensor, delta_BRTU: Tensor) -> Tensor:
    """x [B, R, D], base [T, D], delta [B, R, T, U] -> [B, R, D]."""
    rows, columns = x_BRD.shape[1:]
    taps, groups = delta_BRTU.shape[2:]
    width = columns // groups
    with x_BRD.net.region("grouped_conv", [x_BRD, base_TD, delta_BRTU], {}) as outputs:
        x_BRUW = ops.reshape(x_BRD, (0, rows, groups, width))
        total = None
        for tap in range(min(taps, rows)):  # further ones see nothing but zeros
            base_UW = ops.reshape(ops.narrow(base_TD, 0, tap, 1), (1, 1, groups, width))
            delta_BRU1 = ops.reshape(ops.narrow(delta_BRTU, 2, tap, 1), (0, rows, groups, 1))
            term = (base_UW + delta_BRU1) * ops.shift(x_BRUW, 1, tap)
            total = term if total is None else total + term
        outputs.append(ops.reshape(total, (0, rows, columns)))
    return outputs[0]


OP = Op(
    name="grouped_conv",
    inputs={"x_BRD": "T", "base_TD": "T", "delta_BRTU": "T"},
    outputs={"y_BRD": "T"},
    reference=reference,
    native="to come",
)
