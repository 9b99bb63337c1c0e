"""A step's work as network inputs: tokens packed, nothing padded per request.

Legend: N rows of the step, G segments, S rows of the longest segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from glmspec.network.limits import EngineLimits
from glmspec.runtime.executor import Tensors
from glmspec.runtime.pages import NULL_PAGE, Span, page_table, ring_page_table, ring_write_plan, write_plan


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence to run. span: their positions. tokens: their ids. num_logits: how many of the last rows
    want logits."""

    span: Span
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True)
class Anchor:
    """The newest token of a sequence, after which a block is drafted. pages, ring: the sequence's. position: the
    token's."""

    pages: Sequence[int]
    token: int
    position: int
    ring: Sequence[int] = ()


# Drafted after when rows must be appended and no sequence wants a block: it reads nothing, its drafts are thrown away.
IDLE_ANCHOR = Anchor(pages=(NULL_PAGE,), token=0, position=0)


def pack_rows(rows: Sequence[Rows], limits: EngineLimits, least_pages: int) -> Tensors:
    """The verifier's inputs. least_pages: pages a table must have for the DSA top-k."""
    spans = [run.span for run in rows]
    segment_rows_GS, row_slot_N2, owner_G = _segments(spans, limits.segment_rows)
    end = max(span.start + span.count for span in spans)
    width = max(least_pages, -(-end // limits.page_size))
    after = np.cumsum([span.count for span in spans])
    logit_rows = np.concatenate([np.arange(stop - run.num_logits, stop) for stop, run in zip(after, rows, strict=True)])
    if not len(logit_rows):  # a step of prefill chunks alone: the network wants at least one row
        logit_rows = np.zeros(1, dtype=np.int64)
    return tensors(
        {
            "token_ids": np.concatenate([np.asarray(run.tokens, dtype=np.int32) for run in rows]),
            "positions": np.concatenate([span.positions for span in spans]),
            "segment_rows": segment_rows_GS,
            "row_slot": row_slot_N2,
            "page_table": page_table([spans[owner].pages for owner in owner_G], width),
            "logit_rows": logit_rows,
            **write_plan(spans, limits.page_size, limits.num_pages),
        }
    )


def pack_blocks(
    kept_rows: Sequence[int], kept: Sequence[Span], anchors: Sequence[Anchor], limits: EngineLimits
) -> Tensors:
    """A drafter's inputs, but for the taps. kept_rows: rows of the last verifier step to append to the context;
    kept: whose they are, in the same order. anchors: of the blocks to draft. Sequences that have rings give the inputs
    of sliding layers too."""
    anchors = anchors or [IDLE_ANCHOR]
    width = max(1, max(-(-anchor.position // limits.page_size) for anchor in anchors))
    return tensors(
        {
            "context_rows": np.asarray(kept_rows, dtype=np.int32),
            "context_positions": np.concatenate([span.positions for span in kept]),
            **write_plan(kept, limits.page_size, limits.num_pages),
            "anchor_ids": np.array([anchor.token for anchor in anchors], dtype=np.int32),
            "anchor_positions": np.array([anchor.position for anchor in anchors], dtype=np.int32),
            "page_table": page_table([anchor.pages for anchor in anchors], width),
            **(_ring_inputs(kept, anchors, limits) if kept[0].ring else {}),
        }
    )


def _ring_inputs(kept: Sequence[Span], anchors: Sequence[Anchor], limits: EngineLimits) -> dict[str, np.ndarray]:
    """The inputs that a drafter's sliding layers read beside the others."""
    ring_pages, size = len(kept[0].ring), limits.page_size
    rings, positions = [anchor.ring for anchor in anchors], [anchor.position for anchor in anchors]
    table, start = ring_page_table(rings, positions, size, ring_pages)
    plan = ring_write_plan(kept, size, limits.num_ring_pages(ring_pages))
    return {**plan, "ring_page_table": table, "ring_start": start}


def _segments(spans: Sequence[Span], max_rows: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Cuts spans into segments. Returns the rows of each segment [G, S], the place of each row as (segment, slot)
    [N, 2], and the span that each segment is of [G]."""
    segments: list[tuple[int, int]] = []  # first row, rows
    owner_G: list[int] = []
    row = 0
    for owner, span in enumerate(spans):
        for begin in range(0, span.count, max_rows):
            segments.append((row + begin, min(max_rows, span.count - begin)))
            owner_G.append(owner)
        row += span.count
    width = max(count for _, count in segments)
    segment_rows_GS = np.zeros((len(segments), width), dtype=np.int32)  # pads with row 0: its scores are not read
    row_slot_N2 = np.empty((row, 2), dtype=np.int32)
    for segment, (first, count) in enumerate(segments):
        segment_rows_GS[segment, :count] = np.arange(first, first + count)
        row_slot_N2[first : first + count, 0] = segment
        row_slot_N2[first : first + count, 1] = np.arange(count)
    return segment_rows_GS, row_slot_N2, owner_G


def tensors(arrays: dict[str, np.ndarray]) -> Tensors:
    """Network inputs: float32 stays, every other dtype becomes int32."""
    return {
        name: torch.from_numpy(array if array.dtype == np.float32 else array.astype(np.int32, copy=False))
        for name, array in arrays.items()
    }
