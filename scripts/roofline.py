"""Writes docs/roofline.md: what every op must move and compute at the full model's sizes, and what the plugins do.

Nothing is measured: bytes and flops are worked out from the ops' and plugins' own rules, times from the GPUs' stated
speeds.

    python scripts/roofline.py            # writes the page
    python scripts/roofline.py --check    # fails when the page is not what this would write
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from kernel_checks.costs import launch_cost, op_cost

from glmspec.build.target import TARGETS
from glmspec.plugins import OPS
from glmspec.plugins.spec import Op, Use, text
from glmspec.plugins.variants import Recorder, shaped

PAGE = Path(__file__).resolve().parents[1] / "docs" / "roofline.md"
BATCHES = (1, 8, 32, 128)
GPUS = {"B200, B300": ("b200", "b300"), "H200": ("h200",)}  # those of one column state the same speeds
COMPUTE = "bfloat16"
_COLUMNS = " | ".join(f"{name} floor us | design us" for name in GPUS)
LAUNCH = 1.5  # microseconds from one launch to the next inside an engine, an assumption

HEAD = f"""# What the special ops cost

Written by `scripts/roofline.py` from the rules in `plugins/`, at the full model's sizes: hidden 6,144, vocabulary
154,880, blocks of 9 rows, bfloat16. **Nothing here was measured.** `scripts/gpu_check` measures it on a GPU.

* **bytes, flops**: the least that any implementation moves and computes: inputs once, outputs once.
* **floor**: the time of the larger of the two at the GPU's stated speed ({{speeds}}).
* **design**: what the plugins move at the same speed, and {LAUNCH} us a launch. **x floor** compares the two; "launch"
  where the floor is less than a launch takes.

What must be read for every dependent step (W2 for every draft of a `markov_walk`) or by every token (the rows of
`sparse_mla`, of which a block's tokens share many) counts every time; an L2 cache may make it less. Under each op: its
sizes, in the letters of its tensors (`batch` sequences), and what a use changes. Contexts are 131,072 tokens for the
indexer, 8,192 for a drafter's full attention, a window of 2,048 for rings; heads are those of a rank of eight. Some
rows are more than a GPU holds. Ops without plugins are at the end, with the reason.
"""
# How often a verifier's step of blocks runs them: 78 layers, of which 21 have an indexer and 75 experts.
STEP = {"sparse_mla": 78, "kv_append": 78, "kv_append index keys": 21, "index_topk": 21, "lowest_topk": 75, "argmax": 1,
        "accept": 1}  # fmt: skip


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    wanted = parser.parse_args()
    text = page()
    if wanted.check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name}: {'up to date' if same else 'not what the rules say; run python scripts/roofline.py'}")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(speeds="; ".join(f"{name}: {_speed(*_stated(name))}" for name in GPUS))]
    parts.append(_step())
    parts += [_section(op) for op in OPS.values() if op.plugged]
    parts.append("## Ops without plugins\n\n| op | TensorRT's layers are enough because |\n|---|---|")
    parts += [f"| `{op.name}` | {op.native} |" for op in OPS.values() if not op.plugged]
    return "\n".join(parts) + "\n"


def _stated(column: str) -> tuple[float, float]:
    """Bytes and flops a second of a column's GPUs."""
    (speeds,) = {(TARGETS[name].bandwidth, TARGETS[name].flops) for name in GPUS[column]}
    return speeds


def _speed(bandwidth: float, flops: float) -> str:
    return f"{bandwidth / 1e12:g} TB/s, {flops / 1e15:g} PFLOP/s"


def _step() -> str:
    """A whole step of the verifier, of blocks in greedy decoding: every op as often as it runs."""
    counts = ", ".join(f"{name} {count}" for name, count in STEP.items())
    lines = ["## A step of the verifier\n", f"Times each: {counts}.\n", f"| seqs | {_COLUMNS} |"]
    lines.append("|---:|" + "---:|" * (2 * len(GPUS)))
    for batch in BATCHES:
        cells = []
        for column in GPUS:
            floor = design = 0.0
            for name, count in STEP.items():
                op, _, use = name.partition(" ")
                times = _times(OPS[op], OPS[op].uses[use], batch, column)
                floor, design = floor + count * times.floor, design + count * times.design
            cells.append(f"{floor:,.0f} | {design:,.0f}")
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class Times:
    """Microseconds of an op on a GPU, and what its plugins move in how many launches."""

    floor: float
    design: float
    moved: int
    launches: int


def _times(op: Op, use: Use, batch: int, column: str) -> Times:
    if op.plugged is None:
        raise ValueError(f"{op.name} has no plugins")
    (bandwidth, peak), sizes = _stated(column), op.sizes(batch, use)
    size, flops = op_cost(op, sizes, COMPUTE)
    run = Recorder(TARGETS[GPUS[column][0]].gpu)
    op.plugged(run, *shaped(op, use, sizes, COMPUTE), **use.attributes)
    costs = [launch_cost(launch) for launch in run.launches]
    design = sum(1e6 * max(moved / bandwidth, done / peak) + LAUNCH for moved, done in costs)
    return Times(1e6 * max(size / bandwidth, flops / peak), design, sum(moved for moved, _ in costs), len(costs))


def _legend(op: Op) -> str:
    """The sizes, and what each use changes of them."""
    words = [", ".join(f"{name} {text(rule)}" for name, rule in op.real.items())]
    for name, use in op.uses.items():
        changed = [f"{size} {text(rule)}" for size, rule in use.sizes.items()]
        changed += [f"{key} {value}" for key, value in use.attributes.items() if key not in ("k", "given")]
        if name and changed:
            words.append(f"{name}: {', '.join(changed)}")
    return "; ".join(words).replace("_", ",") + "."


def _section(op: Op) -> str:
    """One op: a table over uses and batches."""
    names = " | ".join(f"{name} floor us | design us | x floor" for name in GPUS)
    lines = [
        f"## {op.name}\n",
        f"{_legend(op)}\n",
        f"| use | seqs | bytes | flops | launches | design bytes | {names} |",
    ]
    lines.append("|---|" + "---:|" * (5 + 3 * len(GPUS)))
    for name, use in op.uses.items():
        lines += [_row(op, name, use, batch) for batch in BATCHES]
    return "\n".join([*lines, ""])


def _row(op: Op, name: str, use: Use, batch: int) -> str:
    size, flops = op_cost(op, op.sizes(batch, use), COMPUTE)
    columns = [_times(op, use, batch, column) for column in GPUS]
    cells = []
    for times in columns:
        ratio = "launch" if times.floor < LAUNCH else f"{times.design / times.floor:.1f}"
        cells.append(f"{times.floor:.2f} | {times.design:.1f} | {ratio}")
    moves = f"{columns[-1].launches} | {_short(columns[-1].moved)}"
    head = f"| {name or '-'} | {batch} | {_short(size)} | {_short(flops)} | {moves} |"
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
