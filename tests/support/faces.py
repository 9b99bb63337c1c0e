"""An op's plugins in Triton's interpreter, beside its reference.

The interpreter must be chosen before a kernel is imported, and an interpreted kernel cannot be compiled. So this file,
run as a program, interprets cases that it is handed in files and leaves the results in others. One such process serves
all of a test process, because it takes longer to import what it needs than to interpret most cases.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kernel_checks.agree import disagreement
from kernel_checks.examples import EXAMPLES
from kernel_checks.interpreter import compute_as_gpus_do
from kernel_checks.launch import Launcher

from glmspec.plugins import OPS
from glmspec.plugins.spec import Op

TESTS = Path(__file__).resolve().parents[1]
POISON = 77  # what outputs hold before a launch: a place that a kernel forgets is seen
PROGRAMS = 500  # that a test file's cases may run in all: the interpreter takes up to 40 ms for one


@dataclass
class Case:
    """One call: inputs in order, attributes by name. op: its name, or `FOLDER:CHAIN`, `FOLDER:PLUGIN`."""

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
    inputs = EXAMPLES[op](sizes, used, compute, g)
    return Case(op, inputs, dict(used.attributes))


def interpret(cases: Mapping[str, Case], sm: str = "SM90") -> dict[str, Result]:
    """Every case through its op's plugins. Raises with the interpreter's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "cases.pt"), Path(folder, "results.pt")
        torch.save({name: (case.op, case.inputs, case.attributes) for name, case in cases.items()}, given)
        server = _server()
        server.stdin.write(json.dumps([str(given), str(made), sm]) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise AssertionError(f"the process that interprets kernels ended ({server.wait()})")
        if error := json.loads(answer):
            raise AssertionError(error)
        return {name: Result(*result) for name, result in torch.load(made).items()}


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that interprets, started when it is first needed."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "scripts")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__], env=environment, stdin=pipe, stdout=pipe, text=True)

    def end() -> None:
        server.stdin.close()
        server.stdout.close()
        server.kill()
        server.wait()

    atexit.register(end)
    return server


def reference(case: Case) -> tuple[torch.Tensor, ...]:
    """What the reference gives. The inputs stay as they are."""
    outputs = case.spec.reference(*(x.clone() for x in case.inputs), **case.attributes)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_agree(case: Case, found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Whole numbers are equal, others within the op's tolerance of the largest."""
    said = disagreement(case.spec, found, expected)
    assert not said, said


def launches(op: str) -> Callable[..., tuple[Any, ...]]:
    """The function that a case calls."""
    folder, _, name = op.partition(":")
    if not name:
        return OPS[op].plugged
    member = getattr(importlib.import_module(f"glmspec.plugins.{folder}"), name)
    return (lambda run, *inputs, **attributes: run(member, *inputs, **attributes)) if name.isupper() else member


def interpret_file(given: str, made: str, sm: str) -> None:
    """Interpret every case."""
    results = {}
    for name, (op, inputs, attributes) in torch.load(given).items():
        run = Launcher(sm, poison=POISON)
        outputs = launches(op)(run, *inputs, **attributes)
        results[name] = (tuple(outputs), run.programs)
    torch.save(results, made)


def remember_builtins() -> None:
    """Triton looks through its language's modules for what to interpret at every call of a kernel's function, which is
    a fifth of the time: look once."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def patch(module: Any, builder: Any, scope: Any) -> None:
        if module not in names:
            names[module] = [name for name, member in inspect.getmembers(module) if is_builtin(member)]
        for name in names[module]:
            if is_builtin(member := getattr(module, name)):
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch


def main() -> None:
    """Answer requests, one a line, until there are no more: with null, or with the error."""
    torch.set_num_threads(1)
    remember_builtins()
    compute_as_gpus_do()
    answers, sys.stdout = sys.stdout, sys.stderr  # what a kernel prints is no answer
    for line in sys.stdin:
        try:
            interpret_file(*json.loads(line))
            error = None
        except Exception:
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main()
