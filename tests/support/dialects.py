"""Checkpoints in every dialect that verifiers are published in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from glmspec.convert.conversion import ConvertOptions
from glmspec.convert.formats import amax, convert, plain, to_float32
from glmspec.convert.recipe import RECIPES, quantizable
from support.models import mtp_tensors, random_verifier, write_checkpoint

AUTO, NVFP4, FP8, BF16 = (ConvertOptions(RECIPES[name]) for name in ("auto", "nvfp4", "fp8", "bf16"))

EXPERT = "model.layers.2.mlp.experts"


def published_verifier(home: Path) -> Path:
    """A random verifier in bfloat16, as the hub has them."""
    random_verifier(home / "float32", seed=2)
    tensors = load_file(home / "float32" / "model.safetensors")
    wide = ("mlp.gate.weight", "e_score_correction_bias", "indexer.weights_proj.weight")
    halved = {name: t if name.endswith(wide) else t.bfloat16() for name, t in tensors.items()}
    return write_checkpoint(home / "hf", halved, json.loads((home / "float32" / "config.json").read_text()))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def fields(name: str, weight: torch.Tensor, format: str, scale_from: float = 0.0) -> tuple[dict, torch.Tensor]:
    """A weight's tensors in ModelOpt's naming, and what they mean."""
    block = plain("bfloat16", weight)
    made = convert(block, format, scale_from or amax(block))
    suffixed = {f"{name}_{suffix}" if suffix else name: made.tensor(suffix).clone() for suffix in made.fields}
    return {k: t.reshape(()) if t.numel() == 1 else t for k, t in suffixed.items()}, torch.from_numpy(to_float32(made))


def fp8_hub(name: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor] | None:
    tensors, meant = fields(name, weight, "fp8_block")
    scale = f"{name}_scale_inv"
    return tensors | {scale: tensors[scale].reshape(-(-weight.shape[0] // 128), -1)}, meant


def modelopt(name: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor] | None:
    if ".mlp.experts." not in name:
        return None
    tensors, meant = fields(name, weight, "nvfp4")
    return tensors | {name.replace("weight", "input_scale"): torch.tensor(0.02)}, meant


def compressed(name: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor] | None:
    """compressed-tensors: packed under another name, scales reciprocal (a power of two here: exact either way)."""
    if ".mlp.experts." not in name:
        return None
    tensors, meant = fields(name, weight, "nvfp4", 2688 * 2.0**-11)
    stem = name.removesuffix("weight")
    return {
        f"{stem}weight_packed": tensors[name],
        f"{stem}weight_scale": tensors[f"{name}_scale"],
        f"{stem}weight_global_scale": (1 / tensors[f"{name}_scale_2"]).reshape(1),
        f"{stem}input_global_scale": torch.tensor([50.0]),
    }, meant


def fused(name: str, weight: torch.Tensor) -> None:
    return None


DIALECTS = {"fp8": fp8_hub, "modelopt": modelopt, "compressed-tensors": compressed, "fused": fused}


def in_dialect(folder: Path, home: Path, dialect: str) -> tuple[Path, Path]:
    """The checkpoint in a dialect, sharded, with an MTP module; and the plain float32 one that it means."""
    stored, meant, config = {}, {}, json.loads((folder / "config.json").read_text())
    plain_tensors = tensors_of(folder)
    for name, weight in (plain_tensors | mtp_tensors(plain_tensors, like=3, layer=6)).items():
        quantize = quantizable(name.removesuffix(".weight")) or "kv_b_proj" in name
        made = DIALECTS[dialect](name, weight) if quantize else None
        tensors, value = made or ({name: weight}, weight.float())
        stored |= tensors
        meant[name] = value
    if dialect == "fused":
        for layer in range(2, 7):
            prefix = f"model.layers.{layer}.mlp.experts"
            per = [[stored.pop(f"{prefix}.{e}.{k}_proj.weight") for k in ("gate", "up", "down")] for e in range(6)]
            stored[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in per])
            stored[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in per])
    write_checkpoint(home / "plain", meant, config)
    return write_checkpoint(home / dialect, stored, config | {"num_nextn_predict_layers": 1}, shards=3), home / "plain"
