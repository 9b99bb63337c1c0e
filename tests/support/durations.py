"""How long each test file takes: the longest are started first, or one of them would run alone at the end.

KEEP_DURATIONS=1 scripts/test     # writes the table anew
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "durations.json"


class Durations:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order files where several processes share them; tests of a file stay in order."""
        if "PYTEST_XDIST_WORKER" in os.environ:
            known = json.loads(TABLE.read_text())
            items.sort(key=lambda item: -known.get(item.nodeid.split("::")[0], 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up."""
        self.seconds[report.nodeid.split("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Keep what was measured, half a second or more."""
        if "KEEP_DURATIONS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
            kept = {file: round(seconds, 1) for file, seconds in sorted(self.seconds.items()) if seconds >= 0.5}
            TABLE.write_text(json.dumps(kept, indent=1) + "\n")
