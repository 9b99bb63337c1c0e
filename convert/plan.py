"""A conversion before it starts: every tensor to be written, and what it is made of.

A `Weight` is one weight of the network, a stack of units (`shards.Layout`); its `Task`s are the pieces of work that
fill it, each small enough to hold in memory and independent of all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from glmspec.convert.formats import Matrix
from glmspec.convert.storage import Shape, StoredWeight
from glmspec.core.dtypes import HEADERS
from glmspec.network.config import RankTensor, field_name, tensors_of
from glmspec.network.formats import BLOCK, FORMATS
from glmspec.network.shards import Layout

_CHUNK = 1 << 25  # bytes of a matrix handled at once, where its format allows cutting it


@dataclass(frozen=True)
class Part:
    """Rows of a unit, and where they come from."""

    unit: int
    row: int
    stored: StoredWeight


@dataclass(frozen=True)
class Task:
    """Parts that are made together. shares: further weights under the same one scale (gate and up; what serving
    engines fuse). make: turns the parts' one matrix into all units of the weight, stacked [units * rows, columns]."""

    parts: tuple[Part, ...]
    shares: tuple[StoredWeight, ...] = ()
    make: Callable[[Matrix], Matrix] | None = None

    @property
    def size(self) -> int:
        """Bytes read."""
        return sum(
            HEADERS[field.dtype].bytes * math.prod(field.size(part.stored.count, part.stored.columns))
            for part in self.parts
            for field in FORMATS[part.stored.format].values()
        )


@dataclass(frozen=True)
class Weight:
    """One weight of the network. dims: its shape before sharding. inputs: activation scales, one a unit, None for a
    weight whose format has none or none are known."""

    name: str
    dims: Shape
    format: str
    layout: Layout
    tasks: tuple[Task, ...]
    inputs: tuple[float, ...] | None = None

    @property
    def names(self) -> list[str]:
        """Every tensor of the checkpoint it is made of."""
        return [name for task in self.tasks for part in task.parts for name in part.stored.names]

    def field_name(self, suffix: str) -> str:
        """The name of the tensor that holds one of its fields."""
        return field_name(self.name, suffix)

    def outputs(self, rank: int) -> dict[str, RankTensor]:
        """The tensors a rank holds of it, by field."""
        return tensors_of(self.name, self.dims, self.format, self.layout, self.inputs is not None, rank)

    def places(self, rank: int, part: Part, matrix: Matrix) -> Iterator[tuple[str, int, np.ndarray]]:
        """What a rank takes of a finished part: field, byte offset in the field's tensor, rows."""
        units, rows, columns = self.layout.box(rank)
        first, last = max(part.row, rows.start), min(part.row + matrix.shape[0], rows.stop)
        if part.unit not in units or first >= last:
            return
        for suffix, field in FORMATS[self.format].items():
            values = matrix.fields[suffix]
            by, wide = field.rows, field.columns
            height = field.size(len(rows), 1)[0]
            begin, at = ((first - part.row) // by, (first - rows.start) // by) if by else (0, 0)
            end = begin + field.size(last - first, 1)[0]
            left = columns.start // wide if wide else 0
            taken = values[begin:end, left : left + field.size(1, len(columns))[1]]
            row = (part.unit - units.start) * height + at
            yield suffix, row * HEADERS[field.dtype].bytes * taken.shape[1], np.ascontiguousarray(taken)


def chunks(unit: int, stored: StoredWeight, format: str, shares: tuple[StoredWeight, ...] = ()) -> list[Task]:
    """Tasks for one unit: in chunks of rows where the format allows. shares: weights under the same one scale."""
    step = max(BLOCK, _CHUNK // (4 * max(1, stored.columns)) // BLOCK * BLOCK)
    whole = stored.format != format and format in ("fp8", "nvfp4")
    if whole or stored.count <= step:
        return [Task((Part(unit, 0, stored),), shares)]
    starts = range(0, stored.count, step)
    return [Task((Part(unit, row, stored.part(row, min(step, stored.count - row))),)) for row in starts]


def needs_amax(task: Task, format: str) -> bool:
    """True when the format has one scale over the whole weight and it is not simply kept."""
    return format in ("fp8", "nvfp4") and any(part.stored.format != format for part in task.parts)
