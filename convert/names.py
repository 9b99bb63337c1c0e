"""The name map: for every weight of a network, the checkpoint tensors it is made of.

A data table, checked in both directions: a weight no tensor supplies and a tensor no weight takes are
both errors that list names. What is left out on purpose is reported, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from glmspec.build.configs.drafter import DrafterConfig
from glmspec.build.configs.verifier import VerifierConfig
from glmspec.build.errors import CheckpointError
from glmspec.build.models.dflash import SHARED_WEIGHTS
from glmspec.build.network.contract import TensorSpec
from glmspec.convert.dequantize import Stored, stored, stored_integers
from glmspec.convert.source import Source

_LISTED = 8  # names shown in an error before "and N more"
_SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """What a weight is made of. parts: tensor names and the shape each must have. make: puts them together."""

    parts: tuple[tuple[str, Shape], ...]
    make: Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Item:
    """One tensor of the converted checkpoint. dtype: as written; names: tensors consumed; make: reads and builds it."""

    name: str
    shape: Shape
    dtype: str
    names: tuple[str, ...]
    make: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """A conversion before it starts. left_out: reason -> tensor names that are not converted."""

    items: tuple[Item, ...]
    left_out: dict[str, list[str]]


def plan_verifier(source: Source, config: VerifierConfig, specs: Iterable[TensorSpec]) -> Plan:
    """Plan a verifier. Raises `CheckpointError` naming missing, surplus and misshapen tensors."""
    items = _items(source, specs, lambda spec: _verifier_recipe(source, config, spec))
    last = config.num_hidden_layers
    modules = {*range(last, last + config.num_nextn_predict_layers), *_mtp_modules(source, last)}
    shared = [layer for layer, kind in enumerate(config.indexer_types) if kind == "shared"]
    reasons = {
        "multi-token-prediction module (not used yet)": lambda name: _layer(name) in modules,
        "indexer of a layer that shares another's top-k": lambda name: ".indexer." in name and _layer(name) in shared,
        "K/V scale of a cache format that is not used": lambda name: name.endswith(
            ("k_proj.k_scale", "v_proj.v_scale")
        ),
        "rotary frequencies, computed from the config": lambda name: name.endswith("rotary_emb.inv_freq"),
    }
    return _closed(source, items, reasons)


def plan_drafter(source: Source, config: DrafterConfig, specs: Iterable[TensorSpec]) -> Plan:
    """Plan a drafter. Weights it shares with the verifier may be absent."""
    absent = {name for name in SHARED_WEIGHTS if _spelled(source, name) not in source}
    if config.reduced_vocabulary and "lm_head.weight" in absent:
        raise CheckpointError(
            f"{source.folder}: tensor lm_head.weight: missing, "
            f"expected [{config.draft_vocab_size}, {config.hidden_size}]: "
            "a reduced draft vocabulary needs a head of its own."
        )
    wanted = [spec for spec in specs if spec.name not in absent]
    items = _items(source, wanted, lambda spec: _as_it_is(_spelled(source, spec.name), spec))
    plan = _closed(
        source, items, {"target-to-draft mask, implied by d2t": lambda name: name == _spelled(source, "t2d")}
    )
    if config.reduced_vocabulary:
        _check_vocabulary_map(source, config)
    return plan


# -- recipes ------------------------------------------------------------------------------------


def _as_it_is(name: str, spec: TensorSpec) -> Recipe:
    return Recipe(((name, tuple(spec.dims)),), lambda tensors: tensors[0])


def _verifier_recipe(source: Source, config: VerifierConfig, spec: TensorSpec) -> Recipe:
    for pattern, recipe in _VERIFIER_TABLE.items():
        if match := re.fullmatch(pattern, spec.name):
            return recipe(source, config, spec, match.group(1))
    return _as_it_is(spec.name, spec)


def _absorbed(config: VerifierConfig, layer: str, *, value: bool) -> Recipe:
    """kv_b_proj [heads * (nope + value), compressed] split per head; the value half transposed."""
    heads, nope, wide = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    rank = config.kv_lora_rank

    def make(tensors: list[torch.Tensor]) -> torch.Tensor:
        per_head = tensors[0].view(heads, nope + wide, rank)
        return per_head[:, nope:].transpose(1, 2) if value else per_head[:, :nope]

    return Recipe(((f"{layer}self_attn.kv_b_proj.weight", (heads * (nope + wide), rank)),), make)


def _experts(source: Source, config: VerifierConfig, spec: TensorSpec, layer: str) -> Recipe:
    """Per-expert projections stacked (gate rows before up rows), or the fused tensor as it is."""
    if spec.name in source:
        return _as_it_is(spec.name, spec)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    down = spec.name.endswith("down_proj")
    kinds = {"down_proj": (hidden, width)} if down else {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
    parts = tuple(
        (f"{layer}mlp.experts.{expert}.{kind}.weight", shape)
        for expert in range(config.n_routed_experts)
        for kind, shape in kinds.items()
    )
    return Recipe(parts, lambda tensors: torch.stack(tensors).view(spec.dims))


# Weights that are not one tensor of the same name. Group 1 is the layer's prefix.
_VERIFIER_TABLE: dict[str, Callable[[Source, VerifierConfig, TensorSpec, str], Recipe]] = {
    r"(model\.layers\.\d+\.)self_attn\.w_uk": lambda s, config, _, layer: _absorbed(config, layer, value=False),
    r"(model\.layers\.\d+\.)self_attn\.w_uv": lambda s, config, _, layer: _absorbed(config, layer, value=True),
    r"(model\.layers\.\d+\.)mlp\.experts\.(?:gate_up|down)_proj": _experts,
}

# Spellings of a drafter's tensors that are about, besides our own.
_DRAFTER_SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: f"model.{name}",
    lambda name: name.replace("confidence_head.proj.", "confidence_head."),
    lambda name: f"model.{name}".replace("confidence_head.proj.", "confidence_head."),
)


def _spelled(source: Source, name: str) -> str:
    """The name under which a drafter's checkpoint holds a weight; our own when it does not."""
    return next((found for spell in _DRAFTER_SPELLINGS if (found := spell(name)) in source), name)


# -- planning -----------------------------------------------------------------------------------


def _items(source: Source, specs: Iterable[TensorSpec], recipe_of: Callable[[TensorSpec], Recipe]) -> list[Item]:
    """One item a weight. Everything that is missing or misshapen is collected before complaining."""
    items, faults = [], []
    for spec in specs:
        recipe = recipe_of(spec)
        parts = []
        for name, shape in recipe.parts:
            try:
                parts.append(_checked(source, name, shape, spec))
            except CheckpointError as error:
                faults.append(str(error))
        if not faults:
            # float32 where the network insists on it, else the checkpoint's own precision.
            dtype = spec.dtype if spec.dtype in ("float32", "int32") else parts[0].dtype
            names = tuple(name for part in parts for name in part.names)
            items.append(Item(spec.name, tuple(spec.dims), dtype, names, _maker(recipe, parts, dtype)))
    if faults:
        raise CheckpointError(_listing(list(dict.fromkeys(faults)), "\n"))
    return items


def _checked(source: Source, name: str, shape: Shape, spec: TensorSpec) -> Stored:
    found = stored_integers(source, name) if spec.dtype == "int32" else stored(source, name)
    if found.shape != shape:
        raise CheckpointError(
            f"{source.folder}: tensor {name}: found shape {list(found.shape)}, expected {list(shape)}."
        )
    return found


def _maker(recipe: Recipe, parts: list[Stored], dtype: str) -> Callable[[], torch.Tensor]:
    return lambda: recipe.make([part.read() for part in parts]).to(getattr(torch, dtype)).contiguous()


def _closed(source: Source, items: list[Item], reasons: dict[str, Callable[[str], bool]]) -> Plan:
    """Account for every tensor: consumed, left out for a reason, or an error."""
    consumed = {name for item in items for name in item.names}

    def leftover_scale(name: str) -> bool:
        stem, _, suffix = name.rpartition(".")
        return suffix in _SCALES and f"{stem}.weight" in consumed

    reasons = {**reasons, "scale of a weight that is not quantized": leftover_scale}
    left_out: dict[str, list[str]] = {}
    surplus = []
    for name in sorted(source.tensors.keys() - consumed):
        reason = next((why for why, matches in reasons.items() if matches(name)), None)
        if reason is None:
            surplus.append(name)
        else:
            left_out.setdefault(reason, []).append(name)
    if surplus:
        raise CheckpointError(
            f"{source.folder}: surplus tensors that no weight of the network takes: {_listing(surplus, ', ')}. "
            "The config and the tensors disagree."
        )
    return Plan(tuple(items), left_out)


def _check_vocabulary_map(source: Source, config: DrafterConfig) -> None:
    """d2t reaches distinct target ids, exactly those that t2d, if there is one, marks."""
    offset = source.read(_spelled(source, "d2t")).long()
    reached = (torch.arange(len(offset)) + offset).sort().values
    if reached[0] < 0 or reached[-1] >= config.vocab_size:
        raise CheckpointError(
            f"{source.folder}: tensor d2t: reaches target ids {reached[0]} to {reached[-1]}, "
            f"expected ids from 0 to {config.vocab_size - 1}."
        )
    mask = _spelled(source, "t2d")
    if mask in source and not torch.equal(reached, source.read(mask).nonzero().squeeze(1)):
        raise CheckpointError(f"{source.folder}: tensor d2t: its target ids and those marked in t2d differ.")
    if (reached.diff() == 0).any():
        raise CheckpointError(f"{source.folder}: tensor d2t: reaches a target id twice, expected distinct ones.")


def _mtp_modules(source: Source, last: int) -> set[int]:
    """Layers beyond the last that are MTP modules by their tensors: no decoder layer has an `eh_proj`."""
    return {
        layer for name in source.tensors if name.endswith(".eh_proj.weight") and (layer := _layer(name) or 0) >= last
    }


def _layer(name: str) -> int | None:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def _listing(lines: list[str], joint: str) -> str:
    more = f"{joint}and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return joint.join(lines[:_LISTED]) + more
