"""An engine directory: what `glmspec-build engine` writes and everything after it reads.

    ENGINES/config.json                  target, limits, models, end tokens, hashes
    ENGINES/checkpoints/NAME/            converted weights, when the inputs were Hugging Face folders
    ENGINES/verifier/config.json         I/O contract, network hash, where the weights are
    ENGINES/verifier/rank0.engine        the plan, for targets built ahead of time
    ENGINES/DRAFTER/...                  the same, one folder a drafter
    ENGINES/tokenizer/                   when the verifier has one

Everything is read and checked, and every network authored, before the first file is written.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glmspec.build.configs.drafter import DrafterConfig
from glmspec.build.configs.limits import CONTEXT, EngineLimits
from glmspec.build.configs.target import Target
from glmspec.build.configs.verifier import VerifierConfig
from glmspec.build.errors import CheckpointError, ConfigError, MissingCapability
from glmspec.build.models.registry import model_of
from glmspec.build.network.contract import CACHE
from glmspec.build.network.form import Form
from glmspec.build.network.graph import Network
from glmspec.build.network.reader import read
from glmspec.build.plan import build_plan
from glmspec.build.progress import Progress
from glmspec.build.trt import Backend, backend
from glmspec.convert.checkpoint import Checkpoint, is_converted, read_checkpoint
from glmspec.convert.conversion import TOKENIZER_FILES, Conversion, plan_conversion
from glmspec.convert.files import (
    ENGINES,
    MODEL_ENGINE,
    new_folder,
    producer,
    refuse_to_replace,
    sha256,
    write_bytes,
    write_json,
)
from glmspec.convert.writer import Run

PLAN_FILE = "rank0.engine"
_MOST_ELEMENTS = 2**31 - 1
VERIFIER, TOKENIZER = "verifier", "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user may choose; None takes the target's default."""

    compute: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass
class _Member:
    """One model on its way into the directory."""

    name: str
    folder: Path
    origin: Checkpoint | Conversion
    net: Network | None = None
    plan: bytes | None = None
    taps: tuple[int, ...] = field(default=())

    @property
    def config(self) -> VerifierConfig | DrafterConfig:
        """What its checkpoint says."""
        return self.origin.config

    @property
    def end_ids(self) -> tuple[int, ...]:
        """A verifier's end tokens."""
        if isinstance(self.origin, Conversion):
            return self.origin.end_tokens
        return tuple(self.origin.record["eos_token_ids"])

    def form(self, compute: str) -> Form:
        """The form of its network."""
        return self.origin.form(compute)

    def index_topk(self, limits: EngineLimits) -> int:
        """K of its DSA top-k, 0 for a drafter."""
        return limits.index_topk(self.config.index_topk) if isinstance(self.config, VerifierConfig) else 0


def build_engines(
    verifier: Path, drafters: Sequence[Path], target: Target, options: Options, out: Path, progress: Progress
) -> None:
    """Build an engine directory. Raises naming the field, tensor or layer at fault, having written nothing."""
    tensorrt = _backend_for(target)
    inputs = [verifier, *drafters]
    refuse_to_replace(out, ENGINES, inputs)
    with progress.stage("Reading and checking checkpoints"):
        members = [_open(VERIFIER, verifier), *_open_drafters(drafters)]
        _check_family(members)
    limits = engine_limits(members[0].config, [one.config for one in members[1:]], target, options)
    _note_oddities(members, limits, progress)
    _check_volumes(members, limits)
    compute = options.compute or target.compute
    for member in members:
        with progress.stage(f"Authoring the {member.name} network"):
            member.net = model_of(member.config, member.taps).author(limits, member.form(compute), tensorrt)
        if target.package:
            with progress.stage(f"Building {member.name} for {target.compute_capability}"):
                ranges = limits.profiles(member.index_topk(limits))[CONTEXT]
                member.plan = build_plan(member.net, ranges, target.compute_capability).plan
    with new_folder(out, ENGINES, inputs) as folder:
        for member in members:
            _write_member(member, folder, out, limits, compute, progress)
        tokenizer = _copy_tokenizer(members[0], folder)
        write_json(folder / "config.json", _directory_record(members, folder, target, limits, compute, tokenizer))


def _backend_for(target: Target) -> Backend:
    """The TensorRT that authors for the target. Fails early, with exit code 3, when this machine lacks it."""
    try:
        return backend(target.package)
    except MissingCapability as error:
        raise MissingCapability(
            f"--target {target.name} ({target.description}) needs its TensorRT here: {error} "
            "Targets that any machine can build for, with tensorrt-rtx: cpu, rtx-pro-6000."
        ) from None


def _open(name: str, folder: Path) -> _Member:
    if not is_converted(folder):
        return _Member(name, folder, plan_conversion(folder))
    checkpoint = read_checkpoint(folder)
    if checkpoint.mapping.tp > 1:
        raise CheckpointError(f"{folder}: made for {checkpoint.mapping.tp} ranks; this version builds engines for 1.")
    checkpoint.check()
    return _Member(name, folder, checkpoint)


def _open_drafters(folders: Sequence[Path]) -> list[_Member]:
    """Named after their kind; a second one of a kind gets a number."""
    members: list[_Member] = []
    for folder in folders:
        member = _open("", folder)
        if not isinstance(member.config, DrafterConfig):
            raise ConfigError(f"{folder}: --drafter: found a verifier, expected a drafter.")
        same = sum(one.config.kind == member.config.kind for one in members)
        member.name = member.config.kind + (f"-{same + 1}" if same else "")
        members.append(member)
    return members


def _check_family(members: list[_Member]) -> None:
    """The drafters must fit the verifier; its taps are the union of what they read."""
    verifier = members[0].config
    if not isinstance(verifier, VerifierConfig):
        raise ConfigError(f"{members[0].folder}: --verifier: found a drafter, expected a verifier.")
    for member in members[1:]:
        config, where = member.config, f"{member.folder}/config.json"
        for key in ("hidden_size", "vocab_size"):
            if getattr(config, key) != getattr(verifier, key):
                raise ConfigError(
                    f"{where}: {key}: found {getattr(config, key)}, expected the verifier's {getattr(verifier, key)}."
                )
        if config.taps[-1] > verifier.num_hidden_layers:
            raise ConfigError(
                f"{where}: aux_hidden_state_layer_ids: found {list(config.taps)}, expected ids from 0 to "
                f"{verifier.num_hidden_layers}: the verifier has {verifier.num_hidden_layers} layers."
            )
    members[0].taps = tuple(sorted({tap for member in members[1:] for tap in member.config.taps}))


def _check_volumes(members: list[_Member], limits: EngineLimits) -> None:
    """Refuse caches that 32-bit offsets cannot address: kernels that use them would read elsewhere, silently."""
    sizes = {"X": limits.num_pages}
    for member in members:
        specs = model_of(member.config, member.taps).input_specs(limits, Form(compute="float32"))
        for spec in specs:
            volume = math.prod(sizes.get(dim, dim) for dim in spec.dims) if spec.role == CACHE else 0
            if volume > _MOST_ELEMENTS:
                raise ConfigError(
                    f"{member.name}: {spec.name}: found {volume:,} elements for {limits.max_num_seqs} sequences of "
                    f"{limits.max_model_len:,} tokens, expected at most {_MOST_ELEMENTS:,}. "
                    "Lower --max-num-seqs or --max-model-len."
                )


def _note_oddities(members: list[_Member], limits: EngineLimits, progress: Progress) -> None:
    """Say what is legal and surprising."""
    for member in members[1:]:
        reach = member.config.max_position_embeddings
        if reach < limits.max_model_len:
            progress.note(
                f"{member.name} knows {reach} positions and max_model_len is {limits.max_model_len}: "
                "beyond its own it drafts nothing."
            )
    if not members[0].end_ids:
        progress.note("the verifier names no end token: answers end at max_tokens only.")


def engine_limits(
    verifier: VerifierConfig, drafters: Sequence[DrafterConfig], target: Target, options: Options
) -> EngineLimits:
    """The limits every model of the directory shares."""
    if (options.max_model_len or 0) > verifier.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len: found {options.max_model_len}, expected at most {verifier.max_position_embeddings}, "
            "the verifier's max_position_embeddings."
        )
    block_rows = 1 + max((drafter.num_drafts for drafter in drafters), default=0)
    max_num_seqs = options.max_num_seqs or target.max_num_seqs
    tokens = options.max_num_batched_tokens or max(target.max_num_batched_tokens, max_num_seqs * block_rows)
    return EngineLimits(
        max_model_len=options.max_model_len or min(target.max_model_len, verifier.max_position_embeddings),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=tokens,
        page_size=target.page_size,
        segment_rows=max(target.segment_rows, block_rows),
        block_rows=block_rows,
    )


def _write_member(
    member: _Member, folder: Path, out: Path, limits: EngineLimits, compute: str, progress: Progress
) -> None:
    home = folder / member.name
    home.mkdir()
    if isinstance(member.origin, Conversion):
        with progress.bytes(f"Converting {member.name}", member.origin.size) as advance:
            checkpoint = member.origin.write(folder / "checkpoints" / member.name, Run(advance=advance))
        where = f"../checkpoints/{member.name}"
    else:
        checkpoint = member.origin
        where = os.path.relpath(checkpoint.folder.resolve(), (out / member.name).resolve())
    if member.plan is not None:
        write_bytes(home / PLAN_FILE, member.plan)
    k = member.index_topk(limits)
    write_json(
        home / "config.json",
        {
            "producer": producer(MODEL_ENGINE),
            "pretrained_config": checkpoint.record,
            "build_config": {
                "compute": compute,
                "taps": list(member.taps),
                "index_topk": k,
                "limits": asdict(limits),
                "profiles": limits.profiles(k),
            },
            "weights": {"folder": where, "sha256": checkpoint.weights_sha256},
            "network": {
                "sha256": read(member.net.definition, member.net.backend).content_hash(),
                "layers": member.net.definition.num_layers,
            },
            "plan": None if member.plan is None else {"file": PLAN_FILE, "sha256": sha256(home / PLAN_FILE)},
            "contract": member.net.contract().to_json(),
        },
    )


def _copy_tokenizer(verifier: _Member, folder: Path) -> bool:
    """Copy the verifier's tokenizer, if it has one."""
    if not (verifier.folder / "tokenizer.json").exists():
        return False
    (folder / TOKENIZER).mkdir()
    for name in TOKENIZER_FILES:
        if (verifier.folder / name).exists():
            shutil.copyfile(verifier.folder / name, folder / TOKENIZER / name)
    return True


def _directory_record(
    members: list[_Member], folder: Path, target: Target, limits: EngineLimits, compute: str, tokenizer: bool
) -> dict[str, Any]:
    tensorrt = members[0].net.backend
    listed = [folder / one.name / "config.json" for one in members]
    if tokenizer:
        listed += (folder / TOKENIZER).iterdir()
    return {
        "producer": producer(ENGINES),
        "target": target.name,
        "tensorrt": {"package": tensorrt.package, "version": tensorrt.version},
        "compute": compute,
        "limits": asdict(limits),
        "eos_token_ids": list(members[0].end_ids),
        "tokenizer": TOKENIZER if tokenizer else None,
        "verifier": VERIFIER,
        "drafters": [
            {"name": one.name, "kind": one.config.kind, "source": one.folder.resolve().name} for one in members[1:]
        ],
        "files": {str(path.relative_to(folder)): sha256(path) for path in sorted(listed)},
    }
