"""Argmax over the last axis where the lowest index wins a tie.

TensorRT's top-k leaves ties undefined; greedy decoding must not (verifier, drafter and every
tensor-parallel rank have to agree).

Legend: N rows, V columns (a vocabulary), Z splits of a row.
"""

from __future__ import annotations

import numpy as np
import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Op, Plugin, Runs, cdiv, inputs_of, pow2


def reference(x_NV: Compute) -> torch.Tensor:
    """x [N, V] -> int32 [N]. torch.argmax returns the first of equal maxima."""
    return x_NV.argmax(-1).to(torch.int32)


def one_hot(index_N: Tensor, size: int) -> Tensor:
    """int32 [N] -> float32 [N, size]: 1 in the column of each row's index, 0 elsewhere."""
    column_1V = index_N.net.constant(np.arange(size)[None], "int32")
    return ops.cast(column_1V.equals(ops.reshape(index_N, (0, 1))), "float32")


@lowers("argmax")
def native(x_NV: Tensor) -> Tensor:
    """x [N, V] -> int32 [N]."""
    net, size = x_NV.net, x_NV.shape[-1]
    best_N1 = ops.reduce(x_NV, "MAX", 1)
    column_1V = net.constant(np.arange(size)[None], "int32")
    index_NV = ops.select(x_NV.equals(best_N1), column_1V, size)
    return ops.reduce(index_NV, "MIN", 1, keep=False)


def plugged(run: Runs, x_NV) -> tuple:
    """Two launches, or one when a row is one split: see `reference`."""
    best_NZ, index_NZ = run(ARGMAX_SPLIT, x_NV)
    if run.shape(index_NZ)[1] == 1:
        return (run.reshape(index_NZ, (-1,)),)
    return run(ARGMAX_MERGE, best_NZ, index_NZ)


ARGMAX_SPLIT = Plugin(
    name="argmax_split",
    op="argmax",
    function="split_kernel",
    inputs=inputs_of(reference),
    outputs={"best_NZ": "float32", "index_NZ": "int32"},
    sizes={"Z": lambda V, BLOCK: cdiv(V, BLOCK)},
    grid=("N", "Z"),
    tiles={"": {"BLOCK": 8192, "WARPS": 8}},  # 19 splits of a vocabulary: 9 rows fill a GPU
)
ARGMAX_MERGE = Plugin(
    name="argmax_merge",
    op="argmax",
    function="merge_kernel",
    inputs=ARGMAX_SPLIT.outputs,
    outputs={"index_N": "int32"},
    sizes={"ZP": lambda Z: pow2(Z)},
    grid=("N",),
    tiles={"": {"WARPS": 1}},
)
OP = Op(
    name="argmax",
    outputs=ARGMAX_MERGE.outputs,
    reference=reference,
    plugged=plugged,
    plugins=(ARGMAX_SPLIT, ARGMAX_MERGE),
    real={"N": lambda batch: 9 * batch, "V": 154_880},
)
