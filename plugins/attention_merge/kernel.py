"""Merges the parts of a divided attention (`glmspec.plugins.attention_merge`).

Legend: N tokens, S splits, H heads, V value columns, D columns of q, whose dtype is the output's; of a program: s
splits at once, h heads, v columns, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
    part_NSHV,
    peak_NSH,
    mass_NSH,
    q_NHD,
    S,
    out_NHV,
    H: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A few heads of one token. 0 where no split sees a row."""
    token = tl.program_id(0).to(tl.int64)
    s, v = tl.arange(0, SPLITS), tl.arange(0, VP)
    head_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here_h, here_v = head_h < H, v < V
    peak_h = tl.full([HEADS], float("-inf"), tl.float32)
    for first in range(0, S, SPLITS):
        mask_sh = (first + s < S)[:, None] & here_h[None, :]
        at_sh = (token * S + first + s)[:, None] * H + head_h[None, :]
        peak_h = tl.maximum(peak_h, tl.max(tl.load(peak_NSH + at_sh, mask=mask_sh, other=float("-inf")), 0))
    zero_h = tl.where(peak_h == float("-inf"), 0.0, peak_h)  # -inf less -inf would be NaN
    mass_h = tl.zeros([HEADS], tl.float32)
    sum_hv = tl.zeros([HEADS, VP], tl.float32)
    for first in range(0, S, SPLITS):
        mask_sh = (first + s < S)[:, None] & here_h[None, :]
        at_sh = (token * S + first + s)[:, None] * H + head_h[None, :]
        weight_sh = tl.exp2(tl.load(peak_NSH + at_sh, mask=mask_sh, other=float("-inf")) - zero_h[None, :])
        mass_h += tl.sum(weight_sh * tl.load(mass_NSH + at_sh, mask=mask_sh, other=0.0), 0)
        mask_shv = mask_sh[:, :, None] & here_v[None, None, :]
        part_shv = tl.load(part_NSHV + at_sh[:, :, None] * V + v[None, None, :], mask=mask_shv, other=0.0)
        sum_hv += tl.sum(part_shv * weight_sh[:, :, None], 0)
    mean_hv = sum_hv / tl.where(mass_h > 0, mass_h, 1.0)[:, None]
    out_hv = out_NHV + (token * H + head_h)[:, None] * V + v[None, :]
    tl.store(out_hv, mean_hv.to(q_NHD.dtype.element_ty), mask=here_h[:, None] & here_v[None, :])
