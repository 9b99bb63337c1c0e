"""A step's work as network inputs: tokens packed, nothing padded per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from glmspec.network.limits import EngineLimits
from glmspec.runtime.pages import NULL_PAGE, Span, page_table, ring_page_table, ring_write_plan, write_plan

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence to run. span: their positions. tokens: their ids. logits: how many of the last rows
    want logits."""

    span: Span
    tokens: Sequence[int]
    logits: int


@dataclass(frozen=True)
class Anchor:
    """A block to draft. pages, ring: the sequence's. anchor: its newest token. position: the anchor's."""

    pages: Sequence[int]
    anchor: int
    position: int
    ring: Sequence[int] = ()


# Drafted when rows must be appended and no sequence wants a block: it reads nothing and is thrown away.
IDLE_ANCHOR = Anchor(pages=(NULL_PAGE,), anchor=0, position=0)


def pack_rows(rows: Sequence[Rows], limits: EngineLimits, least_pages: int) -> Inputs:
    """The verifier's inputs. least_pages: pages a table must have for the DSA top-k."""
    spans = [one.span for one in rows]
    position = np.concatenate([np.arange(span.start, span.start + span.count) for span in spans])
    segments, slots, owners = _segments(spans, limits.segment_rows)
    last = max(span.start + span.count for span in spans)
    width = max(least_pages, -(-last // limits.page_size))
    ends = np.cumsum([span.count for span in spans])
    wanted = np.concatenate([np.arange(end - one.logits, end) for end, one in zip(ends, rows, strict=True)])
    if not len(wanted):  # a step of prefill chunks alone: the network wants at least one row
        wanted = np.zeros(1, dtype=np.int64)
    return tensors(
        {
            "token_ids": np.concatenate([np.asarray(one.tokens, dtype=np.int32) for one in rows]),
            "positions": position,
            "segment_rows": segments,
            "row_slot": slots,
            "page_table": page_table([spans[owner].pages for owner in owners], width),
            "logit_rows": wanted,
            **write_plan(spans, limits.page_size, limits.num_pages),
        }
    )


def pack_blocks(
    kept_rows: Sequence[int], kept: Sequence[Span], blocks: Sequence[Anchor], limits: EngineLimits
) -> Inputs:
    """A drafter's inputs, but for the taps. kept_rows: rows of the last verifier step to append to the context;
    kept: whose they are, in the same order. Sequences that have rings give the inputs of sliding layers too."""
    blocks = blocks or [IDLE_ANCHOR]
    width = max(1, max(-(-block.position // limits.page_size) for block in blocks))
    return tensors(
        {
            "context_rows": np.asarray(kept_rows, dtype=np.int32),
            "context_positions": np.concatenate([np.arange(span.start, span.start + span.count) for span in kept]),
            **write_plan(kept, limits.page_size, limits.num_pages),
            "anchor_ids": np.array([block.anchor for block in blocks], dtype=np.int32),
            "anchor_positions": np.array([block.position for block in blocks], dtype=np.int32),
            "page_table": page_table([block.pages for block in blocks], width),
            **(_ring_inputs(kept, blocks, limits) if kept[0].ring else {}),
        }
    )


def _ring_inputs(kept: Sequence[Span], blocks: Sequence[Anchor], limits: EngineLimits) -> dict[str, np.ndarray]:
    """What a drafter's sliding layers read beside the rest."""
    ring_pages, size = len(kept[0].ring), limits.page_size
    table, start = ring_page_table(
        [block.ring for block in blocks], [block.position for block in blocks], size, ring_pages
    )
    plan = ring_write_plan(kept, size, limits.num_ring_pages(ring_pages))
    return {**plan, "ring_page_table": table, "ring_start": start}


def _segments(spans: Sequence[Span], most: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Rows of each segment [G, S], place of each row [N, 2] as (segment, slot), and the span each segment is of."""
    pieces: list[tuple[int, int]] = []  # first row, rows
    owners: list[int] = []
    row = 0
    for owner, span in enumerate(spans):
        for begin in range(0, span.count, most):
            count = min(most, span.count - begin)
            pieces.append((row + begin, count))
            owners.append(owner)
        row += span.count
    width = max(count for _, count in pieces)
    segment_rows = np.zeros((len(pieces), width), dtype=np.int32)  # padding repeats row 0: its scores are not read
    slots = np.empty((row, 2), dtype=np.int32)
    for segment, (first, count) in enumerate(pieces):
        segment_rows[segment, :count] = np.arange(first, first + count)
        slots[first : first + count, 0] = segment
        slots[first : first + count, 1] = np.arange(count)
    return segment_rows, slots, owners


def tensors(arrays: dict[str, np.ndarray]) -> Inputs:
    """Network inputs: float32 stays, every other dtype becomes int32."""
    plain = {
        name: array if array.dtype == np.float32 else array.astype(np.int32, copy=False)
        for name, array in arrays.items()
    }
    return {name: torch.from_numpy(array) for name, array in plain.items()}
