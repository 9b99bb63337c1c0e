"""Packing a step: every input against a plain loop over rows."""

from __future__ import annotations

import random

import pytest
import torch

from glmspec.network.limits import EngineLimits
from glmspec.runtime.pack import Anchor, Rows, pack_blocks, pack_rows
from glmspec.runtime.pages import NULL_PAGE, Span, ring_write_plan, write_plan

LIMITS = EngineLimits(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=80, page_size=4, segment_rows=6, block_rows=5
)


def random_rows(rng: random.Random, pages: list[int]) -> Rows:
    start, count = rng.randrange(40), rng.randint(1, 20)
    tokens = [rng.randrange(1000) for _ in range(count)]
    return Rows(Span(pages, start, count), tokens, num_logits=rng.choice([0, 1, min(5, count)]))


def random_batch(seed: int) -> tuple[random.Random, list[Rows]]:
    rng = random.Random(seed)
    free = rng.sample(range(1, LIMITS.num_pages), LIMITS.num_pages - 1)
    return rng, [random_rows(rng, free[at * 16 : at * 16 + 16]) for at in range(rng.randint(1, 4))]


@pytest.mark.parametrize("seed", range(60))
def test_rows_equal_a_loop(seed):
    rng, batch = random_batch(seed)
    least = rng.choice([1, 4, 12])
    found = pack_rows(batch, LIMITS, least)
    tokens, positions, owners, logits = [], [], [], []
    for owner, rows in enumerate(batch):
        for at in range(rows.span.count):
            if at >= rows.span.count - rows.num_logits:
                logits.append(len(tokens))
            tokens.append(rows.tokens[at])
            positions.append(rows.span.start + at)
            owners.append(owner)
    assert found["token_ids"].tolist() == tokens
    assert found["positions"].tolist() == positions
    assert found["logit_rows"].tolist() == (logits or [0])  # the network wants one row at least
    assert {tensor.dtype for tensor in found.values()} == {torch.int32}

    segments, slots, table = found["segment_rows"], found["row_slot"].tolist(), found["page_table"].tolist()
    assert segments.shape[1] <= LIMITS.segment_rows
    width = max(least, max(-(-(position + 1) // LIMITS.page_size) for position in positions))
    for row, (segment, slot) in enumerate(slots):
        assert segments[segment, slot] == row  # found again in its own place
        pages = batch[owners[row]].span.pages[:width]
        assert table[segment] == [*pages, *[NULL_PAGE] * (width - len(pages))]
    assert len({tuple(slot) for slot in slots}) == len(tokens)
    owned = {segment: owners[row] for row, (segment, _) in enumerate(slots)}
    assert sorted(owned) == list(range(len(table)))  # no segment without rows
    assert len(table) == len(segments) == sum(-(-rows.span.count // LIMITS.segment_rows) for rows in batch)


def test_segments_are_of_one_sequence_and_hold_at_most_segment_rows():
    batch = [Rows(Span([1, 2, 3, 4], 0, 13), list(range(13)), 1), Rows(Span([9], 2, 1), [99], 1)]
    found = pack_rows(batch, LIMITS, 1)
    assert found["segment_rows"].tolist() == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
        [12, 0, 0, 0, 0, 0],
        [13, 0, 0, 0, 0, 0],
    ]
    assert found["page_table"].tolist() == [[1, 2, 3, 4]] * 3 + [[9, NULL_PAGE, NULL_PAGE, NULL_PAGE]]
    assert found["logit_rows"].tolist() == [12, 13]


@pytest.mark.parametrize("seed", range(10))
def test_both_packs_carry_the_write_plan_of_their_spans(seed):
    _, batch = random_batch(seed)
    spans = [rows.span for rows in batch]
    plan = write_plan(spans, LIMITS.page_size, LIMITS.num_pages)
    kept_rows = list(range(sum(span.count for span in spans)))
    for found in (pack_rows(batch, LIMITS, 1), pack_blocks(kept_rows, spans, [], LIMITS)):
        for name, array in plan.items():
            assert found[name].tolist() == array.tolist(), name


@pytest.mark.parametrize("seed", range(20))
def test_blocks_equal_a_loop(seed):
    rng, batch = random_batch(seed)
    kept = [rows.span for rows in batch]
    kept_rows = [rng.randrange(80) for span in kept for _ in range(span.count)]
    blocks = [Anchor(span.pages, rng.randrange(1000), rng.randrange(60)) for span in kept[: rng.randint(1, 4)]]
    found = pack_blocks(kept_rows, kept, blocks, LIMITS)
    assert found["context_rows"].tolist() == kept_rows
    expected = [span.start + at for span in kept for at in range(span.count)]
    assert found["context_positions"].tolist() == expected
    assert found["anchor_ids"].tolist() == [block.token for block in blocks]
    assert found["anchor_positions"].tolist() == [block.position for block in blocks]
    # A block reads the context before its anchor: pages for `position` rows.
    width = max(1, *(-(-block.position // LIMITS.page_size) for block in blocks))
    for block, pages in zip(blocks, found["page_table"].tolist(), strict=True):
        assert pages == [*block.pages[:width], *[NULL_PAGE] * (width - len(block.pages))]
    assert {tensor.dtype for tensor in found.values()} == {torch.int32}


def test_sequences_that_have_rings_give_the_inputs_of_sliding_layers():
    """A window of 8 rows in pages of 4: three pages a ring."""
    rings = [[3, 1, 2], [6, 5, 4]]
    kept = [Span([9, 8, 7, 6, 5], 0, 18, rings[0]), Span([4], 0, 2, rings[1])]
    blocks = [Anchor(span.pages, 11, span.start + span.count, span.ring) for span in kept]
    found = pack_blocks(range(20), kept, blocks, LIMITS)
    for name, array in ring_write_plan(kept, LIMITS.page_size, 1 + 4 * 3).items():
        assert found[name].tolist() == array.tolist()
    assert len(found["ring_write_order"]) == 3 * 4 - 2 + 2 and len(found["write_order"]) == 20
    assert (found["ring_page_table"].tolist(), found["ring_start"].tolist()) == ([[2, 3, 1], [6, 5, 4]], [8, 0])
    assert {tensor.dtype for tensor in found.values()} == {torch.int32}
    idle = pack_blocks(range(20), kept, [], LIMITS)
    assert (idle["ring_page_table"].tolist(), idle["ring_start"].tolist()) == ([[NULL_PAGE] * 3], [0])
    without = pack_blocks([0], [Span([1], 0, 1)], [], LIMITS)
    assert not [name for name in without if name.startswith("ring_")]


def test_without_a_block_an_idle_one_reads_nothing():
    found = pack_blocks([3, 4], [Span([6], 0, 2)], [], LIMITS)
    assert found["anchor_positions"].tolist() == [0]
    assert found["page_table"].tolist() == [[NULL_PAGE]]
    assert found["context_rows"].tolist() == [3, 4]
