"""Acceptance statistics by the published definitions."""

from __future__ import annotations

import json
import random

import pytest

from glmspec.runtime.stats import SpecStats


def stats(num_spec_tokens: int, *steps: tuple[int, int]) -> SpecStats:
    """Steps as (proposed, accepted)."""
    made = SpecStats(num_spec_tokens)
    for proposed, accepted in steps:
        made.record(proposed, accepted)
    return made


def test_definitions_by_hand():
    made = stats(3, (3, 0), (3, 3), (2, 1), (3, 0))
    assert (made.num_steps, made.num_draft_tokens, made.num_accepted) == (4, 11, 4)
    assert made.mean_acceptance_length == 1 + 4 / 4
    assert made.draft_acceptance_rate == pytest.approx(4 / 11)
    assert made.position_rates == [2 / 4, 1 / 4, 1 / 4]  # steps accepting at least 1, 2, 3 of all 4 steps
    assert made.acceptance_histogram == [2, 1, 0, 1]


def test_counters_are_pooled_before_division():
    one, two = stats(2, (2, 2)), stats(2, (2, 0), (2, 0), (1, 1))
    pooled = SpecStats(2)
    pooled.add(one)
    pooled.add(two)
    assert pooled.mean_acceptance_length == 1 + 3 / 4  # the mean of the two lengths is 2.17
    assert pooled.draft_acceptance_rate == pytest.approx(3 / 7)  # the mean of the two rates is 0.6
    assert pooled.position_rates == [2 / 4, 1 / 4]
    assert (one.num_steps, two.num_steps) == (1, 3)  # the parts stay as they were


@pytest.mark.parametrize("seed", range(20))
def test_positions_sum_to_length_minus_one_and_never_rise(seed):
    rng = random.Random(seed)
    made = SpecStats(rng.randint(1, 8))
    for _ in range(rng.randint(1, 40)):
        proposed = rng.randint(1, made.num_spec_tokens)
        made.record(proposed, rng.randint(0, proposed))
    assert sum(made.position_rates) == pytest.approx(made.mean_acceptance_length - 1)
    assert made.position_rates == sorted(made.position_rates, reverse=True)


def test_nothing_is_divided_by_zero_steps():
    none = SpecStats(4)
    assert none.mean_acceptance_length is None
    assert none.draft_acceptance_rate is None
    assert none.position_rates == [0, 0, 0, 0]
    assert SpecStats(0).position_rates == []


def test_json_is_aiperfs_shape():
    value = stats(2, (2, 1), (2, 2)).to_json()
    assert value == {
        "num_spec_tokens": 2,
        "num_spec_steps": 2,
        "num_draft_tokens": 4,
        "num_accepted_draft_tokens": 3,
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.75,
        "acceptance_histogram": [0, 1, 1],
    }
    # What AIPerf reconciles.
    assert sum(value["acceptance_histogram"]) == value["num_spec_steps"]
    accepted = sum(k * steps for k, steps in enumerate(value["acceptance_histogram"]))
    assert accepted == value["num_accepted_draft_tokens"]


@pytest.mark.parametrize("made", [SpecStats(0), SpecStats(3), stats(3, (3, 2), (1, 1), (2, 0))])
def test_json_round_trip(made):
    value = made.to_json()
    text = json.dumps(value)
    assert SpecStats.from_json(json.loads(text)).to_json() == value
    SpecStats.from_json(value).record(0, 0)
    made.record(0, 0)
    assert json.dumps(value) == text  # nothing is shared
