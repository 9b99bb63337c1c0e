"""Which part of a weight each GPU (rank) gets.

A weight is a stack of units, each a matrix: the experts of a layer, the gate and up halves of an expert, the heads of
an absorbed projection; most weights are one unit. Ranks divide the units, the rows or the columns. Every number format
is divided between its scale blocks, never inside one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from glmspec.core.errors import ConfigError
from glmspec.network.contract import TensorSpec
from glmspec.network.formats import FORMATS

_TRIED = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Mapping:
    """tp: ranks. ep: groups that each hold a share of the experts whole; within one, tp / ep ranks split an expert."""

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.tp % self.ep:
            raise ConfigError(f"--ep: found {self.ep}, expected a divisor of --tp ({self.tp}).")

    def expert_group(self, rank: int) -> int:
        """Which group's experts a rank holds. TensorRT-LLM's order: neighbouring ranks hold different experts."""
        return rank % self.ep


@dataclass(frozen=True)
class Split:
    """Which axis is divided. experts: the units also, by expert group. vocabulary: rows are padded to divide."""

    axis: str = "none"  # none, rows, columns, heads (a unit each)
    experts: bool = False
    vocabulary: bool = False


# Weights that ranks divide, by name; all others are on every rank. (Heads are independent, a gated MLP is split between
# its matrices, rows of the vocabulary are independent.)
_SPLITS: dict[str, Split] = {
    r"model\.embed_tokens\.weight|lm_head\.weight": Split("rows", vocabulary=True),
    r".*\.self_attn\.q_b_proj\.weight": Split("rows"),
    r".*\.self_attn\.w_u[kv]": Split("heads"),
    r".*\.self_attn\.o_proj\.weight": Split("columns"),
    r".*\.mlp\.(?:shared_experts\.)?(?:gate|up)_proj\.weight": Split("rows"),
    r".*\.mlp\.(?:shared_experts\.)?down_proj\.weight": Split("columns"),
    r".*\.mlp\.experts\.gate_up_proj": Split("rows", experts=True),
    r".*\.mlp\.experts\.down_proj": Split("columns", experts=True),
}


def split_of(name: str) -> Split:
    """How a verifier's weight is divided."""
    return next((split for pattern, split in _SPLITS.items() if re.fullmatch(pattern, name)), Split())


@dataclass(frozen=True)
class Layout:
    """A weight's units and how they are divided. units, rows, columns: of the whole weight; every unit is
    [rows, columns]."""

    units: int
    rows: int
    columns: int
    split: Split
    mapping: Mapping

    @property
    def padded(self) -> int:
        """Rows of a unit; of a vocabulary, padded so that every rank gets as many."""
        ways = self._ways()[1] if self.split.vocabulary else 1
        return -(-self.rows // ways) * ways

    def _ways(self) -> tuple[int, int, int]:
        """Ways in which units, rows and columns are divided."""
        tp, ep = self.mapping.tp, self.mapping.ep
        inner = tp // ep if self.split.experts else tp
        units = ep if self.split.experts else tp if self.split.axis == "heads" else 1
        return units, inner if self.split.axis == "rows" else 1, inner if self.split.axis == "columns" else 1

    def box(self, rank: int) -> tuple[range, range, range]:
        """The units, rows (with padding) and columns that a rank holds."""
        within = outer = rank
        if self.split.experts:
            within, outer = rank // self.mapping.ep, self.mapping.expert_group(rank)
        units, rows, columns = self._ways()
        return _part(self.units, units, outer), _part(self.padded, rows, within), _part(self.columns, columns, within)

    def fault(self, format: str) -> str | None:
        """Why this weight in this format cannot be divided so, or None."""
        units, rows, columns = self._ways()
        if self.units % units:
            return f"{self.units} {'experts' if self.split.experts else 'heads'} do not divide by {units}"
        if self.padded % rows or self.columns % columns:
            return f"{self.rows} rows and {self.columns} columns do not divide by {max(rows, columns)}"
        for suffix, field in FORMATS[format].items():
            for size, ways, by, axis in (
                (self.padded, rows, field.rows, "rows"),
                (self.columns, columns, field.columns, "columns"),
            ):
                if ways > 1 and by and (size // ways) % by:
                    return f"a rank's {size // ways} {axis} would cut a {format} {suffix or 'byte'} block of {by}"
        return None


def _part(size: int, ways: int, place: int) -> range:
    """The place-th of so many equal parts."""
    part = size // ways
    return range(place * part, (place + 1) * part) if ways > 1 else range(part)


def layout_of(spec: TensorSpec, mapping: Mapping, drafter: bool = False) -> Layout:
    """The units of a network's weight. Drafters are not divided."""
    split, sizes = Split() if drafter else split_of(spec.name), spec.sizes
    if split.experts or split.axis == "heads":
        stacked = 2 if spec.name.endswith(".gate_up_proj") else 1
        return Layout(sizes[0] * stacked, sizes[1] // stacked, sizes[2], split, mapping)
    return Layout(1, math.prod(sizes[:-1]), sizes[-1] if sizes else 1, split, mapping)


def legal_sizes(layouts: list[tuple[str, Layout, str]], ep: int) -> list[int]:
    """The --tp values, among powers of two, that every weight (name, layout, format) can be divided by."""
    return [
        tp
        for tp in _TRIED
        if tp % ep == 0
        and all(replace(layout, mapping=Mapping(tp, ep)).fault(format) is None for _, layout, format in layouts)
    ]


def check_shards(layouts: list[tuple[str, Layout, str]], mapping: Mapping) -> None:
    """Raise `ConfigError` naming the first weight that cannot be divided, and the sizes that are legal."""
    for name, layout, format in layouts:
        if fault := layout.fault(format):
            legal = ", ".join(map(str, legal_sizes(layouts, mapping.ep))) or "none"
            raise ConfigError(
                f"--tp {mapping.tp} --ep {mapping.ep}: {name}: {fault}. Legal with --ep {mapping.ep}: --tp {legal}."
            )
