"""Rows computed some after others, where all at once would make a tensor of more elements than are counted."""

from __future__ import annotations

from collections.abc import Callable

from glmspec.network import ops
from glmspec.network.graph import Tensor


def piece(x_ND: Tensor, pieces: int, at: int) -> Tensor:
    """Indices of one of so many equal pieces of x's rows, int32; the last ones repeat the last row."""
    own = ops.arange_like(x_ND, 0, pieces)
    if at == 0:
        return own
    count_1, last_1 = (ops.reduce(one, "MAX", 0) for one in (own + 1, ops.arange_like(x_ND, 0)))
    return ops.minimum(own + count_1 * at, last_1)


def by_rows(run: Callable[..., Tensor], pieces: int, *rows: Tensor) -> Tensor:
    """`run` of tensors that have the same rows, in so many pieces; it gives a row for each."""
    if pieces == 1:
        return run(*rows)
    at = [piece(rows[0], pieces, index) for index in range(pieces)]
    made = ops.concat([run(*(ops.gather(x, index) for x in rows)) for index in at], 0)
    return ops.gather(made, ops.arange_like(rows[0], 0))
