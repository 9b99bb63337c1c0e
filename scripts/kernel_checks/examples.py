"""Inputs of every op that has plugins, at any size: what kernels are checked and timed with.

Each function takes the sizes by symbol, the use (which optional inputs are given), the compute dtype and a generator,
and returns the op's inputs in order.

Legend: A rank of codebooks or experts a token, B blocks, C targets, D columns, E experts, F columns of a recurrent row
or rows of an expert, G segments or width of an expert, H heads or columns of a state, J drafts or key/value heads, K
candidates or rows kept, L rows in order of page or scores, M pages of a table, N rows, P rows a page, Q rows of a
block, R rows, S rows of a segment, T taps, U groups, V vocabulary, X pages, Y = X + 1, Z rows of q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from glmspec.plugins import quantize_blocks as quantize_blocks_op
from glmspec.plugins.spec import Use

Sizes = Mapping[str, int]
Tensors = list[torch.Tensor]
INT = torch.int32


def accept(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Blocks of 0 to Q - 1 drafts, of which about two thirds are the greedy token."""
    blocks, rows, most = sizes["B"], sizes["R"], sizes["Q"]
    greedy_R = torch.randint(0, 1000, (rows,), generator=g, dtype=INT)
    draft_R = torch.where(torch.rand(rows, generator=g) < 0.67, greedy_R, greedy_R + 1)
    row_BQ = torch.randperm(rows, generator=g)[: blocks * most].to(INT).view(blocks, most)
    count_B = torch.randint(0, most, (blocks,), generator=g, dtype=INT)
    return [greedy_R, draft_R, row_BQ, count_B]


def argmax(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Scores with ties at the top."""
    return [torch.randn(sizes["N"], sizes["V"], generator=g).clamp(max=3).to(compute)]


def block_attention(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Blocks whose context fills their table but for a few rows; a ring begins somewhere in the sequence."""
    blocks, rows, heads, kv_heads, dim = (sizes[name] for name in "BRHJD")
    pages, page_size, columns = (sizes[name] for name in "XPM")

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(compute)

    own = [rand(blocks, rows, heads, dim), rand(blocks, rows, kv_heads, dim), rand(blocks, rows, kv_heads, dim)]
    caches = [rand(pages, kv_heads, page_size, dim) for _ in range(2)]
    table_BM = (torch.randperm(pages - 1, generator=g)[: blocks * columns] + 1).to(INT).view(blocks, columns)
    fill_B = torch.randint((columns - 1) * page_size + 1, columns * page_size + 1, (blocks,), generator=g)
    ring = "start_B" in use.optional
    start_B = torch.randint(0, 1000, (blocks,), generator=g) * page_size if ring else torch.zeros(blocks)
    anchor_B = (start_B + fill_B).to(INT)
    return [*own, *caches, table_BM, anchor_B, *([start_B.to(INT)] if ring else [])]


def block_product(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Rows and their codes, and a weight's."""
    rows, columns, outputs = (sizes[name] for name in "NCR")
    x_NC = torch.randn(rows, columns, generator=g).to(compute)
    weight_RC = (torch.randn(outputs, columns, generator=g) * 60).to(torch.float8_e4m3fn)
    scale_BZ = (torch.rand(sizes["B"], sizes["Z"], generator=g) + 0.5) / 3000
    return [x_NC, *quantize_blocks_op.reference(x_NC), weight_RC, scale_BZ]


def grouped_conv(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Random rows and kernels."""
    blocks, rows, taps, columns, groups = (sizes[name] for name in "BRTDU")
    shapes = [(blocks, rows, columns), (2, taps, columns), (blocks, rows, 2, taps, groups)]
    shapes += [(blocks, rows, columns)] * len(use.optional)
    return [torch.randn(shape, generator=g).to(compute) for shape in shapes]


def index_topk(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Sequences near the end of their tables, a segment each, of which the last may hold fewer rows than there is room
    for. Small whole numbers, whose sums are exact in any order."""
    tokens, segments, slots = sizes["N"], sizes["G"], sizes["S"]
    pages, table, length = sizes["X"], sizes["M"], sizes["M"] * sizes["P"]
    whole = lambda *dims: torch.randint(-2, 3, dims, generator=g, dtype=torch.int8).to(compute)  # noqa: E731
    token_N = torch.arange(tokens, dtype=INT)
    row_slot_N2 = torch.stack([token_N // slots, token_N % slots], 1)
    segment_rows_GS = torch.zeros(segments * slots, dtype=INT)
    segment_rows_GS[:tokens] = token_N
    page_GM = torch.arange(segments * table) % (pages - 1) + 1  # page 0 is nobody's
    page_GM = page_GM[torch.randperm(segments * table, generator=g)].to(INT)
    return [
        whole(tokens, sizes["H"], sizes["D"]),
        torch.randint(-3, 9, (tokens, sizes["H"]), generator=g).float() / 8,
        whole(pages, 1, sizes["P"], sizes["D"]),
        page_GM.view(segments, table),
        segment_rows_GS.view(segments, slots),
        row_slot_N2,
        (length - slots + token_N % slots).to(INT),
    ]


def kv_append(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Rows that go to pages chosen at random, up to nine a page, in any order of the step."""
    rows, order, pages, page_size = (sizes[name] for name in "NLXP")
    shape = (pages, sizes["J"], page_size, sizes["D"])
    cache_XJPD = torch.randn(shape, generator=g).to(compute)
    rows_NJD = torch.randn(rows, sizes["J"], sizes["D"], generator=g).to(compute)
    order_L = torch.randperm(rows, generator=g)[:order].to(INT)
    most = min(9, page_size)
    written = torch.randperm(pages, generator=g)[: -(-order // most)]
    counts_X = torch.zeros(pages, dtype=INT)
    counts_X[written] = most
    counts_X[written[-1]] -= len(written) * most - order
    offset_X = (torch.rand(pages, generator=g) * (page_size + 1 - counts_X)).to(INT)
    cumulative_Y = torch.cat([torch.zeros(1), counts_X.cumsum(0)]).to(INT)
    plan = [order_L, offset_X, cumulative_Y]
    if "scale_1" not in use.optional:
        return [cache_XJPD, rows_NJD, *plan]
    return [cache_XJPD.to(torch.float8_e4m3fn), rows_NJD, *plan, torch.tensor([0.025])]


def lowest_topk(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Scores of which half are zero, as sums of ReLUs are."""
    return [torch.randn(sizes["N"], sizes["L"], generator=g).clamp(min=0)]


def markov_walk(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Logits, anchors, tables; temperatures of 0 (every third), cold and hot."""
    blocks, drafts, vocab, rank, targets = (sizes[name] for name in "BJVAC")
    randn = lambda *dims: torch.randn(*dims, generator=g).to(compute)  # noqa: E731
    inputs = [
        randn(blocks, drafts, vocab),
        torch.randint(0, targets, (blocks,), generator=g, dtype=INT),
        randn(targets, rank),
        (randn(vocab, rank) / rank**0.5).to(compute),
    ]
    gaps = torch.randperm(targets, generator=g)[:vocab].sort().values if vocab <= targets else torch.arange(vocab)
    optional = {
        "rows_BRF": lambda: randn(blocks, sizes["R"], sizes["F"]),
        "recurrent_FH": lambda: (randn(sizes["F"], sizes["H"]) / sizes["H"] ** 0.5).to(compute),
        "offset_V": lambda: (gaps - torch.arange(vocab)).to(INT),
        "temperature_B": lambda: torch.tensor([0.0, 0.3, 2.0]).repeat(blocks)[:blocks],
        "uniform_BJ": lambda: torch.rand(blocks, drafts, generator=g),
    }
    return inputs + [optional[name]() for name in use.optional]


def _routed(sizes: Sizes, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Rows, distinct experts of each, the last of them another rank's now and then, and their weights."""
    tokens, picks, experts = sizes["N"], sizes["A"], sizes["E"]
    expert_NA = torch.rand(tokens, experts, generator=g).argsort(1)[:, :picks].to(INT)
    expert_NA[::5, -1] = experts
    weight_NA = torch.rand(tokens, picks, generator=g)
    return [torch.randn(tokens, sizes["D"], generator=g).to(compute), expert_NA, weight_NA]


def _experts(sizes: Sizes, g: torch.Generator, dtype: torch.dtype, spread: float) -> Tensors:
    """gate_up [E, F, D] and down [E, D, G]."""
    experts, columns, width = (sizes[name] for name in "EDG")
    shapes = (experts, 2 * width, columns), (experts, columns, width)
    return [(torch.randn(shape, generator=g) * (spread or shape[2] ** -0.5)).to(dtype) for shape in shapes]


def _expert_scales(sizes: Sizes, use: Use, g: torch.Generator, weight: float) -> Tensors:
    """Of weights, and of activations where they are given."""
    experts = sizes["E"]
    shapes = [(experts, 2), (experts,)] * (2 if use.optional else 1)
    spreads = [weight, weight, 0.02, 0.02]
    return [(torch.rand(*shape, generator=g) + 0.5) * by for shape, by in zip(shapes, spreads, strict=False)]


def moe(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Experts of the compute dtype."""
    return _routed(sizes, compute, g) + _experts(sizes, g, compute, 0.0)


def moe_fp8(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Codes, and scales of an expert."""
    codes = _experts(sizes, g, torch.float8_e4m3fn, 60.0)
    return _routed(sizes, compute, g) + codes + _expert_scales(sizes, use, g, 0.0003)


def moe_fp8_block(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Codes, and scales of blocks."""
    codes = _experts(sizes, g, torch.float8_e4m3fn, 60.0)
    shapes = [(sizes["E"], sizes["R"], sizes["K"]), (sizes["E"], sizes["S"], sizes["L"])]
    return _routed(sizes, compute, g) + codes + [(torch.rand(shape, generator=g) + 0.5) / 3000 for shape in shapes]


def moe_nvfp4(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Codes, scales of 16 columns, and scales of an expert."""
    experts, columns, width = (sizes[name] for name in "EDG")
    shapes = (experts, 2 * width, columns), (experts, columns, width)
    codes = [torch.randint(-128, 128, (*shape[:2], shape[2] // 2), generator=g, dtype=torch.int8) for shape in shapes]
    groups = [torch.rand(*shape[:2], shape[2] // 16, generator=g) + 0.5 for shape in shapes]
    coded = codes + [step.to(torch.float8_e4m3fn) for step in groups]
    return _routed(sizes, compute, g) + coded + _expert_scales(sizes, use, g, 0.005)


def quantize_blocks(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Activations with an outlier here and there."""
    x_ND = torch.randn(sizes["N"], sizes["D"], generator=g)
    return [torch.where(x_ND > 3, 20 * x_ND, x_ND).to(compute)]


def reject(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Blocks of Q - 1 drafts and of fewer, drawn from probs near the target's; every other one is verified as a block.
    R is B x Q at least; of every four blocks one is greedy and two are narrowed."""
    blocks, most, rows, columns = sizes["B"], sizes["Q"], sizes["R"], sizes["K"]
    logits_RV = 3 * torch.randn(rows, sizes["V"], generator=g)
    column_Q = torch.arange(most)
    count_B = (most - 1 - torch.arange(blocks) // 4).clamp(min=0)
    row_BQ = torch.arange(blocks).unsqueeze(1) * most + torch.minimum(column_Q, count_B.unsqueeze(1))
    q_row_R, row_Z = torch.arange(rows) % sizes["Z"], torch.arange(sizes["Z"]) % rows
    near_ZV = logits_RV[row_Z] + 0.5 * torch.randn(sizes["Z"], sizes["V"], generator=g)
    ids = []
    if use.optional:
        near_ZV, ids_ZK = near_ZV.topk(columns, dim=1)
        ids = [ids_ZK.to(INT)]
    q_ZK = near_ZV.softmax(-1)
    draft_R = torch.multinomial(q_ZK, 1, generator=g).squeeze(1)[q_row_R]
    if ids:
        draft_R = ids[0][q_row_R, draft_R]
    probs_B = sample_settings(blocks)
    probs_R = [x[(torch.arange(rows) // most).clamp(max=blocks - 1)] for x in probs_B]
    whole = [x.to(INT) for x in (draft_R, q_row_R, row_BQ, count_B)]
    uniform_R, last_B = torch.rand(rows, generator=g), torch.rand(blocks, generator=g)
    block_B = (torch.arange(blocks) % 2).to(INT)
    return [logits_RV.to(compute), *probs_R, *whole, uniform_R, last_B, block_B, q_ZK, *ids]


def sample(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Rows of which every fourth is greedy, narrowed by top-p, or by all at once; the others are as they are."""
    rows, vocabulary = sizes["R"], sizes["V"]
    logits_RV = (3 * torch.randn(rows, vocabulary, generator=g)).to(compute)
    return [logits_RV, *sample_settings(rows), torch.rand(rows, generator=g)]


def sample_settings(rows: int) -> Tensors:
    """Temperature, top-k, top-p and min-p of so many rows."""
    kind_R = torch.arange(rows) % 4
    temperature_R = torch.where(kind_R == 1, 0.0, 0.8)
    top_k_R = torch.where(kind_R == 3, 50, 0).to(INT)
    top_p_R = torch.where(kind_R >= 2, 0.95, 1.0)
    return [temperature_R, top_k_R, top_p_R, torch.where(kind_R == 3, 0.02, 0.0)]


def selector_walk(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Logits of which a walk chooses, anchors, codebooks; temperatures of 0 (every third), cold and hot."""
    blocks, drafts, vocab, rank, targets = (sizes[name] for name in "BJVAC")
    inputs = [
        torch.randn(blocks, drafts, vocab, generator=g).to(compute),
        torch.randn(blocks, drafts, rank, generator=g).to(compute),
        torch.randint(0, targets, (blocks,), generator=g, dtype=INT),
        torch.randn(targets, rank, generator=g).to(compute),
        (torch.randn(vocab, rank, generator=g) / rank**0.5).to(compute),
    ]
    gaps = torch.randperm(targets, generator=g)[:vocab].sort().values if vocab <= targets else torch.arange(vocab)
    optional = {
        "offset_V": (gaps - torch.arange(vocab)).to(INT),
        "temperature_B": torch.tensor([0.0, 0.3, 2.0]).repeat(blocks)[:blocks],
        "uniform_BJ": torch.rand(blocks, drafts, generator=g),
    }
    return inputs + [optional[name] for name in use.optional]


def sparse_mla(sizes: Sizes, use: Use, compute: torch.dtype, g: torch.Generator) -> Tensors:
    """Rows from anywhere in the cache, in order; each token sees its first and about nine of ten of the others."""
    tokens, heads, width, keep = (sizes[name] for name in "NHDK")
    q_NHD = torch.randn(tokens, heads, width, generator=g).to(compute)
    cache_X1PD = torch.randn(sizes["X"], 1, sizes["P"], width, generator=g)
    rows_NK = torch.randint(sizes["X"] * sizes["P"], (tokens, keep), generator=g).sort(1).values.to(INT)
    seen_NK = (torch.rand(tokens, keep, generator=g) < 0.9) | (torch.arange(keep) == 0)
    visible_NK = seen_NK.to(INT)
    if "scale_1" not in use.optional:
        return [q_NHD, cache_X1PD.to(compute), rows_NK, visible_NK]
    return [q_NHD, (cache_X1PD * 40).to(torch.float8_e4m3fn), rows_NK, visible_NK, torch.tensor([0.025])]


EXAMPLES: dict[str, Callable[[Sizes, Use, torch.dtype, torch.Generator], Tensors]] = {
    function.__name__: function
    for function in (
        accept,
        argmax,
        block_attention,
        block_product,
        grouped_conv,
        index_topk,
        kv_append,
        lowest_topk,
        markov_walk,
        moe,
        moe_fp8,
        moe_fp8_block,
        moe_nvfp4,
        quantize_blocks,
        reject,
        sample,
        selector_walk,
        sparse_mla,
    )
}
