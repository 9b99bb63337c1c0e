"""Fixtures that several folders share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import ASSETS, GOLDENS

from glmspec.build.engine import BuildOptions, build_engines
from glmspec.build.target import TARGETS
from glmspec.core.progress import Progress


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny models run several times slower on two threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory) -> Path:
    """An engine directory of the shipped trained models: the verifier and both drafters."""
    out = tmp_path_factory.mktemp("tiny") / "engines"
    drafters = [ASSETS / "tiny-dspark", ASSETS / "tiny-dflash2"]
    build_engines(ASSETS / "tiny-verifier", drafters, TARGETS["cpu"], BuildOptions(), out, Progress())
    return out


@pytest.fixture(scope="session")
def golden_engines(tmp_path_factory) -> Path:
    """An engine directory of the golden checkpoints: random weights, no tokenizer."""
    out = tmp_path_factory.mktemp("golden") / "engines"
    drafters = [GOLDENS / "checkpoints" / name for name in ("dspark", "dflash2", "dspark_redvocab")]
    build_engines(GOLDENS / "checkpoints" / "verifier", drafters, TARGETS["cpu"], BuildOptions(), out, Progress())
    return out
