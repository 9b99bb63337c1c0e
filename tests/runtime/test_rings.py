"""Sliding layers that keep a ring of their window draft what they would over whole contexts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from support.models import features_as_taps, golden_drafters, whole_contexts

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.drafter_dialects import WINDOW_ANCHORED, WINDOW_RELATIVE
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.network.trt import backend
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Anchor, pack_blocks
from glmspec.runtime.pages import PagePool, Span

FLOAT32 = NetworkConfig(compute="float32")
LIMITS = EngineLimits(
    max_model_len=96, max_num_seqs=3, max_num_batched_tokens=288, page_size=8, segment_rows=9, block_rows=9
)
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {"dflash2": (SLIDING, FULL), "dspark": (SLIDING, SLIDING)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, tuple[dict, dict[str, torch.Tensor]]]:
    return golden_drafters(tmp_path_factory.mktemp("goldens"))


def config_of(weights, kind: str, window: int, convention: str, layers: tuple[str, ...]) -> DrafterConfig:
    config = DrafterConfig.from_hf(weights[kind][0], kind, convention)
    return replace(config, layer_types=layers, sliding_window=window)


@dataclass
class Grown:
    """A sequence as a drafter sees it."""

    features: torch.Tensor
    pages: list[int]
    ring: list[int]
    length: int = 0


class Growth:
    """Sequences that come, grow in chunks and end, on two drafters that must agree."""

    def __init__(self, ring: Model, whole: Model, seed: int) -> None:
        self.ring, self.whole, self.rng = ring, whole, random.Random(seed)
        self.window = ring.config.sliding_window
        self.generator = torch.Generator().manual_seed(seed)
        self.pool, self.rings = PagePool(LIMITS.num_pages), PagePool(LIMITS.num_ring_pages(ring.ring_pages))
        for pool in (self.pool, self.rings):  # in no order
            pages = pool.take(pool.free)
            self.rng.shuffle(pages)
            pool.give_back(pages)
        self.sequences = [self.begin() for _ in range(LIMITS.max_num_seqs)]

    def begin(self) -> Grown:
        """A new sequence, over large finite garbage where others were."""
        columns = len(self.ring.config.taps) * self.ring.config.hidden_size
        features = torch.randn(LIMITS.max_model_len, columns, generator=self.generator)
        made = Grown(features, self.pool.take(LIMITS.pages_per_sequence), self.rings.take(self.ring.ring_pages))
        for layer, kind in enumerate(self.ring.config.layer_types):
            for name in ("key", "value"):
                cache, pages = self.ring.caches[0][f"cache.layers.{layer}.{name}"], made.pages
                if kind == SLIDING:
                    assert len(cache) == 1 + LIMITS.max_num_seqs * self.ring.ring_pages
                    pages = made.ring
                cache[pages] = 1e4 * torch.randn(cache[pages].shape, generator=self.generator)
        return made

    def end(self, at: int) -> None:
        self.pool.give_back(self.sequences[at].pages)
        self.rings.give_back(self.sequences[at].ring)
        self.sequences[at] = self.begin()

    def chunk(self, one: Grown) -> int:
        """Rows up to a place of interest, or any number of them."""
        edges = [edge + by for edge in (self.window, 2 * self.window, one.length // 8 * 8 + 8) for by in (-1, 0, 1)]
        ahead = [edge - one.length for edge in edges if one.length < edge]
        return min(self.rng.choice([1, 9, self.rng.randint(1, 96), *ahead]), LIMITS.max_model_len - one.length)

    def step(self) -> None:
        """Some sequences append a chunk, then all that have any context draft a block."""
        for at in range(len(self.sequences)):
            if self.sequences[at].length == LIMITS.max_model_len:
                self.end(at)
        grow = [(one, one.length, self.chunk(one)) for one in self.rng.sample(self.sequences, self.rng.randint(1, 3))]
        features = torch.cat([one.features[start : start + count] for one, start, count in grow])
        for one, _, count in grow:
            one.length += count
        drafting = [one for one in self.sequences if one.length]
        out = []
        for model, ringed in ((self.ring, True), (self.whole, False)):
            spans = [Span(one.pages, start, count, one.ring * ringed) for one, start, count in grow]
            blocks = [Anchor(one.pages, 7, one.length, one.ring * ringed) for one in drafting]
            inputs = pack_blocks(range(len(features)), spans, blocks, LIMITS)
            out.append(model.run(inputs | features_as_taps(model.config, features)))
        for name in ("draft_ids", "scores"):
            torch.testing.assert_close(out[0][name], out[1][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("convention", [WINDOW_ANCHORED, WINDOW_RELATIVE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 7, 8, 9, 40, 96, 500])
def test_a_ring_drafts_what_whole_contexts_do(weights, kind, window, convention):
    """Windows in a page, on its edges, longer than any context; chunks longer than the ring; pages used again."""
    config, tensors = config_of(weights, kind, window, convention, KINDS[kind]), [weights[kind][1]]
    options = {"regions": window not in (8, 40)}  # there every layer, else ops
    ring = Model(model_of(config), LIMITS, FLOAT32, tensors, **options)
    with whole_contexts():
        whole = Model(model_of(config), LIMITS, FLOAT32, tensors, **options)
    assert (ring.ring_pages, whole.ring_pages) == (min(-(-window // 8) + 1, 12), 0)
    growth = Growth(ring, whole, seed=window)
    for _ in range(12):
        growth.step()


def test_what_rings_add_to_a_contract(weights):
    """Nothing where no layer slides; and nothing is left of whole contexts where all do."""

    def inputs(*layers: str) -> dict[str, str]:
        tree = model_of(config_of(weights, "dflash2", 12, WINDOW_ANCHORED, layers))
        return {spec.name: str(spec) for spec in tree.author(LIMITS, FLOAT32, backend()).contract().inputs}

    none, mixed, every = inputs(FULL, FULL), inputs(SLIDING, FULL), inputs(SLIDING, SLIDING)
    assert not [text for text in none.values() if "ring" in text or "[XR" in text]
    rings = {
        "ring_write_order int32[CR]",
        "ring_write_offset int32[XR]",
        "ring_write_cumulative int32[XR+1]",
        "ring_page_table int32[B, 3]",
        "ring_start int32[B]",
    }
    caches = {f"cache.layers.0.{name} float32[XR, 2, 8, 16]" for name in ("key", "value")}
    assert set(mixed.values()) - set(none.values()) == rings | caches
    assert mixed.keys() - every.keys() == {"write_order", "write_offset", "write_cumulative", "page_table"}
