"""A table of what steps of each size cost, in milliseconds: measured once (`runtime/profile.py`) and kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from glmspec.core.errors import ConfigError
from glmspec.core.fields import Fields
from glmspec.core.files import producer
from glmspec.core.sealed import open_sealed, write_sealed

COST_TABLE = "cost table"


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds by size. sizes: measured ones, ascending. ms: of each, never falling. captured: steps up to this
    size, one of `sizes`, are padded to the next measured one and cost as much as that; beyond it, and everywhere when
    it is 0, costs lie on the line through the measured ones, and past the last on that of the last two."""

    sizes: tuple[int, ...]
    ms: tuple[float, ...]
    captured: int = 0

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.ms):
            counts = f"{len(self.sizes)} sizes and {len(self.ms)} times"
            raise ConfigError(f"sizes and ms: found {counts}, expected as many of both, at least one.")
        if self.sizes[0] < 1 or any(size >= after for size, after in pairwise(self.sizes)):
            raise ConfigError(f"sizes: found {list(self.sizes)}, expected growing numbers from 1 up.")
        if any(not (0 < ms < math.inf) for ms in self.ms) or any(ms > after for ms, after in pairwise(self.ms)):
            raise ConfigError(f"ms: found {list(self.ms)}, expected positive times that never fall.")
        if self.captured not in (0, *self.sizes):
            raise ConfigError(f"captured: found {self.captured}, expected 0 or one of {list(self.sizes)}.")

    @classmethod
    def of(cls, sizes: Sequence[int], medians: Sequence[float], captured: int) -> CostCurve:
        """The curve of measurements: their running maximum, because noise must not make a larger step look cheaper."""
        return cls(tuple(sizes), tuple(np.maximum.accumulate(medians).tolist()), captured)

    def at(self, sizes: np.ndarray) -> np.ndarray:
        """Milliseconds of each size, float64, same shape."""
        known, ms = self._arrays
        after = np.minimum(np.searchsorted(known, sizes), len(known) - 1)
        line = np.interp(sizes, known, ms) + self._slope * np.maximum(sizes - known[-1], 0)
        return np.where(sizes <= self.captured, ms[after], line)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.sizes, dtype=np.int64), np.array(self.ms)

    @cached_property
    def _slope(self) -> float:
        """Milliseconds a unit of size, past the last."""
        if len(self.sizes) == 1:
            return 0.0
        return (self.ms[-1] - self.ms[-2]) / (self.sizes[-1] - self.sizes[-2])


@dataclass(frozen=True)
class CostTable:
    """The costs of a step's runs. draft_ms: of a drafter run, by blocks. verify_ms: of a verifier run, by rows."""

    draft_ms: CostCurve
    verify_ms: CostCurve

    def step_ms(self, sequences: int, rows: np.ndarray) -> np.ndarray:
        """Milliseconds of a step that drafts for so many sequences, for each number of verified rows."""
        return self.draft_ms.at(np.array(sequences)) + self.verify_ms.at(rows)


@dataclass(frozen=True)
class MeasuredOn:
    """The engines that a table was measured on. engines_sha256: of the engine directory's config.json. drafter: its
    name."""

    engines_sha256: str
    drafter: str


def save_costs(path: Path, table: CostTable, measured_on: MeasuredOn) -> None:
    """Write the table as JSON. Raises `ConfigError` when it cannot be written."""
    record = {"producer": producer(COST_TABLE), **asdict(measured_on), **asdict(table)}
    try:
        write_sealed(path, record)
    except OSError as error:
        raise ConfigError(
            f"{path}: the cost table cannot be written ({error.strerror}). Choose another file."
        ) from None


def load_costs(path: Path, measured_on: MeasuredOn) -> CostTable:
    """A table that `save_costs` wrote. Raises `ConfigError` for another file, and for one made for other engines or
    another drafter, naming the field, what was found and what was expected."""
    fields = Fields(open_sealed(path, {}, "Delete it, and it will be measured again."), str(path))
    if fields.section("producer").values.get("kind") != COST_TABLE:
        fields.section("producer").fail("kind", repr(COST_TABLE))
    for key, expected in asdict(measured_on).items():
        recorded = fields.values.get(key)
        if recorded != expected:
            raise ConfigError(
                f"{path}: {key}: found {_short(recorded)}, expected {_short(expected)}: the table was measured on "
                "other engines. Delete it, and it will be measured again, or name another file."
            )
    return CostTable(_curve(fields.section("draft_ms")), _curve(fields.section("verify_ms")))


def _curve(fields: Fields) -> CostCurve:
    ms = fields.values.get("ms")
    if not isinstance(ms, list) or any(isinstance(time, bool) or not isinstance(time, (int, float)) for time in ms):
        fields.fail("ms", "a list of milliseconds")
    sizes, captured = fields.integers("sizes", least=1), fields.integer("captured", least=0)
    try:
        return CostCurve(sizes, tuple(map(float, ms)), captured)
    except ConfigError as error:
        raise ConfigError(f"{fields.source}: {error}") from None


def _short(value: object) -> str:
    return repr(value[:12] if isinstance(value, str) else value)
