"""Drafts drawn in the drafters' networks: from which law, that it is told, and that greedy drafts are a case of it.

Scores given the drafts before them are computed in float64 here, from the goldens' hidden states and logits.
"""

from __future__ import annotations

import pytest
import torch
from support.drafters import TENSORS, VARIANTS, Converted, assert_close, draft, golden, load

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.registry import model_of
from glmspec.runtime.model import Model

NAMES = [
    "dflash",
    "dflash, fewer tokens, from the anchor",
    "dspark",
    "dspark without confidence",
    "dspark gated, fewer tokens",
    "dspark rnn, fewer tokens, not from the anchor",
    "dspark without a Markov head",
    "dflash2",
    "dflash2, all are candidates",
    "dflash2, one candidate",
]
REGIONS = pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    return Converted(tmp_path_factory.mktemp("drafters"))


def sampled(converted: Converted, name: str, **options) -> Model:
    config, tensors = converted(name)
    return load(model_of(config, sampled=True), tensors, **options)


def draw(model: Model, name: str, temperature: list[float], seed: int, blocks: list[int] | None = None) -> dict:
    uniform = torch.rand(len(temperature), model.config.num_drafts, generator=torch.Generator().manual_seed(seed))
    heat = torch.tensor(temperature)
    return draft(model, name, blocks, draft_temperature=heat, draft_uniform=uniform) | {"uniform": uniform}


def scores_given(name: str, config: DrafterConfig, tensors: dict, drafts_BJ: torch.Tensor) -> tuple:
    """Target ids [B, J, K] that could be drafted and their scores, float64, for these drafts before them."""
    weights = {key: tensor.double() for key, tensor in tensors.items() if tensor.is_floating_point()}
    hidden, logits = golden(name, "hidden").double(), golden(name, "logits").double()
    previous = torch.cat([golden(name, "anchors").unsqueeze(1), drafts_BJ[:, :-1]], 1).long()
    drafting = hidden[:, config.first_draft_row :]
    if config.selector:
        ids = logits.topk(config.selector.top_k).indices.sort(-1).values
        head = {key.removeprefix("candidate_selector."): one for key, one in weights.items() if "selector" in key}
        query = head["predecessor_codebook"][previous] * (drafting @ head["hidden_projection.weight"].T)
        return ids, logits.gather(2, ids) + torch.einsum("bja,bjka->bjk", query, head["successor_codebook"][ids])
    if config.markov:
        logits = logits + _features(config, weights, previous, hidden) @ weights["markov_head.markov_w2.weight"].T
    ids = torch.arange(config.draft_vocab_size) + tensors.get("d2t", torch.zeros(1, dtype=torch.int32))
    return ids.expand_as(logits), logits


def _features(
    config: DrafterConfig, weights: dict, previous_BJ: torch.Tensor, hidden_BRD: torch.Tensor
) -> torch.Tensor:
    """What W2 is applied to, [B, J, A]."""
    first = config.first_draft_row
    embedding = weights["markov_head.markov_w1.weight"][previous_BJ]
    if config.markov.type == "vanilla":
        return embedding
    if config.markov.type == "gated":
        gate = torch.cat([hidden_BRD[:, first:], embedding], 2) @ weights["markov_head.gate_proj.weight"].T
        return (gate + weights["markov_head.gate_proj.bias"]).sigmoid() * embedding
    embedding = torch.cat([embedding[:, :first], embedding], 1)  # the anchor precedes its own row too
    state, features = torch.zeros_like(embedding[:, 0]), []
    for row in range(config.block_size):
        given = torch.cat([state, embedding[:, row], hidden_BRD[:, row]], 1)
        joint = given @ weights["markov_head.joint_proj.weight"].T + weights["markov_head.joint_proj.bias"]
        gate, candidate, output = joint.chunk(3, 1)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        features.append(output.tanh())
    return torch.stack(features[first:], 1)


def ids_of(found: dict, config: DrafterConfig) -> torch.Tensor:
    """Target ids of q's columns."""
    return found["q_ids"] if "q_ids" in found else torch.arange(config.vocab_size).expand_as(found["q"])


@pytest.mark.parametrize("name", NAMES)
@REGIONS
def test_at_temperature_0_drafts_are_greedy_and_q_is_certain(converted, name, regions):
    config, tensors = converted(name)
    greedy = draft(load(config, tensors, regions=regions), name)
    found = draw(sampled(converted, name, regions=regions), name, [0.0] * 3, seed=1)
    assert found["draft_ids"].tolist() == greedy["draft_ids"].tolist() == golden(name, "draft_ids").tolist()
    assert {key for key in found if not key.startswith("q")} - {"uniform"} == greedy.keys()
    for key in greedy:
        torch.testing.assert_close(found[key], greedy[key], rtol=0, atol=0)
    certain = (ids_of(found, config) == found["draft_ids"].unsqueeze(2)).float()
    assert torch.equal(found["q"], certain) and torch.equal(certain.sum(2), torch.ones(certain.shape[:2]))


@pytest.mark.parametrize("name", NAMES)
@REGIONS
def test_q_is_what_drafts_were_drawn_from(converted, name, regions):
    """Greedy, cool and hot blocks at once, against float64."""
    config, tensors = converted(name)
    model, temperature = sampled(converted, name, regions=regions), [0.0, 0.6, 1.7]
    for seed in range(4):
        found = draw(model, name, temperature, seed)
        ids, scores = scores_given(name, config, tensors, found["draft_ids"])
        assert torch.equal(ids_of(found, config), ids.to(torch.int32))
        for block, heat in enumerate(temperature):
            q, expected = found["q"][block], torch.zeros_like(scores[block])
            if heat:
                expected = (scores[block] / heat).softmax(-1)
            else:
                expected.scatter_(1, scores[block].argmax(-1, keepdim=True), 1.0)
            assert_close(q, expected.float())
            assert_close(q.sum(-1), torch.ones(len(q)))
            passed = q.double().cumsum(-1) <= found["uniform"][block].double().unsqueeze(1) * q.double().sum(-1, True)
            assert found["draft_ids"][block].tolist() == ids[block].gather(1, passed.sum(-1, True)).squeeze(1).tolist()
        if "margin" in found:  # says nothing of the draft itself
            best = scores.sort(descending=True).values
            second = best[..., min(1, best.shape[2] - 1)]
            assert_close(found["margin"], (best[..., 0] - second).float())
        assert_close(found["scores"], scores.amax(-1).float())


@pytest.mark.parametrize("name", ["dflash, fewer tokens, from the anchor", "dspark gated", "dspark rnn", "dflash2"])
def test_50000_draws_follow_q(converted, name):
    """Chi-square of what was drawn against the sum of the laws it was drawn from, draft by draft."""
    model, blocks, runs = sampled(converted, name), 5000, 10
    config = model.config
    drawn, expected = torch.zeros(2, config.num_drafts, config.vocab_size, dtype=torch.float64)
    for seed in range(runs):
        found = draw(model, name, [1.3] * blocks, seed, blocks=[1] * blocks)
        ids = ids_of(found, config).long()
        drawn.scatter_add_(1, found["draft_ids"].T.long(), torch.ones(config.num_drafts, blocks, dtype=torch.float64))
        expected.scatter_add_(1, ids.transpose(0, 1).flatten(1), found["q"].double().transpose(0, 1).flatten(1))
    assert drawn.sum() == runs * blocks * config.num_drafts
    for row in range(config.num_drafts):
        likely = expected[row] >= 5
        assert drawn[row][expected[row] == 0].sum() == 0
        counts, wanted = drawn[row][likely], expected[row][likely]
        freedom = len(counts) - 1
        assert freedom >= 4 and ((counts - wanted) ** 2 / wanted).sum() < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_laws_and_noise_are_there_only_when_asked_for(converted, name):
    config, tensors = converted(name)
    plain, asked = load(config, tensors).contract, sampled(converted, name).contract
    added = [spec for spec in asked.inputs if spec not in plain.inputs]
    assert [(spec.name, spec.dims) for spec in added] == [
        ("draft_temperature", ("B",)), ("draft_uniform", ("B", config.num_drafts)),
    ]  # fmt: skip
    columns = config.selector.top_k if config.selector else config.draft_vocab_size
    probs = {spec.name: (spec.dtype, spec.dims) for spec in asked.outputs if spec not in plain.outputs}
    expected = {"q": ("float32", ("B", config.num_drafts, columns))}
    if config.selector or config.reduced_vocabulary:
        expected["q_ids"] = ("int32", ("B", config.num_drafts, columns))
    assert probs == expected
    assert set(NAMES) <= VARIANTS.keys() and f"{name}/scores" in TENSORS
