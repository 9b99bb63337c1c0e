"""`gpu_check` on a CPU: every op's plugins in the interpreter, and what it says when something is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from glmspec.build.target import TARGETS
from glmspec.plugins import OPS

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
        "from kernel_checks import launch\n"
        "class Nothing:\n    def __getitem__(self, grid): return lambda **arguments: None\n"
        "launch.kernel_of = lambda plugin: Nothing()\n"
        "sys.exit(gpu_check.main())\n"
    )
    done = subprocess.run([sys.executable, str(spoiled)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "WRONG: accepted_B:" in done.stdout and "0 of 1 agree" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "acept"), "--op: found acept, expected one of accept, argmax"),
        (("--batch", "0"), "--batch: found 0, expected 1 or more"),
        (("--json", "/nowhere/rows.json"), "--json: found no folder /nowhere"),
    ],
)
def test_what_it_is_asked_is_looked_at_first(arguments, message):
    done = run("--dry-run", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def gpu_check(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def checked(gpu_check, op, *inputs: torch.Tensor):
    """The row of a check."""
    row = gpu_check.Row(op.name, "", 1)
    gpu_check.check(op, op.uses[""], list(inputs), "SM90", "float32", row)
    return row


def test_in_the_interpreter_no_number_may_differ(gpu_check):
    said = torch.arange(400, dtype=torch.int32)
    other = torch.where(said == 7, 5, said)
    op = replace(OPS["argmax"], plugged=lambda run, x: (other,), reference=lambda x: said)
    assert "1 of 400 differ" in checked(gpu_check, op, torch.zeros(1)).wrong


def test_plugins_and_reference_get_the_same_inputs(gpu_check):
    """Some write in place."""
    op = replace(OPS["argmax"], plugged=lambda run, x: (x.add_(1),), reference=lambda x: x.add_(1))
    row = checked(gpu_check, op, torch.zeros(3, dtype=torch.int32))
    assert row.compared and not row.wrong


@pytest.fixture
def bench(gpu_check, monkeypatch):
    """A GPU on which nothing is really run: what was done, in order."""
    done: list[tuple] = []
    monkeypatch.setattr(gpu_check, "this_sm", lambda: "SM90")
    monkeypatch.setattr(gpu_check, "inputs_of", lambda *_: [])
    monkeypatch.setattr(gpu_check, "check", lambda *_: setattr(_[-1], "compared", True))
    monkeypatch.setattr(gpu_check, "measure", lambda op, *_: done.append(("measured", op.name)))
    monkeypatch.setattr(gpu_check, "measure_compiled", lambda op, *_: done.append(("compiled", op.name)))
    return done


def rows_of(gpu_check, seconds: float = 60) -> list:
    wanted = Namespace(dry_run=False, op=["accept", "argmax"], batch=[1], seconds=seconds)
    return gpu_check.run_all(wanted, lambda rows: None)


def test_references_are_compiled_when_all_else_is_done(gpu_check, bench):
    rows = rows_of(gpu_check)
    assert bench == [(what, op) for what in ("measured", "compiled") for op in ("accept", "argmax")]
    assert all(row.compared and not row.notes for row in rows)


def test_without_time_they_are_not(gpu_check, bench):
    rows = rows_of(gpu_check, seconds=-1)
    assert [what for what, _ in bench] == ["measured", "measured"]
    assert all(row.notes == [gpu_check.LATE] for row in rows)


def test_what_does_not_fit_does_not_agree(gpu_check, bench, monkeypatch):
    def check(*_):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(gpu_check, "check", check)
    for row in rows_of(gpu_check):
        assert not row.compared and "not compared; does not fit" in gpu_check.line(row)


@pytest.mark.parametrize("waits", [False, True])
def test_work_that_waits_is_never_captured(gpu_check, monkeypatch, waits):
    """As torch's debug mode finds it to wait."""
    modes, captures = [], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Namespace(replay="replay"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: captures.append(graph) or nullcontext())

    def work() -> None:
        if waits and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert gpu_check.captured(work) == (None if waits else "replay")
    assert len(captures) == (not waits) and modes[-1] == "default"


@pytest.mark.parametrize(("op", "floor"), [("accept", 152 / 4.8e6), ("sparse_mla", 9 * 2048 * 1157 / 4.8e6 + 0.0326)])
def test_the_floor_is_the_larger_of_two(gpu_check, op, floor):
    found = gpu_check.floor_of(OPS[op], OPS[op].sizes(1, OPS[op].uses[""]), TARGETS["h200"])
    assert found == pytest.approx(floor, rel=0.01)
