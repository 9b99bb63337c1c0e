"""Converting: a Hugging Face folder read, checked and planned, then written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from glmspec.convert.agreement import check_declared
from glmspec.convert.beside import MASK_EMBEDDINGS, copy_files, matching
from glmspec.convert.checkpoint import Checkpoint, is_converted, read_checkpoint
from glmspec.convert.mask_embedding import take_mask_embedding
from glmspec.convert.names import ConvertOptions, Plan, plan_drafter, plan_verifier
from glmspec.convert.origin import hashed_size, source_record
from glmspec.convert.plan import Weight
from glmspec.convert.recipe import RECIPES
from glmspec.convert.source import Source
from glmspec.convert.storage import check_formats, weights_of
from glmspec.convert.writer import JOURNAL, Journal, Run, cut, file_part, write_parts
from glmspec.core.errors import CheckpointError, ConfigError, GlmspecError
from glmspec.core.fields import Fields, read_json
from glmspec.core.files import CHECKPOINT, PARTIAL, producer, write_json
from glmspec.core.folders import resumable_folder
from glmspec.core.sealed import MANIFEST, check_written, digests, open_manifest, open_sealed, write_sealed
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.kinds import Config, check_config, parse_config
from glmspec.models.configs.verifier import VerifierConfig, end_token_ids
from glmspec.models.dflash import SHARED_WEIGHTS
from glmspec.network.config import NetworkConfig, RankTensor, quantized_formats
from glmspec.network.formats import QUANTIZED
from glmspec.network.shards import Mapping

AUTO = ConvertOptions(RECIPES["auto"])


@dataclass(frozen=True)
class Conversion:
    """A source that was read, checked and planned, and is not written yet."""

    source: Source
    config: Config
    plan: Plan
    options: ConvertOptions
    end_tokens: tuple[int, ...] | None  # of a verifier

    @property
    def size(self) -> int:
        """Bytes that will be read: of the tensors, then of the files that are hashed for the record."""
        tensors = sum(task.size for weight in self.plan.weights for task in weight.tasks)
        return tensors + hashed_size(self.source.files, self.source.known_digests)

    @property
    def ranks(self) -> int:
        """Ranks that will be written."""
        return self.options.mapping.tp

    def net_config(self, compute: str) -> NetworkConfig:
        """How a network that takes what will be written is authored."""
        return NetworkConfig(
            compute=compute,
            mapping=self.options.mapping,
            formats=quantized_formats({weight.name: weight.format for weight in self.plan.weights}),
            scaled=frozenset(weight.name for weight in self.plan.weights if weight.inputs is not None),
        )

    @property
    def hf_config(self) -> dict[str, Any]:
        """The source's config.json."""
        return self.source.config

    @property
    def mapping(self) -> Mapping:
        """How it is divided among ranks."""
        return self.options.mapping

    @property
    def mtp(self) -> bool:
        """The verifier's MTP module is among the weights."""
        return self.plan.mtp

    @property
    def shared(self) -> dict[str, str]:
        """A drafter's weight -> the verifier's weight that stands in for it."""
        present = {weight.name for weight in self.plan.weights}
        drafter = isinstance(self.config, DrafterConfig)
        return {k: v for k, v in SHARED_WEIGHTS.items() if drafter and k not in present}

    def rank_tensors(self, rank: int) -> dict[str, RankTensor]:
        """The tensors a rank will hold."""
        return {tensor.name: tensor for weight in self.plan.weights for tensor in weight.outputs(rank).values()}

    @property
    def output_size(self) -> int:
        """Bytes of weights that will be written."""
        parts = cut(self.plan.weights, self.ranks)
        return sum(file_part(weights, rank, "").size for rank in range(self.ranks) for weights in parts)

    def write(self, out: Path, run: Run | None = None) -> Checkpoint:
        """Write the converted checkpoint. Raises `GlmspecError` when the disk is too small, before anything is
        written; an interrupted run leaves whole parts behind, for `resume`."""
        self.write_files(out, CHECKPOINT, self._stems, run or Run(), self._finish)
        return read_checkpoint(out)

    def write_into(self, folder: Path, run: Run) -> Checkpoint:
        """Write into a part of a folder that is being made: one that is there already, whole or begun, by the same
        conversion, is kept or gone on with. Raises `CheckpointError` when it was another one."""
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(folder, self._plan_digest())
        if (folder / "config.json").exists() and not (folder / JOURNAL).exists():
            if is_written(folder, "config.json", self.fingerprint):
                run.advance(self.size)
                return read_checkpoint(folder)
            raise CheckpointError(
                f"{folder}: left by a conversion of other files or with other options, or changed since. "
                "Delete it, or convert with the same ones."
            )
        journal.resume()
        self._fill(folder, self._stems, run, self._finish, journal)
        (folder / JOURNAL).unlink()
        return read_checkpoint(folder)

    def write_files(self, out: Path, kind: str, stems: list[str], run: Run, finish: Callable[..., None]) -> None:
        """Write all parts and what lies beside them. stems: of the file names, by rank."""
        with resumable_folder(out, kind, [self.source.folder], run.resume, self.output_size) as folder:
            journal = Journal(folder, self._plan_digest())
            journal.resume() if run.resume else journal.begin()
            self._fill(folder, stems, run, finish, journal)
        (out / JOURNAL).unlink()

    def _fill(self, folder: Path, stems: list[str], run: Run, finish: Callable[..., None], journal: Journal) -> None:
        parts = cut(self.plan.weights, self.ranks)
        names = [part_names(stem, len(parts)) for stem in stems]
        write_parts(folder, parts, names, journal, run)
        for rank, files in enumerate(names):
            if len(files) > 1:
                write_json(folder / f"{stems[rank]}.safetensors.index.json", index(parts, rank, files))
        copy_files(self.source.folder, self.source.beside.copied, folder)
        finish(folder, names, journal, run.advance)

    @property
    def _stems(self) -> list[str]:
        return [f"rank{rank}" for rank in range(self.ranks)]

    def _finish(self, folder: Path, names: list[list[str]], journal: Journal, advance: Callable[[int], None]) -> None:
        write_sealed(folder / "config.json", self._record(folder, names, journal, advance))

    def _plan_digest(self) -> str:
        """What must be the same for a run to go on where another stopped."""
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.source.files]
        weights = [
            (weight.name, weight.dims, weight.format, str(weight.layout), weight.inputs, weight.names)
            for weight in self.plan.weights
        ]
        text = json.dumps([producer(CHECKPOINT), files, weights, self.source.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def fingerprint(self) -> str:
        """What must be the same for a finished conversion to be this one: the plan, and every file of the source by
        size and time, because those beside the weights are copied or read too."""
        home = self.source.folder
        names = {path.name for path in home.iterdir() if path.is_file() and path.name[0] != "."}
        files = [(name, (home / name).stat()) for name in sorted(names.union(self.source.beside.copied))]
        stats = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
        name, options = home.resolve().name, self.options
        text = json.dumps([self._plan_digest(), name, options.recipe.name, stats])
        return hashlib.sha256(text.encode()).hexdigest()

    def _record(
        self, folder: Path, names: list[list[str]], journal: Journal, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        hf, mapping = self.source.config, self.options.mapping
        formats = {weight.name: weight.format for weight in self.plan.weights}
        return {
            "producer": producer(CHECKPOINT),
            "architecture": hf["architectures"][0],
            "dtype": "bfloat16" if "bfloat16" in formats.values() else next(iter(formats.values())),
            "mapping": {
                "world_size": mapping.tp,
                "tp_size": mapping.tp,
                "pp_size": 1,
                "moe_tp_size": mapping.tp // mapping.ep,
                "moe_ep_size": mapping.ep,
            },
            "quantization": {
                "quant_algo": quant_algo(set(formats.values())),
                "kv_cache_quant_algo": None,
                "recipe": self.options.recipe.name,
                "formats": formats,
                "inputs": [weight.name for weight in self.plan.weights if weight.inputs is not None],
            },
            "ranks": names,
            "shared_from_verifier": self.shared,
            "mtp": self.plan.mtp,
            "eos_token_ids": None if self.end_tokens is None else list(self.end_tokens),
            "mask_embedding": isinstance(self.config, DrafterConfig) and self.config.mask_embedding,
            **self.account(self.plan, folder, names, journal, advance),
            "hf_config": hf,
        }

    def account(
        self, plan: Plan, folder: Path, names: list[list[str]], journal: Journal, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        """What every record says: what was written by `plan`, what was not, and from what. folder: whole but for it.
        advance: called with the bytes of the source that were hashed."""
        done = {name: journal.done[name] for rank in names for name in rank}
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name != JOURNAL]
        return {
            "parts": {name: {"size": part["size"], "sha256": part["sha256"]} for name, part in done.items()},
            "files": digests(folder, (path for path in paths if path.suffix not in (".safetensors", f".{PARTIAL}"))),
            "left_out": plan.left_out,
            "notes": [*self.source.notes, *plan.notes],
            "license": self.source.terms.to_json(),
            "beside": self.source.beside.left,
            "source": source_record(self.source.folder, self.source.files, advance, self.source.known_digests),
            "fingerprint": self.fingerprint,
        }


def is_written(folder: Path, record_file: str, fingerprint: str) -> bool:
    """Whether a folder is a finished conversion with this fingerprint, its files as they were written."""
    try:
        record = open_sealed(folder / record_file, {"parts": dict, "files": dict}, "")
        if record.get("fingerprint") == fingerprint:
            check_written(folder, record, "")
            return True
    except (GlmspecError, OSError, KeyError, TypeError, AttributeError):
        pass
    return False


def plan_conversion(folder: Path, options: ConvertOptions = AUTO) -> Conversion:
    """Read and check a Hugging Face folder; writes nothing. Raises naming the field or tensor at fault."""
    check_source(folder)
    return plan_source(Source(folder), options)


def check_source(folder: Path) -> None:
    """What is told of a folder before its weights are looked at: that it is converted already, that a checkpoint of
    ours changed, that its architecture is another."""
    if is_converted(folder):
        raise CheckpointError(f"{folder}: already a converted checkpoint; use it as it is.")
    if (folder / MANIFEST).exists():
        open_manifest(folder)
    check_config(folder)


def plan_source(source: Source, options: ConvertOptions) -> Conversion:
    """Plan the conversion of an opened source."""
    config = parse_config(source.config, f"{source.folder}/config.json")
    check_formats(source)
    if isinstance(config, VerifierConfig):
        notes = _check_agreement(source, options)
        if odd := matching(source.folder, MASK_EMBEDDINGS):
            source.notes.append(f"{', '.join(odd)}: belongs to a drafter, and is not used with a verifier")
        plan = plan_verifier(source, config, options)
        source.notes += notes
        return Conversion(source, config, plan, options, _end_tokens(source, config))
    if options.activations.amax:
        raise GlmspecError(f"{source.folder}: --calibration: drafters are not quantized.")
    if options.mapping.tp > 1:
        raise GlmspecError(f"{source.folder}: --tp {options.mapping.tp}: a drafter is whole on every rank; use --tp 1.")
    if options.recipe.name not in ("auto", "bf16"):
        raise GlmspecError(
            f"{source.folder}: --quant {options.recipe.name}: drafters are not quantized; use auto or bf16."
        )
    config = take_mask_embedding(source, config)
    plan = plan_drafter(source, config, options)
    stored = [part.stored for weight in plan.weights for task in weight.tasks for part in task.parts]
    source.notes += check_declared(source, {weight.name: weight for weight in stored})
    return Conversion(source, config, plan, options, None)


def _check_agreement(source: Source, options: ConvertOptions) -> tuple[str, ...]:
    """The recipe's rules and the calibration's modules must be of this checkpoint, and so must its own claims. Returns
    notes on these."""
    stored = weights_of(source)
    modules = [name.removesuffix(".weight") for name in stored]
    options.recipe.check_used(modules)
    options.activations.check_known(modules)
    return check_declared(source, stored)


def quant_algo(formats: set[str]) -> str | None:
    """TensorRT-LLM's name for a mixture of formats."""
    algos = {"nvfp4": "NVFP4", "fp8": "FP8", "fp8_block": "FP8_BLOCK_SCALES"}
    names = sorted(algos[format] for format in formats if format in QUANTIZED)
    return None if not names else names[0] if len(names) == 1 else "MIXED_PRECISION"


def part_names(stem: str, count: int) -> list[str]:
    """File names of `count` parts."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]


def index(parts: list[tuple[Weight, ...]], rank: int, files: list[str]) -> dict[str, Any]:
    """Which file holds which tensor, in Hugging Face's shape."""
    outputs = [
        (output, file)
        for weights, file in zip(parts, files, strict=True)
        for weight in weights
        for output in weight.outputs(rank).values()
    ]
    total = sum(output.size for output, _ in outputs)
    return {"metadata": {"total_size": total}, "weight_map": {output.name: file for output, file in outputs}}


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
    try:
        token, held = read_json(settings).get("eos_token"), read_json(vocabulary)
    except ConfigError:
        return []  # convert goes on without it, and says so; engine does not
    content = token.get("content") if isinstance(token, dict) else token
    ids = [entry["id"] for entry in held.get("added_tokens", []) if entry.get("content") == content]
    plain = (held.get("model") or {}).get("vocab")
    if not ids and isinstance(plain, dict) and content in plain:
        ids = [plain[content]]
    return ids
