"""Greedy acceptance (`glmspec.plugins.accept`): one program a few blocks, all of a block's rows side by side.

Legend: R rows, B blocks, Q most rows of a block, b blocks of a program, q rows of a block, padded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accept_kernel(
    said_R, draft_R, row_BQ, count_B, B, accepted_B, tokens_BQ, Q: tl.constexpr, QP: tl.constexpr, BLOCKS: tl.constexpr
):
    """See `accept.reference`. Rows beyond the Q of a block are masked, and so are blocks beyond B."""
    block_b = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column_q = tl.arange(0, QP)
    here_bq = (block_b[:, None] < B) & (column_q[None, :] < Q)
    at_bq = block_b[:, None] * Q + column_q[None, :]
    row_bq = tl.load(row_BQ + at_bq, mask=here_bq, other=0)
    count_b = tl.load(count_B + block_b, mask=block_b < B, other=0)
    said_bq = tl.load(said_R + row_bq, mask=here_bq, other=0)
    draft_bq = tl.load(draft_R + row_bq, mask=here_bq, other=0)
    stands_bq = (said_bq == draft_bq) & (column_q[None, :] < count_b[:, None])
    # The first that does not stand says how many do; a block has a column without a draft, so there is one.
    accepted_b = tl.min(tl.where(stands_bq, QP, column_q[None, :]), 1)
    tl.store(accepted_B + block_b, accepted_b, mask=block_b < B)
    tl.store(tokens_BQ + at_bq, said_bq, mask=here_bq)
