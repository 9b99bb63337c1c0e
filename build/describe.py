"""What a folder holds, as plain data: for `inspect --json`, and for `verify --json` what was verified.

Reads configs, records and headers; no tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glmspec.build.bundle import open_bundle
from glmspec.build.plugin_variants import open_kernels
from glmspec.convert.beside import TEXT, matching
from glmspec.convert.checkpoint import Checkpoint, read_checkpoint
from glmspec.convert.conversion import Conversion, plan_source
from glmspec.convert.implied import ImpliedSource
from glmspec.convert.names import ConvertOptions
from glmspec.convert.recipe import RECIPES
from glmspec.convert.source import INDEX, SINGLE, Source
from glmspec.convert.storage import field_of, weights_of
from glmspec.convert.writer import cut, file_part
from glmspec.core.errors import GlmspecError
from glmspec.core.fields import read_json
from glmspec.core.files import BUNDLE, CHECKPOINT, ENGINES, HF_CHECKPOINT, KERNELS, REPOSITORY
from glmspec.core.sealed import MANIFEST, kind_of, open_manifest
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.drafter_dialects import Dialect
from glmspec.models.configs.kinds import Config, parse_config
from glmspec.runtime.directory import EngineDirectory

Record = dict[str, Any]


def kind_in(folder: Path) -> str:
    """What a folder is, in our words. Raises `GlmspecError` for what is neither ours nor a checkpoint that we know."""
    if kind := kind_of(folder):
        return kind
    record = read_json(folder / "config.json")
    if "architectures" not in record:
        raise GlmspecError(
            f"{folder}: not a checkpoint, engine directory, engine bundle, kernel folder or model repository of "
            "glmspec, and no Hugging Face checkpoint: its config.json has no architectures."
        )
    parse_config(record, f"{folder}/config.json")
    return HF_CHECKPOINT


def describe(folder: Path) -> Record:
    """A folder's kind, sizes in bytes, versions and digests. Raises naming what is missing or damaged."""
    kind = kind_in(folder)
    makers: dict[str, Callable[[Path], Record]] = {
        BUNDLE: _bundle,
        ENGINES: _engines,
        CHECKPOINT: lambda place: checkpoint_record(read_checkpoint(place)),
        REPOSITORY: _repository,
        KERNELS: _kernels,
        HF_CHECKPOINT: published_record,
    }
    record = read_json(folder / "config.json")
    described = {"folder": str(folder), "kind": kind, "glmspec": _version(record), **makers[kind](folder)}
    return described | {key: record[key] for key in ("license", "licenses") if kind != HF_CHECKPOINT and key in record}


def _version(record: Record) -> str | None:
    """The version of glmspec that wrote it, None for somebody else's."""
    maker = record.get("producer")
    return maker.get("version") if isinstance(maker, dict) else None


def checkpoint_record(checkpoint: Checkpoint) -> Record:
    """A converted checkpoint."""
    record, weights = checkpoint.record, checkpoint.weights()
    ranks = [
        {
            "files": names,
            "bytes": sum(record["parts"][name]["size"] for name in names),
            "tensors": sum(len(weight.outputs(rank)) for weight in weights),
        }
        for rank, names in enumerate(record["ranks"])
    ]
    return {
        "architecture": record["architecture"],
        "quant_algo": record["quantization"]["quant_algo"],
        "recipe": record["quantization"]["recipe"],
        "dtype": record["dtype"],
        "source": record["source"]["folder"],
        "revision": record["source"]["revision"],
        "weights_sha256": checkpoint.weights_sha256,
        "bytes": sum(rank["bytes"] for rank in ranks),
        "ranks": ranks,
        "left_out": {reason: len(names) for reason, names in record["left_out"].items()},
        "notes": record["notes"],
    }


def _bundle(folder: Path) -> Record:
    directory = open_bundle(folder)
    keys = ("target", "compute", "limits", "plugins", "finish")
    models = [
        {"name": name, "source": model["pretrained_config"]["source"]["folder"], **model["weights"]}
        for name, model in directory.models.items()
    ]
    return {key: directory.record[key] for key in keys} | {
        "models": models,
        "validated": (folder / "validation.json").exists(),
    }


def _repository(folder: Path) -> Record:
    from glmspec.triton_repo.repository import read_repository

    return {"engines": read_repository(folder)["engines"]}


def _engines(folder: Path) -> Record:
    directory = EngineDirectory.open(folder)
    keys = ("target", "compute_capability", "compute", "tensorrt", "mapping", "limits", "eos_token_ids")
    return {key: directory.record[key] for key in keys} | {
        "num_illegal_ids": len(directory.illegal),
        "drafters": directory.choices,
        "models": [_engine(folder, name, config) for name, config in directory.models.items()],
    }


def _engine(folder: Path, name: str, config: Record) -> Record:
    plans = {
        profile: plan | {"bytes": (folder / name / plan["file"]).stat().st_size}
        for profile, plan in config["plans"].items()
    }
    return {
        "name": name,
        "architecture": config["pretrained_config"]["architecture"],
        "num_drafts": config["build_config"]["num_drafts"],
        "weights": config["weights"],
        "networks": config["networks"],
        "plans": plans,
    }


def _kernels(folder: Path) -> Record:
    open_kernels(folder)
    manifest = read_json(folder / "manifest.json")
    keys = ("name", "file", "sha256", "registers", "shared_memory")
    kernels = [{key: kernel[key] for key in keys} for kernel in manifest["plugins"]]
    return {"compute_capability": manifest["sm"], "triton": manifest["triton"], "kernels": kernels}


def published_record(folder: Path) -> Record:
    """A Hugging Face checkpoint: what its config and headers say, and what `convert` would make of it."""
    values = read_json(folder / "config.json")
    config = parse_config(values, f"{folder}/config.json")
    described = _about(config, values, folder)
    try:
        source = _source(folder, config)
    except GlmspecError as error:
        return described | {"convert": {"accepted": False, "error": str(error)}}
    if source is None:
        return described | {"convert": {"accepted": False, "error": f"{folder}: found a config and no weights."}}
    return described | _held(source) | {"license": source.terms.to_json(), "convert": _converted(source)}


def _source(folder: Path, config: Config) -> Source | None:
    """The tensors that are there; those that the config implies where there are none."""
    if (folder / MANIFEST).exists():
        open_manifest(folder)
    if (folder / INDEX).exists() or (folder / SINGLE).exists():
        return Source(folder)
    return None if isinstance(config, DrafterConfig) else ImpliedSource(folder)


def _about(config: Config, values: Record, folder: Path) -> Record:
    about: Record = {"architecture": values["architectures"][0]}
    if isinstance(config, DrafterConfig):
        about |= {"model": config.kind, "dialect": Dialect.of(values, str(folder)).format}
        about |= {"layers": len(config.layer_types), "drafts": config.num_drafts}
    else:
        about |= {"model": "verifier", "dialect": _quantized_by(values, folder) or "plain"}
        about |= {"layers": config.num_hidden_layers, "mtp_modules": config.num_nextn_predict_layers}
    about["max_position_embeddings"] = config.max_position_embeddings
    about["text_files"] = list(matching(folder, TEXT))
    return about


def _quantized_by(values: Record, folder: Path) -> str | None:
    """Who quantized it: quant_method, or the producer that hf_quant_config.json names."""
    section = values.get("quantization_config")
    if isinstance(section, dict) and section.get("quant_method"):
        return str(section["quant_method"])
    if not (folder / "hf_quant_config.json").exists():
        return None
    maker = read_json(folder / "hf_quant_config.json").get("producer")
    return str(maker.get("name", "unknown")) if isinstance(maker, dict) else "unknown"


def _held(source: Source) -> Record:
    base = [info for name, info in source.tensors.items() if not field_of(source, name)]
    try:
        formats = dict(Counter(weight.format for weight in weights_of(source).values()))
    except GlmspecError:  # then `convert` refuses it, and says why
        formats = {}
    there = not isinstance(source, ImpliedSource)
    return {
        "weights_here": there,
        "bytes": sum(path.stat().st_size for path in source.files) if there else None,
        "files": len(source.files) if there else 0,
        "tensors": len(source.tensors),
        "parameters": sum(math.prod(info.shape) * (2 if info.dtype == "U8" else 1) for info in base),
        "formats": formats,
    }


def _converted(source: Source) -> Record:
    """What `convert` without options would write, or why it would refuse."""
    options = ConvertOptions(RECIPES["auto"])
    try:
        return {"accepted": True, **_planned(plan_source(source, options))}
    except GlmspecError as error:
        return {"accepted": False, "error": str(error)}


def _planned(conversion: Conversion) -> Record:
    weights, ranks = conversion.plan.weights, conversion.options.mapping.tp
    parts = cut(weights, ranks)
    return {
        "bytes": sum(file_part(part, rank, "").size for rank in range(ranks) for part in parts),
        "tensors": sum(len(weight.outputs(0)) for weight in weights),
        "formats": dict(Counter(weight.format for weight in weights)),
        "left_out": {reason: len(names) for reason, names in conversion.plan.left_out.items()},
        "notes": [*conversion.source.notes, *conversion.plan.notes],
        "taken_from_verifier": sorted(conversion.shared),
    }
