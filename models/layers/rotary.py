"""Rotary embeddings from one table, gathered once a step.

The table is [positions, columns]: cosines in the first half of the columns, sines in the second. It is one table
rather than two, and one gather rather than TensorRT's own by position ids: with either of those tensorrt_rtx 1.7 fails
("uses before defs", or a crash of the builder) where rotations stand before a cache update behind two layers of
attention.

Legend: N rows of the step, H heads, F columns of a head (or of the table), E half of the rotary columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.network import ops
from glmspec.network.contract import TABLE, TensorSpec
from glmspec.network.graph import Tensor


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the step's rows, [N, 1, columns / 2] each."""

    cos_N1E: Tensor
    sin_N1E: Tensor

    @classmethod
    def at(cls, positions_N: Tensor) -> Rotary:
        """The rows of the network's table at these positions."""
        table = positions_N.net.inputs["rope_table"]
        half = table.shape[1] // 2
        rows_NF = ops.gather(table, positions_N)
        cos_N1E, sin_N1E = (ops.reshape(ops.narrow(rows_NF, 1, start, half), (0, 1, half)) for start in (0, half))
        return cls(cos_N1E, sin_N1E)

    def turn(self, x_NHF: Tensor, *, interleaved: bool) -> Tensor:
        """x with its leading columns rotated, as many as the table has; the others pass."""
        return ops.rope(x_NHF, self.cos_N1E, self.sin_N1E, interleaved=interleaved)


def rope_table_spec(positions: int, columns: int, compute: str) -> TensorSpec:
    """The table as a network input. `inv_freq` of its angles is theta ** (-2 i / columns), in float32."""
    return TensorSpec("rope_table", compute, (positions, columns), TABLE)
