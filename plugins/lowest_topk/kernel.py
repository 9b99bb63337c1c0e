"""The k largest of each row, where the lowest index wins a tie (`glmspec.plugins.lowest_topk`).

A tile of columns lies in registers as integers that sort as its scores do. The K-th largest of them is found by halving
the range between the least and the greatest, counting what is left above: compares and one sum a step, and as soon as a
count is K it ends. Long rows are cut into splits, whose best meet in `merge_kernel` and `last_kernel`. Lists keep their
columns in rising order all the way, so that the lowest column wins everywhere.

Legend: N rows, L columns, or M x P (P divides them, so that loads are wide), K kept, Z splits of a row, Y groups of
F splits (FAN), T columns of a tile; a list is K long, KP padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31))
MOST = tl.constexpr(2**31 - 1)


@triton.jit
def ordered(score):
    """float32 -> int32 that sorts as the scores do; zeros of both signs are equal."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LEAST, 0, bits)
    return tl.where(bits < 0, bits ^ MOST, bits)


@triton.jit
def halfway(low, high):
    """The middle of two int32, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def best(key, here, count, K: tl.constexpr):
    """Of `count` keys: the K-th largest, or the least when there are no more than K, and how many of its equals are
    among the K. Keys that are not here must be `LEAST`."""
    low = tl.min(tl.where(here, key, MOST))
    high = tl.where(count > K, tl.max(key), low)
    while low < high:  # at least K keys are >= low, fewer are > high
        middle = halfway(low, high)
        above = kept(key >= middle)
        low = tl.where(above >= K, middle, low)
        high = tl.where(above > K, high, tl.where(above == K, middle, middle - 1))
    return low, tl.minimum(count, K) - kept(key > low)


@triton.jit
def kept(keep):
    """How many are true."""
    return tl.sum(keep.to(tl.int32))


@triton.jit
def places(key_T, here_T, least, room):
    """Whether each key is kept, and its place among those that are: all above `least`, and of its equals the first
    `room`."""
    above_T = (here_T & (key_T > least)).to(tl.int32)
    equal_T = (here_T & (key_T == least)).to(tl.int32)
    both_T = above_T + (equal_T << 16)  # two counts in one scan: a tile has fewer than 2^15 entries
    before_T = tl.cumsum(both_T, 0) - both_T
    equals_T = before_T >> 16
    keep_T = (above_T == 1) | ((equal_T == 1) & (equals_T < room))
    return keep_T, (before_T & 0xFFFF) + tl.minimum(equals_T, room)


@triton.jit
def short_kernel(score_NL, column_NK, L: tl.constexpr, K: tl.constexpr, T: tl.constexpr):
    """Rows of one tile: float32 [N, L] -> columns int32 [N, K]."""
    row = tl.program_id(0).to(tl.int64)
    column_T = tl.arange(0, T)
    here_T = column_T < L
    key_T = tl.where(here_T, ordered(tl.load(score_NL + row * L + column_T, mask=here_T, other=0.0)), LEAST)
    least, room = best(key_T, here_T, L, K)
    keep_T, place_T = places(key_T, here_T, least, room)
    tl.store(column_NK + row * K + place_T, column_T, mask=keep_T)


@triton.jit
def split_kernel(
    score_NMP,
    position_N,
    M,
    key_NZK,
    column_NZK,
    count_NZ,
    P: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """The best of every TILE columns, of a row's first position + 1 (of all, without positions): keys, columns in
    rising order, and how many. Nothing is read or written beyond those."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = split * TILE
    length = M * P
    if position_N is not None:
        length = tl.minimum(tl.load(position_N + row) + 1, length)
    count = tl.minimum(tl.maximum(length - first, 0), TILE)
    entry = row * tl.num_programs(1) + split
    tl.store(count_NZ + entry, tl.minimum(count, K))
    if count > 0:
        score_L = score_NMP + row * (M * P) + first
        whole_T, there_T = scored(score_L, 0, count, P, TILE)
        least, room = best(whole_T, there_T, count, K)
        start = entry * K
        for part in range(0, count, PART):
            key_T, here_T = scored(score_L, part, count, P, PART)
            keep_T, place_T = places(key_T, here_T, least, room)
            tl.store(key_NZK + start + place_T, key_T, mask=keep_T)
            tl.store(column_NZK + start + place_T, first + part + tl.arange(0, PART), mask=keep_T)
            start, room = start + kept(keep_T), room - kept(keep_T & (key_T == least))


@triton.jit
def scored(score_L, first, count, P: tl.constexpr, T: tl.constexpr):
    """The keys of T columns from column `first` on, and which of them are below `count`."""
    column_T = first + tl.arange(0, T)
    here_T = column_T < count
    # Whole vectors are loaded: rows are P long at least, and what lies behind the last is not looked at.
    score_T = tl.load(score_L + column_T, mask=column_T < (count + P - 1) // P * P, other=0.0)
    return tl.where(here_T, ordered(score_T), LEAST), here_T


@triton.jit
def listed(key_ZK, at, count, K: tl.constexpr, KP: tl.constexpr):
    """The keys of one list, and which of them are there."""
    slot_K = tl.arange(0, KP)
    here_K = slot_K < count
    # Whole vectors are loaded: a list has room for K, and what lies behind the last is not looked at.
    wide = tl.minimum((count + 3) // 4 * 4, K) if K % 4 == 0 else count
    return tl.where(here_K, tl.load(key_ZK + at * K + slot_K, mask=slot_K < wide, other=LEAST), LEAST), here_K


@triton.jit
def merge_kernel(
    key_NZK,
    column_NZK,
    count_NZ,
    Z,
    key_NYK,
    column_NYK,
    count_NY,
    K: tl.constexpr,
    KP: tl.constexpr,
    FAN: tl.constexpr,
):
    """The best of every FAN lists, as a list."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_ZK, column_ZK, count_Z = key_NZK + row * Z * K, column_NZK + row * Z * K, count_NZ + row * Z
    first = group * FAN
    list_F, slot_K = first + tl.arange(0, FAN), tl.arange(0, KP)
    count_F = tl.load(count_Z + list_F, mask=list_F < Z, other=0)
    merged = row * tl.num_programs(1) + group
    count = tl.sum(count_F, 0)
    tl.store(count_NY + merged, tl.minimum(count, K))
    if count > 0:
        wide_F = tl.minimum((count_F + 3) // 4 * 4, K) if K % 4 == 0 else count_F
        at_FK = list_F[:, None] * K + slot_K[None, :]
        whole_FK = tl.load(key_ZK + at_FK, mask=slot_K[None, :] < wide_F[:, None], other=LEAST)
        there_FK = slot_K[None, :] < count_F[:, None]
        least, room = best(tl.where(there_FK, whole_FK, LEAST), there_FK, count, K)
        start = merged * K
        for at in range(first, tl.minimum(first + FAN, Z)):
            key_K, here_K = listed(key_ZK, at, tl.load(count_Z + at), K, KP)
            keep_K, place_K = places(key_K, here_K, least, room)
            column_K = tl.load(column_ZK + at * K + slot_K, mask=keep_K, other=0)
            tl.store(key_NYK + start + place_K, key_K, mask=keep_K)
            tl.store(column_NYK + start + place_K, column_K, mask=keep_K)
            start, room = start + kept(keep_K), room - kept(keep_K & (key_K == least))


@triton.jit
def best_of_lists(key_YK, count_Y, Y, K: tl.constexpr, KP: tl.constexpr):
    """`best` of a row's lists, however many, and how many are kept."""
    low_K, high_K = tl.full([KP], MOST, tl.int32), tl.full([KP], LEAST, tl.int32)
    count = tl.full([], 0, tl.int32)
    for at in range(0, Y):
        key_K, here_K = listed(key_YK, at, tl.load(count_Y + at), K, KP)
        low_K = tl.minimum(low_K, tl.where(here_K, key_K, MOST))
        high_K = tl.maximum(high_K, key_K)
        count += tl.load(count_Y + at)
    low = tl.min(low_K, 0)
    high = tl.where(count > K, tl.max(high_K, 0), low)
    while low < high:  # as in `best`
        middle = halfway(low, high)
        above = above_in_lists(key_YK, count_Y, Y, middle, K, KP)
        low = tl.where(above >= K, middle, low)
        high = tl.where(above > K, high, tl.where(above == K, middle, middle - 1))
    total = tl.minimum(count, K)
    # Nothing is above the greatest int32, so the next one up is a number.
    return low, total - above_in_lists(key_YK, count_Y, Y, tl.minimum(low, MOST - 1) + 1, K, KP), total


@triton.jit
def above_in_lists(key_YK, count_Y, Y, least, K: tl.constexpr, KP: tl.constexpr):
    """How many of a row's lists' keys are at least so much."""
    above_K = tl.zeros([KP], tl.int32)
    for at in range(0, Y):
        key_K, _ = listed(key_YK, at, tl.load(count_Y + at), K, KP)
        above_K += (key_K >= least).to(tl.int32)
    return tl.sum(above_K, 0)


@triton.jit
def last_kernel(key_NYK, column_NYK, count_NY, Y, column_NK, K: tl.constexpr, KP: tl.constexpr):
    """The best of all lists of a row: columns int32 [N, K] in rising order."""
    row = tl.program_id(0).to(tl.int64)
    key_YK, column_YK, count_Y = key_NYK + row * Y * K, column_NYK + row * Y * K, count_NY + row * Y
    least, room, _ = best_of_lists(key_YK, count_Y, Y, K, KP)
    start = row * K
    for at in range(0, Y):
        key_K, here_K = listed(key_YK, at, tl.load(count_Y + at), K, KP)
        keep_K, place_K = places(key_K, here_K, least, room)
        column_K = tl.load(column_YK + at * K + tl.arange(0, KP), mask=keep_K, other=0)
        tl.store(column_NK + start + place_K, column_K, mask=keep_K)
        start, room = start + kept(keep_K), room - kept(keep_K & (key_K == least))
