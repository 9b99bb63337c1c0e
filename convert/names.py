"""The name map: for every weight of a network, the checkpoint tensors it is made of.

A data table, checked in both directions by `plan`: a weight no tensor supplies and a tensor no weight
consumes are both errors that list names. What is left out on purpose is reported, with the reason.
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
from glmspec.convert.dequantize import Stored, stored
from glmspec.convert.source import Source

_LISTED = 8  # names shown in an error before "and N more"


@dataclass(frozen=True)
class Item:
    """One tensor of the converted checkpoint. dtype: as written; names: tensors consumed; make: reads and builds it."""

    name: str
    shape: tuple[int, ...]
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
    items = _items(source, specs, lambda name: _verifier_parts(source, config, name))
    last = config.num_hidden_layers
    shared = [str(i) for i, kind in enumerate(config.indexer_types) if kind == "shared"]
    reasons = {
        "multi-token-prediction module (not used yet)": lambda n: (at := _layer(n)) is not None and at >= last,
        "indexer of a layer that shares another's top-k": lambda n: ".indexer." in n and n.split(".")[2] in shared,
        "K/V scale of a cache format that is not used": lambda n: n.endswith(("k_proj.k_scale", "v_proj.v_scale")),
        "rotary frequencies, computed from the config": lambda n: n.endswith("rotary_emb.inv_freq"),
    }
    return _closed(source, items, reasons)


def plan_drafter(source: Source, config: DrafterConfig, specs: Iterable[TensorSpec]) -> Plan:
    """Plan a drafter. Weights it shares with the verifier may be absent."""
    absent = {name for name in SHARED_WEIGHTS if name not in source}
    if config.reduced_vocabulary and "lm_head.weight" in absent:
        raise CheckpointError(
            f"{source.folder}: tensor lm_head.weight: missing, "
            f"expected [{config.draft_vocab_size}, {config.hidden_size}]: "
            "a reduced draft vocabulary needs a head of its own."
        )
    wanted = [spec for spec in specs if spec.name not in absent]
    items = _items(source, wanted, lambda name: _drafter_parts(source, name))
    plan = _closed(source, items, {"target-to-draft mask, implied by d2t": lambda n: n == "t2d"})
    if "t2d" in source and config.reduced_vocabulary:
        _check_vocabulary_map(source)
    return plan


@dataclass(frozen=True)
class _Parts:
    """A weight's tensors and how they are put together."""

    parts: list[Stored]
    shape: Callable[[list[tuple[int, ...]]], tuple[int, ...]]
    make: Callable[[list[torch.Tensor]], torch.Tensor]


def _one(source: Source, name: str) -> _Parts:
    return _Parts([stored(source, name)], lambda shapes: shapes[0], lambda tensors: tensors[0])


def _verifier_parts(source: Source, config: VerifierConfig, name: str) -> _Parts:
    for pattern, parts in _VERIFIER_TABLE.items():
        if match := re.fullmatch(pattern, name):
            return parts(source, config, match.group(1))
    return _one(source, name)


def _absorbed(source: Source, config: VerifierConfig, layer: str, *, value: bool) -> _Parts:
    """kv_b_proj [heads * (nope + value), compressed] split per head; the value half transposed."""
    heads, nope, wide = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    rank = config.kv_lora_rank
    kv_b = stored(source, f"{layer}self_attn.kv_b_proj.weight")
    if kv_b.shape != (heads * (nope + wide), rank):
        raise CheckpointError(
            f"{source.folder}: tensor {kv_b.names[0]}: found shape {list(kv_b.shape)}, "
            f"expected {[heads * (nope + wide), rank]} (heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)."
        )

    def make(tensors: list[torch.Tensor]) -> torch.Tensor:
        per_head = tensors[0].view(heads, nope + wide, rank)
        return per_head[:, nope:].transpose(1, 2) if value else per_head[:, :nope]

    return _Parts([kv_b], lambda _: (heads, rank, wide) if value else (heads, nope, rank), make)


def _experts(source: Source, config: VerifierConfig, layer: str, *, down: bool) -> _Parts:
    """Per-expert projections stacked, or the fused tensor as it is."""
    fused = f"{layer}mlp.experts.{'down_proj' if down else 'gate_up_proj'}"
    if fused in source:
        return _one(source, fused)
    kinds = ["down_proj"] if down else ["gate_proj", "up_proj"]
    experts = range(config.n_routed_experts)
    parts = [stored(source, f"{layer}mlp.experts.{e}.{kind}.weight") for e in experts for kind in kinds]

    def shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        odd = next((at for at, one in enumerate(shapes) if one != shapes[0]), None)
        if odd is not None:
            raise CheckpointError(
                f"{source.folder}: tensor {parts[odd].names[0]}: found shape {list(shapes[odd])}, "
                f"expected {list(shapes[0])} like {parts[0].names[0]}."
            )
        return (len(experts), len(kinds) * shapes[0][0], shapes[0][1])

    def make(tensors: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack(tensors)
        return stacked.view(len(experts), -1, stacked.shape[-1])

    return _Parts(parts, shape, make)


# Weights that are not one tensor of the same name. Group 1 is the layer's prefix.
_VERIFIER_TABLE: dict[str, Callable[[Source, VerifierConfig, str], _Parts]] = {
    r"(model\.layers\.\d+\.)self_attn\.w_uk": lambda s, c, layer: _absorbed(s, c, layer, value=False),
    r"(model\.layers\.\d+\.)self_attn\.w_uv": lambda s, c, layer: _absorbed(s, c, layer, value=True),
    r"(model\.layers\.\d+\.)mlp\.experts\.gate_up_proj": lambda s, c, layer: _experts(s, c, layer, down=False),
    r"(model\.layers\.\d+\.)mlp\.experts\.down_proj": lambda s, c, layer: _experts(s, c, layer, down=True),
}


def _drafter_parts(source: Source, name: str) -> _Parts:
    if name != "d2t":
        return _one(source, name)
    if name not in source:
        raise CheckpointError(f"{source.folder}: tensor d2t: missing: a reduced draft vocabulary needs it.")
    info = source.tensors[name]
    read = Stored((name,), info.shape, "int32", lambda: source.read(name).to(torch.int32))
    return _Parts([read], lambda shapes: shapes[0], lambda tensors: tensors[0])


def _items(source: Source, specs: Iterable[TensorSpec], parts_of: Callable[[str], _Parts]) -> list[Item]:
    """One item a weight; every missing tensor and every wrong shape is collected before complaining."""
    items, missing, wrong = [], [], []
    for spec in specs:
        try:
            parts = parts_of(spec.name)
        except CheckpointError as error:
            missing.append(str(error))
            continue
        shape = parts.shape([part.shape for part in parts.parts])
        if shape != tuple(spec.dims):
            first = parts.parts[0].names[0]
            wrong.append(f"{first}: found shape {list(shape)} (as {spec.name}), expected {list(spec.dims)}")
        # float32 where the network insists on it, else the checkpoint's own precision.
        dtype = spec.dtype if spec.dtype in ("float32", "int32") else parts.parts[0].dtype
        names = tuple(name for part in parts.parts for name in part.names)
        items.append(Item(spec.name, tuple(spec.dims), dtype, names, _maker(parts, dtype)))
    if missing:
        raise CheckpointError(_listing(missing))
    if wrong:
        raise CheckpointError(_listing([f"{source.folder}: tensor {one}." for one in wrong]))
    return items


def _maker(parts: _Parts, dtype: str) -> Callable[[], torch.Tensor]:
    return lambda: parts.make([part.read() for part in parts.parts]).to(getattr(torch, dtype)).contiguous()


def _closed(source: Source, items: list[Item], reasons: dict[str, Callable[[str], bool]]) -> Plan:
    """Account for every tensor: consumed, left out for a reason, or an error."""
    consumed = {name for item in items for name in item.names}
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


def _check_vocabulary_map(source: Source) -> None:
    """t2d marks exactly the target ids that d2t reaches."""
    offset = source.read("d2t").long()
    reached = torch.arange(len(offset)) + offset
    marked = source.read("t2d").nonzero().squeeze(1)
    if not torch.equal(reached.sort().values, marked):
        raise CheckpointError(f"{source.folder}: tensor d2t: its target ids and those marked in t2d differ.")


def _layer(name: str) -> int | None:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def _listing(lines: list[str], joint: str = "\n") -> str:
    more = f"{joint}and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return joint.join(lines[:_LISTED]) + more
