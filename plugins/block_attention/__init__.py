"""Attention of a drafter's block over its paged context and over itself.

Row r of the block at anchor position p stands at p + r. It sees context positions below p, in a
sliding layer only the window's, and the block's rows: all of them, or with `causal` those up to
itself. Two window conventions exist: `anchored`, every row sees [p - W, p) and the whole block (how
the checkpoints are trained); `relative`, each row sees |q - k| < W.

The first column of a page table stands at position `start` (0 where there is none). A page that is used
again still holds rows of other positions; they are masked because their columns stand outside.

Legend: B blocks, R rows of a block, H heads, J key/value heads, D head size, X pages, P rows a page, M pages of a
table, L = M * P context rows, I = G = H / J heads of a key/value head, Q = G * R queries of one key/value head, S
splits of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.attention_merge import MERGE
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Int32, NoPlugin, Op, Plugin, Runs, Use, attributes_of, cdiv, inputs_of, pow2

_PAGE = 16  # rows of the smallest page, and what others are multiples of
_WIDEST = 64  # columns of a float32 head: wider ones take more registers than a thread has


def reference(
    q_BRHD: Compute,
    k_BRJD: Compute,
    v_BRJD: Compute,
    k_cache_XJPD: Compute,
    v_cache_XJPD: Compute,
    page_table_BM: Int32,
    anchor_B: Int32,
    start_B: Int32 | None = None,
    *,
    scale: float,
    causal: bool,
    window: int,
    relative: bool,
) -> torch.Tensor:
    """[B, R, H, D] in q's dtype; softmax in float32. window 0 is full attention."""
    blocks, rows, heads, dim = q_BRHD.shape
    kv_heads, page_size = k_cache_XJPD.shape[1:3]
    start_B = torch.zeros_like(anchor_B) if start_B is None else start_B
    anchor_B11, start_B11 = (position_B.long().view(-1, 1, 1) for position_B in (anchor_B, start_B))
    pages = max(1, -(-int((anchor_B - start_B).max()) // page_size))  # what lies behind is masked for all
    table = page_table_BM[:, :pages].long()

    def with_context(cache_XJPD: torch.Tensor, own_BRJD: torch.Tensor) -> torch.Tensor:
        context_BJLD = cache_XJPD[table].transpose(1, 2).reshape(blocks, kv_heads, -1, dim)
        return torch.cat([context_BJLD, own_BRJD.transpose(1, 2)], 2)

    context = start_B11 + torch.arange(pages * page_size)
    row = torch.arange(rows)
    seen_BRL = (context < anchor_B11).expand(-1, rows, -1)
    if window:
        seen_BRL = seen_BRL & (context >= _first_seen(anchor_B11, row.view(1, -1, 1), window, relative))
    seen_RR = torch.from_numpy(_seen_in_block(rows, causal, window, relative)).to(q_BRHD.device).expand(blocks, -1, -1)
    seen_B1RL = torch.cat([seen_BRL, seen_RR], 2).unsqueeze(1)
    out_BHRD = torch.nn.functional.scaled_dot_product_attention(
        q_BRHD.transpose(1, 2),
        with_context(k_cache_XJPD, k_BRJD),
        with_context(v_cache_XJPD, v_BRJD),
        attn_mask=seen_B1RL,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return out_BHRD.transpose(1, 2)


def _first_seen(anchor, row, window: int, relative: bool):
    """The oldest context position a row sees; works on torch and network tensors alike."""
    return anchor + row - (window - 1) if relative else anchor - window


def _seen_in_block(rows: int, causal: bool, window: int, relative: bool) -> np.ndarray:
    """bool [R, R]: which rows of the block each row sees."""
    distance = np.arange(rows)[:, None] - np.arange(rows)[None, :]
    seen = np.ones((rows, rows), dtype=bool)
    if causal:
        seen &= distance >= 0
    if window and relative:
        seen &= np.abs(distance) < window
    return seen


@lowers("block_attention")
def native(
    q_BRHD: Tensor,
    k_BRJD: Tensor,
    v_BRJD: Tensor,
    k_cache_XJPD: Tensor,
    v_cache_XJPD: Tensor,
    page_table_BM: Tensor,
    anchor_B: Tensor,
    start_B: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    window: int,
    relative: bool,
) -> Tensor:
    """[B, R, H, D] in q's dtype; softmax in float32. window 0 is full attention."""
    net = q_BRHD.net
    rows, heads, dim = q_BRHD.shape[1:]
    kv_heads = k_BRJD.shape[2]
    per_kv = heads // kv_heads
    q_BRJID = ops.reshape(q_BRHD, (0, rows, kv_heads, per_kv, dim))
    q_BJQD = ops.reshape(ops.transpose(q_BRJID, (0, 2, 3, 1, 4)), (0, kv_heads, per_kv * rows, dim))
    k_BJRD, v_BJRD = (ops.transpose(own, (0, 2, 1, 3)) for own in (k_BRJD, v_BRJD))
    k_BJLD, v_BJLD = (_context(cache, page_table_BM) for cache in (k_cache_XJPD, v_cache_XJPD))
    on_context = ops.cast(ops.matmul(q_BJQD, k_BJLD, transpose_b=True), "float32") * scale
    on_context = _mask_context(on_context, anchor_B, start_B, rows, per_kv, window, relative)
    on_block = ops.cast(ops.matmul(q_BJQD, k_BJRD, transpose_b=True), "float32") * scale
    seen_QR = np.tile(_seen_in_block(rows, causal, window, relative), (per_kv, 1))
    on_block = on_block + net.constant(np.where(seen_QR, 0.0, -np.inf)[None, None], "float32")
    p = ops.cast(ops.softmax(ops.concat([on_context, on_block], 3), 3), q_BRHD.dtype)
    out_BJQD = ops.matmul(p, ops.concat([v_BJLD, v_BJRD], 2))
    out_BJIRD = ops.reshape(out_BJQD, (0, kv_heads, per_kv, rows, dim))
    return ops.reshape(ops.transpose(out_BJIRD, (0, 3, 1, 2, 4)), (0, rows, heads, dim))


def _context(cache_XJPD: Tensor, page_table_BM: Tensor) -> Tensor:
    """[B, J, L, D]: the pages of each block's sequence, in order."""
    kv_heads, _, dim = cache_XJPD.shape[1:]
    pages_BMJPD = ops.gather(cache_XJPD, page_table_BM)
    return ops.reshape(ops.transpose(pages_BMJPD, (0, 2, 1, 3, 4)), (0, kv_heads, -1, dim))


def _mask_context(
    score_BJQL: Tensor,
    anchor_B: Tensor,
    start_B: Tensor | None,
    rows: int,
    per_kv: int,
    window: int,
    relative: bool,
) -> Tensor:
    """Scores with unseen context columns at -inf."""
    net = score_BJQL.net
    context = ops.reshape(ops.arange_like(score_BJQL, 3), (1, 1, 1, -1))
    if start_B is not None:
        context = context + ops.reshape(start_B, (-1, 1, 1, 1))
    anchor_B111 = ops.reshape(anchor_B, (-1, 1, 1, 1))
    seen = anchor_B111 > context
    if window:
        row_Q = np.tile(np.arange(rows, dtype=np.int32), per_kv)[None, None, :, None]
        first = _first_seen(anchor_B111, net.constant(row_Q, "int32"), window, relative)
        seen = seen & (context > (first - 1))
    return ops.select(seen, score_BJQL, float("-inf"))


def plugged(
    run: Runs, q_BRHD, k_BRJD, v_BRJD, k_cache_XJPD, v_cache_XJPD, page_table_BM, anchor_B, start_B=None, **attributes
) -> tuple:
    """Two launches: see `reference`. The context's tiles are divided among programs, whose parts are then merged."""
    _check_sizes(run, q_BRHD, k_cache_XJPD)
    inputs = (q_BRHD, k_BRJD, v_BRJD, k_cache_XJPD, v_cache_XJPD, page_table_BM, anchor_B)
    split, ring = (SPLIT, ()) if start_B is None else (SPLIT_RING, (start_B,))
    parts = run(split, *inputs, *ring, **attributes)
    return (_merged(run, q_BRHD, *parts),)


def _check_sizes(run: Runs, q_BRHD, k_cache_XJPD) -> None:
    """Raise `NoPlugin` for sizes that the kernels do not take."""
    page, dim = run.shape(k_cache_XJPD)[2], run.shape(q_BRHD)[3]
    if page % _PAGE:
        raise NoPlugin(f"block_attention: pages of {page} rows, expected a multiple of {_PAGE}")
    if run.dtype(q_BRHD) == "float32" and dim > _WIDEST:
        raise NoPlugin(f"block_attention: float32 heads of {dim} columns, at most {_WIDEST}")


def _merged(run: Runs, q_BRHD, part_BSRHD, peak_BSRH, mass_BSRH) -> Any:
    """The splits' parts as one, [B, R, H, D]. To the merge, every row and head of a block is a head of a token."""
    rows, heads, dim = run.shape(q_BRHD)[1:]
    part = run.reshape(part_BSRHD, (0, 0, rows * heads, dim))
    peak, mass = (run.reshape(x_BSRH, (0, 0, rows * heads)) for x_BSRH in (peak_BSRH, mass_BSRH))
    (out,) = run(MERGE, part, peak, mass, run.reshape(q_BRHD, (0, rows * heads, dim)))
    return run.reshape(out, (0, rows, heads, dim))


_INPUTS = inputs_of(reference)
# W: rows of the context, at most; T: tiles of them and of the block's own. Of T tiles and C programs for each key/value
# head S are made: as good as T where blocks are few, C / (B + 2) where they are many. A context of 131,072 rows is
# divided 52 ways for one block, a window of 2,048 rows 22 ways, and for 32 blocks 5 and 3 ways.
# (A rule with a run-time size has + - * // alone, the symbol first: TensorRT's expressions have no more.)
_SPLIT: dict[str, Any] = dict(
    op="block_attention",
    function="split_kernel",
    outputs={"part_BSRHD": "float32", "peak_BSRH": "float32", "mass_BSRH": "float32"},
    attributes=attributes_of(reference),
    sizes={
        "G": lambda H, J: H // J,
        "QP": lambda QUERIES, R, G: min(QUERIES, max(16, pow2(R * G))),
        "DP": lambda D: max(16, pow2(D)),
        "BLOCK": lambda ROWS, P: min(ROWS, P & -P),  # a power of two that divides a page
        "W": lambda window, M, P: window if window else M * P,
        "T": lambda window, BLOCK, M, P: cdiv(window, BLOCK) + 2 if window else M * P // BLOCK + 1,
        "C": lambda window: 96 if window else 160,
        "S": lambda B, T, C: ((B + 2) * T + (T + 1) * C) // ((B + 2) * T + C),
    },
    scalars=("S", "M"),
    grid=(lambda J, R, G, QP: J * cdiv(R * G, QP), "B", "S"),
    tiles={
        "": {"QUERIES": 64, "ROWS": 32, "WARPS": 4, "STAGES": 2},
        "SM100": {"QUERIES": 32},
        "SM103": {"QUERIES": 32},
    },
)
SPLIT = Plugin(name="block_attention_split", inputs=_INPUTS, absent=("start_B",), **_SPLIT)
SPLIT_RING = Plugin(name="block_attention_split_ring", inputs=_INPUTS | inputs_of(reference, "start_B"), **_SPLIT)


def _use(causal: bool, window: int, *optional: str, **sizes: int) -> Use:
    return Use({"scale": 128**-0.5, "causal": causal, "window": window, "relative": False}, optional, sizes)


OP = Op(
    name="block_attention",
    outputs={"out_BRHD": "T"},
    reference=reference,
    plugged=plugged,
    plugins=(SPLIT, SPLIT_RING, MERGE),
    tolerance={"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2},
    # W: rows of the context that are seen, at most.
    real={
        "B": "batch",
        "R": 9,
        "H": 48,
        "J": 8,
        "D": 128,
        "P": 64,
        "M": 128,
        "X": lambda M, batch: 1 + M * batch,
        "W": lambda M, P: M * P,
    },
    uses={
        "": _use(False, 0),
        "ring": _use(False, 2048, "start_B", M=33, W=2048),
        "causal ring": _use(True, 2048, "start_B", M=33, W=2048, R=8),
    },
    run_time="BMX",
)
