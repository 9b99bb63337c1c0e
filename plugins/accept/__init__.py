"""A block's drafts against the tokens that its rows say: a draft stands while it and all before it are what was said.

Legend: R rows, B blocks, Q most rows of a block (the anchor's and its drafts').
"""

from __future__ import annotations

import numpy as np
import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Int32, Op, Plugin, Runs, cdiv, inputs_of, pow2


def reference(said_R: Int32, draft_R: Int32, row_BQ: Int32, count_B: Int32) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts accepted, int32 [B], and tokens, int32 [B, Q], of which accepted + 1 are the block's.

    said: the token after each row. draft: the draft after each row. row: the rows of each block, in order; beyond its
    drafts any. count: its drafts."""
    said_BQ, draft_BQ = said_R[row_BQ.long()], draft_R[row_BQ.long()]
    column_Q = torch.arange(row_BQ.shape[1])
    stands_BQ = (said_BQ == draft_BQ) & (column_Q < count_B.unsqueeze(1))
    return stands_BQ.int().cumprod(1).sum(1).to(torch.int32), said_BQ


@lowers("accept")
def native(said_R: Tensor, draft_R: Tensor, row_BQ: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts accepted, int32 [B], and tokens, int32 [B, Q]: see `reference`."""
    said_BQ, draft_BQ = ops.gather(said_R, row_BQ), ops.gather(draft_R, row_BQ)
    return leading(said_BQ.equals(draft_BQ) & verified(count_B, row_BQ.shape[1])), said_BQ


def verified(count_B: Tensor, rows: int) -> Tensor:
    """bool [B, Q]: rows that a draft follows."""
    column_1Q = count_B.net.constant(np.arange(rows)[None], "int32")
    return ops.reshape(count_B, (0, 1)) > column_1Q


def leading(stands_BQ: Tensor) -> Tensor:
    """How many of each line are true before the first that is not, int32 [B]."""
    misses_BQ = ops.cumsum(ops.cast(ops.unary(stands_BQ, "NOT"), "int32"), 1)
    return ops.reduce(ops.cast(misses_BQ.equals(0), "int32"), "SUM", 1, keep=False)


def plugged(run: Runs, said_R, draft_R, row_BQ, count_B) -> tuple:
    """One launch: see `reference`."""
    return run(ACCEPT, said_R, draft_R, row_BQ, count_B)


ACCEPT = Plugin(
    name="accept",
    op="accept",
    function="accept_kernel",
    inputs=inputs_of(reference),
    outputs={"accepted_B": "int32", "tokens_BQ": "int32"},
    sizes={"QP": lambda Q: pow2(Q)},
    scalars=("B",),
    grid=(lambda B, BLOCKS: cdiv(B, BLOCKS),),
    tiles={"": {"BLOCKS": 4, "WARPS": 1}},
)
OP = Op(
    name="accept",
    outputs=ACCEPT.outputs,
    reference=reference,
    plugged=plugged,
    plugins=(ACCEPT,),
    real={"B": "batch", "Q": 9, "R": lambda batch: 9 * batch},
    run_time="BR",
)
