"""Writes docs/roofline.md: what every op must move and compute at the full model's sizes, and what the plugins do.

Nothing is measured: bytes and flops are worked out from the ops' and plugins' own rules, times from the GPUs' stated
speeds. --check fails when the page is not what this would write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from glmspec.build.configs.target import TARGETS
from glmspec.plugins import OPS
from glmspec.plugins.spec import Op, Use
from glmspec.plugins.variants import Recorder, shaped

PAGE = Path(__file__).resolve().parents[1] / "docs" / "roofline.md"
BATCHES = (1, 8, 32, 128)
GPUS = {"B200, B300": ("b200", "b300"), "H200": ("h200",)}  # those of one column state the same speeds
COMPUTE = "bfloat16"
LAUNCH = 1.5  # microseconds from one launch to the next inside an engine, an assumption

HEAD = f"""# What the special ops cost

Written by `scripts/roofline.py` from the rules in `plugins/`, at the full model's sizes: hidden 6,144, vocabulary
154,880, blocks of 9 rows, bfloat16. **Nothing here was measured.** `scripts/gpu_check` measures it on a GPU.

* **bytes, flops**: the least that any implementation moves and computes: inputs once, outputs once.
* **floor**: the time of the larger of the two at the GPU's stated speed ({{speeds}}).
* **design**: what the plugins move at the same speed, and {LAUNCH} us a launch. **x floor** compares the two; "launch"
  where the floor is less than a launch takes.

What a launch reads twice out of L2 counts twice. Ops without plugins are at the end, with the reason.
"""


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    wanted = parser.parse_args()
    text = page()
    if wanted.check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name}: {'up to date' if same else 'not what the rules say; run scripts/roofline.py'}")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(speeds="; ".join(f"{name}: {_speed(*_stated(name))}" for name in GPUS))]
    plugged = [op for op in OPS.values() if op.plugged]
    parts += [_section(op) for op in plugged]
    parts.append("## Ops without plugins\n\n| op | TensorRT's layers are enough because |\n|---|---|")
    parts += [f"| `{op.name}` | {op.native} |" for op in OPS.values() if not op.plugged]
    return "\n".join(parts) + "\n"


def _stated(column: str) -> tuple[float, float]:
    """Bytes and flops a second of a column's GPUs."""
    (speeds,) = {(TARGETS[name].bandwidth, TARGETS[name].flops) for name in GPUS[column]}
    return speeds


def _speed(bandwidth: float, flops: float) -> str:
    return f"{bandwidth / 1e12:g} TB/s, {flops / 1e15:g} PFLOP/s"


def _section(op: Op) -> str:
    """One op: a table over uses and batches."""
    names = " | ".join(f"{name} floor us | design us | x floor" for name in GPUS)
    lines = [f"## {op.name}\n", f"| use | seqs | bytes | flops | launches | design bytes | {names} |"]
    lines.append("|---|" + "---:|" * (5 + 3 * len(GPUS)))
    for name, use in op.uses.items():
        lines += [_row(op, name, use, batch) for batch in BATCHES]
    return "\n".join([*lines, ""])


def _row(op: Op, name: str, use: Use, batch: int) -> str:
    sizes = op.sizes(batch, use)
    size, flops = op.cost(sizes, COMPUTE)
    cells = []
    for column, gpus in GPUS.items():
        bandwidth, peak = _stated(column)
        run = Recorder(TARGETS[gpus[0]].compute_capability)
        op.plugged(run, *shaped(op, use, sizes, COMPUTE), **use.attributes)
        costs = [launch.cost for launch in run.launches]
        floor = 1e6 * max(size / bandwidth, flops / peak)
        design = sum(1e6 * max(moved / bandwidth, done / peak) + LAUNCH for moved, done in costs)
        cells.append(f"{floor:.2f} | {design:.1f} | {'launch' if floor < LAUNCH else f'{design / floor:.1f}'}")
        moved = sum(cost[0] for cost in costs)
    head = f"| {name or '-'} | {batch} | {_short(size)} | {_short(flops)} | {len(costs)} | {_short(moved)} |"
    return f"{head} {' | '.join(cells)} |"


def _short(number: float) -> str:
    """Like "12.3 M"."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000 or unit == "T":
            return f"{number:.3g} {unit}".strip()
        number /= 1000
    return ""


if __name__ == "__main__":
    sys.exit(main())
