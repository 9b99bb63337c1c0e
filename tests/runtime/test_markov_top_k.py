"""DSpark drafters whose Markov head biases a row's best logits alone."""

from __future__ import annotations

import pytest
import torch
from support.drafters import Converted, assert_close, draft, golden, load

from glmspec.build.errors import ConfigError
from glmspec.build.models.registry import model_of

NAMES = ["dspark", "dspark without confidence", "dspark, fewer tokens", "dspark, not from the anchor"]
REGIONS = pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    return Converted(tmp_path_factory.mktemp("drafters"))


def drafted(converted: Converted, name: str, top_k: int | None, regions: bool, noise: bool = False) -> dict:
    """A golden's blocks; noise: a greedy, a cool and a hot one."""
    config, tensors = converted(name)
    tree = model_of(config, sampled=noise, markov_top_k=top_k)
    g = torch.Generator().manual_seed(1)
    uniform = torch.rand(3, config.num_drafts, generator=g)
    more = {"draft_temperature": torch.tensor([0.0, 0.6, 1.7]), "draft_uniform": uniform} if noise else {}
    return draft(load(config, tensors, tree=tree, regions=regions), name, **more)


@pytest.mark.parametrize("name", NAMES)
@REGIONS
def test_all_tokens_as_candidates_are_the_full_walk(converted, name, regions):
    config, _ = converted(name)
    found = drafted(converted, name, config.draft_vocab_size, regions)
    full = drafted(converted, name, None, regions)
    assert found.keys() == full.keys()
    assert found["draft_ids"].tolist() == full["draft_ids"].tolist() == golden(name, "draft_ids").tolist()
    for key in found.keys() - {"draft_ids"}:
        assert_close(found[key], full[key])


@pytest.mark.parametrize("name", NAMES)
@REGIONS
def test_all_tokens_as_candidates_are_drawn_from_the_full_laws(converted, name, regions):
    config, _ = converted(name)
    found = drafted(converted, name, config.draft_vocab_size, regions, noise=True)
    full = drafted(converted, name, None, regions, noise=True)
    assert found["draft_ids"].tolist() == full["draft_ids"].tolist()
    assert_close(found["q"], full["q"])
    whole = torch.arange(config.draft_vocab_size, dtype=torch.int32).expand_as(full["q"])
    assert torch.equal(found["q_ids"], full["q_ids"] if config.reduced_vocabulary else whole)


@pytest.mark.parametrize("name", NAMES)
@REGIONS
def test_drafts_are_the_best_of_few_candidates(converted, name, regions):
    """Step by step: the four best logits of a row, biased by the draft before."""
    config, tensors = converted(name)
    w1, w2 = (tensors[f"markov_head.markov_{part}.weight"].float() for part in ("w1", "w2"))
    shift = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int32))
    found = drafted(converted, name, 4, regions)
    previous = golden(name, "anchors").long()
    for step in range(config.num_drafts):
        best = golden(name, "logits")[:, step].topk(4)
        score = best.values + (w2[best.indices] @ w1[previous].unsqueeze(2)).squeeze(2)
        chosen = best.indices.gather(1, score.argmax(1, keepdim=True))[:, 0]
        previous = chosen + shift[chosen]
        assert found["draft_ids"][:, step].tolist() == previous.tolist()
        assert_close(found["scores"][:, step], score.amax(1))
    assert found["draft_ids"].tolist() != golden(name, "draft_ids").tolist() or config.reduced_vocabulary


@pytest.mark.parametrize(
    ("name", "top_k", "reason"),
    [
        ("dspark gated", 4, "gated head"),
        ("dspark rnn", 4, "rnn head"),
        ("dspark", 0, "found 0"),
        ("dspark", 65, "found 65, of 64"),
        ("dspark without a Markov head", 4, "no Markov head"),
        ("dflash2", 4, "a dflash2 drafter"),
    ],
)
def test_what_has_no_such_walk_says_so(converted, name, top_k, reason):
    with pytest.raises(ConfigError, match=f"markov_top_k: .*{reason}"):
        model_of(converted(name)[0], markov_top_k=top_k)
