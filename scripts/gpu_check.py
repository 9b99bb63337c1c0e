"""The plugins' kernels on a GPU: compiled, run, compared with their references at the full model's sizes, timed.

Needs torch, Triton and numpy, and neither TensorRT nor an installed glmspec. `scripts/gpu_check` starts it.

For every op, use and batch: the chain of plugins is run and compared; then it and the reference as it is ("eager") are
captured as CUDA graphs and timed by events, with the L2 cache overwritten before each run; the median counts. When all
cases have that, the references under torch.compile are timed too, while there is time. The floor is the time that the
op's least bytes and flops take at the stated speed of the GPU that engines are built for with this SM.

--dry-run runs the same on a CPU in Triton's interpreter, with small sizes and without times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCHES = (32, 1)  # the one that goals are set for first: torch.compile may use up the time
SECONDS = 420  # a compilation that has begun takes up to a minute more
RUNS, WARM = 30, 3
SHARE = 0.01  # of blocks or rows may differ on a GPU: sums in another order now and then choose another token
LATE = "compiled: no time left"
FLUSH = 512 << 20  # bytes; more than any L2


@dataclass
class Row:
    """One op in one use at one batch. compared: False where there is no verdict. Times in microseconds, None where not
    measured; share: of the floor."""

    op: str
    use: str
    batch: int
    launches: int = 0
    compared: bool = False
    wrong: str = ""
    floor: float | None = None
    plugins: float | None = None
    eager: float | None = None
    compiled: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """Of the GPU's speed that the plugins reach."""
        return self.floor / self.plugins if self.floor and self.plugins else None


def find_glmspec() -> None:
    """Let `glmspec.*` be imported from this checkout, installed or not; `kernel_checks` too."""
    sys.path.insert(0, str(ROOT / "scripts"))
    package = types.ModuleType("glmspec")
    package.__path__ = [str(ROOT)]
    sys.modules["glmspec"] = package


def cases(ops: list[str], batches: tuple[int, ...]) -> Iterator[tuple[Any, str, int]]:
    """Ops with plugins, their uses, and batches."""
    from glmspec.plugins import OPS

    wanted = [op for name, op in OPS.items() if op.plugged and (not ops or name in ops)]
    for batch in batches:
        yield from ((op, use, batch) for op in wanted for use in op.uses)


def inputs_of(op: Any, use: Any, sizes: dict[str, int], compute: str, device: str) -> list[Any]:
    """The op's own example."""
    import torch
    from kernel_checks.examples import EXAMPLES

    g = torch.Generator(device).manual_seed(1)
    return [x.to(device) for x in EXAMPLES[op.name](sizes, use, getattr(torch, compute), g)]


def check(op: Any, use: Any, inputs: list[Any], sm: str, compute: str, row: Row) -> None:
    """Run the plugins once and compare. In the interpreter whole numbers must be equal."""
    from kernel_checks.agree import disagreement
    from kernel_checks.launch import Launcher

    run = Launcher(sm, poison=77)
    outputs = op.plugged(run, *(x.clone() for x in inputs), **use.attributes)
    row.launches = run.launches
    expected = op.reference(*(x.clone() for x in inputs), **use.attributes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    share = SHARE if expected[0].is_cuda else 0.0
    row.wrong = disagreement(op, outputs, expected, compute=compute, share=share)
    row.compared = True
    if share and not row.wrong and (exactly := disagreement(op, outputs, expected, compute=compute)):
        row.notes.append(exactly)


def timed(work: Callable[[], Any], row: Row, what: str) -> float | None:
    """Median microseconds of a run, captured as a graph where that can be (a note says where not). None, with a note,
    where it fails."""
    import torch

    try:
        for _ in range(WARM):
            work()
        torch.cuda.synchronize()
    except Exception as error:
        row.notes.append(f"{what}: {_first_line(error)}")
        return None
    run = captured(work)
    if run is None:
        row.notes.append(f"{what}: not captured, launches are in its time")
        run = work
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for before, after in marks:
        flush.zero_()
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(before.elapsed_time(after) for before, after in marks)


def captured(work: Callable[[], Any]) -> Callable[[], None] | None:
    """The work as one CUDA graph; None where it waits for the GPU half-way, which can't be captured. That is found out
    beforehand: a capture that fails leaves torch on the capture's stream, its memory held."""
    import torch

    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.set_sync_debug_mode("error")
        work()
        torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(graph):
            work()
    except Exception:
        torch.cuda.synchronize()
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return graph.replay


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def measure(op: Any, use: Any, inputs: list[Any], sm: str, row: Row) -> None:
    """Time the plugins and the reference."""
    from kernel_checks.launch import Launcher

    run = Launcher(sm)
    row.plugins = timed(lambda: op.plugged(run, *inputs, **use.attributes), row, "plugins")
    row.eager = timed(lambda: op.reference(*inputs, **use.attributes), row, "eager")


def measure_compiled(op: Any, use: Any, inputs: list[Any], row: Row) -> None:
    """Time the reference under torch.compile."""
    import torch

    torch._dynamo.reset()
    compiled = torch.compile(op.reference, dynamic=False)
    row.compiled = timed(lambda: compiled(*inputs, **use.attributes), row, "compiled")


def floor_of(op: Any, sizes: dict[str, int], gpu: Any) -> float:
    """Microseconds that the least bytes or flops take."""
    from kernel_checks.costs import op_cost

    size, flops = op_cost(op, sizes, "bfloat16")
    return 1e6 * max(size / gpu.bandwidth, flops / gpu.flops)


def machine(dry: bool) -> dict[str, Any]:
    """Where this ran."""
    import torch
    import triton

    gpu = "none: Triton's interpreter" if dry else torch.cuda.get_device_name()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": None if dry else torch.version.cuda,
        "python": platform.python_version(),
    }


def target_of(sm: str) -> Any:
    """The GPU's row in the table of targets, by its SM."""
    from glmspec.build.target import TARGETS

    return next((target for target in TARGETS.values() if target.compute_capability == sm), None)


def this_sm() -> str:
    """Like "SM90", whose tile sizes are used for unknown ones too."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"SM{major}{minor}"


def run_all(wanted: argparse.Namespace, keep: Callable[[list[Row]], None]) -> list[Row]:
    """Every case: compared and timed, then the references compiled while there is time. A case that fails is a row that
    says so. keep: told of all rows after each case."""
    from glmspec.plugins.compiler import SMS
    from glmspec.plugins.spec import NoPlugin

    if wanted.dry_run:
        from kernel_checks.interpreter import compute_as_gpus_do

        compute_as_gpus_do()
    deadline = time.monotonic() + wanted.seconds
    here = "SM90" if wanted.dry_run else this_sm()
    sm, gpu = here if here in SMS else "SM90", target_of(here)
    device, compute = ("cpu", "float32") if wanted.dry_run else ("cuda", "bfloat16")

    def first(op: Any, use: Any, sizes: dict[str, int], row: Row) -> None:
        inputs = inputs_of(op, use, sizes, compute, device)
        try:
            check(op, use, inputs, sm, compute, row)
        except NoPlugin:  # of float32
            check(op, use, inputs_of(op, use, sizes, "bfloat16", device), sm, "bfloat16", row)
        if not wanted.dry_run:
            row.floor = floor_of(op, sizes, gpu) if gpu else None
            measure(op, use, inputs, sm, row)

    def second(op: Any, use: Any, sizes: dict[str, int], row: Row) -> None:
        measure_compiled(op, use, inputs_of(op, use, sizes, compute, device), row)

    rows: list[Row] = []
    todo = list(cases(wanted.op, (2,) if wanted.dry_run else tuple(wanted.batch)))
    for work in (first,) if wanted.dry_run else (first, second):
        for at, (op, name, batch) in enumerate(todo):
            use = op.uses[name]
            sizes = small(op, use, batch) if wanted.dry_run else op.sizes(batch, use)
            if work is first:
                rows.append(Row(op.name, name, batch))
            elif time.monotonic() > deadline:
                rows[at].notes.append(LATE)
                continue
            attempt(lambda: work(op, use, sizes, rows[at]), device, rows[at])  # noqa: B023  (called at once)
            print(line(rows[at]), flush=True)
            keep(rows)
    keep(rows)
    return rows


def attempt(work: Callable[[], None], device: str, row: Row) -> None:
    """Do it on a device; what fails is noted."""
    import torch

    try:
        with torch.device(device):
            work()
    except torch.OutOfMemoryError:
        row.notes.append("does not fit into this GPU's memory")
    except Exception as error:
        row.wrong = _first_line(error)
        print(traceback.format_exc(), file=sys.stderr)
    if device == "cuda":
        torch.cuda.empty_cache()


def small(op: Any, use: Any, batch: int) -> dict[str, int]:
    """Sizes that the interpreter can do in seconds."""
    from kernel_checks.costs import SMALL

    return op.sizes(batch, type(use)(sizes={**use.sizes, **SMALL.get(op.name, {})}))


def line(row: Row) -> str:
    """A row of the table."""
    us = lambda value: f"{value:9.1f}" if value is not None else "        -"  # noqa: E731
    share = f"{100 * row.share:4.0f} %" if row.share else "     -"
    faster = [
        f"{other / row.plugins:6.1f}x" if other and row.plugins else "      -" for other in (row.eager, row.compiled)
    ]
    name = f"{row.op} {row.use}".strip()
    verdict = f"WRONG: {row.wrong}" if row.wrong else "agrees" if row.compared else "not compared"
    verdict = "; ".join([verdict, *row.notes])
    numbers = f"{row.batch:4} {row.launches:3} {us(row.floor)} {us(row.plugins)} {share} {' '.join(faster)}"
    return f"{name:34} {numbers}  {verdict}"


HEAD = f"{'op, use':34} {'seqs':>4} {'run':>3} {'floor us':>9} {'plugins':>9} {'share':>6} {'eager':>7} {'compile':>7}"


def main() -> int:
    """0 when everything agrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--op", action="append", default=[], help="this op only; may be given several times")
    parser.add_argument("--batch", action="append", type=int, default=[], help="sequences; may be given several times")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which nothing is compiled by torch")
    parser.add_argument("--json", type=Path, help="file to write")
    wanted = parser.parse_args()
    wanted.batch = wanted.batch or list(BATCHES)
    if min(wanted.batch) < 1:
        parser.error(f"--batch: found {min(wanted.batch)}, expected 1 or more")
    if wanted.json and not wanted.json.parent.is_dir():
        parser.error(f"--json: found no folder {wanted.json.parent}, expected one. Make it first.")
    if wanted.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        warnings.filterwarnings("ignore", module="triton.runtime.interpreter")  # log(0) on the way to a cutoff of none
    find_glmspec()
    try:
        import torch
        import triton  # noqa: F401

        from glmspec.plugins import OPS
    except ImportError as error:
        print(
            f"gpu_check: {error}. This python needs torch, Triton and numpy; PYTHON chooses another.", file=sys.stderr
        )
        return 3

    able = [name for name, op in OPS.items() if op.plugged]
    for name in wanted.op:
        if name not in able:
            parser.error(f"--op: found {name}, expected one of {', '.join(able)}")
    if not wanted.dry_run and not torch.cuda.is_available():
        print("gpu_check: no CUDA GPU here. --dry-run runs it in Triton's interpreter.", file=sys.stderr)
        return 3
    where = machine(wanted.dry_run)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(HEAD)
    rows = run_all(wanted, lambda rows: write(wanted.json, where, rows))
    wrong, compared = [row for row in rows if row.wrong], [row for row in rows if row.compared]
    left = f", {len(rows) - len(compared)} not compared" if len(compared) < len(rows) else ""
    late = sum(LATE in row.notes for row in rows)
    left += f", {late} references not compiled for want of time" if late else ""
    print(f"{sum(not row.wrong for row in compared)} of {len(rows)} agree{left}")
    return 1 if wrong or not compared else 0


def write(path: Path | None, where: dict[str, Any], rows: list[Row]) -> None:
    """What is known so far: a lent GPU may go before the end."""
    if path is None:
        return
    record = {"machine": where, "rows": [{**asdict(row), "share": row.share} for row in rows]}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.rename(path)


if __name__ == "__main__":
    sys.exit(main())
