"""Rows computed a tile at a time, where all at once would make a tensor of more elements than TensorRT counts.

Legend: N rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable

from glmspec.network import ops
from glmspec.network.graph import Tensor


def tile_rows(x_ND: Tensor, tiles: int, index: int) -> Tensor:
    """Which rows of x one of so many equal tiles has, int32; the last tiles repeat the last row."""
    rows = ops.arange_like(x_ND, 0, tiles)
    if index == 0:
        return rows
    count_1, last_1 = (ops.reduce(values, "MAX", 0) for values in (rows + 1, ops.arange_like(x_ND, 0)))
    return ops.minimum(rows + count_1 * index, last_1)


def in_tiles(run: Callable[..., Tensor], tiles: int, *tensors: Tensor) -> Tensor:
    """`run` of tensors that have the same rows, in so many tiles; it gives a row for each."""
    if tiles == 1:
        return run(*tensors)
    rows = [tile_rows(tensors[0], tiles, index) for index in range(tiles)]
    results = ops.concat([run(*(ops.gather(x, own) for x in tensors)) for own in rows], 0)
    return ops.gather(results, ops.arange_like(tensors[0], 0))
