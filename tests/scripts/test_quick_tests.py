"""`scripts/test --quick`: the test files that a change reaches, and what is told of the others."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "quick_tests.py"
FILES = {
    "core/__init__.py": "",
    "core/errors.py": "",
    "network/__init__.py": "",
    "network/graph.py": "from glmspec.core import errors",
    "runtime/__init__.py": "",
    "runtime/engine.py": "def load():\n    from ..network import graph",
    "runtime/alone.py": "",
    "assets/prompts.jsonl": "{}",
    "tests/conftest.py": "import pytest\nimport glmspec.runtime.engine\n@pytest.fixture\ndef engines(): ...",
    "tests/support/__init__.py": "",
    "tests/support/nets.py": "import glmspec.network.graph",
    "tests/core/test_errors.py": "import glmspec.core.errors",
    "tests/network/test_graph.py": "from support.nets import x",
    "tests/runtime/test_engine.py": "def test(engines): ...",
    "tests/runtime/test_alone.py": "from glmspec.runtime import alone\nPROMPTS = 'prompts.jsonl'",
    "tests/build/test_cli.py": "SCRIPT = 'from glmspec.runtime.engine import Engine'",
}


@pytest.fixture(scope="module")
def quick():
    spec = importlib.util.spec_from_file_location("quick_tests", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def reached_tests(distance: dict[str, int]) -> set[str]:
    return {Path(file).stem for file in distance if Path(file).stem.startswith("test_")}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("core/errors.py", {"test_errors", "test_graph", "test_engine", "test_cli"}),
        ("network/graph.py", {"test_graph", "test_engine", "test_cli"}),  # late, by a text, by a fixture
        ("runtime/alone.py", {"test_alone"}),
        ("tests/support/nets.py", {"test_graph"}),
        ("tests/core/test_errors.py", {"test_errors"}),
        ("assets/prompts.jsonl", {"test_alone"}),
        ("tests/conftest.py", {"test_errors", "test_graph", "test_engine", "test_alone", "test_cli"}),
    ],
)
def test_what_a_change_reaches(quick, root, changed, tests):
    assert reached_tests(quick.Imports(root).reaching({changed})) == tests


def test_the_nearest_come_first_and_the_longest_are_told(quick):
    distance = {"tests/test_a.py": 2, "tests/test_b.py": 1, "tests/test_long.py": 1, "tests/conftest.py": 1, "x.py": 0}
    durations = {"tests/test_long.py": quick.FILE_MAX + 1, "tests/test_b.py": 14.0, "tests/test_a.py": 14.0}
    assert quick.chosen(distance, durations) == (["tests/test_b.py", "tests/test_a.py"], ["tests/test_long.py"])
    many = {f"tests/test_{at}.py": 1 for at in range(9)}
    took, left = quick.chosen(many, dict.fromkeys(many, 14.0))
    assert len(took) == quick.SUM_MAX // 14 and len(took) + len(left) == 9


def test_changes_since_main_and_uncommitted_ones_are_found(quick, root):
    def git(*arguments: str) -> None:
        named = ["git", "-c", "user.name=x", "-c", "user.email=x", *arguments]
        subprocess.run(named, cwd=root, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    git("add", "core", "network")
    git("commit", "-q", "-m", "one")
    git("checkout", "-q", "-b", "other")
    git("add", "runtime")
    git("commit", "-q", "-m", "two")
    (root / "core" / "errors.py").write_text("x = 1")
    git("add", "tests", "assets")
    assert quick.changed_files(root) == set(FILES) - {"core/__init__.py", "network/__init__.py", "network/graph.py"}


def test_this_repository_is_read(quick):
    imports = quick.Imports(quick.ROOT)
    reached = reached_tests(imports.reaching({"runtime/scheduler.py"}))
    assert {"test_scheduler", "test_generate", "test_worker"} <= reached and "test_formats" not in reached
