"""Rows written to a paged cache in place (`glmspec.plugins.kv_append`): a program has a few rows of the plan, finds the
page of each and copies them.

Legend: N rows of the step, X pages, J heads, P rows a page, D columns, L rows in order of page, Y = X + 1 places of
`cumulative`; of a program: r rows, j heads and d columns (padded to powers of two), w places looked at together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.float8 import to_float8


@triton.jit
def append_kernel(
    cache_XJPD,
    rows_NJD,
    order_L,
    offset_X,
    cumulative_Y,
    scale_1,
    L,
    Y,
    updated_XJPD,
    J: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    JP: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """See `kv_append.reference`; updated_XJPD is cache_XJPD's memory."""
    at_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    page_r = _last_not_above(cumulative_Y, Y, at_r, WIDTH)
    here_r = (at_r < L) & (page_r < Y - 1)  # the last place only says how many rows there are
    row_r = tl.load(order_L + at_r, mask=here_r, other=0).to(tl.int64)
    first_r = tl.load(cumulative_Y + page_r, mask=here_r, other=0)
    slot_r = tl.load(offset_X + page_r, mask=here_r, other=0) + at_r - first_r
    j, d = tl.arange(0, JP)[None, :, None], tl.arange(0, DP)[None, None, :]
    mask_rjd = here_r[:, None, None] & (j < J) & (d < D)
    value_rjd = tl.load(rows_NJD + (row_r[:, None, None] * J + j) * D + d, mask=mask_rjd, other=0.0)
    if scale_1 is not None:
        value_rjd = to_float8(tl.div_rn(value_rjd.to(tl.float32), tl.load(scale_1)))
    place_rjd = ((page_r.to(tl.int64)[:, None, None] * J + j) * P + slot_r[:, None, None]) * D + d
    tl.store(updated_XJPD + place_rjd, value_rjd, mask=mask_rjd)


@triton.jit
def _last_not_above(rising_Y, Y, wanted_r, WIDTH: tl.constexpr):
    """The last place of a list, which rises from 0, that is not above each number: first among WIDTH places spread over
    it, then among those up to the next of them. Two loads, one after the other, where halving would take 15."""
    w = tl.arange(0, WIDTH)
    step = (Y + WIDTH - 1) // WIDTH
    spread_w = tl.load(rising_Y + w * step, mask=w * step < Y, other=2147483647)
    first_r = (tl.sum((spread_w[None, :] <= wanted_r[:, None]).to(tl.int32), 1) - 1) * step
    count_r = tl.zeros_like(first_r)
    for start in range(0, step, WIDTH):
        at_rw = first_r[:, None] + start + w[None, :]
        there_rw = (start + w[None, :] < step) & (at_rw < Y)
        near_rw = tl.load(rising_Y + at_rw, mask=there_rw, other=2147483647)
        count_r += tl.sum((near_rw <= wanted_r[:, None]).to(tl.int32), 1)
    return first_r + count_r - 1
