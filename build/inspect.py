"""`glmspec-build inspect`: a directory's contents as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glmspec.build.bundle import open_bundle
from glmspec.build.describe import describe, kind_in
from glmspec.build.plugin_variants import open_kernels
from glmspec.convert.checkpoint import read_checkpoint
from glmspec.convert.command import left_out_lines
from glmspec.convert.origin import name_of
from glmspec.convert.terms import terms_lines
from glmspec.core.fields import read_json
from glmspec.core.files import BUNDLE, CHECKPOINT, ENGINES, KERNELS, REPOSITORY
from glmspec.core.units import size_text
from glmspec.runtime.directory import EngineDirectory


def show(folder: Path) -> None:
    """Print a checkpoint, an engine bundle or directory, a kernel folder or a model repository to stdout."""
    kind, record = kind_in(folder), read_json(folder / "config.json")
    console = Lines()
    if kind == BUNDLE:
        _show_bundle(console, folder, open_bundle(folder))
    elif kind == ENGINES:
        _show_engines(console, folder, EngineDirectory.open(folder))
    elif kind == CHECKPOINT:
        _show_checkpoint(console, folder, record)
    elif kind == REPOSITORY:
        _show_repository(console, folder)
    elif kind == KERNELS:
        _show_kernels(console, folder, open_kernels(folder)["kernels_for"])
    else:
        record = describe(folder)
        _show_published(console, record)
    for line in terms_lines(name_of(folder), record):
        console.say(line)


class Lines(Console):
    """A console whose lines are never broken: paths and commands are copied from them."""

    def title(self, place: object, text: str) -> None:
        """What a place is."""
        self.print(f"[bold]{escape(str(place))}[/bold]: {escape(text)}", soft_wrap=True)

    def say(self, text: str) -> None:
        """A line beside the tables."""
        self.print(text, markup=False, soft_wrap=True)


def _show_published(console: Lines, about: dict[str, Any]) -> None:
    """What config and headers say, then what `convert` would make of them."""
    console.title(about["folder"], "Hugging Face checkpoint, not converted yet")
    table = _table("Checkpoint", "what", "value")
    for key in ("architecture", "model", "dialect", "layers", "drafts", "mtp_modules", "max_position_embeddings"):
        if key in about:
            table.add_row(key, _cell(about[key]))
    for key in ("files", "tensors", "parameters"):
        if about.get(key):
            table.add_row(key, _cell(about[key]))
    if about.get("formats"):
        table.add_row("formats", _counts(about["formats"]))
    if "weights_here" in about:
        size = size_text(about["bytes"]) if about["weights_here"] else "none here: as the config implies"
        table.add_row("weights", size)
    table.add_row("text files", ", ".join(about["text_files"]) or "none")
    console.print(table)
    plan = about["convert"]
    if not plan["accepted"]:
        console.say(f"convert refuses it: {plan['error']}")
        return
    wrote = f"{size_text(plan['bytes'])} in {plan['tensors']:,} tensors ({_counts(plan['formats'])})"
    console.say(f"convert writes {wrote}, as one rank")
    for reason, count in plan["left_out"].items():
        console.say(f"left out {count:,} tensors: {reason}")
    for note in plan["notes"]:
        console.say(f"note: {note}")


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def _counts(formats: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in formats.items())


def _show_bundle(console: Lines, folder: Path, directory: EngineDirectory) -> None:
    record = directory.record
    console.title(folder, f"engine bundle for {record['target']}, not compiled yet")
    table = _table("Models", "name", "from", "weights", "SHA-256")
    for name, model in directory.models.items():
        source, weights = model["pretrained_config"]["source"]["folder"], model["weights"]
        table.add_row(name, source, weights["folder"], weights["sha256"][:16])
    console.print(table)
    console.say(f"validation: {'validation.json' if (folder / 'validation.json').exists() else 'none'}")
    if record["kernels"]:
        _show_kernels(console, folder / record["kernels"], record["target"])
    else:
        why = "compiled when it is finished, by Triton there" if record["plugins"] != "off" else "plugins are off"
        console.say(f"kernels: none ({why})")
    console.say(f"to finish it: {record['finish']}")


def _show_engines(console: Lines, folder: Path, directory: EngineDirectory) -> None:
    record = directory.record
    console.title(folder, f"engines for {record['target']}, compute {record['compute']}")
    tensorrt, maker = record["tensorrt"], record["producer"]
    console.say(f"authored by glmspec {maker['version']} with {tensorrt['package']} {tensorrt['version']}")
    configs = directory.models
    models = _table("Models", "name", "architecture", "profile", "layers", "plan", "weights")
    hashes = _table("Hashes (SHA-256, first 16 digits)", "name", "profile", "network", "plan", "weights")
    for name, config in configs.items():
        weights, architecture = config["weights"], config["pretrained_config"]["architecture"]
        for profile, network in config["networks"].items():
            plan = config["plans"].get(profile)
            size = size_text((folder / name / plan["file"]).stat().st_size) if plan else "authored at load"
            models.add_row(name, architecture, profile, f"{network['layers']:,}", size, weights["folder"])
            digests = (network["sha256"], plan["sha256"] if plan else "-", weights["sha256"])
            hashes.add_row(name, profile, *(digest[:16] for digest in digests))
    limits = _table("Limits", "limit", "value")
    for key, value in record["limits"].items():
        limits.add_row(key, "all" if value is None else f"{value:,}")
    limits.add_row("illegal token ids", f"{len(directory.illegal):,}")
    for table in (models, hashes, limits):
        console.print(table)
    drafts = [f"{name} ({_drafting(configs[name]['build_config'])})" for name in directory.choices]
    console.say(f"drafters: {', '.join(drafts) or 'none'}")
    for name, config in configs.items():
        _show_contract(console, name, config["contract"])


def _drafting(build: dict[str, Any]) -> str:
    """How a drafter drafts, in a few words."""
    words = f"{build['num_drafts']} drafts a step{', drawn' if build['sampled'] else ''}"
    words += f", among the {build['markov_top_k']} best logits" if build["markov_top_k"] else ""
    return words + (f", {build['drafter_window']} window" if build["drafter_window"] else "")


def _show_repository(console: Lines, folder: Path) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    from glmspec.triton_repo.repository import read_repository

    messages: Any = model_config_pb2  # protobuf makes its classes when it is imported
    engines = read_repository(folder)["engines"]["folder"]
    console.title(folder, f"Triton model repository for the engines in {engines}")
    for path in sorted(folder.glob("*/config.pbtxt")):
        config = text_format.Parse(path.read_text(encoding="utf-8"), messages.ModelConfig())
        table = _table(f"Model {config.name}", "direction", "tensor", "type", "dims")
        for direction, tensors in (("in", config.input), ("out", config.output)):
            for tensor in tensors:
                kind = messages.DataType.Name(tensor.data_type).removeprefix("TYPE_")
                table.add_row(direction, tensor.name, kind, ", ".join(map(str, tensor.dims)))
        console.print(table)
        for key, value in sorted(config.parameters.items()):
            console.say(f"{key}: {value.string_value or '-'}")


def _show_kernels(console: Lines, folder: Path, target: str) -> None:
    manifest = read_json(folder / "manifest.json")
    console.title(folder, f"kernels for {target} ({manifest['sm']}), by Triton {manifest['triton']}")
    table = _table("Plugins", "name", "file", "registers", "shared", "warps", "grid")
    for kernel in manifest["plugins"]:
        numbers = (kernel["registers"], kernel["shared_memory"], kernel["launch"]["warps"])
        grid = ", ".join(kernel["launch"]["grid"])
        table.add_row(kernel["name"], kernel["file"].split(".")[-2], *(f"{number:,}" for number in numbers), grid)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    """A table whose first column never wraps."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0, overflow="fold")
    return table


def _show_contract(console: Lines, name: str, contract: dict[str, Any]) -> None:
    table = _table(f"{name}: inputs and outputs of a step", "direction", "tensor", "dtype", "dims")
    for direction, specs in (("in", contract["inputs"]), ("out", contract["outputs"])):
        for spec in specs:
            if spec["role"] == "step":
                table.add_row(direction, spec["name"], spec["dtype"], ", ".join(map(str, spec["dims"])))
    bound: dict[str, int] = {}
    for spec in contract["inputs"]:
        bound[spec["role"]] = bound.get(spec["role"], 0) + 1
    console.print(table)
    if once := [f"{n} {role}s" for role, n in bound.items() if role != "step"]:
        console.say(f"  bound once: {', '.join(once)}")


def _show_checkpoint(console: Lines, folder: Path, record: dict[str, Any]) -> None:
    checkpoint = read_checkpoint(folder)  # refuses one that has lost its weights
    kind = record["quantization"]["quant_algo"] or record["dtype"]
    console.title(folder, f"{record['architecture']}, {kind}, from {record['source']['folder']}")
    for rank, names in enumerate(record["ranks"]):
        size = size_text(sum(record["parts"][name]["size"] for name in names))
        title = f"rank {rank} ({len(names)} files, {size})"
        if rank:
            console.say(f"{title}: the same names, dtypes and shapes")
            continue
        table = _table(title, "tensor", "dtype", "shape")
        for weight in checkpoint.weights():
            for output in weight.outputs(rank).values():
                table.add_row(output.name, output.dtype, ", ".join(map(str, output.shape)))
        console.print(table)
    for name, source in record["shared_from_verifier"].items():
        console.say(f"{name} is taken from the verifier's {source}")
    for line in left_out_lines(record):
        console.say(line)
