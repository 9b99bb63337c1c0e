"""A step's rows written to a paged cache in place, where the write plan says (`glmspec.models.layers.paged`).

Row order[i] goes to page p, the one with cumulative[p] <= i < cumulative[p + 1], at slot offset[p] + i - cumulative[p].
Of `order` what lies beyond the last of `cumulative` is not written. A cache of float8 rows has one scale: what is
stored is row / scale, rounded and kept within +-448.

Legend: N rows of the step, L rows in order of page, X pages, Y = X + 1, J heads, P rows a page, D columns.
"""

from __future__ import annotations

from typing import Any

import torch

from glmspec.core.errors import NetworkError
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.rounding import to_e4m3
from glmspec.plugins.spec import Compute, Float32, Int32, NoPlugin, Op, Plugin, Runs, Use, cdiv, inputs_of, pow2

_FP8 = "float8_e4m3fn"


def reference(
    cache_XJPD: Compute,
    rows_NJD: Compute,
    order_L: Int32,
    offset_X: Int32,
    cumulative_Y: Int32,
    scale_1: Float32 | None = None,
) -> torch.Tensor:
    """The cache itself, with the rows in it. scale_1: float32, of a float8 cache."""
    return append(cache_XJPD, rows_NJD, order_L, slots(offset_X, cumulative_Y), scale_1)


def slots(offset_X: torch.Tensor, cumulative_Y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and slot, int64 [rows] each, of every row of a plan."""
    counts, rows = cumulative_Y.diff(), int(cumulative_Y[-1])
    page = torch.repeat_interleave(torch.arange(len(counts)), counts, output_size=rows)
    slot = torch.arange(rows) - cumulative_Y[page] + offset_X[page]
    return page, slot


def append(
    cache_XJPD: torch.Tensor,
    rows_NJD: torch.Tensor,
    order_L: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor],
    scale_1: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference`, with the plan's `slots` known."""
    rows_LJD = rows_NJD.index_select(0, order_L[: len(where[0])])
    if scale_1 is not None:
        rows_LJD = to_e4m3(rows_LJD.float() / scale_1)
    return write(cache_XJPD, rows_LJD, where)


def write(cache_XJPD: torch.Tensor, rows_LJD: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The cache with packed rows written in place."""
    page, slot = where
    if cache_XJPD.dtype == torch.float8_e4m3fn:  # torch copies no float8 to places
        write(cache_XJPD.view(torch.uint8), rows_LJD.view(torch.uint8), where)
    elif cache_XJPD.shape[1] == 1:
        flat = cache_XJPD.view(-1, cache_XJPD.shape[3])
        flat.index_copy_(0, page * cache_XJPD.shape[2] + slot, rows_LJD.squeeze(1))
    else:
        cache_XJPD[page, :, slot] = rows_LJD
    return cache_XJPD


@lowers("kv_append")
def native(
    cache_XJPD: Tensor,
    rows_NJD: Tensor,
    order_L: Tensor,
    offset_X: Tensor,
    cumulative_Y: Tensor,
    scale_1: Tensor | None = None,
) -> Tensor:
    """The cache with the rows in it, in its memory. Raises `NetworkError` for a float8 cache where plugins are off."""
    if cache_XJPD.dtype == _FP8:
        raise NetworkError("kv_append: found a float8 cache: TensorRT has no layer that updates it, plugins do.")
    return ops.kv_update(cache_XJPD, ops.gather(rows_NJD, order_L), offset_X, cumulative_Y)


def plugged(run: Runs, cache_XJPD, rows_NJD, order_L, offset_X, cumulative_Y, scale_1=None) -> tuple:
    """One launch: see `reference`."""
    dtype, inputs = run.dtype(cache_XJPD), [cache_XJPD, rows_NJD, order_L, offset_X, cumulative_Y]
    if (scale_1 is None) == (dtype == _FP8):
        raise NoPlugin(f"kv_append: a cache of {dtype} {'without' if scale_1 is None else 'with'} a scale")
    return run(APPEND, *inputs) if scale_1 is None else run(APPEND_FP8, *inputs, scale_1)


_INPUTS = inputs_of(reference)
_APPEND: dict[str, Any] = dict(
    op="kv_append",
    function="append_kernel",
    aliased={"updated_XJPD": "cache_XJPD"},
    sizes={"JP": lambda J: pow2(J), "DP": lambda D: pow2(D)},
    scalars=("L", "Y"),
    grid=(lambda L, ROWS: cdiv(L, ROWS),),
    tiles={"": {"ROWS": 4, "WIDTH": 256, "WARPS": 4}},
)
APPEND = Plugin(
    name="kv_append",
    inputs=_INPUTS,
    outputs={"updated_XJPD": "T"},
    absent=("scale_1",),
    **_APPEND,
)
APPEND_FP8 = Plugin(
    name="kv_append_fp8",
    inputs={**_INPUTS, "cache_XJPD": _FP8, **inputs_of(reference, "scale_1")},
    outputs={"updated_XJPD": _FP8},
    **_APPEND,
)
OP = Op(
    name="kv_append",
    outputs={"updated_XJPD": "T"},
    reference=reference,
    plugged=plugged,
    plugins=(APPEND, APPEND_FP8),
    tolerance={"float32": 0, "bfloat16": 0, _FP8: 0},
    # z: bytes of a cached number.
    real={
        "N": lambda batch: 9 * batch,
        "L": "N",
        "J": 1,
        "D": 576,
        "P": 64,
        "X": lambda batch: 1 + 128 * batch,
        "Y": lambda X: X + 1,
        "z": 2,
    },
    uses={
        "": Use(),
        "index keys": Use(sizes={"D": 128}),
        "drafter": Use(sizes={"J": 8, "D": 128}),
        "fp8": Use({}, ("scale_1",), {"z": 1}, {"cache_XJPD": _FP8}),
    },
    run_time="NLXY",
)
