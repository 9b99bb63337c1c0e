"""A converted checkpoint on disk: `config.json` and `rank{r}` safetensors, TensorRT-LLM's layout.

    CKPT/config.json                          what it is, from what, how it is quantized, the digest of every part
    CKPT/rank0.safetensors                    or, beyond one part:
    CKPT/rank0-00001-of-00004.safetensors     ... and rank0.safetensors.index.json

Written by `conversion.py`, read by everything after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from glmspec.convert.beside import TEXT, matching
from glmspec.convert.formats import NUMPY, Matrix, to_float32
from glmspec.convert.plan import Weight
from glmspec.core.errors import CheckpointError, EngineError
from glmspec.core.fields import Fields, read_json
from glmspec.core.files import CHECKPOINT, produced
from glmspec.core.sealed import SEAL, check_digest, check_files, check_sealed, check_shape, check_written, kind_of
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.kinds import Config, parse_config
from glmspec.models.registry import checkpoint_specs
from glmspec.network.config import NetworkConfig, RankTensor, quantized_formats
from glmspec.network.formats import FORMATS
from glmspec.network.shards import Mapping, layout_of

SHAPE = {
    "architecture": str,
    "dtype": str,
    "mapping": {"tp_size": int, "moe_ep_size": int},
    "quantization": {"quant_algo": (str, NoneType), "recipe": str, "formats": dict, "inputs": list},
    "ranks": list,
    "parts": dict,
    "files": dict,
    "shared_from_verifier": dict,
    "mtp": bool,
    "mask_embedding": bool,
    "eos_token_ids": (list, NoneType),
    "left_out": dict,
    "notes": list,
    "source": {"folder": str, "files": dict},
    "hf_config": dict,
}
_AGAIN = "Convert the checkpoint again."


@dataclass(frozen=True)
class Checkpoint:
    """A converted checkpoint on disk."""

    folder: Path
    config: Config
    record: dict[str, Any]

    @property
    def mapping(self) -> Mapping:
        """How it is divided among ranks."""
        mapping = self.record["mapping"]
        return Mapping(mapping["tp_size"], mapping["moe_ep_size"])

    @property
    def files(self) -> list[Path]:
        """Every file that holds weights."""
        return [self.folder / name for name in self.record["parts"]]

    @property
    def size(self) -> int:
        """Bytes of those files."""
        return sum(part["size"] for part in self.record["parts"].values())

    @property
    def shared(self) -> dict[str, str]:
        """The drafter's weight -> the verifier's weight that stands in for it."""
        return self.record["shared_from_verifier"]

    @property
    def mtp(self) -> bool:
        """Whether it holds a verifier's MTP module."""
        return self.record["mtp"]

    @property
    def hf_config(self) -> dict[str, Any]:
        """The Hugging Face config.json it was converted from."""
        return self.record["hf_config"]

    @property
    def end_tokens(self) -> tuple[int, ...] | None:
        """Ids that end a text; None for a drafter."""
        ids = self.record["eos_token_ids"]
        return None if ids is None else tuple(ids)

    @property
    def weights_sha256(self) -> str:
        """Digest of all weights: of the recorded digests of the parts."""
        return parts_digest(self.record["parts"])

    @property
    def identity(self) -> dict[str, str]:
        """What is kept of it by what is built for it: the digests of all weights and of its own record."""
        return {"sha256": self.weights_sha256, "config_sha256": self.record[SEAL]}

    def weights(self) -> list[Weight]:
        """The weights it holds, without what they were made of."""
        formats, inputs = self.record["quantization"]["formats"], self.record["quantization"]["inputs"]
        drafter = isinstance(self.config, DrafterConfig)
        return [
            Weight(
                spec.name,
                spec.sizes,
                formats[spec.name],
                (layout := layout_of(spec, self.mapping, drafter)),
                (),
                (0.0,) * layout.units if spec.name in inputs else None,
            )
            for spec in checkpoint_specs(self.config, int(self.mtp))
            if spec.name not in self.shared
        ]

    def net_config(self, compute: str) -> NetworkConfig:
        """How a network that takes these weights as they are is authored."""
        quantization = self.record["quantization"]
        return NetworkConfig(
            compute=compute,
            mapping=self.mapping,
            formats=quantized_formats(quantization["formats"]),
            scaled=frozenset(quantization["inputs"]),
        )

    def rank_tensors(self, rank: int) -> dict[str, RankTensor]:
        """A rank's tensors by their files' headers."""
        tensors = {}
        for part in self.record["ranks"][rank]:
            tensors |= self._read(part, lambda file, name: _held(name, file.get_slice(name)))
        return tensors

    def tensors(self, rank: int) -> dict[str, torch.Tensor]:
        """A rank's tensors as they are stored. Raises `CheckpointError` when a file is not whole."""
        tensors = {}
        for part in self.record["ranks"][rank]:
            tensors |= self._read(part, lambda file, name: file.get_tensor(name))
        return tensors

    def load(self) -> dict[str, torch.Tensor]:
        """Every weight of a checkpoint for one rank, quantized ones as float32. Raises `CheckpointError` when a file
        is not whole."""
        if self.mapping.tp > 1:
            raise CheckpointError(f"{self.folder}: made for {self.mapping.tp} ranks. Convert with --tp 1 to load it.")
        tensors = self.tensors(0)
        return {weight.name: _values(weight, tensors) for weight in self.weights()}

    def check(self, advance: Callable[[int], None] = lambda size: None) -> None:
        """Compare the headers of all files with what the network takes, and every file with its recorded digest.
        Raises `CheckpointError` naming the file and the first tensor at fault. advance: called with the bytes
        of weights hashed since."""
        weights = self.weights()
        for rank, names in enumerate(self.record["ranks"]):
            present, where = {}, {}
            for part in names:
                held = self._read(part, lambda file, name: _described(file.get_slice(name)))
                present |= held
                where |= dict.fromkeys(held, part)
            wanted = {
                output.name: f"{output.dtype}{list(output.shape)}"
                for weight in weights
                for output in weight.outputs(rank).values()
            }
            for name in sorted(present.keys() | wanted.keys()):
                if present.get(name) != wanted.get(name):
                    raise CheckpointError(
                        f"{self.folder}: {where.get(name, names[0])}: tensor {name}: found "
                        f"{present.get(name, 'none')}, expected {wanted.get(name, 'none')}. Convert again."
                    )
        check_files(self.folder, self.record["files"], _AGAIN)
        for name in matching(self.folder, TEXT):  # they decide how texts become tokens
            if name not in self.record["files"]:
                raise CheckpointError(
                    f"{self.folder / name}: found beside the weights, and the conversion did not write it: it could "
                    "change answers. Remove it, or convert again from a folder that has it."
                )
        for path in self.files:
            check_digest(path, self.record["parts"][path.name]["sha256"], _AGAIN, advance)

    def check_loaded(self) -> None:
        """What every load compares. Raises `CheckpointError` naming the first file at fault."""
        check_written(self.folder, self.record, _AGAIN)

    def _read(self, part: str, take: Callable[[Any, str], Any]) -> dict[str, Any]:
        """What `take` makes of every tensor of a part, by name."""
        try:
            with safe_open(self.folder / part, framework="pt") as file:
                return {key: take(file, key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.folder / part}: not a whole safetensors file ({error}). Convert again."
            ) from None


def parts_digest(parts: dict[str, dict[str, Any]]) -> str:
    """One digest for files whose digests are recorded."""
    text = "".join(f"{name} {parts[name]['sha256']}\n" for name in sorted(parts))
    return hashlib.sha256(text.encode()).hexdigest()


def config_of(record: dict[str, Any], source: str) -> Config:
    """The frozen config of a converted checkpoint's record: of its Hugging Face config.json, with what lay beside."""
    config = parse_config(record["hf_config"], source)
    return replace(config, mask_embedding=True) if record["mask_embedding"] else config


def is_converted(folder: Path) -> bool:
    """True for a folder that `convert` wrote."""
    return kind_of(folder) == CHECKPOINT


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a converted checkpoint. Raises when a weights file is gone, when its record changed, and naming the first
    key of the record that is not as `convert` writes it."""
    checkpoint = open_converted(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: not a converted checkpoint. Run: glmspec-build convert {folder} -o OUT")
    return checkpoint


def open_converted(folder: Path) -> Checkpoint | None:
    """What `read_checkpoint` opens; None for a folder that `convert` did not write. Its config.json is read once."""
    path = folder / "config.json"
    record = read_json(path)
    if produced(record) != CHECKPOINT:
        return None
    check_sealed(record, path, SHAPE, _AGAIN)
    checkpoint = Checkpoint(folder, config_of(record, f"{path}: hf_config"), record)
    _check_record(checkpoint, Fields(record, str(path)))
    for part in checkpoint.files:
        if not part.exists():
            raise CheckpointError(f"{folder}: {part.name}: missing. {_AGAIN}")
    return checkpoint


def built_for(home: Path, owner: Path, recorded: dict[str, str], again: str) -> Checkpoint:
    """The checkpoint in `home` that `owner` was made for. recorded: what that keeps of its `identity`. again: what to
    do about another. Raises `EngineError` for one that is gone or another one; its files are not hashed."""
    if not (home / "config.json").exists():
        raise EngineError(f"{owner}: its weights are expected in {home}, and are not there.")
    checkpoint = read_checkpoint(home)
    for key, actual in checkpoint.identity.items():
        if actual != recorded[key]:
            raise EngineError(
                f"{home}: not the checkpoint {owner} was made for ({key}: found {actual[:12]}, expected "
                f"{recorded[key][:12]}). {again}"
            )
    return checkpoint


def _check_record(checkpoint: Checkpoint, fields: Fields) -> None:
    """What the shape of a record does not tell: that its lists are of each other's entries, and of the network's."""
    ranks, parts = fields.values["ranks"], fields.section("parts")
    for part in parts.values:
        check_shape(parts.section(part), {"size": int, "sha256": str})
    if len(ranks) != checkpoint.mapping.tp or not all(_are_among(parts.values, names) for names in ranks):
        fields.fail("ranks", f"for each of {checkpoint.mapping.tp} ranks a list of parts")
    quantization = fields.section("quantization")
    formats = quantization.section("formats")
    specs = {spec.name for spec in checkpoint_specs(checkpoint.config, int(checkpoint.mtp))} - checkpoint.shared.keys()
    for name in sorted(specs | formats.values.keys()):
        if name not in specs:
            formats.fail(name, "no such key: the network has no such weight")
        formats.choice(name, tuple(FORMATS))
    if not _are_among(specs, quantization.values["inputs"]):
        quantization.fail("inputs", "names of weights")


def _are_among(known: Collection[str], names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) and name in known for name in names)


def _held(name: str, view: Any) -> RankTensor:
    return RankTensor(name, view.get_dtype(), tuple(view.get_shape()))


def _described(view: Any) -> str:
    return f"{view.get_dtype()}{list(view.get_shape())}"


def _values(weight: Weight, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A weight of the only rank: as it is in a plain format, else float32, unit by unit."""
    fields = {suffix: tensors[weight.field_name(suffix)] for suffix in FORMATS[weight.format]}
    if len(fields) == 1:
        return fields[""]
    layout, flat = weight.layout, {}
    for suffix, field in FORMATS[weight.format].items():
        tensor = fields[suffix].reshape(-1)
        bits = tensor.view(torch.uint8).numpy().view(NUMPY[field.dtype])
        flat[suffix] = bits.reshape(layout.units, *field.size(layout.rows, layout.columns))
    values = [to_float32(Matrix(weight.format, {k: v[unit] for k, v in flat.items()})) for unit in range(layout.units)]
    return torch.stack([torch.from_numpy(array) for array in values]).reshape(weight.dims)
