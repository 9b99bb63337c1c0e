"""`glmspec-build inspect`: a directory's contents as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from glmspec.build.configs.fields import read_json
from glmspec.build.errors import GlmspecError


def show(folder: Path) -> None:
    """Print an engine directory or a converted checkpoint to stdout."""
    record = read_json(folder / "config.json")
    console = Console()
    if "target" in record:
        _show_engines(console, folder, record)
    elif "hf_config" in record:
        _show_checkpoint(console, folder, record)
    else:
        raise GlmspecError(f"{folder}: neither an engine directory nor a converted checkpoint of glmspec.")


def left_out_lines(record: dict[str, Any]) -> list[str]:
    """What a conversion left out, and why, a line a reason."""
    lines = [f"left out {len(names)} tensors: {reason}" for reason, names in record["left_out"].items()]
    return lines + [f"note: {note}" for note in record["notes"]]


def _show_engines(console: Console, folder: Path, record: dict[str, Any]) -> None:
    limits = record["limits"]
    console.print(f"[bold]{folder}[/bold]: engines for {record['target']}, compute {record['compute']}")
    tensorrt, maker = record["tensorrt"], record["producer"]
    console.print(f"authored by glmspec {maker['version']} with {tensorrt['package']} {tensorrt['version']}")
    table = Table(title="Models")
    for column in ("name", "architecture", "network layers", "network hash", "plan", "weights", "weights hash"):
        table.add_column(column)
    names = [record["verifier"], *(drafter["name"] for drafter in record["drafters"])]
    configs = {name: read_json(folder / name / "config.json") for name in names}
    for name, config in configs.items():
        plan = folder / name / config["plan"]["file"] if config["plan"] else None
        table.add_row(
            name,
            config["pretrained_config"]["architecture"],
            f"{config['network']['layers']:,}",
            config["network"]["sha256"][:12],
            _size(plan) if plan else "none (authored at load)",
            config["weights"]["folder"],
            config["weights"]["sha256"][:12],
        )
    console.print(table)
    table = Table(title="Limits")
    for key in limits:
        table.add_column(key)
    table.add_row(*(f"{value:,}" for value in limits.values()))
    console.print(table)
    for name, config in configs.items():
        _show_contract(console, name, config["contract"])


def _show_contract(console: Console, name: str, contract: dict[str, Any]) -> None:
    table = Table(title=f"{name}: inputs and outputs of a step (weights, tables and caches are bound once)")
    for column in ("direction", "tensor", "dtype", "dims"):
        table.add_column(column)
    for direction, specs in (("in", contract["inputs"]), ("out", contract["outputs"])):
        for spec in specs:
            if spec["role"] == "step":
                table.add_row(direction, spec["name"], spec["dtype"], ", ".join(map(str, spec["dims"])))
    bound: dict[str, int] = {}
    for spec in contract["inputs"]:
        bound[spec["role"]] = bound.get(spec["role"], 0) + 1
    console.print(table)
    console.print("  bound once: " + ", ".join(f"{n} {role}s" for role, n in bound.items() if role != "step"))


def _show_checkpoint(console: Console, folder: Path, record: dict[str, Any]) -> None:
    console.print(
        f"[bold]{folder}[/bold]: {record['architecture']}, {record['dtype']}, from {record['source']['folder']}"
    )
    table = Table(title=f"{record['weights']['file']} ({_size(folder / record['weights']['file'])})")
    for column in ("tensor", "dtype", "shape"):
        table.add_column(column)
    with safe_open(folder / record["weights"]["file"], framework="np") as file:
        for name in file.keys():  # noqa: SIM118  (not a dict)
            view = file.get_slice(name)
            table.add_row(name, view.get_dtype(), ", ".join(map(str, view.get_shape())))
    console.print(table)
    for name, source in record["shared_from_verifier"].items():
        console.print(f"{name} is taken from the verifier's {source}")
    for line in left_out_lines(record):
        console.print(line)


def _size(path: Path) -> str:
    size = float(path.stat().st_size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.1f} {unit}"
        size /= 1024
    return ""
