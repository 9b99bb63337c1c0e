"""What is shipped under assets/: small enough, and really trained."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from support.models import ASSETS

from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.request import Request

LIMIT_BYTES = 12 * 2**20


@pytest.fixture(scope="module")
def prompts() -> list[dict]:
    return [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def answers(tiny_engines, prompts) -> list[list[int]]:
    engine = Engine(tiny_engines, speculate=False)
    requests = [Request(prompt_ids=tuple(engine.tokenizer.encode(one["prompt"])), max_tokens=64) for one in prompts]
    return [job.answer.tokens for job in answer_all(engine, requests)]


def test_the_assets_stay_small():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= LIMIT_BYTES


def test_the_verifier_says_different_things(answers):
    """An under-trained model repeats one token or one answer, and then every speculation test is idle."""
    assert len({tuple(tokens) for tokens in answers}) >= 55
    most_common = [Counter(tokens).most_common(1)[0][1] / len(tokens) for tokens in answers]
    assert sum(most_common) / len(most_common) < 0.35
    assert len({token for tokens in answers for token in tokens}) >= 60


def test_the_verifier_answers_right(tiny_engines):
    """Held-out questions with one right answer."""
    engine = Engine(tiny_engines, speculate=False)

    def ask(content: str) -> str:
        chat = engine.tokenizer.chat([{"role": "user", "content": content}])
        ids = tuple(engine.tokenizer.encode(chat, templated=True))
        return engine.answer(Request(prompt_ids=ids, max_tokens=80))[0].text

    assert ask("Count from 31 to 40.") == "31, 32, 33, 34, 35, 36, 37, 38, 39, 40"
    assert ask("Who are you?").startswith("I am a tiny model.")


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_drafts_are_worth_verifying(tiny_engines, prompts, answers, drafter):
    """The trained drafters on held-out prompts: a wrong row, offset or mask shows here and nowhere else."""
    engine = Engine(tiny_engines, drafter)
    requests = [Request(prompt_ids=tuple(engine.tokenizer.encode(one["prompt"])), max_tokens=64) for one in prompts]
    jobs = answer_all(engine, requests)
    assert [job.answer.tokens for job in jobs] == answers
    pools: dict[str, list] = {"all": jobs}
    for one, job in zip(prompts, jobs, strict=True):
        pools.setdefault(one["kind"], []).append(job)
    assert len(pools) == 5
    for kind, members in pools.items():
        steps = sum(job.stats.num_steps for job in members)
        accepted = sum(job.stats.num_accepted for job in members)
        assert 1 + accepted / steps >= (3.0 if kind == "all" else 2.5), kind
