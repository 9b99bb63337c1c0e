"""Speculation is lossless: at temperature 0 the answer is the verifier's own greedy answer, token for token."""

from __future__ import annotations

import json
import random

import pytest
import torch
from support.models import ASSETS, GOLDENS, reference_verifier, stable_topk, whole_contexts

from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import CACHE
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.model import Model
from glmspec.runtime.propose import BlockDrafter, Drafts
from glmspec.runtime.request import Request

NEW_TOKENS = 64
PROMPTS = 28


@pytest.fixture(scope="module")
def engines(tiny_engines) -> dict[str, Engine]:
    """The trained verifier plain and with each drafter."""
    return {
        "plain": Engine(tiny_engines, speculate=False),
        "dspark": Engine(tiny_engines, "dspark"),
        "dflash2": Engine(tiny_engines, "dflash2"),
    }


@pytest.fixture(scope="module")
def requests(engines) -> list[Request]:
    """Every other held-out prompt, most of them longer than index_topk."""
    lines = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    tokenizer = engines["plain"].tokenizer
    ids = [tuple(tokenizer.encode(text)) for text in lines[::2][:PROMPTS]]
    assert len(ids) == PROMPTS and sum(len(one) > engines["plain"].verifier.config.index_topk for one in ids) > 14
    return [Request(prompt_ids=one, max_tokens=NEW_TOKENS) for one in ids]


@pytest.fixture(scope="module")
def plain(engines, requests) -> list[list[int]]:
    """Plain greedy decoding."""
    return [job.answer.tokens for job in answer_all(engines["plain"], requests)]


def test_plain_decoding_alone_is_the_same(engines, requests, plain):
    for request, tokens in list(zip(requests, plain, strict=True))[::4]:
        assert engines["plain"].answer(request)[0].tokens == tokens


def test_plain_decoding_is_transformers_greedy(plain, requests):
    """The anchor of everything below: the verifier alone equals transformers' own generate."""
    model = reference_verifier(ASSETS / "tiny-verifier")
    for request, tokens in list(zip(requests, plain, strict=True))[:: PROMPTS // 5]:
        prompt = torch.tensor([request.prompt_ids])
        with torch.no_grad(), stable_topk():
            out = model.generate(
                prompt, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(prompt)
            )
        assert out[0, prompt.shape[1] :].tolist() == tokens


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_speculated_equals_plain_one_at_a_time(engines, requests, plain, drafter):
    found = [engines[drafter].answer(request)[0].tokens for request in requests]
    assert found == plain


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_speculated_equals_plain_all_at_once(engines, requests, plain, drafter):
    """Mixed lengths, prompt chunks beside verify blocks; what else runs never changes an answer."""
    jobs = answer_all(engines[drafter], requests)
    assert [job.answer.tokens for job in jobs] == plain


class ScriptedDrafter:
    """Stands in for a drafter: knows the true continuation and spoils it at one place of every block."""

    features: tuple[str, ...] = ()
    confident = True

    def __init__(self, real, truth: list[int], spoil_at: int) -> None:
        self.num_drafts, self.max_positions = real.num_drafts, real.max_positions
        self._vocab_size = real.model.config.vocab_size
        self._truth, self._spoil_at = truth, spoil_at

    def propose(self, features, kept, wanted) -> Drafts:
        count = self.num_drafts
        blocks = []
        for sequence in wanted:
            block = (self._truth[len(sequence.tokens) :] + [0] * count)[:count]
            if self._spoil_at < count:
                block[self._spoil_at] = (block[self._spoil_at] + 1) % self._vocab_size
            blocks.append(block)
        return Drafts(blocks, {}, (count, 1), torch.ones(len(blocks), count))


@pytest.mark.parametrize("spoil_at", range(9))
def test_a_draft_spoiled_anywhere_changes_nothing(tiny_engines, requests, plain, spoil_at):
    """At place k of every block k drafts are accepted and one is corrected; 8 spoils none."""
    engine = Engine(tiny_engines, "dspark")
    for index in (3, 11, 21):
        request, tokens = requests[index], plain[index]
        truth = list(request.prompt_ids) + tokens
        engine.loop.drafter = ScriptedDrafter(engine.drafter, truth, spoil_at)
        answer, stats = engine.answer(request)
        assert answer.tokens == tokens
        full = [accepted for accepted, steps in enumerate(stats.acceptance_histogram) for _ in range(steps)]
        assert max(full) == min(spoil_at, 8)
        assert all(accepted == spoil_at for accepted in full[1:]) or spoil_at == 8  # but for the last, shorter block


def test_random_weights_without_tokenizer(golden_engines):
    """Drafts of random drafters are nearly all rejected; prompts around the page boundaries; every drafter."""
    plain = Engine(golden_engines, speculate=False)
    generator = random.Random(5)
    requests = [
        Request(prompt_ids=tuple(generator.randrange(2, 95) for _ in range(length)), max_tokens=20)
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 90)
    ]
    expected = [job.answer for job in answer_all(plain, requests)]
    oracle = reference_verifier(GOLDENS / "checkpoints" / "verifier")
    for request, answer in zip(requests[1::3], expected[1::3], strict=True):
        prompt = torch.tensor([request.prompt_ids])
        with torch.no_grad(), stable_topk():
            out = oracle.generate(prompt, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert out[0, prompt.shape[1] :].tolist() == answer.tokens
    for name in ("dspark", "dflash2", "dspark-2"):
        found = [job.answer for job in answer_all(Engine(golden_engines, name), requests)]
        assert found == expected


def test_some_requests_of_a_batch_may_decline_speculation(engines, requests, plain):
    mixed = [
        Request(prompt_ids=one.prompt_ids, max_tokens=NEW_TOKENS, speculate=index % 2 == 0)
        for index, one in enumerate(requests[:12])
    ]
    jobs = answer_all(engines["dspark"], mixed)
    assert [job.answer.tokens for job in jobs] == plain[:12]
    assert [job.stats.num_steps > 0 for job in jobs] == [index % 2 == 0 for index in range(12)]


def test_the_limit_of_the_engine_ends_an_answer(engines):
    """A prompt just short of max_model_len: the answer fills it, with and without drafts, and stops with length."""
    limit = engines["plain"].limits.max_model_len
    ids = tuple((b"1, 2, 3, 4, 5, 6, 7, 8, 9. " * 200)[: limit - 13])
    answers = [
        engine.answer(Request(prompt_ids=ids, max_tokens=100, ignore_eos=True))[0] for engine in engines.values()
    ]
    assert {len(answer.tokens) for answer in answers} == {13}
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens


def test_a_drafter_falls_silent_beyond_its_reach(tiny_engines, requests, plain):
    """The drafter knows fewer positions than the verifier: no drafts past them, the same text, and it is not run for
    rows that it will never draft from."""
    engine = Engine(tiny_engines, "dspark")
    index = max(range(PROMPTS), key=lambda i: len(plain[i]))
    prompt = len(requests[index].prompt_ids)
    engine.drafter.model.run = counted = Counted(engine.drafter.model.run)
    for max_positions, most in ((prompt + 20, 20), (prompt + 7, 0)):
        engine.drafter.max_positions, counted.runs = max_positions, 0
        answer, stats = engine.answer(requests[index])
        assert answer.tokens == plain[index]
        assert (most > 0) == (stats.num_draft_tokens > 0) and stats.num_draft_tokens <= 8 * most
        assert counted.runs == stats.num_steps  # one a block, the prompt's rows with the first


class Counted:
    """A function that counts its calls."""

    def __init__(self, real) -> None:
        self.runs, self._real = 0, real

    def __call__(self, inputs):
        self.runs += 1
        return self._real(inputs)


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_rings_draft_what_whole_contexts_do(tiny_engines, requests, plain, drafter):
    """Prompts shorter and longer than the window of 64 rows, whose answers cross it and the ring of 80, several at
    once: not a draft differs from those of sliding layers that keep everything."""
    lengths = {index: len(one.prompt_ids) for index, one in enumerate(requests)}
    chosen = sorted(lengths, key=lengths.get)[1:25:3]
    assert lengths[chosen[0]] < 64 and any(64 < length < 80 for length in map(lengths.get, chosen))
    ringed, whole = Engine(tiny_engines, drafter), Engine(tiny_engines, drafter)
    config = ringed.drafter.model.config
    assert config.sliding_window == 64 and ringed.drafter.ring_pages == 5
    with whole_contexts():
        model = Model(model_of(config), whole.limits, NetworkConfig(compute="float32"), whole.drafter.model.weights)
    whole.loop.drafter, whole.scheduler.ring_pages = BlockDrafter(model, whole.limits), 0
    histograms = []
    for engine in (ringed, whole):
        jobs = answer_all(engine, [requests[index] for index in chosen])
        assert [job.answer.tokens for job in jobs] == [plain[index] for index in chosen]
        histograms.append([job.stats.acceptance_histogram for job in jobs])
    assert histograms[0] == histograms[1]
    assert sum(sum(one[4:]) for one in histograms[0]) > 20  # a drafter that knows its context is often right
    assert ringed.scheduler.rings.free == 5 * ringed.limits.max_num_seqs


def test_aborted_requests_leave_the_others_alone(engines, requests, plain):
    """Abort while waiting, in the prompt and between draft and verify; every page comes back."""
    engine = engines["dflash2"]
    free = (engine.scheduler.pool.free, engine.scheduler.rings.free)
    sequences = [engine.add(request) for request in requests[:14]]
    tokens: dict[int, list[int]] = {index: [] for index in range(14)}
    for step in range(400):
        if step in (1, 3, 6) and not sequences[step].finished:
            engine.abort(sequences[step])
            engine.abort(sequences[step])  # twice is harmless
        for sequence, delta in engine.step():
            tokens[sequences.index(sequence)] += delta.tokens
        if not engine.busy:
            break
    assert not engine.busy and (engine.scheduler.pool.free, engine.scheduler.rings.free) == free
    kept = [index for index in range(14) if sequences[index].finish_reason != "aborted"]
    assert len(kept) >= 11
    assert all(tokens[index] == plain[index] for index in kept)


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_the_drafter_knows_the_same_context_as_after_a_cold_start(tiny_engines, requests, plain, drafter):
    """Rows appended a few at a time, in a batch, equal those of one pass over the same tokens: no row is lost,
    doubled or shifted. (That would only lower acceptance, and show nowhere else.)"""
    rows = {}
    for name, company in (("warm", requests[4:7]), ("cold", [])):
        engine = Engine(tiny_engines, drafter)
        for other in company:  # before it in every packed step
            engine.add(other)
        request = requests[3]
        if name == "cold":
            request = Request(prompt_ids=request.prompt_ids + tuple(plain[3]), max_tokens=3, ignore_eos=True)
        sequence = engine.add(request)
        engine.step()
        owned = {"X": list(sequence.pages), "XR": list(sequence.ring)}
        while engine.busy:
            engine.step()
        count = len(requests[3].prompt_ids) + len(plain[3]) - 1 - 9  # the last block's rows are never appended
        rows[name] = {}
        for spec in engine.drafter.model.contract.of_role(CACHE):
            pages, tensor = owned[spec.dims[0]], engine.drafter.model.caches[0][spec.name]
            first = count - 50 if spec.dims[0] == "XR" else 0  # what a ring still holds in both
            page = [pages[at // 16 % len(pages)] for at in range(first, count)]
            rows[name][spec.name] = tensor[page, :, [at % 16 for at in range(first, count)]]
    assert count > 60
    for cache, expected in rows["cold"].items():
        torch.testing.assert_close(rows["warm"][cache], expected, rtol=1e-3, atol=1e-3, msg=cache)
