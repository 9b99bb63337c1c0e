"""`convert --dry-run`: every tensor that would be written, the size of every rank, and what it all adds up to."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.table import Table

from glmspec.convert.conversion import check_source, plan_source
from glmspec.convert.hf import plan_hf
from glmspec.convert.implied import ImpliedSource
from glmspec.convert.names import ConvertOptions, Plan
from glmspec.convert.source import INDEX, SINGLE, Source
from glmspec.convert.storage import field_of
from glmspec.convert.writer import cut, file_part
from glmspec.core.progress import Progress


def dry_run(folder: Path, options: ConvertOptions, hf: bool, progress: Progress) -> None:
    """Print a JSON line an output tensor to stdout, and tables to stderr. A folder with a config and no weights is
    planned by what its config implies."""
    if folder.is_dir():
        check_source(folder)
    there = (folder / INDEX).exists() or (folder / SINGLE).exists()
    source = Source(folder) if there else ImpliedSource(folder)
    conversion = plan_source(source, options)
    plan = plan_hf(conversion) if hf else conversion.plan
    for rank in range(options.mapping.tp):
        for weight in plan.weights:
            for output in weight.outputs(rank).values():
                line = {"rank": rank, "tensor": output.name, "dtype": output.dtype, "shape": output.shape}
                print(json.dumps(line | {"bytes": output.size}))
    progress.show(_inputs(source))
    progress.show(_outputs(plan, options, hf))
    for reason, names in plan.left_out.items():
        parameters = sum(math.prod(source.tensors[name].shape) for name in names if not field_of(source, name))
        progress.say(f"left out {len(names):,} tensors ({parameters:,} parameters): {reason}")


def _inputs(source: Source) -> Table:
    base = [name for name in source.tensors if not field_of(source, name)]
    table = Table(title="Checkpoint", title_justify="left")
    for column in ("tensors", "scales of them", "parameters"):
        table.add_column(column, justify="right")
    parameters = sum(
        math.prod(source.tensors[name].shape) * (2 if source.tensors[name].dtype == "U8" else 1) for name in base
    )
    table.add_row(f"{len(base):,}", f"{len(source.tensors) - len(base):,}", f"{parameters:,}")
    return table


def _outputs(plan: Plan, options: ConvertOptions, hf: bool) -> Table:
    parts = cut(plan.weights, options.mapping.tp)
    table = Table(title=f"To write: recipe {options.recipe.name}", title_justify="left")
    for column in ("files", "parts", "tensors", "bytes", "largest part"):
        table.add_column(column, justify="left" if column == "files" else "right")
    total = 0
    for rank in range(options.mapping.tp):
        sizes = [file_part(weights, rank, "").size for weights in parts]
        tensors = sum(len(weight.outputs(rank)) for weight in plan.weights)
        total += sum(sizes)
        name = "model" if hf else f"rank {rank}"
        table.add_row(name, str(len(sizes)), f"{tensors:,}", f"{sum(sizes):,}", f"{max(sizes):,}")
    table.add_section()
    table.add_row("all", "", "", f"{total:,}", "")
    return table
