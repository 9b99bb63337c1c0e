"""Measuring what steps cost: the engine's own models run on idle blocks, before any request is there.

An idle sequence reads the null page and writes to pages that nobody owns. Like any finished sequence it leaves rows
there, beyond everyone's range until they are overwritten.
"""

from __future__ import annotations

import statistics
import time
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from glmspec.core.files import check_output
from glmspec.network.limits import EngineLimits
from glmspec.runtime.cost_table import CostCurve, CostTable, MeasuredOn, load_costs, save_costs
from glmspec.runtime.ending import Ending
from glmspec.runtime.executor import Tensors
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import NULL_PAGE, PagePool, Span
from glmspec.runtime.propose import Drafter, KeptRows
from glmspec.runtime.request import Request
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.stats import SpecStats

ROUNDS = 5
MAX_CAPTURED = 512  # rows up to which steps are padded to a measured size, as with captured CUDA graphs
_CONTEXT = 512  # positions before an idle block, where the limits allow them


@dataclass(frozen=True)
class LoadedModels:
    """The models of an engine, and the pages that idle runs of them may take."""

    verifier: Model
    drafter: Drafter
    limits: EngineLimits
    pool: PagePool
    rings: PagePool  # where a drafter's sliding layers keep their rows


def measure_costs(models: LoadedModels) -> CostTable:
    """Medians of interleaved rounds, at sizes up to the limits (or as far as the free pages go). The pages come
    back."""
    limits, pool = models.limits, models.pool
    block_rows = _block_rows(limits)
    own = -(-2 * block_rows // limits.page_size)  # a block's pages: for the rows verified, and those drafted after them
    blocks = max(1, min(limits.max_num_seqs, pool.free // own))
    ring = models.drafter.ring_pages
    pages, rings = pool.take(min(blocks * own, pool.free)), models.rings.take(blocks * ring)
    try:
        idle = [
            _idle(models, pages[at * own : (at + 1) * own], rings[at * ring : (at + 1) * ring]) for at in range(blocks)
        ]
        verify = {size: _verify(models, idle, size) for size in measured_sizes(blocks * block_rows)}
        draft = {size: _draft(models, idle[:size]) for size in measured_sizes(blocks)}
        return CostTable(_measured(draft), _measured(verify))
    finally:
        pool.give_back(pages[::-1])  # in the order in which they were taken
        models.rings.give_back(rings[::-1])


def measured_sizes(greatest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 and so on, and the greatest."""
    powers = [2**exponent for exponent in range(greatest.bit_length())]
    return sorted({size for power in powers for size in (power, power * 3 // 2) if size < greatest} | {greatest})


def costs_of(given: CostTable | Path | None, models: LoadedModels, measured_on: MeasuredOn) -> CostTable:
    """The table given, or in the file given; else measured, and written to that file. Raises `ConfigError` for a file
    that does not fit or cannot be written."""
    if isinstance(given, CostTable):
        return given
    if given is not None and given.exists():
        return load_costs(given, measured_on)
    if given is not None:
        check_output(given)  # before anything is measured
    table = measure_costs(models)
    if given is not None:
        save_costs(given, table, measured_on)
    return table


def _measured(runs: Mapping[int, Callable[[], object]]) -> CostCurve:
    """The curve of some runs. runs: by size; every size runs once in each round, so that a slow moment hits them
    all."""
    times: dict[int, list[float]] = {size: [] for size in runs}
    for run in runs.values():  # warms up
        run()
    for _ in range(ROUNDS):
        for size, run in runs.items():
            start = time.perf_counter()
            run()
            times[size].append((time.perf_counter() - start) * 1000)
    captured = max(size for size in runs if size <= MAX_CAPTURED)
    return CostCurve.of(list(times), list(map(statistics.median, times.values())), captured)


def _idle(models: LoadedModels, pages: list[int], ring: list[int]) -> Sequence:
    """A sequence after a verify step that kept a whole block: its rows lie on `pages`, all before them on the null
    page."""
    limits = models.limits
    block_rows = _block_rows(limits)
    before = max(0, min(_CONTEXT, limits.max_model_len - 2 * block_rows)) // limits.page_size
    start = before * limits.page_size
    request = Request(prompt_ids=(0,) * (start + block_rows + 1), max_tokens=1)
    sequence = Sequence(request, Ending(request, (), None, 1), len(request.prompt_ids), SpecStats(0))
    sequence.pages, sequence.ring, sequence.cached = [NULL_PAGE] * before + pages, ring, start
    return sequence


def _block_rows(limits: EngineLimits) -> int:
    """Rows of an idle block; two must fit a sequence."""
    return max(1, min(limits.block_rows, limits.max_model_len // 2))


def _verify(models: LoadedModels, idle: abc.Sequence[Sequence], rows: int) -> Callable[[], Tensors]:
    """A verifier run of so many rows in all, whole blocks but for the last."""
    limits, verifier = models.limits, models.verifier
    least_pages = limits.least_pages(verifier.config.index_topk)
    block_rows = _block_rows(limits)
    counts = [min(block_rows, rows - first) for first in range(0, rows, block_rows)]
    spans = [Span(sequence.pages, sequence.cached, count) for sequence, count in zip(idle, counts, strict=False)]
    packed = [Rows(span, [0] * span.count, span.count) for span in spans]
    return lambda: verifier.run(pack_rows(packed, limits, least_pages))


def _draft(models: LoadedModels, idle: abc.Sequence[Sequence]) -> Callable[[], object]:
    """A drafter run that appends a block's rows for each and drafts for all."""
    block_rows, drafter = _block_rows(models.limits), models.drafter
    features = _verify(models, idle, len(idle) * block_rows)()
    kept = [KeptRows(sequence, at * block_rows, sequence.cached, block_rows) for at, sequence in enumerate(idle)]
    return lambda: drafter.propose(features, kept, idle)
