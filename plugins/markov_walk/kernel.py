"""The Markov walk (`glmspec.plugins.markov_walk`): every draft is a pass over W2 for all blocks at once, whose parts of
the vocabulary are then merged, a program a block.

Legend: B blocks, J drafts, R rows of a block, V draft vocabulary, C target vocabulary, A rank, F columns of a row, H
columns of the recurrent weight, E rows of feature a block, S splits of the vocabulary; b blocks of a program, v tokens
of a tile, a, c columns, j drafts, s splits, w tokens of a split, n any of these, all padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import as_read, as_stored

NO_TOKEN = tl.constexpr(2**31 - 1)
NONE = tl.constexpr(float("-inf"))


@triton.jit
def markov_begin_kernel(
    anchor_B,
    w1_CA,
    embeddings_BJA,
    state_BA,
    ids_BJ,
    scores_BJ,
    margins_BJ,
    bests_BJ,
    totals_BJ,
    J: tl.constexpr,
    A: tl.constexpr,
    AP: tl.constexpr,
):
    """What a walk starts with: the anchor's embedding as the first one, a state of zeros. The rest is only memory."""
    block = tl.program_id(0).to(tl.int64)
    column_a = tl.arange(0, AP)
    there_a = column_a < A
    anchor = tl.load(anchor_B + block).to(tl.int64)
    tl.store(embeddings_BJA + block * J * A + column_a, tl.load(w1_CA + anchor * A + column_a, mask=there_a), there_a)
    tl.store(state_BA + block * A + column_a, tl.zeros([AP], state_BA.dtype.element_ty), mask=there_a)


@triton.jit
def tanh(x):
    """The hyperbolic tangent."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def product(
    x_A, at_b, there_b, matrix_FH, column_c, there_c, first, A: tl.constexpr, H: tl.constexpr, AC: tl.constexpr
):
    """Rows of x, each A long at its place, times the transpose of `matrix`'s rows `column` and columns from `first`
    on, float32 [b, c]."""
    sum_bc = tl.zeros([at_b.shape[0], column_c.shape[0]], tl.float32)
    for start in range(0, A, AC):
        column_a = start + tl.arange(0, AC)
        there_a = column_a < A
        x_ba = tl.load(x_A + at_b[:, None] + column_a[None, :], mask=there_b[:, None] & there_a[None, :], other=0.0)
        at_ac = column_c[None, :] * H + first + column_a[:, None]
        matrix_ac = tl.load(matrix_FH + at_ac, mask=there_a[:, None] & there_c[None, :], other=0.0)
        sum_bc = tl.dot(x_ba, matrix_ac, sum_bc, input_precision="ieee")
    return sum_bc


@triton.jit
def tile(B, A: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's blocks and columns, and which of them are there."""
    block_b = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    column_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there_b, there_c = block_b < B, column_c < A
    return block_b, column_c, there_b, there_c, there_b[:, None] & there_c[None, :]


@triton.jit
def markov_gated_kernel(
    embeddings_BJA,
    rows_BRA,
    recurrent_AA,
    B,
    row,
    step,
    feature_BA,
    J: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    AC: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The feature of a gated head. One program some blocks and columns."""
    block_b, column_c, there_b, there_c, there_bc = tile(B, A, BLOCKS, COLUMNS)
    at_b = (block_b * J + step) * A
    gate_bc = product(embeddings_BJA, at_b, there_b, recurrent_AA, column_c, there_c, 0, A, A, AC)
    row_bc = tl.load(rows_BRA + ((block_b * R + row) * A)[:, None] + column_c[None, :], mask=there_bc, other=0.0)
    gate_bc = as_read(tl.sigmoid(as_read(gate_bc + row_bc.to(tl.float32), feature_BA)), feature_BA)
    embedding_bc = tl.load(embeddings_BJA + at_b[:, None] + column_c[None, :], mask=there_bc, other=0.0)
    feature_bc = as_stored(gate_bc * embedding_bc.to(tl.float32), feature_BA)
    tl.store(feature_BA + block_b[:, None] * A + column_c[None, :], feature_bc, mask=there_bc)


@triton.jit
def markov_rnn_kernel(
    embeddings_BJA,
    state_BA,
    rows_BRF,
    recurrent_FH,
    B,
    row,
    step,
    feature_BA,
    after_BA,
    J: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    F: tl.constexpr,
    H: tl.constexpr,
    AC: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The feature of an rnn head, and its state after the row. One program some blocks and columns."""
    block_b, column_c, there_b, there_c, there_bc = tile(B, A, BLOCKS, COLUMNS)
    at_bc = block_b[:, None] * A + column_c[None, :]
    joint_bc = ()
    for part in tl.static_range(3):
        place_c = part * A + column_c
        sum_bc = product(state_BA, block_b * A, there_b, recurrent_FH, place_c, there_c, 0, A, H, AC)
        at_b = (block_b * J + step) * A
        sum_bc += product(embeddings_BJA, at_b, there_b, recurrent_FH, place_c, there_c, A, A, H, AC)
        row_bc = tl.load(rows_BRF + ((block_b * R + row) * F)[:, None] + place_c[None, :], mask=there_bc, other=0.0)
        joint_bc = joint_bc + (as_read(sum_bc + row_bc.to(tl.float32), feature_BA),)
    gate_bc = as_read(tl.sigmoid(joint_bc[0]), feature_BA)
    state_bc = tl.load(state_BA + at_bc, mask=there_bc, other=0.0).to(tl.float32)
    fresh_bc = as_read(as_read(1.0 - gate_bc, feature_BA) * as_read(tanh(joint_bc[1]), feature_BA), feature_BA)
    tl.store(after_BA + at_bc, as_stored(as_read(gate_bc * state_bc, feature_BA) + fresh_bc, after_BA), mask=there_bc)
    tl.store(feature_BA + at_bc, as_stored(tanh(joint_bc[2]), feature_BA), mask=there_bc)


@triton.jit
def weight(z, best, temperature):
    """exp((z - best) / temperature), 0 where z is -inf."""
    return tl.exp((z - tl.where(best == NONE, 0.0, best)) / temperature)


@triton.jit
def add_product(
    z_vb, w2_VA, token_v, feature_BEA, at_b, there_b, chunk,
    V: tl.constexpr, A: tl.constexpr, AC: tl.constexpr,
):  # fmt: skip
    """z, and what one chunk of the rank adds to it: rows of W2 times the blocks' features, each of which begins at
    `at`."""
    column_a = chunk * AC + tl.arange(0, AC)
    there_v, there_a = token_v < V, column_a < A
    there_va, there_ab = there_v[:, None] & there_a[None, :], there_a[:, None] & there_b[None, :]
    w2_va = tl.load(w2_VA + (token_v.to(tl.int64) * A)[:, None] + column_a[None, :], mask=there_va, other=0.0)
    feature_ab = tl.load(feature_BEA + at_b[None, :] + column_a[:, None], mask=there_ab, other=0.0)
    return tl.dot(w2_va, feature_ab, z_vb, input_precision="ieee")


@triton.jit
def best_of_lanes(best_vb, index_vb, second_vb):
    """Each block's best, the lowest token that has it and the second best, from those of its lanes."""
    best_b = tl.max(best_vb, 0)
    index_b = tl.min(tl.where(best_vb == best_b[None, :], index_vb, NO_TOKEN), 0)
    second_b = tl.max(tl.where(index_vb == index_b[None, :], second_vb, best_vb), 0)
    return best_b, index_b, second_b


@triton.jit
def markov_step_kernel(
    logits_BJV, feature_BEA, w2_VA, temperature_B,
    B, step, at,
    best_BS, index_BS, second_BS, sum_BS, z_BJV,
    J: tl.constexpr, V: tl.constexpr, E: tl.constexpr, A: tl.constexpr, S: tl.constexpr, AC: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One draft's biased logits z in a split of the vocabulary: the best, the lowest token that has it, the second
    best, and where drafts are drawn the sum of exp((z - best) / temperature); z then takes the logits' place.

    Programs of one split lie side by side, so that W2 is read from memory once. Lanes keep their own best ones."""
    block_b = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    split = tl.program_id(1)
    there_b = block_b < B
    at_b, row_b = (block_b * E + at) * A, (block_b * J + step) * V
    lane_v = tl.arange(0, TOKENS)
    best_vb = tl.full([TOKENS, BLOCKS], NONE, tl.float32)
    second_vb = best_vb
    index_vb = (split * TILES * TOKENS + lane_v)[:, None] + tl.zeros([TOKENS, BLOCKS], tl.int32)
    if temperature_B is not None:
        temperature_b = tl.load(temperature_B + block_b, mask=there_b, other=0.0)
        temperature_1b = tl.where(temperature_b == 0.0, 1.0, temperature_b)[None, :]
        sum_vb = tl.zeros([TOKENS, BLOCKS], tl.float32)
    # One loop over the chunks of all tiles, so that W2 keeps coming while a tile ends.
    z_vb = tl.zeros([TOKENS, BLOCKS], tl.float32)
    for turn in range(TILES * CHUNKS):
        token_v = (split * TILES + turn // CHUNKS) * TOKENS + lane_v
        z_vb = add_product(z_vb, w2_VA, token_v, feature_BEA, at_b, there_b, turn % CHUNKS, V, A, AC)
        if turn % CHUNKS == CHUNKS - 1:
            there_vb, place_vb = (token_v < V)[:, None] & there_b[None, :], token_v[:, None] + row_b[None, :]
            logit_vb = tl.load(logits_BJV + place_vb, mask=there_vb, other=NONE).to(tl.float32)
            z_vb = as_read(logit_vb + z_vb, logits_BJV)
            if temperature_B is not None:
                tl.store(z_BJV + place_vb, as_stored(z_vb, z_BJV), mask=there_vb)
                top_vb = tl.maximum(best_vb, z_vb)
                sum_vb = sum_vb * weight(best_vb, top_vb, temperature_1b) + weight(z_vb, top_vb, temperature_1b)
            second_vb = tl.maximum(second_vb, tl.minimum(best_vb, z_vb))
            index_vb = tl.where(z_vb > best_vb, token_v[:, None], index_vb)
            best_vb = tl.maximum(best_vb, z_vb)
            z_vb = tl.zeros([TOKENS, BLOCKS], tl.float32)
    best_b, index_b, second_b = best_of_lanes(best_vb, index_vb, second_vb)
    part_b = block_b * S + split
    tl.store(best_BS + part_b, best_b, mask=there_b)
    tl.store(index_BS + part_b, index_b, mask=there_b)
    tl.store(second_BS + part_b, second_b, mask=there_b)
    if temperature_B is not None:
        sum_b = tl.sum(sum_vb * weight(best_vb, best_b[None, :], temperature_1b), 0)
        tl.store(sum_BS + part_b, sum_b, mask=there_b)


@triton.jit
def first_past(goal, sum_n, weight_n, place_n):
    """The first place whose running sum passes the goal. Sums round, and must not lead to what has no weight."""
    passing_n = tl.where((sum_n > goal) & (weight_n > 0.0), place_n, NO_TOKEN)
    return tl.minimum(tl.min(passing_n, 0), tl.max(tl.where(weight_n > 0.0, place_n, 0), 0))


@triton.jit
def best_of_splits(best_BS, index_BS, second_BS, block, split_s, there_s, S: tl.constexpr):
    """What the splits of a block left: of each its best, the lowest token that has it, and its second best; of all the
    best and the lowest token that has it."""
    best_s = tl.load(best_BS + block * S + split_s, mask=there_s, other=NONE)
    index_s = tl.load(index_BS + block * S + split_s, mask=there_s, other=NO_TOKEN)
    second_s = tl.load(second_BS + block * S + split_s, mask=there_s, other=NONE)
    best = tl.max(best_s, 0)
    return best_s, index_s, second_s, best, tl.min(tl.where(best_s == best, index_s, NO_TOKEN), 0)


@triton.jit
def updated(new, now_j, old_j, there_j):
    """What earlier drafts left, and something new for the one of this step. old_j: pointers."""
    return tl.where(now_j, new, tl.load(old_j, mask=there_j))


@triton.jit
def draw_from_splits(
    best, best_s, split_s, there_s, temperature, sum_BS, z_BJV, uniform_BJ, block, step,
    J: tl.constexpr, S: tl.constexpr, vocab: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A token drawn from softmax(z / temperature), and the sum of all weights: the split in which the running sum
    passes the uniform number's share of it, then the token in that split. A temperature of 0 draws as 1 does."""
    warm = tl.where(temperature == 0.0, 1.0, temperature)
    weight_s = tl.load(sum_BS + block * S + split_s, mask=there_s, other=0.0) * weight(best_s, best, warm)
    sum_s = tl.cumsum(weight_s, 0)
    total = tl.max(sum_s, 0)
    goal = tl.load(uniform_BJ + block * J + step) * total
    split = first_past(goal, sum_s, weight_s, split_s)
    before = tl.max(tl.where(split_s < split, sum_s, 0.0), 0)
    token_w = split * SPLIT + tl.arange(0, SPLIT)
    z_w = tl.load(z_BJV + (block * J + step) * vocab + token_w, mask=token_w < vocab, other=NONE).to(tl.float32)
    weight_w = weight(z_w, best, warm)
    return first_past(goal, before + tl.cumsum(weight_w, 0), weight_w, token_w), total


@triton.jit
def markov_finish_kernel(
    best_BS, index_BS, second_BS, w1_CA, old_embeddings_BJA, old_ids_BJ, old_scores_BJ, old_margins_BJ, offset_V,
    sum_BS, z_BJV, temperature_B, uniform_BJ, old_bests_BJ, old_totals_BJ,
    step,
    embeddings_BJA, ids_BJ, scores_BJ, margins_BJ, bests_BJ, totals_BJ,
    J: tl.constexpr, JP: tl.constexpr, vocab: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One draft, from what its splits of the vocabulary left: a program a block. What earlier drafts left is copied."""
    block = tl.program_id(0).to(tl.int64)
    split_s, step_j, column_a = tl.arange(0, SP), tl.arange(0, JP), tl.arange(0, AP)
    there_s, there_j = split_s < S, step_j < J
    best_s, index_s, second_s, best, index = best_of_splits(best_BS, index_BS, second_BS, block, split_s, there_s, S)
    token, at_j, now_j = index, block * J + step_j, step_j == step
    margin = 0.0
    if vocab > 1:
        margin = best - tl.max(tl.where(index_s == index, second_s, best_s), 0)
    if uniform_BJ is not None:
        temperature = tl.load(temperature_B + block)
        drawn, total = draw_from_splits(
            best, best_s, split_s, there_s, temperature, sum_BS, z_BJV, uniform_BJ, block, step, J, S, vocab, SPLIT
        )
        token = tl.where(temperature == 0.0, index, drawn)
        bests_j = updated(index, now_j, old_bests_BJ + at_j, there_j)
        totals_j = updated(total, now_j, old_totals_BJ + at_j, there_j)
        tl.store(bests_BJ + at_j, bests_j, mask=there_j)
        tl.store(totals_BJ + at_j, totals_j, mask=there_j)
    if offset_V is not None:
        token += tl.load(offset_V + token)
    ids_j = updated(token, now_j, old_ids_BJ + at_j, there_j)
    scores_j = tl.where(now_j, best, tl.load(old_scores_BJ + at_j, mask=there_j).to(tl.float32))
    margins_j = updated(margin, now_j, old_margins_BJ + at_j, there_j)
    tl.store(ids_BJ + at_j, ids_j, mask=there_j)
    tl.store(scores_BJ + at_j, as_stored(scores_j, scores_BJ), mask=there_j)
    tl.store(margins_BJ + at_j, margins_j, mask=there_j)
    # The draft is the next one's predecessor.
    there_ja = there_j[:, None] & (column_a < A)[None, :]
    at_ja = at_j[:, None] * A + column_a[None, :]
    next_a = tl.load(w1_CA + token.to(tl.int64) * A + column_a, mask=column_a < A)
    old_ja = tl.load(old_embeddings_BJA + at_ja, mask=there_ja)
    tl.store(embeddings_BJA + at_ja, tl.where((step_j == step + 1)[:, None], next_a[None, :], old_ja), mask=there_ja)


@triton.jit
def markov_law_kernel(
    z_BJV,
    scores_BJ,
    bests_BJ,
    totals_BJ,
    temperature_B,
    probs_BJV,
    J: tl.constexpr,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Biased logits -> the probs of the drafts. One program some columns of one draft."""
    row = tl.program_id(0)
    token_v = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there_v, place_v = token_v < V, row.to(tl.int64) * V + token_v
    z_v = tl.load(z_BJV + place_v, mask=there_v, other=NONE).to(tl.float32)
    temperature = tl.load(temperature_B + row // J)
    best = tl.load(scores_BJ + row).to(tl.float32)
    probs_v = weight(z_v, best, tl.where(temperature == 0.0, 1.0, temperature)) / tl.load(totals_BJ + row)
    sure_v = (token_v == tl.load(bests_BJ + row)).to(tl.float32)
    tl.store(probs_BJV + place_v, tl.where(temperature == 0.0, sure_v, probs_v), mask=there_v)
