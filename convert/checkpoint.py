"""A converted checkpoint: `config.json` and `rank{r}.safetensors`, TensorRT-LLM's layout.

Written by `convert`, read by everything after it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from glmspec.build.configs.drafter import ARCHITECTURES as DRAFTERS
from glmspec.build.configs.drafter import DrafterConfig
from glmspec.build.configs.fields import Fields, read_json
from glmspec.build.configs.verifier import ARCHITECTURE as VERIFIER
from glmspec.build.configs.verifier import VerifierConfig, end_token_ids
from glmspec.build.errors import CheckpointError, ConfigError
from glmspec.build.models.dflash import SHARED_WEIGHTS
from glmspec.build.models.registry import model_of
from glmspec.convert.files import CHECKPOINT, new_folder, producer, sha256, write_json
from glmspec.convert.names import Plan, plan_drafter, plan_verifier
from glmspec.convert.safetensors_stream import write_stream
from glmspec.convert.source import Source

RANK_FILE = "rank0.safetensors"
# Copied beside the weights when the source has them: what text in and text out needs.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

Config = VerifierConfig | DrafterConfig


@dataclass(frozen=True)
class Checkpoint:
    """A converted checkpoint on disk. sources: weight name -> verifier weight, for those it shares."""

    folder: Path
    config: Config
    record: dict[str, Any]

    @property
    def weights_file(self) -> Path:
        """The file that holds the weights."""
        return self.folder / self.record["weights"]["file"]

    @property
    def shared(self) -> dict[str, str]:
        """The drafter's weight -> the verifier's weight that stands in for it."""
        return self.record["shared_from_verifier"]

    @property
    def weights_sha256(self) -> str:
        """Digest of the weights, as recorded when they were written."""
        return self.record["weights"]["sha256"]

    def load(self) -> dict[str, torch.Tensor]:
        """Every tensor. Raises `CheckpointError` when the file is not whole."""
        try:
            return load_file(self.weights_file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.weights_file}: not a whole safetensors file ({error}). Convert again."
            ) from None

    def check(self) -> None:
        """Compare the weights file's header with what the network takes, and its digest with the recorded one.
        Raises `CheckpointError` naming the file and the first tensor at fault."""
        try:
            with safe_open(self.weights_file, framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.weights_file}: not a whole safetensors file ({error}). Convert again."
            ) from None
        specs = model_of(self.config).weight_specs("bfloat16")
        wanted = {spec.name: tuple(spec.dims) for spec in specs if spec.name not in self.shared}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{self.weights_file}: tensor {name}: found {found.get(name, 'none')}, "
                    f"expected {wanted.get(name, 'none')}. Convert again."
                )
        if sha256(self.weights_file) != self.weights_sha256:
            raise CheckpointError(f"{self.weights_file}: changed since it was written. Convert again.")


@dataclass(frozen=True)
class Conversion:
    """A source that was read, checked and planned, and is not written yet."""

    source: Source
    config: Config
    plan: Plan
    end_tokens: tuple[int, ...] | None  # of a verifier

    def write(self, out: Path, advance: Callable[[str], None] = lambda name: None) -> Checkpoint:
        """Write the converted checkpoint. advance is called with each tensor's name as it is written."""
        with new_folder(out, CHECKPOINT, [self.source.folder]) as folder:
            items = self.plan.items

            def tensors():
                for item in items:
                    yield item.make()
                    advance(item.name)

            specs = [(item.name, item.dtype, item.shape) for item in items]
            write_stream(folder / RANK_FILE, specs, tensors(), {"producer": "glmspec"})
            for name in TOKENIZER_FILES:
                if (self.source.folder / name).exists():
                    shutil.copyfile(self.source.folder / name, folder / name)
            write_json(folder / "config.json", self._record(folder))
        return read_checkpoint(out)

    def _record(self, folder: Path) -> dict[str, Any]:
        hf = self.source.config
        present = {item.name for item in self.plan.items}
        drafter = isinstance(self.config, DrafterConfig)
        floats = sorted({item.dtype for item in self.plan.items if item.dtype != "int32"})
        return {
            "producer": producer(CHECKPOINT),
            "architecture": hf["architectures"][0],
            "dtype": floats[0],
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
            "weights": {"file": RANK_FILE, "sha256": sha256(folder / RANK_FILE), "tensors": len(present)},
            "shared_from_verifier": {k: v for k, v in SHARED_WEIGHTS.items() if drafter and k not in present},
            "eos_token_ids": None if self.end_tokens is None else list(self.end_tokens),
            "left_out": self.plan.left_out,
            "notes": self.source.notes,
            "source": {
                "folder": self.source.folder.resolve().name,
                "files": {path.name: sha256(path) for path in self.source.files},
            },
            "hf_config": hf,
        }


def plan_conversion(folder: Path) -> Conversion:
    """Read and check a Hugging Face folder; writes nothing. Raises naming the field or tensor at fault."""
    if is_converted(folder):
        raise CheckpointError(f"{folder}: already a converted checkpoint; use it as it is.")
    source = Source(folder)
    config = parse_config(source.config, f"{folder}/config.json")
    specs = model_of(config).weight_specs("bfloat16")
    if isinstance(config, VerifierConfig):
        return Conversion(source, config, plan_verifier(source, config, specs), _end_tokens(source, config))
    return Conversion(source, config, plan_drafter(source, config, specs), None)


def parse_config(hf: dict[str, Any], source: str) -> Config:
    """The frozen config of a Hugging Face config.json, its kind decided by `architectures`."""
    names = hf.get("architectures")
    if names == [VERIFIER]:
        return VerifierConfig.from_hf(hf, source)
    if isinstance(names, list) and len(names) == 1 and names[0] in DRAFTERS:
        return DrafterConfig.from_speculators(hf, source)
    found = hf.get("model_type") or hf.get("speculators_model_type")
    raise ConfigError(
        f"{source}: architectures: found {names!r} (model_type {found!r}), expected {VERIFIER}"
        f" or a speculators drafter ({', '.join(DRAFTERS)})."
    )


def is_converted(folder: Path) -> bool:
    """True for a folder that `convert` wrote."""
    return "hf_config" in read_json(folder / "config.json")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a converted checkpoint. Raises when the weights file is gone."""
    record = read_json(folder / "config.json")
    if "hf_config" not in record:
        raise CheckpointError(f"{folder}: not a converted checkpoint. Run: glmspec-build convert {folder} -o OUT")
    config = parse_config(record["hf_config"], f"{folder}/config.json: hf_config")
    checkpoint = Checkpoint(folder, config, record)
    if not checkpoint.weights_file.exists():
        raise CheckpointError(f"{folder}: {checkpoint.weights_file.name}: missing. Convert the checkpoint again.")
    return checkpoint


def _end_tokens(source: Source, config: VerifierConfig) -> tuple[int, ...]:
    """Every id that ends a text: the union over config.json, generation_config.json and the tokenizer."""
    path = source.folder / "generation_config.json"
    extra: tuple[int, ...] = ()
    if path.exists():
        fields = Fields(read_json(path), str(path))
        extra = end_token_ids(fields)
        if any(token >= config.vocab_size for token in extra):
            fields.fail("eos_token_id", f"ids below vocab_size ({config.vocab_size})")
    return tuple(dict.fromkeys([*config.eos_token_ids, *extra, *_tokenizer_end(source.folder)]))


def _tokenizer_end(folder: Path) -> list[int]:
    """The id of the tokenizer's own end token, when it names one."""
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (settings.exists() and vocabulary.exists()):
        return []
    token, held = read_json(settings).get("eos_token"), read_json(vocabulary)
    content = token.get("content") if isinstance(token, dict) else token
    ids = [entry["id"] for entry in held.get("added_tokens", []) if entry.get("content") == content]
    plain = (held.get("model") or {}).get("vocab")
    if not ids and isinstance(plain, dict) and content in plain:
        ids = [plain[content]]
    return ids
