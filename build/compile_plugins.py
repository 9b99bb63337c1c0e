"""`glmspec-build plugins`: the plugins' kernels compiled ahead of time, for the full model's sizes or for a deployment.

    KERNELS/config.json          what the folder is
    KERNELS/manifest.json        every kernel: constants, parameters, registers, launch rule, hashes
    KERNELS/NAME.ptx, .cubin     what TensorRT is given, and the same assembled

Nothing is written when a kernel spills or passes a limit of its `limits.json`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from glmspec.build.deployment import Deployment
from glmspec.build.plugin_variants import check_plugins, graphs_of, variants_of
from glmspec.build.settings import PLUGINS_OFF
from glmspec.build.target import TARGETS, Target
from glmspec.build.validate.case import Case
from glmspec.core.errors import ConfigError
from glmspec.core.files import KERNELS, producer
from glmspec.core.folders import new_folder
from glmspec.core.progress import Progress
from glmspec.core.sealed import digests, write_sealed
from glmspec.plugins import OPS
from glmspec.plugins.compiler import SMS, Compiled, Variant, compile_all, write_compiled
from glmspec.plugins.spec import COMPUTE
from glmspec.plugins.variants import real_variants


def full_model(target: Target, ops: Sequence[str] = ()) -> list[Variant]:
    """The kernels of the full model's sizes. ops: of these only. Raises `ConfigError` for a target without plugins."""
    sm = _sm(target)
    able = [name for name, op in OPS.items() if op.plugged]
    for name in ops:
        if name not in able:
            raise ConfigError(f"--op: found {name}, expected one of {', '.join(able)}.")
    variants = [variant for name in ops or able for variant in real_variants(OPS[name], sm, target.compute)]
    return list(dict.fromkeys(variants))


def _sm(target: Target) -> str:
    if target.compute_capability not in SMS:
        able = ", ".join(known.name for known in TARGETS.values() if known.compute_capability in SMS)
        raise ConfigError(f"--target: found {target.name}, which has no plugins, expected one of {able}.")
    return target.compute_capability


def of_deployment(deployment: Deployment, progress: Progress) -> list[Variant]:
    """The kernels that a deployment's networks use. Raises `ConfigError` for a target without plugins."""
    _sm(deployment.target)
    if deployment.plugins == PLUGINS_OFF:
        raise ConfigError("--plugins: found off, expected auto or on: there is nothing to compile without plugins.")
    with progress.stage("Authoring the networks"):
        graphs = graphs_of(deployment, Case(deployment).backend)
        kernels = variants_of(deployment, graphs)
    check_plugins(deployment, graphs)
    for reason in kernels.kept:
        progress.note(f"TensorRT's layers instead of a plugin: {reason}")
    return list(kernels.variants)


def compile_plugins(
    variants: Sequence[Variant], target: Target, out: Path | None, progress: Progress, *, table: bool = True
) -> dict[str, Any]:
    """Compile, show a table, and write a folder if asked to; the numbers of every kernel. Raises `NetworkError` with
    all that is wrong."""
    start = time.perf_counter()
    if out is None:
        kernels = _compile(variants, target, progress)
    else:
        with new_folder(out, KERNELS) as folder:
            kernels = _compile(variants, target, progress)
            write_compiled(folder, target.gpu, kernels)
            record = {"producer": producer(KERNELS), "kernels_for": target.name}
            write_sealed(folder / "config.json", record | {"files": digests(folder, folder.iterdir())})
    if table:
        Console().print(_table(target.gpu, kernels))
    return {
        "producer": producer(KERNELS),
        "target": target.name,
        "compute_capability": target.compute_capability,
        "triton": version("triton"),
        "seconds": round(time.perf_counter() - start, 2),
        "folder": str(out) if out else None,
        "kernels": [_numbers(kernel) for kernel in kernels],
    }


def _numbers(kernel: Compiled) -> dict[str, Any]:
    return {
        "plugin": kernel.variant.plugin.id,
        "name": kernel.variant.name,
        "dtype": kernel.variant.compute,
        "constants": dict(kernel.variant.constants),
        "registers": kernel.registers,
        "stack_bytes": kernel.stack,
        "shared_memory_bytes": kernel.shared_memory,
        "warps": kernel.warps,
        "sha256": kernel.sha256,
    }


def _compile(variants: Sequence[Variant], target: Target, progress: Progress) -> list[Compiled]:
    with progress.steps(f"Compiling for {target.compute_capability}", len(variants)) as advance:

        def tick(variant: Variant) -> None:
            progress.doing(variant.plugin.name)
            advance(variant.name)

        return compile_all(variants, tick)


def _table(sm: str, kernels: Sequence[Compiled]) -> Table:
    table = Table(title=f"Kernels for {sm}: none spills", title_justify="left")
    table.add_column("plugin", no_wrap=True)
    table.add_column("for", overflow="fold")
    for name in ("registers", "shared", "warps"):
        table.add_column(name, justify="right", no_wrap=True)
    for kernel in kernels:
        row = (kernel.registers, kernel.shared_memory, kernel.warps)
        table.add_row(kernel.variant.plugin.id, _label(kernel, kernels), *(f"{cell:,}" for cell in row))
    return table


def _label(kernel: Compiled, kernels: Sequence[Compiled]) -> str:
    """What tells a kernel from others of its plugin: its dtype, and the constants that differ and are not derived."""
    plugin, compute = kernel.variant.plugin, kernel.variant.compute
    others = [dict(other.variant.constants) for other in kernels if other.variant.plugin is plugin]
    mine = dict(kernel.variant.constants)

    def differs(name: str) -> bool:
        return name not in plugin.sizes and any(other.get(name) != mine[name] for other in others)

    words = [compute] if COMPUTE in (*plugin.inputs.values(), *plugin.outputs.values()) else []
    words += [f"{name} {size}" for name, size in mine.items() if differs(name)]
    return ", ".join(words) or "-"
