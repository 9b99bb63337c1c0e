"""Public bug reports about speculative decoding, as small inputs (the numbers are the cases')."""

from __future__ import annotations

import random

import pytest
import torch

from glmspec.plugins import draw, reject
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling

INT = torch.int32


@pytest.fixture(scope="module")
def engines(golden_engines) -> dict[str, Engine]:
    """Random weights, which repeat themselves in a loop."""
    return {name: Engine(golden_engines, name, speculate=name is not None) for name in (None, "dspark", "dflash2")}


def prompt(length: int) -> tuple[int, ...]:
    return tuple(random.Random(length).choices(range(2, 90), k=length))


@pytest.mark.parametrize("mode", ["sampled", "argmax", "candidates"])
def test_25_frequencies_are_p_whatever_q_is(mode):
    """p = [.6, .3, .1], q = [.2, .5, .3], 50,000 draws; scoring argmax drafts with the softmax gives [.4, .6, 0]."""
    n, g = 50_000, torch.Generator().manual_seed(1)
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.2, 0.5, 0.3]])
    ids = {"sampled": [0, 1, 2], "argmax": [1], "candidates": [1, 2]}[mode]
    q_ids, q = torch.tensor([ids], dtype=INT), q[:, ids] / q[:, ids].sum()
    drafts = q_ids[0][draw.reference(q.expand(n, -1), torch.rand(n, generator=g)).long()]
    rows = torch.arange(2 * n).view(n, 2).to(INT)
    pairs = torch.stack([drafts, torch.zeros_like(drafts)], 1).flatten()
    _, tokens = reject.accepted(
        p.expand(2 * n, -1), pairs, torch.zeros(2 * n, dtype=INT), rows, torch.ones(n, dtype=INT),
        torch.rand(2 * n, generator=g), torch.rand(n, generator=g), torch.zeros(n, dtype=INT), q, q_ids,
    )  # fmt: skip
    found = torch.bincount(tokens[:, 0].long(), minlength=3) / n
    torch.testing.assert_close(found, p[0], atol=4.5 * 0.5 / n**0.5, rtol=0)


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_27_penalties_break_a_loop_in_the_same_way(engines, drafter):
    """A greedy model in a loop; frequency_penalty 2 with drafts and without."""
    loop = Request(prompt_ids=prompt(9), max_tokens=40, ignore_eos=True)
    penalized = Request(prompt_ids=prompt(9), max_tokens=40, ignore_eos=True, sampling=Sampling(frequency_penalty=2.0))
    plain, (expected, _) = engines[None].answer(loop)[0], engines[None].answer(penalized)
    assert expected.tokens != plain.tokens and len(set(expected.tokens)) > len(set(plain.tokens))
    assert engines[drafter].answer(penalized)[0].tokens == expected.tokens


@pytest.mark.parametrize("drafter", [None, "dspark", "dflash2"])
def test_27_min_tokens_ends_exactly_one_later(engines, drafter):
    """min_tokens 5 where an end token is preferred everywhere: it is the sixth token. The same for a stop token."""
    engine = engines[drafter]
    end = engine.end_ids[0] if engine.end_ids else 17
    sampling = Sampling(min_tokens=5, logit_bias=((end, 100.0),))
    request = Request(prompt_ids=prompt(12), max_tokens=20, stop_token_ids=(end,), sampling=sampling)
    answer, stats = engine.answer(request)
    assert len(answer.tokens) == 6 and answer.tokens[5] == end and answer.finish_reason == "stop"
    assert stats.num_accepted <= 5


def test_34_a_drafter_below_the_verifier_falls_silent_for_that_request(golden_engines, engines):
    """A drafter of 32 positions, prompts of 20, 31 and 60: the same answers, and drafts only below the limit."""
    engine = Engine(golden_engines, "dspark")
    engine.drafter.max_positions = 32
    requests = [Request(prompt_ids=prompt(n), max_tokens=15, ignore_eos=True) for n in (20, 31, 60)]
    jobs = answer_all(engine, requests)
    assert [job.answer.tokens for job in jobs] == [engines[None].answer(one)[0].tokens for one in requests]
    assert jobs[0].stats.num_steps > 0 and all(job.stats.num_steps == 0 for job in jobs[1:])
    assert all("knows 32 positions" in job.to_json(engine)["note"] for job in jobs)


def test_stop_tokens_add_to_the_model_s_own(engines):
    plain = engines[None].answer(Request(prompt_ids=prompt(9), max_tokens=20, ignore_eos=True))[0].tokens
    stop = plain[6]
    for name in ("dspark", "dflash2"):
        request = Request(prompt_ids=prompt(9), max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
        answer = engines[name].answer(request)[0]
        assert answer.tokens == plain[: plain.index(stop) + 1] and answer.finish_reason == "stop"
