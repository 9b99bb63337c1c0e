"""Verifiers that `validate` is tested on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.models import random_verifier
from support.validation import DIVISIBLE, FULL


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("validate")
    random_verifier(home / "hf", seed=1, **DIVISIBLE)
    return home / "hf"


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("full")
    shutil.copyfile(FULL, home / "config.json")
    return home


@pytest.fixture(scope="module")
def shallow(tmp_path_factory) -> Path:
    """The full model's config with 18 of its 78 layers: all of its widths, and every kind of layer several times."""
    home = tmp_path_factory.mktemp("shallow")
    (home / "config.json").write_text(json.dumps(json.loads(FULL.read_text()) | {"num_hidden_layers": 18}))
    return home
