"""Fixtures that several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.compiled import keep_compiled
from support.durations import Durations
from support.engines import keep_networks
from support.models import ASSETS, GOLDENS
from support.shared import Shared

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.progress import Progress

CACHE = Path(__file__).parents[1] / ".cache" / "tests"  # by content: what changes has another name


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny models run several times slower on two threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Iterator[Shared]:
    """Where what takes long to make is made once for all test processes."""
    made = Shared(tmp_path_factory)
    yield made
    made.check()


@pytest.fixture(scope="session")
def networks() -> dict:
    """Networks of engine directories that were loaded in this process."""
    return {}


@pytest.fixture(autouse=True, scope="module")
def networks_once(networks) -> Iterator[None]:
    """An engine directory's network is authored and read once a process."""
    with pytest.MonkeyPatch.context() as patch:
        keep_networks(networks, patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> Iterator[None]:
    """A kernel is compiled once, by the first run that needs it. Tests of the compiler itself replace this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        keep_compiled(CACHE, patch)
        yield


@pytest.fixture(scope="session")
def tiny_engines(shared) -> Path:
    """An engine directory of the shipped trained models: the verifier and both drafters."""
    return shared.folder("tiny-engines", build_tiny)


def build_tiny(out: Path) -> None:
    drafters = [ASSETS / "tiny-dspark", ASSETS / "tiny-dflash2"]
    build_engines(ASSETS / "tiny-verifier", drafters, TARGETS["cpu"], BuildOptions(), out, Progress())


@pytest.fixture(scope="session")
def golden_engines(shared) -> Path:
    """An engine directory of the golden checkpoints: random weights, no tokenizer."""
    return shared.folder("golden-engines", build_golden)


def build_golden(out: Path) -> None:
    drafters = [GOLDENS / "checkpoints" / name for name in ("dspark", "dflash2", "dspark_redvocab")]
    build_engines(GOLDENS / "checkpoints" / "verifier", drafters, TARGETS["cpu"], BuildOptions(), out, Progress())


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations())
