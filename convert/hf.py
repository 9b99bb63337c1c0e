"""`--format hf`: a Hugging Face checkpoint instead of ours, per-expert tensors, scales named as ModelOpt names them.

Everything the source has is in it, the MTP module too; what a network does not take and ours leaves out is copied.
What serving engines fuse (gate with up, the projections that read one input) is quantized under one scale; what is
quantized already is kept, each matrix under its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glmspec.convert.conversion import Conversion
from glmspec.convert.fused import partners
from glmspec.convert.names import ConvertOptions, Plan, activation_notes
from glmspec.convert.plan import Weight, chunks
from glmspec.convert.source import Source
from glmspec.convert.storage import StoredWeight, no_weight, weights_of
from glmspec.convert.writer import Journal, Run
from glmspec.core.errors import GlmspecError
from glmspec.core.files import HF_CHECKPOINT, producer, write_json
from glmspec.core.sealed import MANIFEST, write_sealed
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.network.config import RankTensor
from glmspec.network.formats import QUANTIZED
from glmspec.network.shards import Layout, Mapping, Split

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_ALGOS = {"nvfp4": "NVFP4", "fp8": "FP8", "fp8_block": "FP8_PB_WO"}


@dataclass(frozen=True)
class _ModelOptBlocks(Weight):
    """FP8 with block scales as readers of ModelOpt's FP8_PB_WO look for it: `weight_scale`
    [rows / 128, 1, columns / 128, 1]."""

    def outputs(self, rank: int) -> dict[str, RankTensor]:
        tensors = super().outputs(rank)
        rows, columns = tensors["scale_inv"].shape
        scale = replace(tensors["scale_inv"], name=self.field_name("scale"), shape=(rows, 1, columns, 1))
        return tensors | {"scale_inv": scale}


def write_hf(conversion: Conversion, out: Path, run: Run) -> None:
    """Write a Hugging Face checkpoint of what a conversion has read and checked. Raises for drafters and ranks."""
    plan = plan_hf(conversion)

    def finish(folder: Path, names: list[list[str]], journal: Journal, advance: Callable[[int], None]) -> None:
        config = hf_config(conversion.source, plan)
        write_json(folder / "config.json", {**config, "producer": producer(HF_CHECKPOINT)})
        if config.get("quantization_config", {}).get("quant_method") == "modelopt":
            section = {k: v for k, v in config["quantization_config"].items() if k not in ("quant_method", "ignore")}
            section["exclude_modules"] = config["quantization_config"]["ignore"]
            write_json(folder / "hf_quant_config.json", {"producer": section.pop("producer"), "quantization": section})
        record = {"producer": producer(HF_CHECKPOINT), "recipe": conversion.options.recipe.name}
        write_sealed(folder / MANIFEST, record | conversion.account(plan, folder, names, journal, advance))

    replace(conversion, plan=plan).write_files(out, HF_CHECKPOINT, ["model"], run, finish)


def plan_hf(conversion: Conversion) -> Plan:
    """Every weight under its Hugging Face name. Raises for drafters and ranks."""
    source, options = conversion.source, conversion.options
    if isinstance(conversion.config, DrafterConfig):
        raise GlmspecError(f"{source.folder}: --format hf: drafters are read in their own format; nothing to write.")
    if options.mapping != Mapping():
        raise GlmspecError(
            "--format hf: a Hugging Face checkpoint is not divided among ranks; leave --tp and --ep out."
        )
    stored, recipe = weights_of(source), options.recipe
    formats = {name: recipe.format(_module(name), weight.format, keep=True) for name, weight in stored.items()}
    inputs, guessed = _inputs(stored, formats, options)
    native = {format for format in formats.values() if format in QUANTIZED} == {"fp8_block"}
    weights = []
    for name, weight in stored.items():
        shape = (weight.count, weight.columns) if weight.rows >= 0 else weight.shape
        layout = Layout(1, weight.count, weight.columns, Split(), Mapping())
        tasks = chunks(0, weight, formats[name], partners(name, formats[name], recipe, stored.get))
        kind = _ModelOptBlocks if formats[name] == "fp8_block" and not native else Weight
        weights.append(kind(name, shape, formats[name], layout, tuple(tasks), inputs.get(name)))
    consumed = {name for weight in weights for name in weight.names}
    left_out: dict[str, list[str]] = {}
    for name in sorted(source.tensors.keys() - consumed):
        left_out.setdefault(no_weight(name) or "scale of a weight that is not quantized", []).append(name)
    return Plan(tuple(weights), left_out, tuple(activation_notes(weights, guessed, options)))


def _inputs(
    stored: dict[str, StoredWeight], formats: dict[str, str], options: ConvertOptions
) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    """Activation scales by weight, and the modules whose own had to be made up: as in our layout, the experts of a
    layer together."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in stored:
        match = _EXPERT.fullmatch(name)
        layer, matrix = (match[1], "down" if match[2] == "down" else "gate_up") if match else (name, "")
        groups.setdefault((layer, matrix, formats[name]), []).append(name)
    scales, guessed = {}, []
    for (_, kind, format), names in groups.items():
        modules = [_module(name) for name in names]
        input_scales, missing = options.activations.scales(
            modules, [stored[name] for name in names], format, 2 if kind == "gate_up" and len(names) % 2 == 0 else 1
        )
        guessed += missing
        if input_scales:
            scales |= {name: (scale,) for name, scale in zip(names, input_scales, strict=True)}
    return scales, guessed


def hf_config(source: Source, plan: Plan) -> dict[str, Any]:
    """config.json of the result."""
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    quantization = quantization_config(plan)
    return config if quantization is None else {**config, "quantization_config": quantization}


def quantization_config(plan: Plan) -> dict[str, Any] | None:
    """What loaders read: native FP8's keys when all is FP8 with block scales, else ModelOpt's."""
    quantized = [weight for weight in plan.weights if weight.format in QUANTIZED]
    formats = {_module(weight.name): weight.format for weight in quantized}
    if not formats:
        return None
    matrices = [_module(weight.name) for weight in plan.weights if len(weight.dims) == 2]
    plain = sorted(module for module in matrices if module not in formats)
    if set(formats.values()) == {"fp8_block"}:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": plain,
        }
    bare = {_module(weight.name) for weight in quantized if weight.format == "nvfp4" and weight.inputs is None}
    algos = {module: "W4A16_NVFP4" if module in bare else _ALGOS[format] for module, format in sorted(formats.items())}
    common = {"quant_method": "modelopt", "ignore": plain, "producer": {"name": "glmspec"}}
    if len(set(algos.values())) == 1:
        return {**common, "quant_algo": next(iter(algos.values())), "group_size": 16}
    layers = {
        module: {"quant_algo": algo} | ({"group_size": 16} if "NVFP4" in algo else {}) for module, algo in algos.items()
    }
    return {**common, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def _module(name: str) -> str:
    return name.removesuffix(".weight")
