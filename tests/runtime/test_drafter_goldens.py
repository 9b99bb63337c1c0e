"""The drafter networks on the executor against golden tensors, in both window conventions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.models import GOLDENS, features_as_taps, golden_drafters

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.drafter_dialects import WINDOW_ANCHORED, WINDOW_RELATIVE
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.network.reader import read
from glmspec.network.trt import backend
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Anchor, pack_blocks
from glmspec.runtime.pages import Span

LIMITS = EngineLimits(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, page_size=8, segment_rows=9, block_rows=9
)
PAGES = [3, 1, 5, 2, 7]
RINGS = [[2, 3, 1], [6, 4, 5], [8, 7, 9]]  # three pages hold the window of 12 rows wherever it begins
CONVENTIONS = {"speculators": WINDOW_ANCHORED, "vllm": WINDOW_RELATIVE}
CONTEXT = 24


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, tuple[dict, dict[str, torch.Tensor]]]:
    return golden_drafters(tmp_path_factory.mktemp("goldens"))


def load(weights, kind: str, window: str, **options) -> Model:
    values, tensors = weights[kind]
    model = model_of(DrafterConfig.from_hf(values, kind, window))
    return Model(model, LIMITS, NetworkConfig(compute="float32"), [tensors], **options)


def final_norm(weights, kind: str) -> str:
    """Name of the drafter's hidden state after its final norm."""
    net = model_of(DrafterConfig.from_hf(weights[kind][0], kind)).author(
        LIMITS, NetworkConfig(compute="float32"), backend()
    )
    return [node.output.name for node in read(net.definition, net.backend).nodes if node.name.startswith("norm/")][-1]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
def test_block_equals_the_golden(weights, kind, convention, regions):
    golden = load_file(GOLDENS / f"{kind}_block_{convention}.safetensors")
    probe = () if regions else (final_norm(weights, kind),)
    model = load(weights, kind, CONVENTIONS[convention], regions=regions, probes=probe)
    block = Anchor(PAGES, int(golden["anchor"]), int(golden["position"]), RINGS[0])
    inputs = pack_blocks(range(CONTEXT), [Span(PAGES, 0, CONTEXT, RINGS[0])], [block], LIMITS)
    out = model.run(inputs | features_as_taps(model.config, golden["context_features"]))
    assert out["draft_ids"][0].tolist() == golden["draft_tokens"].tolist()
    for layer in range(model.config.num_hidden_layers):
        for cache, key in (("key", "ctx_k"), ("value", "ctx_v")):
            pages = RINGS[0] if model.config.layer_types[layer] == "sliding_attention" else PAGES
            rows = model.caches[0][f"cache.layers.{layer}.{cache}"][pages].transpose(1, 2).flatten(0, 1)[:CONTEXT]
            torch.testing.assert_close(rows, golden[f"{key}.{layer}"], rtol=1e-4, atol=1e-4)
    if probe:
        torch.testing.assert_close(out[probe[0]], golden["block_hidden"], rtol=1e-4, atol=1e-4)
    if "confidence" in golden:
        torch.testing.assert_close(out["confidence"][0], golden["confidence"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out["scores"][0], golden["markov_logits"].amax(-1), rtol=1e-4, atol=1e-4)
    else:
        torch.testing.assert_close(out["scores"][0], golden["candidate_scores"].amax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_a_ring_shorter_than_the_context_gives_the_golden(weights, kind, convention):
    """Pages of four rows: the ring has four of them, the context six, appended in two chunks over what others left."""
    limits = replace(LIMITS, page_size=4)
    values, tensors = weights[kind]
    config = DrafterConfig.from_hf(values, kind, CONVENTIONS[convention])
    model = Model(model_of(config), limits, NetworkConfig(compute="float32"), [tensors])
    for cache in model.caches[0].values():
        cache.fill_(1e3)
    golden = load_file(GOLDENS / f"{kind}_block_{convention}.safetensors")
    pages, ring = [9, 3, 1, 5, 2, 7], [4, 9, 2, 6]
    block = Anchor(pages, int(golden["anchor"]), int(golden["position"]), ring)
    for start, stop, blocks in ((0, 19, []), (19, CONTEXT, [block])):
        inputs = pack_blocks(range(stop - start), [Span(pages, start, stop - start, ring)], blocks, limits)
        out = model.run(inputs | features_as_taps(config, golden["context_features"][start:stop]))
    assert out["draft_ids"][0].tolist() == golden["draft_tokens"].tolist()
    scores = golden["markov_logits" if kind == "dspark" else "candidate_scores"].amax(-1)
    torch.testing.assert_close(out["scores"][0], scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "dspark_redvocab"])
def test_blocks_in_a_batch_do_not_see_each_other(weights, kind):
    """Context appended in pieces, three sequences at once, equals each sequence alone."""
    model = load(weights, kind, WINDOW_ANCHORED)
    config, g = model.config, torch.Generator().manual_seed(1)
    owned = [[1, 2, 3], [9, 4, 6], [5, 8, 7]]
    lengths, anchors = [19, 5, 11], [12, 40, 77]
    features = [torch.randn(n, len(config.taps) * config.hidden_size, generator=g) for n in lengths]

    def draft(which: list[int], pieces: int) -> list[list[int]]:
        for cache in model.caches[0].values():
            cache.zero_()
        for piece in range(pieces):
            parts = [torch.arange(lengths[i]).chunk(pieces)[piece] for i in which]
            spans = [Span(owned[i], int(part[0]), len(part), RINGS[i]) for i, part in zip(which, parts, strict=True)]
            stacked = torch.cat([features[i][part] for i, part in zip(which, parts, strict=True)])
            blocks = [Anchor(owned[i], anchors[i], lengths[i], RINGS[i]) for i in which] if piece == pieces - 1 else []
            inputs = pack_blocks(range(len(stacked)), spans, blocks, LIMITS)
            out = model.run(inputs | features_as_taps(config, stacked))
        return out["draft_ids"].tolist()

    alone = [draft([i], 1)[0] for i in range(3)]
    assert draft([0, 1, 2], 2) == alone
    assert draft([2, 0], 3) == [alone[2], alone[0]]
    assert all(0 <= token < config.vocab_size for block in alone for token in block)


@pytest.mark.parametrize("rank", [None, 0])
def test_reduced_vocabulary_drafts_are_target_ids(weights, rank):
    """By the Markov walk, and without one (rank 0), where each row's best is mapped on its own."""
    values, tensors = weights["dspark_redvocab"]
    if rank == 0:
        values = {**values, "markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False}
    model = load({"dspark_redvocab": (values, tensors)}, "dspark_redvocab", WINDOW_ANCHORED)
    reachable = set((torch.arange(48) + weights["dspark_redvocab"][1]["d2t"]).tolist())
    g = torch.Generator().manual_seed(2)
    features = torch.randn(20, 64, generator=g)
    blocks = [Anchor(PAGES, anchor, 20, RINGS[0]) for anchor in (3, 50, 95)]
    inputs = pack_blocks(range(20), [Span(PAGES, 0, 20, RINGS[0])], blocks, LIMITS)
    found = model.run(inputs | features_as_taps(model.config, features))["draft_ids"]
    drafts = set(found.flatten().tolist())
    assert drafts <= reachable and any(token >= 48 for token in drafts)


def test_plain_dflash_is_a_dspark_of_rank_0(weights):
    """The block alone: each row's best, from rows 1 and up."""
    values, tensors = weights["dspark"]
    block = values["transformer_layer_config"] | {"layer_types": ["full_attention"] * 3}
    plain = {
        **values,
        "transformer_layer_config": block,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
    }
    plain["speculators_config"] = json.loads(json.dumps(values["speculators_config"]).replace("8", "7"))
    off = {"markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False}
    drafts = []
    for changes in (off, {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "markov_rank": 0}):
        model = load({"dspark": (plain | changes, tensors)}, "dspark", WINDOW_ANCHORED)
        g = torch.Generator().manual_seed(4)
        features = torch.randn(CONTEXT, len(model.config.taps) * 64, generator=g)
        inputs = pack_blocks(range(CONTEXT), [Span(PAGES, 0, CONTEXT)], [Anchor(PAGES, 7, CONTEXT)], LIMITS)
        drafts.append(model.run(inputs | features_as_taps(model.config, features))["draft_ids"].tolist())
    assert drafts[0] == drafts[1] and len(drafts[0][0]) == 7
    assert model.config.kind == "dflash"
