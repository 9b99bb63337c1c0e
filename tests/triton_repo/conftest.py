"""What the serving tests share."""

from __future__ import annotations

import pytest

from glmspec.runtime.engine import Engine


@pytest.fixture(scope="session")
def oracle(tiny_engines) -> Engine:
    """An engine of the test's own thread, to compare with: a worker's engine belongs to the worker."""
    return Engine(tiny_engines)
