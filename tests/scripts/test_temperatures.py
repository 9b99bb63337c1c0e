"""Temperatures of a confidence head, fitted to observations whose chances are known."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from glmspec.runtime.estimates import Confidence, logit, sigmoid

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_temperatures_are_recovered_and_calibrate(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    fit_temperatures = importlib.import_module("temperatures").fit_temperatures
    rng = np.random.default_rng(1)
    true = (0.5, 3.0)
    position_Z = np.repeat([0, 1], 20_000)
    chance_Z = rng.uniform(0.02, 0.98, len(position_Z))
    stood_Z = rng.random(len(position_Z)) < chance_Z
    confidence_Z = sigmoid(logit(chance_Z) * np.array(true)[position_Z])
    found = fit_temperatures(position_Z, confidence_Z, stood_Z, 3)
    assert found[:2] == pytest.approx(true, rel=0.06)
    assert found[2] == 1.0  # nothing seen there
    calibrated = Confidence(found).chances(np.stack([confidence_Z[:100], confidence_Z[-100:], confidence_Z[:100]], 1))
    assert np.abs(calibrated[:, 0] - chance_Z[:100]).max() < 0.03
    assert np.abs(calibrated[:, 1] - chance_Z[-100:]).max() < 0.03
