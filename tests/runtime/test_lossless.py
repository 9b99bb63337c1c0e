"""Every drafter, greedy and drawn drafts, both ways of verifying: the same greedy answers, the verifier's own law."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import ASSETS, GOLDENS

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.progress import Progress
from glmspec.runtime.adaptive import Adaptive
from glmspec.runtime.cost_table import CostCurve, CostTable
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling

TOPK, WINDOW, PAGE = 48, 64, 16  # the tiny verifier's, the tiny drafters', the target cpu's
NEW_TOKENS = 36
DRAFTERS = ("dspark", "dflash2", "mtp")
# Rows cost about what a step's start does: most blocks are verified in part.
DEAR = Adaptive(costs=CostTable(CostCurve((1,), (1.0,)), CostCurve((1, 101), (0.2, 20.2))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The trained models with every drafter, by how drafts are chosen; two rows of chunks a sequence and step."""
    made = {}
    for way in ("greedy", "probabilistic"):
        made[way] = tmp_path_factory.mktemp(way) / "engines"
        options = BuildOptions(
            mtp=True, draft_sampling=way, max_model_len=320, max_num_seqs=6, max_num_batched_tokens=96
        )
        drafters = [ASSETS / "tiny-dspark", ASSETS / "tiny-dflash2"]
        build_engines(ASSETS / "tiny-verifier", drafters, TARGETS["cpu"], options, made[way], Progress(), check=False)
    return made


@pytest.fixture(scope="module")
def requests(folders) -> list[Request]:
    """Prompts that end around a page's end, around index_topk and around the window; their answers cross the rest."""
    engine = Engine(folders["greedy"], speculate=False)
    lines = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    text = engine.tokenizer.encode("".join(lines[12:20]))
    ends = [1, PAGE, *(edge + by for edge in (TOPK, WINDOW, 5 * PAGE) for by in (-1, 0, 1)), 150]
    return [Request(prompt_ids=tuple(text[:end]), max_tokens=NEW_TOKENS) for end in ends]


@pytest.fixture(scope="module")
def plain(folders, requests) -> list[list[int]]:
    engine = Engine(folders["greedy"], speculate=False)
    return [engine.answer(request)[0].tokens for request in requests]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("way", "adaptive"), [("greedy", None), ("probabilistic", None), ("probabilistic", DEAR)])
def test_greedy_answers_are_plain(folders, requests, plain, way, adaptive, drafter):
    """Mixed lengths in one batch, some sampled requests among them, which change nothing for the others."""
    engine = Engine(folders[way], drafter, verification="block", adaptive=adaptive)
    hot = [replace(one, sampling=Sampling(temperature=1.5, seed=at)) for at, one in enumerate(requests[::3])]
    jobs = answer_all(engine, [*requests, *hot])
    assert [job.answer.tokens for job in jobs[: len(requests)]] == plain
    assert engine.stats.num_accepted > len(requests) * NEW_TOKENS / 3
    if adaptive:
        whole = engine.stats.num_steps * engine.stats.num_spec_tokens
        assert 0.2 * whole < engine.stats.num_draft_tokens < 0.9 * whole


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_seed_is_the_answer_whatever_else_runs(folders, requests, drafter, method):
    """Drawn drafts: alone and in company, in another order, beside requests that come and go."""
    engine = Engine(folders["probabilistic"], drafter, verification=method)
    drawn = [
        replace(one, sampling=Sampling(temperature=2.0, top_p=0.98, seed=at, presence_penalty=0.2))
        for at, one in enumerate(requests[2:9])
    ]
    together = [job.answer.tokens for job in answer_all(engine, [*drawn, *requests])][: len(drawn)]
    assert 0 < engine.stats.num_accepted < engine.stats.num_draft_tokens
    assert [engine.answer(one)[0].tokens for one in drawn[::3]] == together[::3]
    assert [job.answer.tokens for job in answer_all(engine, [*requests[:3], *drawn[::-1]])][3:] == together[::-1]


def test_a_prompt_that_leaves_one_token_for_the_next_step(folders, requests):
    """One token beyond what a step takes, alone; in company it is cut elsewhere. The answer's first token is drawn
    without drafts in both."""
    engine = Engine(folders["probabilistic"], "dflash2")
    prompt = (requests[-1].prompt_ids * 2)[: engine.limits.max_num_batched_tokens + 1]
    drawn = [
        Request(prompt_ids=prompt, max_tokens=4, sampling=Sampling(temperature=4.0, seed=seed)) for seed in range(6)
    ]
    together = [job.answer.tokens for job in answer_all(engine, [*requests[:2], *drawn])][2:]
    assert [engine.answer(one)[0].tokens for one in drawn] == together


# -- the law, end to end ------------------------------------------------------------------------------

PROMPT, DRAWS, HEAT = (5, 17, 42, 8, 90, 33, 2, 61, 7), 1_500, 0.35


@pytest.fixture(scope="module")
def random_engines(tmp_path_factory) -> Path:
    """Random weights, whose drafts are mostly rejected; the reduced vocabulary among the drafters."""
    out = tmp_path_factory.mktemp("random") / "engines"
    drafters = [GOLDENS / "checkpoints" / name for name in ("dspark", "dflash2", "dspark_redvocab")]
    options = BuildOptions(draft_sampling="probabilistic", max_num_seqs=128, max_model_len=64)
    build_engines(GOLDENS / "checkpoints" / "verifier", drafters, TARGETS["cpu"], options, out, Progress(), check=False)
    return out


@pytest.fixture(scope="module")
def probs(random_engines) -> torch.Tensor:
    """The second token's law after PROMPT, over every first token, from the verifier's logits alone."""
    engine = Engine(random_engines, speculate=False)
    limits, vocab = engine.limits, engine.verifier.config.vocab_size
    pages = list(range(1, limits.pages_per_sequence + 1))
    least = limits.least_pages(engine.verifier.config.index_topk)

    def logits(tokens: list[int], start: int) -> torch.Tensor:
        rows = [Rows(Span(pages, start, len(tokens)), tokens, 1)]
        return engine.verifier.run(pack_rows(rows, limits, least))["logits"][0].double()

    first = (logits(list(PROMPT), 0) / HEAT).softmax(0)
    second = torch.stack([(logits([token], len(PROMPT)) / HEAT).softmax(0) for token in range(vocab)])
    return first @ second


@pytest.mark.parametrize(
    ("drafter", "method"),
    [("dspark", "standard"), ("dspark", "block"), ("dflash2", "block"), ("dspark-2", "standard")],
)
def test_the_second_token_has_its_law(random_engines, probs, drafter, method):
    """The first token comes from the prompt's row, the second from a block: 1,500 seeds, through the whole engine."""
    engine = Engine(random_engines, drafter, verification=method)
    requests = [
        Request(prompt_ids=PROMPT, max_tokens=4, ignore_eos=True, sampling=Sampling(temperature=HEAT, seed=1000 + seed))
        for seed in range(DRAWS)
    ]
    jobs = answer_all(engine, requests)
    counts = torch.bincount(torch.tensor([job.answer.tokens[1] for job in jobs]), minlength=len(probs)).double()
    expected = probs * DRAWS
    some = expected > 5
    rest = (counts[~some].sum() - expected[~some].sum()) ** 2 / expected[~some].sum()
    chi, freedom = ((counts - expected) ** 2 / expected)[some].sum() + rest, int(some.sum())
    assert freedom > 15 and (chi - freedom) / (2 * freedom) ** 0.5 < 4
    assert 0 < engine.stats.num_accepted < engine.stats.num_draft_tokens
