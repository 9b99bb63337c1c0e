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

from glmspec.core.errors import ConfigError, EngineError
from glmspec.runtime.accept import Accepted, DraftBlock
from glmspec.runtime.adaptive import Adaptive, AdaptiveVerification, fair_prices, survivals
from glmspec.runtime.cost_table import CostCurve, CostTable
from glmspec.runtime.engine import Engine
from glmspec.runtime.estimates import Confidence, Margins
from glmspec.runtime.generate import answer_all
from glmspec.runtime.request import Request

DRAFTING = CostCurve((1,), (1.0,))
FREE = CostTable(DRAFTING, CostCurve((1,), (1e-6,)))
DEAR = CostTable(DRAFTING, CostCurve((1, 101), (1e3, 101e3)))
EVEN = CostTable(DRAFTING, CostCurve((1, 101), (0.1, 10.1)))


END = 9


def blocks(*rows: list[float], ids: list[list[int]] | None = None) -> SimpleNamespace:
    ids = ids or [[5] * len(row) for row in rows]
    return SimpleNamespace(signal=torch.tensor(rows, dtype=torch.float64), ids=ids)


def adaptive(costs: CostTable = FREE, threshold: float = 0.0) -> AdaptiveVerification:
    return AdaptiveVerification(Confidence(), costs, threshold)


def choose(one: AdaptiveVerification, drafts: SimpleNamespace, most: list[int] | None = None) -> list[int]:
    """END ends every answer."""
    count, size = drafts.signal.shape
    return one.choose(most or [size] * count, drafts, [{END}] * count)


def random_costs(rng: random.Random) -> CostTable:
    ms = list(itertools.accumulate(rng.choice([0.0, rng.random()]) for _ in range(40)))
    return CostTable(CostCurve((1,), (1 + rng.random(),)), CostCurve.of(range(1, 41), [1 + one for one in ms], 40))


# -- the choice ---------------------------------------------------------------------------------------


def test_slots_above_a_fair_price_are_the_best_choice_there_is():
    """Against brute force over every way to verify some of each block."""
    rng = random.Random(0)
    for _ in range(100):
        sequences, drafts, costs = rng.randint(1, 3), rng.randint(1, 3), random_costs(rng)
        survival_BJ = np.cumprod([[rng.random() for _ in range(drafts)] for _ in range(sequences)], 1)

        def gained(counts, survival_BJ=survival_BJ) -> float:
            return sum(row[:count].sum() for row, count in zip(survival_BJ, counts, strict=True))

        def speed(counts, sequences=sequences, costs=costs, gained=gained) -> float:
            rows = np.array(sequences + sum(counts))
            return (sequences + gained(counts)) / float(costs.step_ms(sequences, rows))

        fastest = max(map(speed, ways := list(itertools.product(range(drafts + 1), repeat=sequences))))
        low, high = fair_prices(survival_BJ.ravel(), sequences, costs)
        for fair in (low, (low + min(high, 1)) / 2):
            counts = (survival_BJ > fair).sum(1).tolist()
            assert speed(counts) == pytest.approx(fastest)
            assert sum(counts) == min(sum(way) for way in ways if speed(way) > fastest - 1e-12)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [([], (0, np.inf)), ([0.75], (0, 0.75)), ([0.75, 0.125], (0.125, 0.75)), ([0.125, 0.25], (0.25, np.inf))],
)
def test_fair_prices_lie_between_the_last_slot_that_pays_and_the_next(slots, expected):
    """A step of one row takes 2 ms, and every row 1 more: the first slot pays above 1 / 2."""
    costs = CostTable(CostCurve((1,), (1.0,)), CostCurve((1, 101), (1.0, 101.0)))
    assert fair_prices(np.array(slots), 1, costs) == expected


def test_of_equally_fast_budgets_the_smallest():
    costs = CostTable(DRAFTING, CostCurve((1, 2), (1.0, 3.0)))
    assert fair_prices(np.array([1.0]), 1, costs) == (1.0, np.inf)


def test_the_first_step_verifies_all_and_later_ones_what_the_price_allows():
    one = adaptive(EVEN)
    assert choose(one, blocks([0.01, 0.9, 0.9], [0.02, 0.9, 0.9])) == [3, 3]  # none of them pays: fair from 0.02 up
    assert choose(one, blocks([0.01, 0.9, 0.9], [0.03, 0.5, 0.9])) == [0, 1]


def test_the_price_moves_to_the_nearest_that_is_fair_a_fifth_of_the_way():
    """By all of it at first, then a half, a third, a quarter; where it is fair already, not at all."""
    one, prices = adaptive(EVEN), []
    good, bad = blocks([0.9, 0.9, 0.9]), blocks([0.8, 0.1, 0.9])  # fair: from 0; from 0.08 up to 0.8
    for drafts in (good, bad, bad, bad, bad, bad, good):
        choose(one, drafts)
        prices.append(one._price)
    expected = [0.0]
    for step in range(2, 7):
        expected.append(expected[-1] + (0.08 - expected[-1]) / min(step, 5))
    assert prices == pytest.approx([*expected, expected[-1]])


def test_where_rows_cost_nothing_every_draft_is_verified():
    one = adaptive(FREE)
    for signal in torch.rand(50, 2, 8, generator=torch.Generator().manual_seed(0)).tolist():
        assert choose(one, blocks(*signal)) == [8, 8]


def test_a_step_that_explores_verifies_all():
    estimates = SimpleNamespace(exploring=False, chances=lambda signal_BJ: signal_BJ)
    one, found = AdaptiveVerification(estimates, DEAR), []
    for estimates.exploring in (False, False, True, False):
        found.append(choose(one, blocks([0.5, 0.5])))
    assert found == [[2], [0], [2], [0]]


def test_what_a_sequence_gets_does_not_depend_on_its_company():
    """Sequences come and go between the steps that set the price and the one that keeps to it."""
    half, bad = [0.9, 0.9, 0.1, 0.1], [0.1, 0.9, 0.9, 0.9]
    for company in ([], [half] * 7, [bad] * 7):
        one = adaptive(EVEN)
        choose(one, blocks(half, half))
        assert choose(one, blocks(half, *company))[0] == 2
    assert choose(one, blocks(half, half), most=[1, 4]) == [1, 2]


def test_what_follows_a_drafted_end_is_never_verified():
    """Whatever its chances, also in the step that verifies all and in one that explores; the end itself is verified."""
    certain = [1.0, 1.0, 1.0]
    drafts = blocks(certain, certain, certain, certain, ids=[[5, END, 5], [END, END, 5], [5, 5, END], [5, 7, 5]])
    one, exploring = adaptive(FREE), AdaptiveVerification(Margins(3), FREE)
    endings = [{END}, {END, 7}, {END}, {7}]
    for way in (one, one, exploring, exploring):
        assert way.choose([3] * 4, drafts, endings) == [2, 1, 3, 2]
    assert one.choose([3] * 4, drafts, [()] * 4) == [3] * 4  # ignore_eos


def test_survivals():
    """Two blocks, of which the second ends with its first draft."""
    chance = np.array([[0.5, 0.5, 0.5], [0.5, 1.0, 1.0]])
    assert survivals(chance, [[1, 2, END], [END, 1, 1]], [{END}] * 2).tolist() == [[0.5, 0.25, 0.125], [0.5, 0, 0]]


class PeekingAtItself(AdaptiveVerification):
    """Does not verify an end either."""

    def choose(self, most, drafts, endings) -> list[int]:
        later = SimpleNamespace(signal=drafts.signal, ids=[[*block[1:], block[0]] for block in drafts.ids])
        return super().choose(most, later, endings)


class Hasty(AdaptiveVerification):
    """Keeps to the price of this very step."""

    def choose(self, most, drafts, endings) -> list[int]:
        survival_BJ = survivals(self.estimates.chances(drafts.signal.double().numpy()), drafts.ids, endings)
        return (survival_BJ > fair_prices(survival_BJ.ravel(), len(most), self.costs)[0]).sum(1).tolist()


def peeks(way: type[AdaptiveVerification]) -> tuple[int, int]:
    """How often draft j or what comes after it, of a sequence, has a part in whether its drafts up to j are verified;
    and how often in what else is."""
    rng, g, peeked, changed = random.Random(1), torch.Generator().manual_seed(0), 0, 0
    for _ in range(300):
        sequences, drafts, costs = rng.randint(1, 4), 4, random_costs(rng)
        before, now, other = (torch.rand(sequences, drafts, generator=g).sqrt() for _ in range(3))
        ids, changed_ids = (torch.randint(END - 3, END + 1, (sequences, drafts), generator=g) for _ in range(2))
        sequence, at = rng.randrange(sequences), rng.randrange(drafts)
        kept = torch.arange(sequences) != sequence
        other[kept], other[sequence, : at + 1] = now[kept], now[sequence, : at + 1]
        changed_ids[kept], changed_ids[sequence, :at] = ids[kept], ids[sequence, :at]
        counts = []
        for signal, block_ids in ((now, ids), (other, changed_ids)):
            one = way(Confidence(), costs, threshold=0.05)
            choose(one, SimpleNamespace(signal=before, ids=ids.tolist()))
            counts.append(choose(one, SimpleNamespace(signal=signal, ids=block_ids.tolist())))
        peeked += min(counts[0][sequence], at + 1) != min(counts[1][sequence], at + 1)
        changed += counts[0] != counts[1]
    return peeked, changed


def test_no_draft_and_no_later_one_has_a_part_in_whether_a_draft_is_verified():
    """What makes it lossless: changing draft j of a sequence, and the signals after it, leaves alone whether its drafts
    up to j are verified."""
    peeked, changed = peeks(AdaptiveVerification)
    assert peeked == 0 and changed > 20
    assert peeks(PeekingAtItself)[0] > 20 and peeks(Hasty)[0] > 3


@pytest.mark.parametrize(("threshold", "expected"), [(0.0, [3, 3]), (0.5, [1, 2]), (0.75, [1, 1]), (1.0, [0, 0])])
def test_below_the_threshold_nothing_is_verified(threshold, expected):
    one = adaptive(threshold=threshold)
    signals = blocks([0.75, 0.2, 0.9], [0.75, 0.75, 0.75])
    assert choose(one, signals) == expected == choose(one, signals)


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
    verified, accepted = [DraftBlock(None, ()), DraftBlock(None, [7, 7])], [Accepted(0, [1]), Accepted(1, [7, 1])]
    AdaptiveVerification(estimates, FREE).learn(verified, accepted, signals)
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
    verified, accept = [], engine.loop.acceptance.accept
    engine.loop.acceptance.accept = lambda logits, blocks, probs: (
        verified.append([len(block.drafts) for block in blocks]) or accept(logits, blocks, probs)
    )
    try:
        jobs = answer_all(engine, requests)
    finally:
        engine.loop.acceptance.accept = accept
    flat = [count for step in verified for count in step]
    return [job.answer.tokens for job in jobs], len(verified), sum(flat), flat.count(0)


def test_the_text_is_plain_decoding_s_whatever_verification_costs(engine, requests, plain):
    whole, steps, drafts, _ = answers(engine, requests, None)
    free = answers(engine, requests, FREE)
    dear = answers(engine, requests, DEAR)
    some = answers(engine, requests, EVEN)
    assert whole == free[0] == dear[0] == some[0] == plain
    assert free[1] == steps and 0.9 * drafts < free[2] <= drafts  # as without it, but for what follows drafted ends
    assert dear[1] > steps and dear[2] < 0.7 * drafts and dear[3] > 30  # but for steps that explore, none
    assert drafts >= some[2] > dear[2]


def test_every_block_comes_with_its_own_ending_tokens(engine, monkeypatch):
    """The model's end tokens, not with ignore_eos, and the request's own."""
    told, end_ids = [], set(engine.end_ids)
    spy = SimpleNamespace(choose=lambda most, drafts, endings: told.append(endings) or most, learn=lambda *_: None)
    settings = [
        {"speculate": False, "stop_token_ids": (8,)}, {}, {"ignore_eos": True}, {"stop_token_ids": (7,)},
        {"stop_token_ids": (7,), "ignore_eos": True},
    ]  # fmt: skip
    monkeypatch.setattr(engine.loop, "adaptive", spy)
    answer_all(engine, [Request(prompt_ids=(3, 4, 5), max_tokens=8, **one) for one in settings])
    assert [set(one) for one in told[0]] == [end_ids, set(), end_ids | {7}, {7}]


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
