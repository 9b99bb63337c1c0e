"""DFlash2's grouped dynamic causal convolution along the rows of a block.

y[i] = sum over taps t of (base[t] + delta[i, t, group of the column]) * x[i - t], zero before the block's start, plus a
residual where one is given. A block has two kernels, one for each side of a sublayer; delta is computed per row from
the sublayer's input, by the caller.

Legend: B blocks, R rows of a block, T taps, D columns, U groups of W = D / U columns, 2 sides,
Z = 2 * T taps of both sides.
"""

from __future__ import annotations

from typing import Any

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import (
    ITEM_BYTES,
    Compute,
    NoPlugin,
    Op,
    Plugin,
    Runs,
    Use,
    attributes_of,
    cdiv,
    inputs_of,
    pow2,
)

ROW_BYTES = 36  # of one column of a block: what a thread's registers hold of its columns


def reference(
    x_BRD: Compute,
    base_2TD: Compute,
    delta_BR2TU: Compute,
    residual_BRD: Compute | None = None,
    *,
    side: int,
) -> torch.Tensor:
    """x [B, R, D], base [2, T, D], delta [B, R, 2, T, U], residual [B, R, D] -> [B, R, D]. side: 0 or 1."""
    columns = x_BRD.shape[2]
    taps, groups = delta_BR2TU.shape[3:]
    kernel_BRTD = base_2TD[side] + delta_BR2TU[:, :, side].repeat_interleave(columns // groups, -1)
    padded = torch.nn.functional.pad(x_BRD, (0, 0, taps - 1, 0))
    windows_BRDT = padded.unfold(1, taps, 1).flip(-1)  # tap t of row i is x[i - t]
    y_BRD = (kernel_BRTD * windows_BRDT.transpose(2, 3)).sum(2)
    return y_BRD if residual_BRD is None else residual_BRD + y_BRD


@lowers("grouped_conv")
def native(
    x_BRD: Tensor, base_2TD: Tensor, delta_BR2TU: Tensor, residual_BRD: Tensor | None = None, *, side: int
) -> Tensor:
    """[B, R, D]: see `reference`."""
    rows, columns = x_BRD.shape[1:]
    taps, groups = delta_BR2TU.shape[3:]
    width = columns // groups
    x_BRUW = ops.reshape(x_BRD, (0, rows, groups, width))
    base_ZUW = ops.reshape(base_2TD, (2 * taps, groups, width))
    delta_BRZU = ops.reshape(delta_BR2TU, (0, rows, 2 * taps, groups))
    total: Any = None  # a Tensor from the first tap on
    for tap in range(min(taps, rows)):  # further ones see nothing but zeros
        base_1UW = ops.narrow(base_ZUW, 0, side * taps + tap, 1)
        delta_BR1U = ops.narrow(delta_BRZU, 2, side * taps + tap, 1)
        kernel_BRUW = ops.reshape(base_1UW, (1, 1, groups, width)) + ops.reshape(delta_BR1U, (0, rows, groups, 1))
        term = kernel_BRUW * ops.shift(x_BRUW, 1, tap)
        total = term if total is None else total + term
    y_BRD = ops.reshape(total, (0, rows, columns))
    return y_BRD if residual_BRD is None else residual_BRD + y_BRD


def plugged(run: Runs, x_BRD, base_2TD, delta_BR2TU, residual_BRD=None, *, side: int) -> tuple:
    """One launch: see `reference`."""
    rows, most = run.shape(x_BRD)[1], ROW_BYTES // ITEM_BYTES[run.dtype(x_BRD)]
    if rows > most:
        raise NoPlugin(f"grouped_conv: a block of {rows} rows, and the kernel's registers hold {most}")
    if residual_BRD is None:
        return run(PLAIN, x_BRD, base_2TD, delta_BR2TU, side=side)
    return run(ADDED, x_BRD, base_2TD, delta_BR2TU, residual_BRD, side=side)


def _plugin(name: str, residual: dict[str, str]) -> Plugin:
    """A plugin with the residual, or without."""
    return Plugin(
        name=name,
        op="grouped_conv",
        function="grouped_conv_kernel",
        inputs=inputs_of(reference) | residual,
        outputs={"y_BRD": "T"},
        attributes=attributes_of(reference),
        sizes={
            "W": lambda D, U: D // U,
            "WP": lambda W, COLUMNS: min(pow2(W), COLUMNS),
            "GROUPS": lambda COLUMNS, WP: COLUMNS // WP,
        },
        absent=() if residual else ("residual_BRD",),
        grid=("B", lambda U, GROUPS: cdiv(U, GROUPS), lambda W, WP: cdiv(W, WP)),
        tiles={"": {"COLUMNS": 256, "WARPS": 1}},  # 16 bytes a thread; few columns, that one block is many programs
    )


PLAIN = _plugin("grouped_conv", {})
ADDED = _plugin("grouped_conv_added", inputs_of(reference, "residual_BRD"))
OP = Op(
    name="grouped_conv",
    outputs=PLAIN.outputs,
    reference=reference,
    plugged=plugged,
    plugins=(PLAIN, ADDED),
    real={"B": "batch", "R": 9, "T": 2, "D": 6144, "U": 384, "S": 2},  # S of x's size
    uses={"before": Use({"side": 0}), "after": Use({"side": 1}, ("residual_BRD",), {"S": 3})},
    run_time="B",
)
