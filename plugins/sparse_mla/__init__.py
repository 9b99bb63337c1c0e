"""Absorbed MLA over each token's selected cache rows.

Queries are already in the latent space: out = softmax(q . rows * scale) rows[:, value_start:]. A cache of float8 rows
has one scale: a row is worth what it holds times that.

Legend: N tokens, H heads, D latent row [rotary key | compressed K/V], V = D - value_start
compressed columns, K rows, X pages, P rows a page, S splits of the K rows.
"""

from __future__ import annotations

from typing import Any

import torch

from glmspec.core.errors import NetworkError
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.attention_merge import MERGE
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import (
    Compute,
    Float32,
    Int32,
    NoPlugin,
    Op,
    Plugin,
    Runs,
    Use,
    attributes_of,
    cdiv,
    inputs_of,
    pow2,
)

_FP8 = "float8_e4m3fn"
_WIDEST = 256  # columns of a float32 row: wider ones take more shared memory than a program has


def reference(
    q_NHD: Compute,
    cache_X1PD: Compute,
    rows_NK: Int32,
    visible_NK: Int32,
    scale_1: Float32 | None = None,
    *,
    scale: float,
    value_start: int,
) -> torch.Tensor:
    """[N, H, V] in q's dtype; softmax in float32. NaN for a token that sees no row (the plugins give 0: it never
    happens). scale_1: float32, of a float8 cache."""
    size = cache_X1PD.shape[-1]
    if scale_1 is None:
        rows_NKD = torch.nn.functional.embedding(rows_NK, cache_X1PD.view(-1, size))
    else:
        rows_NKD = (cache_X1PD.view(-1, size)[rows_NK.long()].float() * scale_1).to(q_NHD.dtype)
    score_NHK = torch.matmul(q_NHD, rows_NKD.transpose(1, 2)).float() * scale
    score_NHK.masked_fill_(visible_NK.unsqueeze(1) == 0, -torch.inf)
    p_NHK = torch.softmax(score_NHK, -1).to(q_NHD.dtype)
    return torch.matmul(p_NHK, rows_NKD)[..., value_start:]


@lowers("sparse_mla")
def native(
    q_NHD: Tensor,
    cache_X1PD: Tensor,
    rows_NK: Tensor,
    visible_NK: Tensor,
    scale_1: Tensor | None = None,
    *,
    scale: float,
    value_start: int,
) -> Tensor:
    """[N, H, V] in q's dtype; softmax in float32. Raises `NetworkError` for a float8 cache where plugins are off."""
    return _layers(q_NHD, cache_X1PD, rows_NK, visible_NK, scale, value_start)


def _layers(
    q_NHD: Tensor, cache_X1PD: Tensor, rows_NK: Tensor, visible_NK: Tensor, scale: float, value_start: int
) -> Tensor:
    if cache_X1PD.dtype == _FP8:
        raise NetworkError("sparse_mla: found a float8 cache: TensorRT has no layer that gathers its rows, plugins do.")
    size, keep = cache_X1PD.shape[-1], rows_NK.shape[-1]
    rows_NKD = ops.gather(ops.reshape(cache_X1PD, (-1, size)), rows_NK)
    score_NHK = ops.cast(ops.matmul(q_NHD, rows_NKD, transpose_b=True), "float32") * scale
    score_NHK = ops.select(ops.reshape(visible_NK, (0, 1, keep)) > 0, score_NHK, float("-inf"))
    p_NHK = ops.cast(ops.softmax(score_NHK, 2), q_NHD.dtype)
    # The whole row is multiplied and sliced after: slicing first would copy every gathered row.
    return ops.narrow(ops.matmul(p_NHK, rows_NKD), 2, value_start, size - value_start)


def plugged(run: Runs, q_NHD, cache_X1PD, rows_NK, visible_NK, scale_1=None, *, scale, value_start) -> tuple:
    """Two launches: see `reference`. A token that sees no row gets 0."""
    dtype, columns = run.dtype(q_NHD), run.shape(q_NHD)[2]
    if value_start < 1:
        raise NoPlugin("sparse_mla: rows without a rotary part")
    if dtype == "float32" and columns > _WIDEST:
        raise NoPlugin(f"sparse_mla: float32 rows of {columns} columns, at most {_WIDEST}")
    cached, inputs = run.dtype(cache_X1PD), [q_NHD, cache_X1PD, rows_NK, visible_NK]
    if (scale_1 is None) == (cached == _FP8):
        raise NoPlugin(f"sparse_mla: a cache of {cached} {'without' if scale_1 is None else 'with'} a scale")
    split, inputs = (SPLIT, inputs) if scale_1 is None else (SPLIT_FP8, [*inputs, scale_1])
    parts = run(split, *inputs, scale=scale, value_start=value_start)
    return run(MERGE, *parts, q_NHD)


# A token's rows are divided the more the fewer tokens there are: 32 ways for a block alone, 4 for 32 blocks. Fewer
# would leave multiprocessors idle at the end of the launch; the parts' bytes stay below a tenth of the rows'.
# (Rules that hold a run-time size are made of + - * // alone, the symbol first: TensorRT's expressions have no more.)
_SIZES = {
    "V": lambda D, value_start: D - value_start,
    "RP": lambda value_start: max(16, pow2(value_start)),
    "VP": lambda V: max(64, pow2(V)),
    "HEADS": lambda H: min(16, max(8, pow2(H))),
    "BLOCK": 16,  # rows at once: with twice as many a program takes 54 KB of shared memory
    "MOST": lambda K, BLOCK: min(40, cdiv(K, BLOCK)),
    "S": lambda N, MOST: (N + 30 * MOST + 29) // (N + 30),
}
_SPLIT: dict[str, Any] = dict(
    op="sparse_mla",
    function="split_kernel",
    outputs={"out_NSHV": "float32", "peak_NSH": "float32", "mass_NSH": "float32"},
    attributes=attributes_of(reference),
    sizes=_SIZES,
    scalars=("S",),
    # Tokens of a step may be more than an axis other than x has programs.
    grid=(lambda N, H, HEADS: N * cdiv(H, HEADS), "S"),
    tiles={"": {"WARPS": 4, "STAGES": 2}},
)
_INPUTS = inputs_of(reference)
SPLIT = Plugin(name="sparse_mla_split", inputs=_INPUTS, absent=("scale_1",), **_SPLIT)
SPLIT_FP8 = Plugin(
    name="sparse_mla_split_fp8",
    inputs={**_INPUTS, "cache_X1PD": _FP8, **inputs_of(reference, "scale_1")},
    **_SPLIT,
)
_REAL = {"scale": 256**-0.5, "value_start": 64}
OP = Op(
    name="sparse_mla",
    outputs={"out_NHV": "T"},
    reference=reference,
    plugged=plugged,
    plugins=(SPLIT, SPLIT_FP8, MERGE),
    # Rounding of scores, of probabilities and of the result, which the reference does too.
    tolerance={"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2},
    # z: bytes of a cached number. On 8 ranks a rank has 8 heads.
    real={
        "N": lambda batch: 9 * batch,
        "H": 8,
        "D": 576,
        "V": 512,
        "K": 2048,
        "P": 64,
        "X": lambda batch: 1 + 128 * batch,
        "z": 2,
    },
    uses={
        "": Use(_REAL),
        "4 ranks": Use(_REAL, sizes={"H": 16}),
        "fp8": Use(_REAL, ("scale_1",), {"z": 1}, {"cache_X1PD": _FP8}),
    },
    run_time="NX",
)
