"""`gpu_check` on a CPU: every op's plugins in the interpreter, and what it says when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Only what a bare machine has: torch, Triton, numpy and what they need.
BARE = """
import importlib.abc, runpy, sys
class Bare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tensorrt_rtx", "tensorrt", "safetensors", "transformers", "numba", "click", "rich"}:
            raise ImportError(name)
sys.meta_path.insert(0, Bare())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", BARE, str(ROOT / "scripts" / "gpu_check.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_dry_run_checks_every_op_and_use(tmp_path):
    done = run("--dry-run", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    from glmspec.plugins import OPS

    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["op"], row["use"]) for row in rows] == [
        (n, use) for n, op in OPS.items() if op.plugged for use in op.uses
    ]
    assert all(row["launches"] and not row["wrong"] for row in rows)


def test_without_a_gpu_it_says_what_else_there_is():
    done = run()
    assert done.returncode == 3 and "--dry-run" in done.stderr


def test_a_wrong_kernel_is_told(tmp_path):
    """A plugin that leaves its outputs as they are."""
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(
        "import runpy, sys\n"
        f"sys.argv = ['gpu_check', '--dry-run', '--op', 'accept']\nsys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import gpu_check\ngpu_check.find_glmspec()\nimport os\nos.environ['TRITON_INTERPRET'] = '1'\n"
        "from glmspec.plugins import launch\n"
        "class Nothing:\n    def __getitem__(self, grid): return lambda **arguments: None\n"
        "launch.kernel_of = lambda plugin: Nothing()\n"
        "sys.exit(gpu_check.main())\n"
    )
    done = subprocess.run([sys.executable, str(spoiled)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "WRONG: accepted_B:" in done.stdout and "0 of 1 agree" in done.stdout
