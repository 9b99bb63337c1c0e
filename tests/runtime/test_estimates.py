"""Chances of acceptance: calibrated confidences, and what is learned of margins."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from glmspec.core.errors import ConfigError
from glmspec.runtime.estimates import Confidence, Margins, read_temperatures, sigmoid

W, B = np.array([0.9, 0.3, 2.0]), np.array([-1.0, 0.5, -3.0])


def taught(steps: int, weights=(W, B), estimates: Margins | None = None, blocks: int = 32) -> Margins:
    """Told of blocks whose drafts stand with the chances that `weights` say."""
    w_J, b_J = weights
    rng = np.random.default_rng(0)
    estimates = estimates or Margins(len(w_J))
    for _ in range(steps):
        margin_BJ = rng.exponential(3, (blocks, len(w_J)))
        stands_BJ = rng.random(margin_BJ.shape) < sigmoid(w_J * margin_BJ + b_J)
        verified_B = rng.integers(0, len(w_J) + 1, blocks)
        accepted_B = np.minimum(stands_BJ.cumprod(1).sum(1), verified_B)
        estimates.observe(margin_BJ, verified_B, accepted_B)
    return estimates


def test_the_law_of_margins_is_recovered():
    """From the drafts alone that were verified and reached."""
    estimates = taught(400)
    margin_J = np.array([[0.5] * 3, [2.0] * 3, [6.0] * 3])
    assert np.abs(estimates.chances(margin_J) - sigmoid(W * margin_J + B)).max() < 0.06
    assert np.abs(estimates.weights_J2[:2] - np.stack([W, B], 1)[:2]).max() < 0.35


def test_the_newest_observations_count():
    estimates = taught(300, (-W, -B), taught(300))
    margin_J = np.array([[2.0] * 3])
    assert np.abs(estimates.chances(margin_J) - sigmoid(-W * margin_J - B))[:, :2].max() < 0.06  # few reach the third


def test_before_the_first_fit_and_without_observations_the_prior_stands():
    fresh, blind = Margins(2), Margins(2)
    for _ in range(500):
        blind.observe(np.ones((1, 2)), np.zeros(1, dtype=int), np.zeros(1, dtype=int))
    for estimates in (fresh, blind):
        assert estimates.chances(np.array([[0.0, 5.0]]))[0] == pytest.approx([0.5, 0.924], abs=1e-3)


def test_few_observations_move_the_prior_a_little():
    estimates = Margins(1)
    for _ in range(10):  # the first fit; ten drafts, all accepted
        estimates.observe(np.array([[1.0]]), np.array([1]), np.array([1]))
    assert 0.7 < estimates.chances(np.array([[1.0]]))[0, 0] < 0.97


def test_margins_are_capped():
    estimates = Margins(1)
    estimates.weights_J2[:] = [0.1, -3.0]
    found = estimates.chances(np.array([[39.0], [40.0], [1e30], [np.inf]]))[:, 0]
    assert found[0] < found[1] == found[2] == found[3] == pytest.approx(1 / (1 + np.exp(-1)))
    for _ in range(10):
        estimates.observe(np.array([[np.inf]]), np.array([1]), np.array([1]))
    assert np.isfinite(estimates.weights_J2).all()


def test_perfect_separation_stays_finite():
    estimates = Margins(1)
    for step in range(600):
        estimates.observe(np.array([[40.0 * (step % 2)]]), np.array([1]), np.array([step % 2]))
    assert np.isfinite(estimates.weights_J2).all()
    assert estimates.chances(np.array([[0.0], [40.0]]))[:, 0] == pytest.approx([0, 1], abs=0.02)


def test_it_explores_at_first_and_after_every_fit():
    estimates, found = Margins(1), []
    for step in range(460):
        if estimates.exploring:
            found.append(step)
        estimates.observe(np.ones((1, 1)), np.ones(1, dtype=int), np.ones(1, dtype=int))
    assert found == [0, 10, 30, 70, 150, 250, 350, 450]


def test_memory_is_flat_over_20_000_steps():
    estimates = Margins(2)
    told = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([2, 1]), np.array([1, 1])
    sizes = []
    tracemalloc.start()
    for step in range(20_000):
        estimates.observe(*told)
        if step in (4_999, 19_999):
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert abs(sizes[1] - sizes[0]) < 4096


def test_without_temperatures_a_confidence_is_taken_as_it_is():
    signal = np.array([[0.0, 0.3, 1.0]])
    assert Confidence().chances(signal).tolist() == signal.tolist()
    assert np.abs(Confidence((1.0,) * 3).chances(signal) - signal).max() < 1e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperatures": [1, -1]}', r"temperatures: found \[1, -1\], expected a list of positive numbers"),
        ('{"temperatures": 1}', "temperatures: found 1, expected"),
        ("{}", "temperatures: found no such key"),
        ("[1]", "expected an object"),
        ("{", "not readable as JSON"),
    ],
)
def test_a_file_of_temperatures_that_is_none(tmp_path, text, message):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_temperatures(tmp_path / "t.json")


def test_temperatures_are_read(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"temperatures": [1, 0.5]}))
    assert read_temperatures(tmp_path / "t.json") == (1.0, 0.5)
