"""Every variation of the block drafters on the executor, op by op and layer by layer, against speculators' own classes.

`scripts/oracle/drafter_goldens.py` made the goldens, and says what is in them. Tensors come through the converter under
the names speculators saves. What speculators cannot express is compared with a transcription here.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from support.drafters import LIMITS, TENSORS, VARIANTS, Converted, assert_close, draft, golden, load

from glmspec.build.plan import build_plan
from glmspec.models.configs.drafter import DrafterConfig, Scaling
from glmspec.models.configs.drafter_dialects import WINDOW_ANCHORED
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import CONTEXT
from glmspec.network.reader import read
from glmspec.network.trt import backend


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    return Converted(tmp_path_factory.mktemp("drafters"))


def norm_of(config: DrafterConfig) -> str:
    """Name of the block's hidden state after the final norm."""
    net = model_of(config).author(LIMITS, NetworkConfig(compute="float32"), backend())
    return [node.output.name for node in read(net.definition, net.backend).nodes if node.name.startswith("norm/")][-1]


@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_drafter_equals_speculators(converted, name, regions):
    config, tensors = converted(name)
    assert config.window == WINDOW_ANCHORED
    probe = norm_of(config)
    model = load(config, tensors, regions=regions, probes=() if regions else (probe,))
    found = draft(model, name)
    if not regions:
        assert_close(found[probe].view_as(golden(name, "hidden")), golden(name, "hidden"))
    assert_close(found["scores"], golden(name, "scores").amax(-1))
    assert found["draft_ids"].tolist() == golden(name, "draft_ids").tolist()
    assert ("confidence" in found) == (f"{name}/confidence" in TENSORS) == ("margin" not in found)
    if "confidence" in found:
        assert_close(found["confidence"], golden(name, "confidence"))
    else:
        best = golden(name, "scores").sort(descending=True).values
        assert_close(found["margin"], best[..., 0] - best[..., min(1, best.shape[2] - 1)])


def test_the_goldens_tell_variations_apart():
    """No two have the same drafts: each shows what it is named after."""
    drafts = {json.dumps(golden(name, "draft_ids").tolist()): name for name in VARIANTS if name not in SAME}
    assert len(drafts) == len(VARIANTS) - len(SAME)
    for name, other in SAME.items():
        assert golden(name, "draft_ids").tolist() == golden(other, "draft_ids").tolist()


# Variations that draft what another one drafts: the confidence differs, or a head of rank 0 is none.
SAME = {
    "dspark without confidence": "dspark",
    "dspark rnn, confidence from hidden": "dspark rnn",
    "dspark without heads": "dflash",
    "dspark without a Markov head": "dflash from the anchor",
}


# -- what speculators cannot express --------------------------------------------------------------


@pytest.mark.parametrize("name", ["dflash", "dspark gated"])
@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
def test_logits_are_multiplied_then_capped_then_biased(converted, name, regions):
    """speculators has no such keys. Only the head differs, so logits follow from the golden's; so does the bias of the
    first draft, whose predecessor is the anchor whatever is drafted."""
    config, tensors = converted(name)
    model = load(replace(config, scaling=Scaling(logits=2.5, cap=1.5)), tensors, regions=regions)
    before = golden(name, "logits")
    logits = 1.5 * torch.tanh(before * 2.5 / 1.5)
    scores = draft(model, name)["scores"]
    assert_close(scores[:, 0], (logits + golden(name, "scores") - before)[:, 0].amax(-1))
    if name == "dflash":
        assert_close(scores, logits.amax(-1))


@pytest.mark.parametrize("scaling", [Scaling(), Scaling(logits=2.5, cap=1.5)], ids=["plain", "scaled"])
@pytest.mark.parametrize("vocabulary", [64, 24])
@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
def test_a_selector_over_fewer_tokens_or_scaled_logits(converted, scaling, vocabulary, regions):
    """speculators' DFlash2 wants the whole vocabulary: a transcription, with the reduced head of another variation."""
    config, tensors = converted("dflash2")
    if vocabulary == 24:
        fewer = converted("dspark, fewer tokens")[1]
        codes = tensors["candidate_selector.successor_codebook"][:24]
        tensors = {**tensors, "lm_head.weight": fewer["lm_head.weight"], "d2t": fewer["d2t"]}
        tensors["candidate_selector.successor_codebook"] = codes
    config = replace(config, draft_vocab_size=vocabulary, scaling=scaling)
    found = draft(load(config, tensors, regions=regions), "dflash2")
    logits = golden("dflash2", "hidden") @ tensors["lm_head.weight"].float().T * scaling.logits
    logits = logits if scaling.cap is None else scaling.cap * torch.tanh(logits / scaling.cap)
    names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    predecessors, successors, projection = (tensors[f"candidate_selector.{name}"].float() for name in names)
    projected = golden("dflash2", "hidden") @ projection.T
    offset = tensors.get("d2t", torch.zeros(vocabulary, dtype=torch.int32))
    for block, previous in enumerate(golden("dflash2", "anchors").tolist()):
        for at, row in enumerate(range(1, config.block_size)):
            unary, ids = logits[block, row].topk(config.selector.top_k)
            query = predecessors[previous] * projected[block, row]
            scores = unary + successors[ids] @ query
            best = ids[scores.argmax()]
            previous = int(best + offset[best])
            assert_close(found["scores"][block, at], scores.max())
            assert int(found["draft_ids"][block, at]) == previous


def test_embeddings_are_scaled(converted):
    """The block's embeddings times a factor are another table's."""
    config, tensors = converted("dflash")
    factor = replace(config, scaling=Scaling(embedding=3.0))
    table = {**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"].float() * 3}
    found, expected = draft(load(factor, tensors), "dflash"), draft(load(config, table), "dflash")
    assert_close(found["scores"], expected["scores"])
    assert (found["scores"] - golden("dflash", "scores").amax(-1)).abs().max() > 0.1


def test_neutral_factors_add_no_layer(converted):
    config, _ = converted("dflash2")
    values = VARIANTS["dflash2"]["config"]
    neutral = {"input_embedding_scale": 1, "output_multiplier": 1.0, "final_logit_softcapping": None}
    names = [
        [node.name for node in _nodes(DrafterConfig.from_hf(one, "DIR"))] for one in (values, {**values, **neutral})
    ]
    assert names[0] == names[1] and not any("tanh" in name for name in names[0])
    assert any("tanh" in node.name for node in _nodes(replace(config, scaling=Scaling(cap=2.0))))


def _nodes(config: DrafterConfig):
    net = model_of(config).author(LIMITS, NetworkConfig(compute="float32"), backend())
    return read(net.definition, net.backend).nodes


@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
@pytest.mark.parametrize("name", ["dspark rnn", "dspark, not from the anchor", "dflash2, as many taps as rows"])
@pytest.mark.parametrize("drafts", [1, 2])
def test_fewer_drafts_are_a_smaller_block(converted, name, drafts, regions):
    """Not a cut of the answers: rows left out are not missed where attention is causal, and are where it is full."""
    config, tensors = converted(name)
    whole = draft(load(config, tensors), name)
    found = draft(load(config.drafting(drafts), tensors, regions=regions), name)
    assert found["draft_ids"].shape == (3, drafts)
    bidirectional = "full_attention" in config.layer_types or config.sliding_window_non_causal
    same = torch.allclose(found["scores"], whole["scores"][:, :drafts], atol=1e-5)
    assert same != bidirectional
    causal = replace(config, layer_types=("sliding_attention",) * config.num_hidden_layers)
    causal = replace(causal, sliding_window_non_causal=False)
    whole = draft(load(causal, tensors), name)
    found = draft(load(causal.drafting(drafts), tensors, regions=regions), name)
    assert found["draft_ids"].tolist() == whole["draft_ids"][:, :drafts].tolist()
    assert_close(found["scores"], whole["scores"][:, :drafts])


@pytest.mark.parametrize("sampled", [False, True])
def test_every_variation_authors_in_bfloat16(converted, sampled):
    """With every factor too: dtypes fit wherever float32 is in between."""
    for name in VARIANTS:
        config = replace(converted(name)[0], scaling=Scaling(2.0, 0.5, 30.0))
        model_of(config, sampled=sampled).author(LIMITS, NetworkConfig(compute="bfloat16"), backend())


def test_a_drawing_recurrent_walk_compiles(converted):
    """For a GPU that is not here: what no other drafter has, at once."""
    config, _ = converted("dspark rnn, fewer tokens, not from the anchor")
    trt = backend("tensorrt_rtx")
    net = model_of(replace(config, scaling=Scaling(2.0, 0.5, 30.0)), sampled=True).author(
        LIMITS, NetworkConfig(compute="bfloat16"), trt
    )
    assert build_plan(net, LIMITS.profiles(0, config.sliding_window)[CONTEXT], "SM120").plan
