"""Absorbed MLA over selected cache rows (`glmspec.plugins.sparse_mla`): the rows of a token are divided among programs;
`attention_merge` makes one result of theirs.

Legend: N tokens, H heads, D latent row [R rotary key | V compressed K/V], K rows, S splits of them, X pages, P rows a
page; of a program: h heads, b rows at once, r and v columns (padded to powers of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def with_tile(peak_h, mass_h, sum_vh, score_bh, value_bv):
    """The running softmax of each head with one tile more: its largest score, mass and sum of rows."""
    higher_h = tl.maximum(peak_h, tl.max(score_bh, 0))
    zero_h = tl.where(higher_h == float("-inf"), 0.0, higher_h)  # -inf less -inf would be NaN
    p_bh = tl.exp2(score_bh - zero_h[None, :])
    fade_h = tl.exp2(peak_h - zero_h)
    mass_h = mass_h * fade_h + tl.sum(p_bh, 0)
    sum_vh = tl.dot(tl.trans(value_bv), p_bh.to(value_bv.dtype), sum_vh * fade_h[None, :], input_precision="ieee")
    return higher_h, mass_h, sum_vh


@triton.jit
def split_kernel(
    q_NHD, cache_X1PD, rows_NK, visible_NK, scale_1,
    S,
    out_NSHV, peak_NSH, mass_NSH,
    H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, V: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr,
    scale: tl.constexpr, value_start: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over one split, unnormalized: sums of rows, the largest score (times log2 e) and the mass below it.

    One pass: a row is read once, for the score and for the sum. A split without a visible row gives 0, -inf and 0."""
    groups: tl.constexpr = (H + HEADS - 1) // HEADS
    token, split = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(1)
    h, r, v, b = tl.arange(0, HEADS), tl.arange(0, RP), tl.arange(0, VP), tl.arange(0, BLOCK)
    head_h = tl.program_id(0) % groups * HEADS + h
    here_h, here_r, here_v = head_h < H, r < value_start, v < V
    q_hd = q_NHD + token * H * D + head_h[:, None] * D
    q_hr = tl.load(q_hd + r[None, :], mask=here_h[:, None] & here_r[None, :], other=0.0)
    q_hv = tl.load(q_hd + value_start + v[None, :], mask=here_h[:, None] & here_v[None, :], other=0.0)
    factor = scale * LOG2_E
    if scale_1 is not None:
        unit = tl.load(scale_1)
        factor = factor * unit
    peak_h = tl.full([HEADS], float("-inf"), tl.float32)
    mass_h = tl.zeros([HEADS], tl.float32)
    sum_vh = tl.zeros([VP, HEADS], tl.float32)
    tiles: tl.constexpr = (K + BLOCK - 1) // BLOCK
    for tile in range(split * tiles // S, (split + 1) * tiles // S):
        at_b = tile * BLOCK + b
        seen_b = tl.load(visible_NK + token * K + at_b, mask=at_b < K, other=0) != 0
        row_b = tl.load(rows_NK + token * K + at_b, mask=at_b < K, other=0).to(tl.int64)
        # Of an unseen row nothing is read: it may hold anything, and zero times NaN is NaN.
        latent_bd = cache_X1PD + row_b[:, None] * D
        key_br = tl.load(latent_bd + r[None, :], mask=seen_b[:, None] & here_r[None, :], other=0.0).to(q_hr.dtype)
        key_bv = tl.load(latent_bd + value_start + v[None, :], mask=seen_b[:, None] & here_v[None, :], other=0.0)
        key_bv = key_bv.to(q_hv.dtype)
        score_bh = tl.dot(key_br, tl.trans(q_hr), input_precision="ieee")
        score_bh = tl.dot(key_bv, tl.trans(q_hv), score_bh, input_precision="ieee") * factor
        score_bh = tl.where(seen_b[:, None], score_bh, float("-inf"))
        peak_h, mass_h, sum_vh = with_tile(peak_h, mass_h, sum_vh, score_bh, key_bv)
    if scale_1 is not None:
        sum_vh = sum_vh * unit
    part_h = (token * S + split) * H + head_h
    tl.store(out_NSHV + part_h[None, :] * V + v[:, None], sum_vh, mask=here_h[None, :] & here_v[:, None])
    tl.store(peak_NSH + part_h, peak_h, mask=here_h)
    tl.store(mass_NSH + part_h, mass_h, mask=here_h)
