"""Sampled decoding end to end: the same law, and for drafts that are not drawn the very same tokens, with and without
drafts, alone and in company."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import ASSETS

from glmspec.core.errors import RequestError
from glmspec.network.limits import EngineLimits
from glmspec.runtime.accept import Acceptance, DraftBlock
from glmspec.runtime.adjustments import Adjustments
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.noise import Noise
from glmspec.runtime.request import Answer, Request
from glmspec.runtime.sampling import Sampling
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.settings import request_of
from glmspec.runtime.stats import SpecStats

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def engines(tiny_engines) -> dict[str, Engine]:
    made = {name: Engine(tiny_engines, name) for name in ("dspark", "dflash2")}
    return {"plain": Engine(tiny_engines, speculate=False)} | made


SETTINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, top_p=0.9, seed=2, logprobs=3),
    Sampling(temperature=1.5, top_k=20, min_p=0.02, seed=2**63),
    Sampling(repetition_penalty=1.3),
    Sampling(frequency_penalty=1.5, presence_penalty=0.5),
    Sampling(temperature=0.7, seed=5, repetition_penalty=0.8, presence_penalty=-1.0, min_tokens=30),
    Sampling(min_tokens=NEW_TOKENS, logit_bias=((101, 2.0), (116, -8.0))),
    Sampling(),
    Sampling(logprobs=0),
    Sampling(temperature=1.0, seed=0, bad_words=((32,), (116, 104))),
]


@pytest.fixture(scope="module")
def requests(engines) -> list[Request]:
    lines = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    ids = [tuple(engines["plain"].tokenizer.encode(text)) for text in lines[: 2 * len(SETTINGS)]]
    return [
        Request(prompt_ids=one, max_tokens=NEW_TOKENS, sampling=SETTINGS[at % len(SETTINGS)])
        for at, one in enumerate(ids)
    ]


@pytest.fixture(scope="module")
def plain(engines, requests) -> list[Answer]:
    """Plain decoding, one request at a time."""
    return [engines["plain"].answer(request)[0] for request in requests]


def same(found: Answer, expected: Answer) -> None:
    assert (found.tokens, found.text, found.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in one.best] == [token for token, _ in other.best]


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_drafts_change_no_token(engines, requests, plain, drafter):
    """Penalties see the drafts before them, noise belongs to positions: with drafts as without, in one batch."""
    jobs = answer_all(engines[drafter], requests)
    for job, expected in zip(jobs, plain, strict=True):
        same(job.answer, expected)
    assert sum(job.stats.num_accepted for job in jobs) > 100
    assert engines[drafter].stats.num_accepted < engines[drafter].stats.num_draft_tokens


def test_a_seed_is_the_answer_and_no_seed_is_fresh(engines, requests):
    request = replace(requests[0], sampling=Sampling(temperature=4.0))
    free = [engines["dspark"].answer(request)[0].tokens for _ in range(3)]
    assert len({tuple(tokens) for tokens in free}) == 3
    seeded = replace(request, sampling=Sampling(temperature=4.0, seed=11))
    assert engines["dspark"].answer(seeded)[0].tokens == engines["dflash2"].answer(seeded)[0].tokens


def test_the_settings_do_what_they_say(engines, requests, plain):
    """Not only the same with drafts as without: right."""
    for request, answer in zip(requests, plain, strict=True):
        sampling = request.sampling
        if sampling.min_tokens:
            ends = set(engines["plain"].end_ids)
            assert not ends & set(answer.tokens[: sampling.min_tokens]) and len(answer.tokens) >= sampling.min_tokens
        if sampling.bad_words:
            text = list(answer.tokens)
            assert 32 not in text and (116, 104) not in set(itertools.pairwise(text))
        assert len(answer.logprobs) == (0 if sampling.logprobs is None else len(answer.tokens))
        for one in answer.logprobs:
            assert len(one.best) == sampling.logprobs
            if one.best:
                assert one.best[0][1] >= one.logprob and list(one.best) == sorted(one.best, key=lambda b: -b[1])


def test_the_next_token_has_the_law_of_the_verifier_s_logits(engines, requests):
    """20,000 seeds at one place of one prompt: the acceptance networks against softmax of the logits themselves."""
    engine, seeds = engines["plain"], 20_000
    request = replace(requests[3], max_tokens=1)
    seen = {}
    verifier, run = engine.verifier, engine.verifier.run
    try:
        verifier.run = lambda inputs: seen.setdefault("out", run(inputs))
        engine.answer(request)
    finally:
        verifier.run = run
    z = seen["out"]["logits"][0].double() / 3.0
    order = z.argsort(descending=True)
    keep = order[: int((z.softmax(0)[order].cumsum(0) < 0.95).sum()) + 1]
    probs = torch.zeros_like(z)
    probs[keep] = z[keep].softmax(0)
    counts = torch.zeros_like(probs)
    for start in range(0, seeds, 1000):
        blocks = []
        for seed in range(start, start + 1000):
            seeded = replace(request, sampling=Sampling(temperature=3.0, top_p=0.95, seed=seed))
            blocks.append(DraftBlock(Sequence(seeded, None, 0, SpecStats(0)), ()))
        logits = {"logits": seen["out"]["logits"][:1].expand(1000, -1)}
        accepted = engine.loop.acceptance.accept(logits, blocks, {})
        counts += torch.bincount(torch.tensor([one.tokens[0] for one in accepted]), minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    some = probs * seeds > 5
    chi = ((counts[some] - probs[some] * seeds) ** 2 / (probs[some] * seeds)).sum()
    freedom = int(some.sum()) - 1
    assert freedom > 10 and (chi - freedom) / (2 * freedom) ** 0.5 < 4.5


# -- noise --------------------------------------------------------------------------------------------


def test_noise_belongs_to_seed_and_position():
    one, again, other = Noise(7), Noise(7), Noise(8)
    whole = one.draws(100, 9)
    assert all(again.draws(100 + at, 1)[0] == whole[at] for at in range(9))
    assert not np.intersect1d(whole, other.draws(100, 9)).size
    drafts, accepting, last = one.block(100, 8)
    fewer = again.block(100, 3)
    assert np.array_equal(fewer[0], drafts[:3]) and np.array_equal(fewer[1], accepting[:3]) and fewer[2] == last
    every = np.concatenate([whole, drafts, accepting, [last], *one.block(101, 8)[:2]])
    assert len(np.unique(every)) == len(every)


def test_every_bit_of_a_seed_counts():
    seeds = [*(1 << bit for bit in range(64)), 0, 2**64 - 1, 2**64 - 2]
    assert (
        len({tuple(Noise(seed).draws(5, 2)) for seed in seeds} | {Noise(seed).block(5, 1)[2] for seed in seeds}) == 134
    )


def test_noise_is_uniform_and_independent():
    numbers = np.stack([np.concatenate(Noise(seed).block(50, 4)[:2]) for seed in range(20_000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean(0) - 0.5).max() < 4.5 * (1 / 12 / 20_000) ** 0.5
    correlation = np.corrcoef(numbers.T) - np.eye(8)
    assert abs(correlation).max() < 4.5 / 20_000**0.5


# -- adjustments --------------------------------------------------------------------------------------


def test_entries_of_each_row_see_the_drafts_before_it():
    sampling = Sampling(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((9, 1.0),),
        bad_words=((3, 4), (7,)), min_tokens=3,
    )  # fmt: skip
    one = Adjustments(sampling, [1, 1, 2], {0})
    one.append([3])
    rows = one.rows([4, 4])
    values = [{int(t): (float(b), float(f), float(a)) for t, b, f, a in zip(r.tokens, r.before, r.factor, r.after, strict=True)} for r in rows]  # fmt: skip  # noqa: E501
    inf = float("inf")
    common = {1: (0, 2, 0), 2: (0, 2, 0), 3: (0, 2, -0.75), 7: (-inf, 1, 0), 9: (1, 1, 0)}
    assert values[0] == common | {0: (-inf, 1, 0), 4: (-inf, 1, 0)}
    assert values[1] == common | {0: (-inf, 1, 0), 4: (0, 2, -0.75)}
    assert values[2] == common | {4: (0, 2, -1.25)}
    one.append([4, 4])
    assert [one.rows([])[0].tokens.tolist()] == [rows[2].tokens.tolist()]


def test_bad_words_begin_in_the_answer():
    """Their lead in the prompt does not count, in the answer or in drafts it does."""
    one = Adjustments(Sampling(bad_words=((3, 4),)), [3], ())
    assert [row.tokens.tolist() for row in one.rows([3, 5])] == [[], [4], []]
    one.append([3])
    assert [row.tokens.tolist() for row in one.rows([5])] == [[4], []]


def test_stop_tokens_are_end_tokens_to_min_tokens(engines, requests):
    """A token that is no end token of the model, and another that is one and does not count."""
    plain = engines["plain"].answer(requests[7])[0].tokens
    stop = plain[2]
    request = replace(requests[7], stop_token_ids=(stop,), ignore_eos=True, sampling=Sampling(min_tokens=8))
    answer = engines["dspark"].answer(request)[0]
    assert stop not in answer.tokens[:8]
    assert engines["plain"].answer(request)[0].tokens == answer.tokens


# -- what the networks are given ----------------------------------------------------------------------


class Recorder:
    """Stands in for a network: keeps its inputs and accepts nothing."""

    def run(self, inputs):
        self.inputs = {name: tensor.tolist() for name, tensor in inputs.items() if name not in ("logits", "q")}
        count = len(inputs["draft_counts"])
        return {"accepted": torch.zeros(count, dtype=torch.int32), "tokens": torch.zeros(count, 4, dtype=torch.int32)}


def test_every_number_has_its_own_use():
    """Accepting numbers, the last one and the law's row of each draft, as `Noise` and the drafter have them."""
    limits = EngineLimits(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, page_size=8, segment_rows=8, block_rows=4
    )
    network = Recorder()
    acceptance = Acceptance({"reject": network}, limits, "block")
    settings = (Sampling(temperature=0.5, seed=3, top_k=60), Sampling(), Sampling(temperature=1.0, seed=4, top_k=5))
    sequences = [
        Sequence(Request(prompt_ids=(1,) * (5 + at), max_tokens=9, sampling=one), None, 20, SpecStats(3))
        for at, one in enumerate(settings)
    ]
    blocks = [
        DraftBlock(sequences[0], (7, 8), (0, 1)),
        DraftBlock(sequences[1], (9,), (3,)),
        DraftBlock(sequences[2], ()),
    ]
    acceptance.accept({"logits": torch.zeros(6, 60)}, blocks, {"q": torch.zeros(9, 60)})
    given = network.inputs
    _, accepting, last = Noise(3).block(4, 2)
    assert given["uniform"] == [*accepting.tolist(), 0, 0, 0, 0]
    assert given["last_uniform"] == [last, 0, Noise(4).draws(7, 1)[0]]
    assert last not in accepting
    assert given["q_rows"] == [0, 1, 0, 3, 0, 0] and given["verify_blocks"] == [1, 1, 1]
    assert given["draft_ids"] == [7, 8, 0, 9, 0, 0] and given["draft_counts"] == [2, 1, 0]
    assert given["block_rows"] == [[0, 1, 2, 2], [3, 4, 4, 4], [5, 5, 5, 5]]
    assert given["top_k"] == [0, 0, 0, 0, 0, 5]  # as many as there are is no limit
    assert given["temperature"] == [0.5, 0.5, 0.5, 0, 0, 1]


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": -1.0}, "temperature: found -1, expected 0 to 100"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"temperature": 1e-9}, "temperature: found 1e-09, expected 0 (greedy) or"),
        ({"top_p": 0.0}, "top_p: found 0"),
        ({"top_p": 1.5}, "top_p: found 1.5, expected 0 to 1"),
        ({"top_k": -1}, "top_k: found -1"),
        ({"top_k": 2000}, "top_k: found 2000, expected at most 1024"),
        ({"top_k": 2**64}, "top_k: found 18446744073709551616, expected at most 1024"),
        ({"temperature": 1e39}, "temperature: found 1e+39, expected 0 to 100"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty: found 1e-50"),
        ({"min_p": 2.0}, "min_p: found 2"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 2**64}, "seed: found 18446744073709551616"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: found 0, expected 0.01 to 100"),
        ({"frequency_penalty": 3.0}, "frequency_penalty: found 3, expected -2 to 2"),
        ({"presence_penalty": float("inf")}, "presence_penalty: found inf"),
        ({"min_tokens": -1}, "min_tokens: found -1"),
        ({"logprobs": 21}, "logprobs: found 21, expected 0 to 20"),
        ({"logit_bias": ((5000, 1.0),)}, "logit_bias: found token id 5000"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias: the same token twice"),
        ({"logit_bias": ((5, float("inf")),)}, "logit_bias: found a bias of inf, expected -10000 to 10000"),
        ({"logit_bias": tuple((n, 1.0) for n in range(1025))}, "found 1025 tokens and words, expected at most 1024"),
        ({"bad_words": ((),)}, "bad_words: found an empty word"),
        ({"bad_words": ((1, -2),)}, "bad_words: found token id -2"),
    ],
)
def test_settings_out_of_range_are_refused(changes, words):
    with pytest.raises(RequestError) as caught:
        Sampling(**changes).check(4096)
    assert words in str(caught.value)


def test_a_least_temperature_may_travel_as_float32():
    Sampling(temperature=float(np.float32(1e-4))).check(4096)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"temperature": 10**400}, "temperature: found a number of 401 digits"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias: found a number of 401 digits"),
        ({"logit_bias": {"1_0": 1}}, "'1_0' is no token id"),
        ({"logit_bias": '{"5": 1%s}' % ("0" * 400)}, "logit_bias: found a number of 401 digits"),
    ],
)
def test_numbers_beyond_reason_are_refused(said, words):
    with pytest.raises(RequestError) as caught:
        request_of([1], {"max_tokens": 3, **said}, None)
    assert words in str(caught.value)


def test_stop_tokens_that_leave_nothing_are_refused():
    with pytest.raises(RequestError, match="stop_token_ids: found 8 tokens, expected at most 7"):
        Request(prompt_ids=(1,), max_tokens=8, stop_token_ids=tuple(range(8))).check(8, 50, False)


def test_bad_words_also_after_a_space():
    """Where the tokenizer makes one other token of it."""
    words = {"no": [7], " no": [8], "so": [1], " so": [2, 3]}
    tokenizer = SimpleNamespace(encode=lambda text, templated: words[text])
    said = {"max_tokens": 3, "bad_words": ["no", "so"]}
    assert request_of([1], said, tokenizer).sampling.bad_words == ((7,), (8,), (1,))


def test_min_tokens_beyond_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens: found 9, expected at most max_tokens"):
        Request(prompt_ids=(1,), max_tokens=8, sampling=Sampling(min_tokens=9)).check(100, 50, False)
