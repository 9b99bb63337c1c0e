"""Laws from logits, and draws (`glmspec.plugins.sample`; `reject` uses the same).

A law is never written. What of it is: the least logit that stays of a row, and of every split of a row its largest
logit and its weight. A weight is 2^(rate (logit - largest)), rate = log2(e) / temperature. Of greedy rows (temperature
0) only the lowest argmax matters.

Legend: R rows, V vocabulary, S splits of a row, s the same, padded, c columns of a split, b of a tile, x any.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_SPAN = tl.constexpr(110.0)  # exp(-110) is 0 in float32
_REACHED = tl.constexpr(1e-30)  # a split of less has no chance that a float32 could tell from none


@triton.jit
def least_logit_kernel(
    logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, bound_R, V: tl.constexpr, BLOCK: tl.constexpr
):
    """The least logit that stays of a row; -inf of one that nothing narrows, and of a greedy one.

    One program a row: a row stays in the L2 cache from pass to pass, and rows that nothing narrows cost nothing.
    Several would have to meet after every pass, in a launch of its own, whether a row is narrowed or not.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(temperature_R + row), tl.load(top_k_R + row)
    top_p, min_p = tl.load(top_p_R + row), tl.load(min_p_R + row)
    counted = (top_k > 0) & (top_k < V)
    bound = float("-inf")
    if (temperature > 0) & (counted | (top_p < 1) | (min_p > 0)):
        logits_V = logits_RV + row * V
        rate = tl.div_rn(_LOG2E, temperature)
        largest = _largest(logits_V, V, BLOCK)
        bound = tl.maximum(largest - _SPAN * temperature, largest + temperature * tl.log(min_p))
        if counted:
            bound = _search(logits_V, bound, largest, temperature, 0 * rate, 0 * top_p, top_k.to(tl.float32), V, BLOCK)
        if top_p < 1:
            bound = _search(logits_V, bound, largest, temperature, rate, top_p, 0 * top_p, V, BLOCK)
    tl.store(bound_R + row, bound)


@triton.jit
def _largest(logits_V, V: tl.constexpr, BLOCK: tl.constexpr):
    column_b = tl.arange(0, BLOCK)
    largest_b = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=4):  # three tiles under way
        largest_b = tl.maximum(largest_b, _tile(logits_V, start + column_b, V))
    return tl.max(largest_b, 0)


@triton.jit
def _search(logits_V, low, largest, temperature, rate, share, wanted, V: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit such that it and all above weigh `wanted`, or `share` of all from `low` on; rate 0 counts.

    Every pass weighs what lies above each of four cuts and keeps one of the five intervals [low, high), until that has
    one value: about five passes for logits as a model gives them. What is asked of all from `low` on is true of `low`.
    """
    # Above the largest, also where the temperature is lost in rounding.
    high = largest + tl.maximum(temperature, 1e-6 * tl.abs(largest))
    cut1, cut2 = largest - 40 * temperature, largest - 16 * temperature
    cut3, cut4 = largest - 6 * temperature, largest - 2 * temperature
    column_b = tl.arange(0, BLOCK)
    least, most = low, high
    while least < most:
        none_b = tl.zeros([BLOCK], tl.float32)
        above0_b, above1_b, above2_b, above3_b, above4_b = none_b, none_b, none_b, none_b, none_b
        least_b, most_b = none_b + float("inf"), none_b - float("inf")
        for start in tl.range(0, V, BLOCK, num_stages=4):  # three tiles under way
            logit_b = _tile(logits_V, start + column_b, V)
            weight_b = tl.where(logit_b >= low, tl.exp2((logit_b - largest) * rate), 0.0)
            above0_b += weight_b
            above1_b += tl.where(logit_b >= cut1, weight_b, 0.0)
            above2_b += tl.where(logit_b >= cut2, weight_b, 0.0)
            above3_b += tl.where(logit_b >= cut3, weight_b, 0.0)
            above4_b += tl.where(logit_b >= cut4, weight_b, 0.0)
            inside_b = (logit_b >= low) & (logit_b < high)
            least_b = tl.minimum(least_b, tl.where(inside_b, logit_b, float("inf")))
            most_b = tl.maximum(most_b, tl.where(inside_b, logit_b, float("-inf")))
        least, most = tl.min(least_b, 0), tl.max(most_b, 0)
        wanted = tl.maximum(wanted, share * tl.sum(above0_b, 0))  # the first pass has all, later ones have less
        low, high = _halved(low, high, cut1, tl.sum(above1_b, 0) >= wanted)
        low, high = _halved(low, high, cut2, tl.sum(above2_b, 0) >= wanted)
        low, high = _halved(low, high, cut3, tl.sum(above3_b, 0) >= wanted)
        low, high = _halved(low, high, cut4, tl.sum(above4_b, 0) >= wanted)
        width = (high - low) * 0.2
        cut1, cut2, cut3, cut4 = low + width, low + 2 * width, low + 3 * width, low + 4 * width
    # Nothing lies in between where fewer than are wanted have any chance; and above the largest where none is wanted.
    return tl.minimum(tl.where(least > most, low, least), largest)


@triton.jit
def _halved(low, high, cut, enough):
    """[low, high), from the cut on or up to it."""
    return tl.where(enough, tl.maximum(low, cut), low), tl.where(enough, high, tl.minimum(high, cut))


@triton.jit
def _tile(logits_V, column_b, V: tl.constexpr):
    return tl.load(logits_V + column_b, mask=column_b < V, other=float("-inf")).to(tl.float32)


@triton.jit
def row_stats_kernel(
    logits_RV, temperature_R, bound_R, largest_RS, sum_RS, first_RS, V: tl.constexpr, S: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Of one split of one row: its largest logit, and the sum of weights, over the split's largest, of what stays; of
    greedy rows the lowest column of the largest instead."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column_c = split * SPLIT + tl.arange(0, SPLIT)
    logit_c = _tile(logits_RV + row * V, column_c, V)
    temperature, bound = tl.load(temperature_R + row), tl.load(bound_R + row)
    largest = tl.max(logit_c, 0)
    total, first = 0.0, V
    if temperature > 0:
        over = tl.where(largest > float("-inf"), largest, 0.0)
        weight_c = tl.exp2((logit_c - over) * tl.div_rn(_LOG2E, temperature))
        total = tl.sum(tl.where(logit_c >= bound, weight_c, 0.0), 0)
    else:
        first = tl.min(tl.where(logit_c == largest, column_c, V), 0)
    at = row * S + split
    tl.store(largest_RS + at, largest)
    tl.store(sum_RS + at, total)
    tl.store(first_RS + at, first)


@triton.jit
def draw_row_kernel(
    logits_RV, temperature_R, bound_R, largest_RS, sum_RS, first_RS, u_R, token_R, V: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A row's token: the split where the running sum passes u of the whole is the only one that is read."""
    row = tl.program_id(0).to(tl.int64)
    split_s = tl.arange(0, SP)
    rate, largest, first, part_s = row_probs(temperature_R, largest_RS, sum_RS, first_RS, row, split_s, V, S)
    token = first
    if first == V:
        split, left = passing(part_s, split_s, tl.load(u_R + row))
        column_c = split * SPLIT + tl.arange(0, SPLIT)
        logit_c = _tile(logits_RV + row * V, column_c, V)
        weight_c = weight(logit_c, rate, tl.load(bound_R + row), largest)
        token = tl.maximum(within(weight_c, column_c, left, V), 0)  # a token, also of a row that has none
    tl.store(token_R + row, token)


@triton.jit
def row_probs(temperature_R, largest_RS, sum_RS, first_RS, row, split_s, V: tl.constexpr, S: tl.constexpr):
    """The law of a row: rate, largest logit, the lowest argmax if it is greedy (else V), and the weight of every split
    (1 of the only token of a greedy row)."""
    there_s, at_s = split_s < S, row * S + split_s
    largest_s = tl.load(largest_RS + at_s, mask=there_s, other=float("-inf"))
    sum_s = tl.load(sum_RS + at_s, mask=there_s, other=0.0)
    first_s = tl.load(first_RS + at_s, mask=there_s, other=V)
    temperature = tl.load(temperature_R + row)
    rate = tl.div_rn(_LOG2E, tl.where(temperature > 0, temperature, 1.0))
    largest = tl.max(largest_s, 0)
    first = tl.min(tl.where(largest_s == largest, first_s, V), 0)
    return rate, largest, first, sum_s * tl.exp2((largest_s - largest) * rate)


@triton.jit
def weight(logit_x, rate, bound, largest):
    """2^(rate (logit - largest)) of what stays, 0 of the rest."""
    return tl.where(logit_x >= bound, tl.exp2((logit_x - largest) * rate), 0.0)


@triton.jit
def passing(part_s, split_s, u):
    """The first split whose running sum passes u of the whole, and what of that is left for its columns to pass.

    Sums of a parallel scan may fall by a rounding where nothing is added, so a part of nothing is never taken."""
    sum_s = tl.cumsum(part_s, 0)
    target = u * tl.max(sum_s, 0)
    some_s = part_s > _REACHED
    last = tl.max(tl.where(some_s, split_s, 0), 0)
    split = tl.minimum(tl.min(tl.where(some_s & (sum_s > target), split_s, last), 0), last)
    return split, target - tl.sum(tl.where(split_s < split, part_s, 0.0), 0)


@triton.jit
def within(weight_c, column_c, left, V: tl.constexpr):
    """The first column whose running sum passes `left`, or the last with any weight (rounding may leave it so); -1
    where none has any."""
    some_c = weight_c > 0
    passed_c = some_c & (tl.cumsum(weight_c, 0) > left)
    first = tl.min(tl.where(passed_c, column_c, V), 0)
    return tl.where(first < V, first, tl.max(tl.where(some_c, column_c, -1), 0))
