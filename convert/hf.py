"""`--format hf`: a Hugging Face checkpoint instead of ours, per-expert tensors, scales named as ModelOpt names them.

Everything the source has is in it, the MTP module too; what a network does not take and ours leaves out is copied.
What serving engines fuse (gate with up, the projections that read one input) shares one scale.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from glmspec.build.configs.drafter import DrafterConfig
from glmspec.build.errors import GlmspecError
from glmspec.convert.conversion import Conversion, parts_record, source_record
from glmspec.convert.files import HF_CHECKPOINT, producer, write_json
from glmspec.convert.formats import QUANTIZED
from glmspec.convert.names import Options, Plan
from glmspec.convert.plan import Part, Task, Weight, chunks
from glmspec.convert.recipe import quantizable
from glmspec.convert.shards import Layout, Mapping, Split
from glmspec.convert.source import Source
from glmspec.convert.storage import Stored, field_of, stored
from glmspec.convert.writer import Journal, Run

_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
# Modules that serving engines run as one matrix.
_FUSED = (
    ("gate_proj", "up_proj"),
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk"),
    ("self_attn.q_b_proj", "self_attn.indexer.wq_b"),
)
_NO_WEIGHTS = ("k_scale", "v_scale", "inv_freq")
_ALGOS = {"nvfp4": "NVFP4", "fp8": "FP8", "fp8_block": "FP8_PB_WO"}


MANIFEST = "glmspec.json"


def write_hf(conversion: Conversion, out: Path, run: Run) -> None:
    """Write a Hugging Face checkpoint of what a conversion has read and checked. Raises for drafters and ranks."""
    source, options = conversion.source, conversion.options
    if isinstance(conversion.config, DrafterConfig):
        raise GlmspecError(f"{source.folder}: --format hf: drafters are read in their own format; nothing to write.")
    if options.mapping != Mapping():
        raise GlmspecError(
            "--format hf: a Hugging Face checkpoint is not divided among ranks; leave --tp and --ep out."
        )
    plan = plan_hf(source, options)

    def finish(folder: Path, names: list[list[str]], journal: Journal) -> None:
        record = {
            "producer": producer(HF_CHECKPOINT),
            "recipe": options.recipe.name,
            "parts": parts_record(names, journal),
            "left_out": plan.left_out,
            "notes": [*source.notes, *plan.notes],
            "source": source_record(source),
        }
        write_json(folder / MANIFEST, record)
        write_json(folder / "config.json", {**hf_config(source, plan), "producer": producer(HF_CHECKPOINT)})

    replace(conversion, plan=plan).write_files(out, HF_CHECKPOINT, ["model"], run, finish)


def plan_hf(source: Source, options: Options) -> Plan:
    """Every weight under its Hugging Face name."""
    found = _modules(source)
    formats = {name: options.recipe.format(_module(name), one.format, keep=True) for name, one in found.items()}
    weights = []
    for name, one in found.items():
        inputs, _ = options.activations.scales([_module(name)], [one], formats[name])
        weights.append(_weight(name, found, formats, inputs))
    return Plan(tuple(weights), _left_out(source))


def hf_config(source: Source, plan: Plan) -> dict[str, Any]:
    """config.json of the result."""
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    quantization = quantization_config(plan)
    return config if quantization is None else {**config, "quantization_config": quantization}


def quantization_config(plan: Plan) -> dict[str, Any] | None:
    """What loaders read: native FP8's keys when all is FP8 with block scales, else ModelOpt's."""
    formats = {_module(weight.name): weight.format for weight in plan.weights if weight.format in QUANTIZED}
    if not formats:
        return None
    plain = sorted(_module(one.name) for one in plan.weights if _module(one.name) not in formats and len(one.dims) == 2)
    if set(formats.values()) == {"fp8_block"}:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": plain,
        }
    algos = {module: _ALGOS[format] for module, format in sorted(formats.items())}
    common = {"quant_method": "modelopt", "ignore": plain, "producer": {"name": "glmspec"}}
    if len(set(algos.values())) == 1:
        return {**common, "quant_algo": next(iter(algos.values())), "group_size": 16}
    layers = {
        module: {"quant_algo": algo} | ({"group_size": 16} if algo == "NVFP4" else {}) for module, algo in algos.items()
    }
    return {**common, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def _modules(source: Source) -> dict[str, Stored]:
    """Every weight of the source by its name, `.weight` and all; fused experts one by one."""
    found: dict[str, Stored] = {}
    for name in sorted(source.tensors, key=_natural):
        if field_of(source, name):
            continue
        fused = _FUSED_EXPERTS.fullmatch(name)
        if fused:
            found |= _experts(fused[1], fused[2], stored(source, name))
        elif not name.endswith(_NO_WEIGHTS):
            weight = name.removesuffix("_packed")
            found[weight] = stored(source, weight)
    return found


def _experts(prefix: str, kind: str, whole: Stored) -> dict[str, Stored]:
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    count, rows = whole.shape[0], whole.shape[1] // len(kinds)
    return {
        f"{prefix}.{expert}.{one}.weight": whole.part((expert * len(kinds) + at) * rows, rows)
        for expert in range(count)
        for at, one in enumerate(kinds)
    }


def _weight(name: str, found: dict[str, Stored], formats: dict[str, str], inputs: tuple[float, ...] | None) -> Weight:
    one, format = found[name], formats[name]
    shape = (one.count, one.columns) if one.rows >= 0 else one.shape
    layout = Layout(1, one.count, one.columns, Split(), Mapping())
    tasks = chunks(0, one, format)
    if format in ("nvfp4", "fp8"):
        shares = tuple(found[other] for other in _partners(name, found) if formats[other] == format)
        tasks = [Task((Part(0, 0, one),), shares)]
    return Weight(name, shape, format, layout, tuple(tasks), inputs)


def _partners(name: str, found: dict[str, Stored]) -> list[str]:
    """Other weights that are fused with this one."""
    for group in _FUSED:
        for one in group:
            stem = name.removesuffix(f".{one}.weight")
            if stem != name and quantizable(_module(name)):
                names = [f"{stem}.{other}.weight" for other in group if other != one]
                return [other for other in names if other in found]
    return []


def _left_out(source: Source) -> dict[str, list[str]]:
    names = [name for name in sorted(source.tensors) if name.endswith(_NO_WEIGHTS)]
    return {"scale of a cache format, or rotary frequencies: not weights": names} if names else {}


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _natural(name: str) -> list[Any]:
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", name)]
