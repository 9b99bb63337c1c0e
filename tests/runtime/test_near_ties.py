"""Where two tokens nearly tie: what other rows of a step may change, and how far.

A row's logits move by roundings with the rows beside it, so plain, drafted and batched runs may choose otherwise where
the best two are closer than that, and nowhere else. Ties are constructed: by a bias that makes up for what the second
best lacks, and by a second token with the very row of another.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.models import ASSETS

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.progress import Progress
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.request import Answer, Request, TokenLogprob
from glmspec.runtime.sampling import Sampling

NEAR_TIE = 2e-4  # of log-probabilities, in float32; docs/speculation.md states it
TOKENS, AT = 16, 6  # of an answer; the place where a bias makes a tie
TWINS = dict(enumerate(b" ,e\n", 2))  # control characters get the rows of these, and come first among equals


def prompts(engine: Engine, count: int) -> list[tuple[int, ...]]:
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines()
    return [tuple(engine.tokenizer.encode(json.loads(line)["prompt"])) for line in lines[: 9 * count : 9]]


def asked(prompt: tuple[int, ...], **sampling) -> Request:
    return Request(prompt_ids=prompt, max_tokens=TOKENS, ignore_eos=True, sampling=Sampling(logprobs=20, **sampling))


def ahead(answer: Answer, bias: dict[int, float]) -> list[float]:
    """How far the best was ahead of the second best, row by row."""
    made = []
    for one in answer.logprobs:
        best, second, *_ = sorted((value + bias.get(token, 0.0) for token, value in one.best), reverse=True)
        made.append(best - second)
    return made


def moved(one: TokenLogprob, two: TokenLogprob) -> float:
    """The most that a log-probability of the ten best differs."""
    values = dict(two.best)
    return max(abs(value - values[token]) for token, value in one.best[:10] if token in values)


def check(plain: Answer, found: Answer, bias: dict[int, float]) -> None:
    """What holds up to the first token that is another, and where that may be."""
    margins = ahead(plain, bias)
    for at, (mine, other) in enumerate(zip(plain.tokens, found.tokens, strict=True)):
        assert moved(plain.logprobs[at], found.logprobs[at]) <= NEAR_TIE / 2
        if mine != other:
            assert margins[at] <= NEAR_TIE
            break


@pytest.fixture(scope="module")
def engines(tiny_engines, tmp_path_factory) -> dict[str, dict[str, Engine]]:
    """The tiny models as they are, and with a token that has the row of another; plain and drafted."""
    home = tmp_path_factory.mktemp("ties")
    shutil.copytree(ASSETS / "tiny-verifier", home / "verifier")
    tensors = load_file(home / "verifier" / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[list(TWINS)] = head[list(TWINS.values())]
    save_file(tensors, home / "verifier" / "model.safetensors")
    drafters = [ASSETS / "tiny-dspark", ASSETS / "tiny-dflash2"]
    build_engines(home / "verifier", drafters, TARGETS["cpu"], BuildOptions(), home / "out", Progress(), check=False)
    return {"as they are": loaded(tiny_engines), "twin": loaded(home / "out")}


def loaded(folder: Path) -> dict[str, Engine]:
    return {"plain": Engine(folder, speculate=False)} | {name: Engine(folder, name) for name in ("dspark", "dflash2")}


@pytest.fixture(scope="module")
def cases(engines) -> dict[str, list[tuple[Request, Answer, dict[int, float]]]]:
    """Requests with plain answers, each alone, and the biases that make ties."""
    made = {}
    for kind, some in engines.items():
        plain, made[kind] = some["plain"], []
        for prompt in prompts(plain, 8):
            bias = {}
            if kind == "as they are":
                (_, best), (second, value) = plain.answer(asked(prompt))[0].logprobs[AT].best[:2]
                bias = {second: best - value}
            request = asked(prompt, logit_bias=tuple(bias.items()))
            made[kind].append((request, plain.answer(request)[0], bias))
    return made


@pytest.mark.parametrize("kind", ["as they are", "twin"])
@pytest.mark.parametrize("name", ["plain", "dspark", "dflash2"])
def test_answers_differ_at_near_ties_only(engines, cases, kind, name):
    """All in one batch, drafted or not, against each alone and plain: the same law, and other tokens only where the
    plain run's best two are nearly the same."""
    jobs = answer_all(engines[kind][name], [request for request, _, _ in cases[kind]])
    for (_, answer, bias), job in zip(cases[kind], jobs, strict=True):
        check(answer, job.answer, bias)


@pytest.mark.parametrize("kind", ["as they are", "twin"])
def test_ties_were_constructed(cases, kind):
    """Else nothing was tried."""
    assert sum(min(ahead(answer, bias)) <= NEAR_TIE for _, answer, bias in cases[kind]) >= 3


@pytest.mark.parametrize("name", ["plain", "dspark"])
def test_sampled_answers_have_the_same_law(engines, name):
    """At temperature 1 the chances of the tokens move as little, up to the first token that is another."""
    plain = engines["twin"]["plain"]
    made = [asked(prompt, temperature=1.0, seed=at) for at, prompt in enumerate(prompts(plain, 6))]
    jobs = answer_all(engines["twin"][name], made)
    for request, job in zip(made, jobs, strict=True):
        answer = plain.answer(request)[0]
        for mine, other, one, two in zip(
            answer.tokens, job.answer.tokens, answer.logprobs, job.answer.logprobs, strict=True
        ):
            assert moved(one, two) <= NEAR_TIE / 2
            if mine != other:
                break


def test_the_margin_is_the_documented_one():
    text = (ASSETS.parent / "docs" / "speculation.md").read_text()
    assert f"closer than {NEAR_TIE}" in text
