"""The name map: for every weight of a network, the checkpoint tensors it is made of.

A data table, checked in both directions: a weight no tensor supplies and a tensor no weight takes are
both errors that list names. What is left out on purpose is reported, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from glmspec.convert.calibration import MAX_INPUT, Activations
from glmspec.convert.formats import Matrix, plain
from glmspec.convert.fused import partners
from glmspec.convert.plan import Part, Task, Weight, chunks
from glmspec.convert.recipe import Recipe
from glmspec.convert.source import Source
from glmspec.convert.storage import (
    EXPERT_MATRICES,
    NO_WEIGHTS,
    Shape,
    StoredWeight,
    field_of,
    find,
    no_weight,
    stored,
    stored_integers,
)
from glmspec.core.errors import CheckpointError
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.kinds import Config
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.dflash import SHARED_WEIGHTS
from glmspec.models.registry import checkpoint_specs
from glmspec.network.contract import TensorSpec
from glmspec.network.formats import BLOCK, GROUP, QUANTIZED
from glmspec.network.shards import Layout, Mapping, check_shards, layout_of

_LISTED = 8  # names shown in an error before "and N more"


@dataclass(frozen=True)
class ConvertOptions:
    """What the user chose. activations: calibrated amax, when given. hf: a Hugging Face checkpoint is written. device:
    cpu or cuda, where NVFP4 is computed. workers: threads, None for the cores there are. resume: go on from an
    interrupted run. sha256: that the source's one file of weights must have."""

    recipe: Recipe
    mapping: Mapping = field(default_factory=Mapping)
    activations: Activations = field(default_factory=Activations)
    hf: bool = False
    device: str = "cpu"
    workers: int | None = None
    resume: bool = False
    sha256: str | None = None


@dataclass(frozen=True)
class Plan:
    """A conversion before it starts. left_out: reason -> tensor names that are not converted. mtp: the weights of a
    verifier's MTP module are among them."""

    weights: tuple[Weight, ...]
    left_out: dict[str, list[str]]
    notes: tuple[str, ...] = ()
    mtp: bool = False


def plan_verifier(source: Source, config: VerifierConfig, options: ConvertOptions) -> Plan:
    """Plan a verifier. Raises `CheckpointError` naming missing, surplus and misshapen tensors."""
    first, modules = config.num_hidden_layers, _mtp_modules(source, config)
    mtp = first in modules
    planner = _Planner(source, options, config)
    weights = [planner.verifier_weight(spec) for spec in checkpoint_specs(config, int(mtp))]
    planner.complain(f"model.layers.{first}." if mtp else None)
    copies = tuple(f"model.layers.{first}.{name}." for name in ("embed_tokens", "shared_head.head"))
    shared = [layer for layer, kind in enumerate(config.indexer_types) if kind == "shared"]
    reasons = {
        "multi-token-prediction module beyond the first, the only one that is used": lambda name: (
            _layer(name) in modules - {first}
        ),
        "embedding or head of the multi-token-prediction module, which shares the verifier's": lambda name: (
            mtp and name.startswith(copies)
        ),
        "indexer of a layer that shares another's top-k": lambda name: ".indexer." in name and _layer(name) in shared,
    }
    left_out = _closed(source, weights, reasons)
    check_shards([(weight.name, weight.layout, weight.format) for weight in weights], options.mapping)
    notes = activation_notes(weights, planner.guessed, options)
    if config.num_nextn_predict_layers and not mtp:
        notes.append(
            f"no multi-token-prediction module: num_nextn_predict_layers is {config.num_nextn_predict_layers}, and the "
            f"checkpoint holds no model.layers.{first}.*"
        )
    return Plan(tuple(weights), left_out, tuple(notes), mtp)


def plan_drafter(source: Source, config: DrafterConfig, options: ConvertOptions) -> Plan:
    """Plan a drafter. Weights it shares with the verifier may be absent; what the training job's wrappers put before
    names, and the verifier's own tensors that it saved beside the drafter's, are noted and left out."""
    owned = {name for name in source.tensors if _of_the_verifier(source, config, name)}
    held, wrappers = _unwrapped(source, owned)
    absent = {name for name in SHARED_WEIGHTS if _spelled(held, name) not in source}
    if config.reduced_vocabulary and "lm_head.weight" in absent:
        raise CheckpointError(
            f"{source.folder}: tensor lm_head.weight: missing, "
            f"expected [{config.draft_vocab_size}, {config.hidden_size}]: "
            "a reduced draft vocabulary needs a head of its own."
        )
    planner = _Planner(source, options, config)
    specs = checkpoint_specs(config, 0)
    weights = [planner.single(spec, _spelled(held, spec.name)) for spec in specs if spec.name not in absent]
    planner.complain()
    offsets, mask = _spelled(held, "d2t"), _spelled(held, "t2d")
    reasons = {
        "the verifier's own, which serves without a copy": lambda name: name in owned,
    }
    if config.reduced_vocabulary:
        reasons["target-to-draft mask, implied by d2t"] = lambda name: name == mask
        _check_vocabulary_map(source, config, offsets, mask)
    else:
        reasons["map of a whole vocabulary to itself"] = lambda name: name in (offsets, mask)
        _check_identity(source, config, offsets, mask)
    notes = (f"names of tensors are read without their wrappers' {', '.join(wrappers)}",) if wrappers else ()
    return Plan(tuple(weights), _closed(source, weights, reasons), notes)


def activation_notes(weights: list[Weight], guessed: list[str], options: ConvertOptions) -> list[str]:
    """What the user should know about activation scales that were made up, or that are not there."""
    notes, bare = [], [weight.name for weight in weights if weight.format in MAX_INPUT and weight.inputs is None]
    if guessed:
        names = _listing(guessed, ", ")
        notes.append(f"no activation scale for {names}: each takes the largest of its layer's experts")
    if options.activations.amax and all(weight.inputs is None for weight in weights):
        notes.append("the calibration is not used: no weight has a format with an activation scale (nvfp4, fp8)")
    if bare:
        names = _listing(bare, ", ")
        notes.append(f"no activation scales, so activations stay unquantized (give --calibration for some): {names}")
    return notes


class _Planner:
    """Takes tensors for weights. Everything that is missing or misshapen is collected before complaining."""

    def __init__(self, source: Source, options: ConvertOptions, config: Config) -> None:
        self.source, self.options, self.config = source, options, config
        self._faults: list[str] = []
        self.guessed: list[str] = []  # modules whose activation scale had to be made up

    def complain(self, mtp: str | None = None) -> None:
        """Raise what was collected. mtp: what the names of the MTP module's tensors begin with."""
        faults, advice = list(dict.fromkeys(self._faults)), ""
        if mtp and any(f" {mtp}" in fault for fault in faults):
            advice = f"\n{mtp}* is a multi-token-prediction module: give it whole, or drop all of its tensors."
        if faults:
            raise CheckpointError(_listing(faults, "\n") + advice)

    def verifier_weight(self, spec: TensorSpec) -> Weight:
        """Look the weight up in the table."""
        for pattern, make in _VERIFIER_TABLE.items():
            if match := re.fullmatch(pattern, spec.name):
                return make(self, spec, match.group(1))
        return self.single(spec, spec.name)

    def single(self, spec: TensorSpec, name: str) -> Weight:
        """A weight that is one tensor."""
        dims = spec.sizes
        stored_weight = self._take(name, dims, spec)
        layout = self._layout(spec)
        format = self._format(spec, name.removesuffix(".weight"), stored_weight)
        inputs = self._inputs([name.removesuffix(".weight")], [stored_weight], format, 1)
        shares = partners(name, format, self.options.recipe, lambda other: find(self.source, other))
        return Weight(spec.name, dims, format, layout, tuple(chunks(0, stored_weight, format, shares)), inputs)

    def absorbed(self, spec: TensorSpec, layer: str) -> Weight:
        """kv_b_proj [heads * (nope + value), compressed] split per head; the value half transposed."""
        config, value = self.config, spec.name.endswith("w_uv")
        assert isinstance(config, VerifierConfig)  # whose table alone asks for it
        heads, nope, wide, rank = spec.sizes[0], config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        module = f"{layer}self_attn.kv_b_proj"
        stored_weight = self._take(f"{module}.weight", (heads * (nope + wide), rank), spec)
        format = self._format(spec, module, stored_weight)

        def make(matrix: Matrix) -> Matrix:
            per_head = matrix.values().view(heads, nope + wide, rank)
            half = per_head[:, nope:].transpose(1, 2) if value else per_head[:, :nope]
            return plain(format, half.reshape(-1, spec.sizes[-1]))

        task = Task((Part(0, 0, stored_weight),), make=make)
        return Weight(spec.name, spec.sizes, format, self._layout(spec), (task,))

    def experts(self, spec: TensorSpec, layer: str) -> Weight:
        """Per-expert projections stacked (gate rows before up rows), or slices of the fused tensor."""
        kinds = EXPERT_MATRICES[spec.name.rpartition(".")[2]]
        count, rows = spec.sizes[0], spec.sizes[1] // len(kinds)
        modules = [f"{layer}mlp.experts.{expert}.{kind}" for expert in range(count) for kind in kinds]
        if spec.name in self.source:
            whole = self._take(spec.name, spec.sizes, spec)
            stored_weights = [whole.part(unit * rows, rows) for unit in range(len(modules))]
        else:
            stored_weights = [self._take(f"{module}.weight", (rows, spec.sizes[2]), spec) for module in modules]
        # An up half of a fused tensor may begin inside a scale's block: it has no grid of its own to keep.
        inside = spec.name in self.source and stored_weights[0].format == "fp8_block" and rows % BLOCK
        format = self._one_format(spec, modules, stored_weights, "fp8_rows" if inside else None)
        tasks = tuple(
            Task(tuple(Part(unit, 0, stored_weights[unit]) for unit in range(first, first + len(kinds))))
            for first in range(0, len(modules), len(kinds))
        )
        inputs = self._inputs(modules, stored_weights, format, len(kinds))
        return Weight(spec.name, spec.sizes, format, self._layout(spec), tasks, inputs)

    def _layout(self, spec: TensorSpec) -> Layout:
        return layout_of(spec, self.options.mapping, drafter=isinstance(self.config, DrafterConfig))

    def _take(self, name: str, shape: Shape, spec: TensorSpec) -> StoredWeight:
        """A tensor as it is stored; a stand-in when something is wrong with it, which is noted."""
        try:
            weight = stored_integers(self.source, name) if spec.dtype == "int32" else stored(self.source, name)
            if weight.shape != shape:
                raise CheckpointError(
                    f"{self.source.folder}: tensor {name}: found shape {list(weight.shape)}, expected {list(shape)}."
                )
        except CheckpointError as error:
            self._faults.append(str(error))
            return StoredWeight(self.source, name, "bfloat16", shape, {"": name})
        return weight

    def _format(self, spec: TensorSpec, module: str, weight: StoredWeight, stored_as: str | None = None) -> str:
        """float32 where the network insists on it, else what the recipe says of a weight that is stored so."""
        if spec.dtype in ("float32", "int32"):
            return spec.dtype
        format = self.options.recipe.format(module, stored_as or weight.format)
        if format == "nvfp4" and weight.columns % GROUP:
            where = f"{self.source.folder}: tensor {weight.name}"
            self._faults.append(f"{where}: found {weight.columns} columns, nvfp4 needs a multiple of {GROUP}.")
        return format

    def _one_format(
        self, spec: TensorSpec, modules: list[str], weights: list[StoredWeight], stored_as: str | None
    ) -> str:
        formats = [
            self._format(spec, module, weight, stored_as) for module, weight in zip(modules, weights, strict=True)
        ]
        if len(set(formats)) > 1:
            other = next(at for at, format in enumerate(formats) if format != formats[0])
            self._faults.append(
                f"{self.source.folder}: {modules[0]} would be {formats[0]} and {modules[other]} {formats[other]}, "
                "expected one format for all experts of a layer. Choose it with --quant or --recipe."
            )
        return formats[0]

    def _inputs(
        self, modules: list[str], weights: list[StoredWeight], format: str, shared: int
    ) -> tuple[float, ...] | None:
        """Activation scales; those that had to be made up are noted."""
        scales, missing = self.options.activations.scales(modules, weights, format, shared)
        self.guessed += missing
        return scales


# Weights that are not one tensor of the same name. Group 1 is the layer's prefix.
_VERIFIER_TABLE: dict[str, Callable[[_Planner, TensorSpec, str], Weight]] = {
    r"(model\.layers\.\d+\.)self_attn\.w_u[kv]": _Planner.absorbed,
    r"(model\.layers\.\d+\.)mlp\.experts\.(?:gate_up|down)_proj": _Planner.experts,
}

# Spellings of a drafter's tensors that are about, besides our own.
_DRAFTER_SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: f"model.{name}",
    lambda name: name.replace("confidence_head.proj.", "confidence_head."),
    lambda name: f"model.{name}".replace("confidence_head.proj.", "confidence_head."),
)


def _spelled(held: dict[str, str], name: str) -> str:
    """The name under which a drafter's checkpoint holds a weight; our own when it does not. held: `_unwrapped`'s."""
    return next((held[spelling] for spell in _DRAFTER_SPELLINGS if (spelling := spell(name)) in held), name)


# A whole verifier, and one's head, last norm and embedding, under the names that training code keeps them by. A norm or
# projection of `target` features may be a trained part of a drafter, so it is none of these.
_VERIFIER = re.compile(r"(.*\.)?(verifier|teacher|target)(_model|\.model)\..*")
_PART_OF_VERIFIER = re.compile(
    r"(.*\.)?((verifier|teacher)[._](lm_head|norm|embed_tokens)|target[._](lm_head|embed_tokens))\.weight"
)


def _of_the_verifier(source: Source, config: DrafterConfig, name: str) -> bool:
    """Named as the verifier's and, where it is a part alone, as wide."""
    wide = source.tensors[name].shape[-1:] == (config.hidden_size,)
    return bool(_VERIFIER.fullmatch(name) or (wide and _PART_OF_VERIFIER.fullmatch(name)))


def _unwrapped(source: Source, owned: set[str]) -> tuple[dict[str, str], list[str]]:
    """A drafter's tensors by name without what wraps it in training, and those wrappers: what stands before every name,
    and modules with private names (`_orig_mod`, `_fsdp_wrapped_module`) wherever they stand."""
    paths = {name: name.split(".") for name in sorted(source.tensors.keys() - owned)}
    private = sorted({part for path in paths.values() for part in path if part.startswith("_")})
    paths = {name: [part for part in path if part not in private] for name, path in paths.items()}
    modules = zip(*(path[:-1] for path in paths.values()), strict=False)
    before = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, modules)]
    held: dict[str, str] = {}
    for name, path in paths.items():
        if (other := held.setdefault(".".join(path[len(before) :]), name)) != name:
            raise CheckpointError(
                f"{source.folder}: tensors {other} and {name}: one tensor twice but for {' and '.join(private)}, "
                "expected it once."
            )
    return held, [] if before == ["model"] and not private else [f"{part}." for part in (*before, *private)]


def _closed(source: Source, weights: list[Weight], reasons: dict[str, Callable[[str], Any]]) -> dict[str, list[str]]:
    """Account for every tensor: consumed, left out for a reason, or an error."""
    consumed = {name for weight in weights for name in weight.names}

    def spare(name: str) -> bool:
        base = field_of(source, name)
        return base in consumed and stored(source, base).format not in QUANTIZED

    reasons = {
        **reasons,
        **{why: pattern.fullmatch for why, pattern in NO_WEIGHTS.items()},
        "scale of a weight that is not quantized": spare,
    }
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
    return left_out


def _check_vocabulary_map(source: Source, config: DrafterConfig, offsets: str, mask: str) -> None:
    """d2t reaches distinct target ids, exactly those that t2d, if there is one, marks."""
    offset = source.read(offsets).long()
    reached = (torch.arange(len(offset)) + offset).sort().values
    if reached[0] < 0 or reached[-1] >= config.vocab_size:
        raise CheckpointError(
            f"{source.folder}: tensor d2t: reaches target ids {reached[0]} to {reached[-1]}, "
            f"expected ids from 0 to {config.vocab_size - 1}."
        )
    if mask in source and not torch.equal(reached, source.read(mask).nonzero().squeeze(1)):
        raise CheckpointError(f"{source.folder}: tensor d2t: its target ids and those marked in t2d differ.")
    if (reached.diff() == 0).any():
        raise CheckpointError(f"{source.folder}: tensor d2t: reaches a target id twice, expected distinct ones.")


def _check_identity(source: Source, config: DrafterConfig, offsets: str, mask: str) -> None:
    """Where a drafter has the whole vocabulary, d2t moves no token and t2d marks every one."""
    for name, moved in ((offsets, lambda value: value != 0), (mask, lambda value: value == 0)):
        if name in source and (source.tensors[name].shape != (config.vocab_size,) or moved(source.read(name)).any()):
            raise CheckpointError(
                f"{source.folder}: tensor {name}: found a reduced vocabulary, expected every one of the "
                f"{config.vocab_size} tokens to stand for itself, because draft_vocab_size is vocab_size."
            )


def _mtp_modules(source: Source, config: VerifierConfig) -> set[int]:
    """Layers beyond the last that hold an MTP module, or pieces of one: the config counts them, or they have an
    `eh_proj`, as no decoder layer has."""
    first = config.num_hidden_layers
    counted = range(first, first + config.num_nextn_predict_layers)
    return {
        layer
        for name in source.tensors
        if (layer := _layer(name) or 0) >= first and (layer in counted or ".eh_proj." in name) and not no_weight(name)
    }


def _layer(name: str) -> int | None:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def _listing(lines: list[str], joint: str) -> str:
    more = f"{joint}and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return joint.join(lines[:_LISTED]) + more
