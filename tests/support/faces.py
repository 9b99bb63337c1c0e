"""An op's plugins in Triton's interpreter, beside its reference.

The interpreter must be chosen before a kernel is imported, and an interpreted kernel cannot be compiled. So this file,
run as a program, interprets cases that it is handed in a file and leaves the results in another.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glmspec.plugins import OPS
from glmspec.plugins.agree import disagreement
from glmspec.plugins.launch import Launcher
from glmspec.plugins.spec import Op

TESTS = Path(__file__).resolve().parents[1]
POISON = 77  # what outputs hold before a launch: a place that a kernel forgets is seen
PROGRAMS = 500  # that a test file's cases may run in all: the interpreter takes up to 40 ms for one


@dataclass
class Case:
    """One call of an op: inputs in order, attributes by name."""

    op: str
    inputs: list[torch.Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> Op:
        """What the op is."""
        return OPS[self.op]


@dataclass
class Result:
    """What the plugins gave, and how many programs they launched."""

    outputs: tuple[torch.Tensor, ...]
    programs: int


def example(
    op: str, sizes: Mapping[str, int], *, use: str = "", compute: torch.dtype = torch.float32, seed: int = 0
) -> Case:
    """The op's own example at these sizes, in one of the ways the full model uses it."""
    g, used = torch.Generator().manual_seed(seed), OPS[op].uses[use]
    inputs = importlib.import_module(f"glmspec.plugins.{op}.example").example(sizes, used, compute, g)
    return Case(op, inputs, dict(used.attributes))


def interpret(cases: Mapping[str, Case], sm: str = "SM90") -> dict[str, Result]:
    """Every case through its op's plugins. Raises with the interpreter's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "cases.pt"), Path(folder, "results.pt")
        torch.save({name: (case.op, case.inputs, case.attributes) for name, case in cases.items()}, given)
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)}
        command = [sys.executable, __file__, str(given), str(made), sm]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise AssertionError(done.stderr)
        return {name: Result(*result) for name, result in torch.load(made).items()}


def reference(case: Case) -> tuple[torch.Tensor, ...]:
    """What the reference gives. The inputs stay as they are."""
    outputs = case.spec.reference(*(x.clone() for x in case.inputs), **case.attributes)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_agree(case: Case, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Whole numbers are equal, others within the op's tolerance of the largest."""
    said = disagreement(case.spec, found, expected)
    assert not said, said


def main(given: str, made: str, sm: str) -> None:
    """Interpret every case."""
    results = {}
    for name, (op, inputs, attributes) in torch.load(given).items():
        run = Launcher(sm, poison=POISON)
        outputs = OPS[op].plugged(run, *inputs, **attributes)
        results[name] = (tuple(outputs), run.programs)
    torch.save(results, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
