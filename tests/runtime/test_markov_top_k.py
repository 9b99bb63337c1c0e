"""DSpark drafters whose Markov head biases a row's best logits alone."""

from __future__ import annotations

import json

import pytest
import torch
from support.cli import done
from support.drafters import Converted, assert_close, draft, golden, load
from support.models import ASSETS

from glmspec.build.deployment import open_deployment
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.errors import ConfigError
from glmspec.models.registry import model_of
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Request

NAMES = ["dspark", "dspark without confidence", "dspark, fewer tokens", "dspark, not from the anchor"]
REGIONS = pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    return Converted(tmp_path_factory.mktemp("drafters"))


def drafted(converted: Converted, name: str, top_k: int | None, regions: bool, noise: bool = False) -> dict:
    """A golden's blocks; noise: a greedy, a cool and a hot one."""
    config, tensors = converted(name)
    tree = model_of(config.chosen(None, None, top_k), sampled=noise)
    g = torch.Generator().manual_seed(1)
    uniform = torch.rand(3, config.num_drafts, generator=g)
    more = {"draft_temperature": torch.tensor([0.0, 0.6, 1.7]), "draft_uniform": uniform} if noise else {}
    return draft(load(tree, tensors, regions=regions), name, **more)


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
        ("dspark gated", 4, "gated Markov head"),
        ("dspark rnn", 4, "rnn Markov head"),
        ("dspark", 0, "found 0"),
        ("dspark", 65, "found 65 .*expected 1 to 64"),
        ("dspark without a Markov head", 4, "no Markov head"),
        ("dflash2", 4, "a dflash2 drafter with no Markov head"),
    ],
)
def test_what_has_no_such_walk_says_so(converted, name, top_k, reason):
    with pytest.raises(ConfigError, match=f"--markov-top-k: .*{reason}"):
        converted(name)[0].chosen(None, None, top_k)


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_the_engine_answers_the_same(tmp_path, sampling):
    """From the command line to tokens: drafts are other ones, the verifier's answers are not."""
    common = ("engine", "--verifier", ASSETS / "tiny-verifier", "--target", "cpu", "--max-num-seqs", 2, "--no-validate")
    done(*common, "-o", tmp_path / "plain")
    drafters = ("--drafter", ASSETS / "tiny-dspark", "--drafter", ASSETS / "tiny-dflash2", "--markov-top-k", 4)
    done(*common, *drafters, "--draft-sampling", sampling, "-o", tmp_path / "few")
    request = Request(prompt_ids=tuple(b"The old man said"), max_tokens=24)
    expected, _ = Engine(tmp_path / "plain", speculate=False).answer(request)
    answer, stats = Engine(tmp_path / "few", "dspark").answer(request)
    assert answer.tokens == expected.tokens and stats.num_accepted > 0
    build = json.loads((tmp_path / "few" / "dspark" / "config.json").read_text())["build_config"]
    assert build["markov_top_k"] == 4
    probs = {"columns": 4, "candidates": True} if sampling == "probabilistic" else None
    assert build["law"] == probs
    assert (
        json.loads((tmp_path / "few" / "dflash2" / "config.json").read_text())["build_config"]["markov_top_k"] is None
    )


def test_with_no_markov_head_anywhere_it_is_refused():
    with pytest.raises(ConfigError, match="--markov-top-k: found 4 and no drafter with a Markov head among dflash2"):
        open_deployment(
            ASSETS / "tiny-verifier", (ASSETS / "tiny-dflash2",), TARGETS["cpu"], BuildOptions(markov_top_k=4)
        )
