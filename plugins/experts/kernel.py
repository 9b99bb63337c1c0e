"""Which rows each expert has, and the sum over a token's experts (`glmspec.plugins.experts`).

Legend: N tokens, A experts a token, P = N * A pairs, E experts of this rank, D hidden; of a program: c pairs, r
rows, d columns, e experts (padded to a power of two).
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import as_read, as_stored


@triton.jit
def route_kernel(expert_NA, P, order_P, range_E2, E: tl.constexpr, CHUNK: tl.constexpr):
    """An expert's program: looks through all pairs for its own, twice (where they begin; where each belongs). Every
    place of order_P has one program that writes it: those behind the last pair have the last expert's."""
    expert = tl.program_id(0)
    c = tl.arange(0, CHUNK)
    below_c, mine_c = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for start in range(0, P, CHUNK):
        id_c = tl.load(expert_NA + start + c, mask=start + c < P, other=-1)
        below_c += ((id_c >= 0) & (id_c < expert)).to(tl.int32)
        mine_c += (id_c == expert).to(tl.int32)
    place, count = tl.sum(below_c, 0), tl.sum(mine_c, 0)
    tl.store(range_E2 + 2 * expert, place)
    tl.store(range_E2 + 2 * expert + 1, count)
    end = place + count
    if count > 0:
        for start in range(0, P, CHUNK):
            id_c = tl.load(expert_NA + start + c, mask=start + c < P, other=-1)
            mine_c = (id_c == expert).to(tl.int32)
            place_c = place + tl.cumsum(mine_c, 0) - mine_c
            tl.store(order_P + place_c, start + c, mask=mine_c == 1)
            place += tl.sum(mine_c, 0)
    if expert == E - 1:
        for start in range(end, P, CHUNK):
            tl.store(order_P + start + c, tl.full([CHUNK], -1, tl.int32), mask=start + c < P)


@triton.jit
def tile_of(range_E2, tile, P, TILE: tl.constexpr, E: tl.constexpr):
    """Which expert's rows a tile has: the expert, the first of the tile's places in order_P and how many there are (at
    most TILE; none or less in a surplus tile). Whatever range_E2 holds, they are places of order_P and an expert."""
    EP: tl.constexpr = triton.next_power_of_2(E)
    e = tl.arange(0, EP)
    count_e = tl.load(range_E2 + 2 * e + 1, mask=e < E, other=0)
    count_e = tl.minimum(tl.maximum(count_e, 0), P)
    tiles_e = (count_e + TILE - 1) // TILE
    past_e = tl.cumsum(tiles_e, 0) <= tile
    expert = tl.minimum(tl.sum(past_e.to(tl.int32), 0), E - 1)
    done = (tile - tl.sum(tl.where(past_e & (e < expert), tiles_e, 0), 0)) * TILE
    start = tl.minimum(tl.maximum(tl.load(range_E2 + 2 * expert), 0), P)
    rows = tl.sum(tl.where(e == expert, count_e, 0), 0) - done
    return expert, start + done, tl.minimum(tl.minimum(rows, TILE), P - start - done)


@triton.jit
def pairs_of(order_P, first, rows, P, TILE: tl.constexpr):
    """The pairs of a tile's rows, and which of them are there: whatever order_P holds, they are pairs."""
    t = tl.arange(0, TILE)
    pair_t = tl.load(order_P + first + t, mask=t < rows, other=-1)
    here_t = (pair_t >= 0) & (pair_t < P)
    return tl.where(here_t, pair_t, 0), here_t


@triton.jit
def gated(gate, up, x_ND):
    """silu(gate) * up, of numbers of x's dtype, rounded to it after each step."""
    silu = as_read(gate / (1.0 + tl.exp(-gate)), x_ND)
    return as_read(silu * up, x_ND)


@triton.jit
def largest(input_E2, E: tl.constexpr):
    """The scale of x: the largest of all experts' and halves', which share it."""
    i = tl.arange(0, triton.next_power_of_2(2 * E))
    return tl.max(tl.load(input_E2 + i, mask=i < 2 * E, other=0.0), 0)


@triton.jit
def sum_kernel(
    out_PD,
    expert_NA,
    N,
    out_ND,
    A: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """See `experts.summed`. A load is masked, not multiplied: a skipped pair's memory may hold anything."""
    n_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sum_rd = tl.zeros([ROWS, BLOCK], tl.float32)
    for a in tl.static_range(A):
        expert_r = tl.load(expert_NA + n_r * A + a, mask=n_r < N, other=-1)
        here_rd = ((expert_r >= 0) & (expert_r < E))[:, None] & (d < D)[None, :]
        out_rd = out_PD + (n_r * A + a)[:, None] * D + d[None, :]
        sum_rd += tl.load(out_rd, mask=here_rd, other=0.0).to(tl.float32)
    place_rd = out_ND + n_r[:, None] * D + d[None, :]
    tl.store(place_rd, as_stored(sum_rd, out_ND), mask=(n_r < N)[:, None] & (d < D)[None, :])
