"""How much of each block is verified: the best slots, as many as pay, always a block's first, and the same text."""

from __future__ import annotations

import itertools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import ASSETS

from glmspec.build.errors import ConfigError, EngineError
from glmspec.runtime.accept import Ballot, Verdict
from glmspec.runtime.adaptive import Adaptive, AdaptiveVerification, Slots
from glmspec.runtime.cost_table import Column, CostTable
from glmspec.runtime.engine import Engine
from glmspec.runtime.estimates import Confidence, Margins
from glmspec.runtime.generate import answer_all
from glmspec.runtime.request import Request

DRAFTING = Column((1,), (1.0,))
FREE = CostTable(DRAFTING, Column((1,), (1e-6,)))
DEAR = CostTable(DRAFTING, Column((1, 101), (1e3, 101e3)))
EVEN = CostTable(DRAFTING, Column((1, 101), (0.1, 10.1)))


def blocks(*rows: list[float]) -> SimpleNamespace:
    return SimpleNamespace(signal=torch.tensor(rows, dtype=torch.float64))


def adaptive(costs: CostTable = FREE, threshold: float = 0.0) -> AdaptiveVerification:
    return AdaptiveVerification(Confidence(), costs, threshold)


def random_costs(rng: random.Random) -> CostTable:
    ms = list(itertools.accumulate(rng.choice([0.0, rng.random()]) for _ in range(40)))
    return CostTable(Column((1,), (1 + rng.random(),)), Column.of(range(1, 41), [1 + one for one in ms], 40))


# -- the choice ---------------------------------------------------------------------------------------


def test_budget_and_admission_are_the_best_there_are():
    """Against brute force over every way to verify some of each block."""
    rng = random.Random(0)
    for _ in range(60):
        sequences, drafts, costs = rng.randint(1, 3), rng.randint(1, 3), random_costs(rng)
        chance_BJ = np.array([[rng.random() for _ in range(drafts)] for _ in range(sequences)])
        most = [rng.randint(0, drafts) for _ in range(sequences)]
        survival_BJ = np.cumprod(chance_BJ, 1)

        def gained(counts, survival_BJ=survival_BJ) -> float:
            return sum(row[:count].sum() for row, count in zip(survival_BJ, counts, strict=True))

        def speed(counts, sequences=sequences, costs=costs) -> float:
            rows = np.array(sequences + sum(counts))
            return (sequences + gained(counts)) / float(costs.step_ms(sequences, rows))

        ways = list(itertools.product(*(range(one + 1) for one in most)))
        slots = Slots.of(chance_BJ, most, 0.0)
        budget = slots.budget(costs)
        assert speed(slots.best(budget)) == pytest.approx(max(map(speed, ways)))
        assert budget == min(sum(way) for way in ways if speed(way) > max(map(speed, ways)) - 1e-12)
        for n in range(sum(most) + 1):
            counts = slots.best(n)
            assert sum(counts) == n and all(count <= one for count, one in zip(counts, most, strict=True))
            assert gained(counts) == pytest.approx(max(gained(way) for way in ways if sum(way) == n))


def test_equals_go_to_the_lower_position_then_to_the_earlier_sequence():
    slots = Slots.of(np.array([[0.5, 1.0], [0.5, 1.0], [0.9, 0.1]]), [2, 2, 2], 0.0)
    assert [slots.best(n) for n in range(7)] == [
        [0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2],
    ]  # fmt: skip


def test_of_equally_fast_budgets_the_smallest():
    assert Slots.of(np.array([[1.0]]), [1], 0.0).budget(CostTable(DRAFTING, Column((1, 2), (1.0, 3.0)))) == 0


def test_the_first_step_verifies_all_and_later_ones_what_the_step_before_would_have_liked():
    one = adaptive(EVEN)
    good, bad = blocks([0.9, 0.9, 0.9], [0.9, 0.9, 0.9]), blocks([0.01, 0.9, 0.9], [0.02, 0.9, 0.9])
    assert one.choose([3, 3], bad) == [3, 3]
    assert one.choose([3, 3], good) == [0, 0]
    assert one.choose([3, 3], bad) == [3, 3]


def test_the_budget_is_a_share_of_the_slots():
    """Sequences come and go between the step that sets it and the one that keeps to it."""
    one = adaptive(EVEN)
    half = blocks([0.9, 0.9, 0.1, 0.1], [0.9, 0.9, 0.1, 0.1])
    one.choose([4, 4], half)
    assert one.choose([4, 4], half) == [2, 2]
    wide = blocks(*[[0.9, 0.9, 0.1, 0.1]] * 8)
    assert sum(one.choose([4] * 8, wide)) == 16
    one.choose([4, 4], half)
    assert one.choose([1], blocks([0.9, 0.9, 0.9, 0.9])) == [1]  # rounded up


def test_no_draft_and_no_later_one_has_a_part_in_whether_a_draft_is_verified():
    """What makes it lossless: changing the signals after draft j of a sequence, which drafts from j on may change,
    leaves alone whether its drafts up to j are verified. This catches a budget of the same step."""
    rng, g = random.Random(1), torch.Generator().manual_seed(0)
    changed_elsewhere = 0
    for _ in range(300):
        sequences, drafts, costs = rng.randint(1, 4), 4, random_costs(rng)
        before, now, other = (torch.rand(sequences, drafts, generator=g) for _ in range(3))
        sequence, at = rng.randrange(sequences), rng.randrange(drafts)
        other[:sequence], other[sequence + 1 :] = now[:sequence], now[sequence + 1 :]
        other[sequence, : at + 1] = now[sequence, : at + 1]
        counts = []
        for signal in (now, other):
            one, most = adaptive(costs, threshold=0.05), [drafts] * sequences
            one.choose(most, SimpleNamespace(signal=before))
            counts.append(one.choose(most, SimpleNamespace(signal=signal)))
        assert min(counts[0][sequence], at + 1) == min(counts[1][sequence], at + 1)
        changed_elsewhere += counts[0] != counts[1]
    assert changed_elsewhere > 20


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, [3, 3]), (0.5, [1, 2]), (0.75, [1, 1]), (1.0, [0, 0])])
def test_below_the_threshold_nothing_is_verified(threshold, expected):
    one = adaptive(threshold=threshold)
    signals = blocks([0.75, 0.2, 0.9], [0.75, 0.75, 0.75])
    assert one.choose([3, 3], signals) == expected == one.choose([3, 3], signals)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"adaptive threshold: found 1.5, expected 0 to 1"):
        Adaptive(threshold=1.5)
    with pytest.raises(ConfigError, match="adaptive threshold"):
        Adaptive(threshold=float("nan"))


def test_what_is_learned_belongs_to_the_blocks_it_came_from():
    """The second block is verified to its second draft, which falls; the first not at all."""
    seen = {}
    estimates = SimpleNamespace(observe=lambda *told: seen.update(told=told))
    signals = blocks([1, 2, 3], [4, 5, 6])
    ballots, verdicts = [Ballot(None, ()), Ballot(None, [7, 7])], [Verdict(0, [1]), Verdict(1, [7, 1])]
    AdaptiveVerification(estimates, FREE).learn(ballots, verdicts, signals)
    signal_BJ, verified_B, accepted_B = seen["told"]
    assert (signal_BJ.tolist(), verified_B.tolist(), accepted_B.tolist()) == (signals.signal.tolist(), [0, 2], [0, 1])


# -- engines ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def requests(tiny_engines) -> list[Request]:
    """Of mixed lengths; more than run at once."""
    tokenizer = Engine(tiny_engines, speculate=False).tokenizer
    texts = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    lengths = (24, 9, 17, 24, 5, 20, 13, 24, 24, 24)
    prompts = [tuple(tokenizer.encode(text)) for text in texts[: len(lengths)]]
    return [Request(prompt_ids=one, max_tokens=most) for one, most in zip(prompts, lengths, strict=True)]


@pytest.fixture(scope="module")
def plain(tiny_engines, requests) -> list[list[int]]:
    return [job.answer.tokens for job in answer_all(Engine(tiny_engines, speculate=False), requests)]


@pytest.fixture(scope="module", params=["dspark", "dflash2"])
def engine(tiny_engines, request) -> Engine:
    return Engine(tiny_engines, request.param, adaptive=Adaptive(costs=FREE))


def answers(engine: Engine, requests: list[Request], costs: CostTable) -> tuple[list[list[int]], int, int, int]:
    """Tokens; steps; drafts verified; blocks of which nothing was verified."""
    engine.loop.adaptive = None
    if costs:
        estimates = Confidence() if engine.drafter.confident else Margins(engine.drafter.num_drafts)
        engine.loop.adaptive = AdaptiveVerification(estimates, costs)
    verified, judge = [], engine.loop.acceptance.judge
    engine.loop.acceptance.judge = lambda logits, ballots, law: (
        verified.append([len(ballot.drafts) for ballot in ballots]) or judge(logits, ballots, law)
    )
    try:
        jobs = answer_all(engine, requests)
    finally:
        engine.loop.acceptance.judge = judge
    flat = [count for step in verified for count in step]
    return [job.answer.tokens for job in jobs], len(verified), sum(flat), flat.count(0)


def test_the_text_is_plain_decoding_s_whatever_verification_costs(engine, requests, plain):
    whole, steps, drafts, _ = answers(engine, requests, None)
    free = answers(engine, requests, FREE)
    dear = answers(engine, requests, DEAR)
    some = answers(engine, requests, EVEN)
    assert whole == free[0] == dear[0] == some[0] == plain
    assert free[1:3] == (steps, drafts)  # as without it
    assert dear[1] > steps and dear[2] < 0.7 * drafts and dear[3] > 30  # but for steps that explore, none
    assert drafts >= some[2] > dear[2]


def test_the_engine_s_own_estimates(engine):
    assert isinstance(engine.loop.adaptive.estimates, Confidence if engine.drafter.confident else Margins)


def test_adaptive_without_a_drafter_is_refused(tiny_engines):
    with pytest.raises(EngineError, match="there is no drafter"):
        Engine(tiny_engines, speculate=False, adaptive=Adaptive(costs=FREE))


def test_temperatures_must_fit_the_drafter(tiny_engines):
    with pytest.raises(ConfigError, match="confidence temperatures: found 2, expected 8"):
        Engine(tiny_engines, "dspark", adaptive=Adaptive(costs=FREE, temperatures=(1.0, 1.0)))
    with pytest.raises(ConfigError, match="drafter 'dflash2' has no confidence head"):
        Engine(tiny_engines, "dflash2", adaptive=Adaptive(costs=FREE, temperatures=(1.0,) * 8))
    engine = Engine(tiny_engines, "dspark", adaptive=Adaptive(costs=FREE, temperatures=(2.0,) * 8, threshold=0.25))
    chosen = engine.loop.adaptive
    assert chosen.threshold == 0.25 and chosen.costs is FREE
    assert chosen.estimates.chances(np.array([[0.8] * 8]))[0, 0] == pytest.approx(2 / 3)
