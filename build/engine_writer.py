"""An engine directory's files: networks compiled, weights and tokenizer beside them, records that hash it all.

    ENGINES/config.json                  target, limits, models, end tokens, hashes
    ENGINES/checkpoints/NAME/            converted weights, when the inputs were Hugging Face folders
    ENGINES/verifier/config.json         I/O contract, network hashes, where the weights are
    ENGINES/verifier/PROFILE.engine      a plan a profile, for GPUs; every rank loads the same ones
    ENGINES/verifier/PROFILE.layers.jsonl, build.log, timing.cache
    ENGINES/DRAFTER/...                  the same, one folder a drafter
    ENGINES/tokenizer/                   when the verifier has one
    ENGINES/licenses/NAME/               of each member whose checkpoint has licence files
    ENGINES/validation.json              what `validate` found, unless it was skipped

`engine.py` fills one at once, `bundle.py` in two halves.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glmspec.build.deployment import Deployment
from glmspec.build.layer_list import layer_lines
from glmspec.build.member import MTP, VERIFIER, Member
from glmspec.build.plan import Built, build_plan
from glmspec.convert.beside import TEXT, copy_files, matching
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.conversion import Conversion
from glmspec.convert.origin import name_of
from glmspec.convert.terms import Terms
from glmspec.convert.tokenizer import has_tokenizer
from glmspec.convert.writer import Run
from glmspec.core.files import ENGINES, MODEL_ENGINE, producer, write_bytes, write_json
from glmspec.core.progress import Progress
from glmspec.core.sealed import digests, write_sealed
from glmspec.network.contract import Contract
from glmspec.network.reader import read
from glmspec.network.trt import Backend
from glmspec.plugins.registration import compile_kernels

TOKENIZER, LICENCES, REPORT, CHECKPOINTS = "tokenizer", "licenses", "validation.json", "checkpoints"
TIMING_CACHE, BUILD_LOG = "timing.cache", "build.log"


@dataclass(frozen=True)
class Compiled:
    """One member's network for one profile. built: None where the executor runs it."""

    sha256: str
    layers: tuple[str, ...]
    contract: Contract
    built: Built | None


def compile_member(
    deployment: Deployment, member: Member, tensorrt: Backend, progress: Progress
) -> dict[str, Compiled]:
    """A member's networks by profile, compiled where the target wants plans."""
    made, cache = {}, b""
    ranges = member.ranges(deployment.limits)
    for profile in deployment.profiles(member):
        with progress.stage(f"Authoring the {member.name} network ({profile})"):
            net = deployment.author(member, profile, tensorrt, plugged=True)
            graph = read(net.definition, net.backend)
        built = None
        if net.kernels:  # what fails in TensorRT's hands has no name there
            with progress.steps(f"Compiling the plugins of {member.name} ({profile})", len(net.kernels)) as advance:
                compile_kernels(net.kernels, advance)
        if deployment.target.package:
            with progress.stage(f"Building {member.name} ({profile}) for {deployment.target.compute_capability}"):
                built = build_plan(net, ranges[profile], deployment.target.compute_capability, cache)
            cache = built.timing_cache
        made[profile] = Compiled(graph.content_hash(), tuple(layer_lines(graph)), net.contract(), built)
    return made


def write_engines(
    deployment: Deployment,
    compiled: dict[str, dict[str, Compiled]],
    folder: Path,
    out: Path,
    tensorrt: Backend,
    progress: Progress,
) -> None:
    """Fill an engine directory that will be at `out`."""
    weights = written_weights(deployment, folder, progress)
    for member in deployment.members:
        _write_member(deployment, member, weights[member.name], compiled[member.name], folder, out)
    tokenizer = copy_tokenizer(deployment.verifier, folder)
    licences = copy_licences(weights, folder)
    record = _directory_record(deployment, folder, tensorrt, tokenizer)
    write_sealed(folder / "config.json", record | {"licenses": licences})


def _write_member(
    deployment: Deployment,
    member: Member,
    weights: tuple[Checkpoint, str | None],
    compiled: dict[str, Compiled],
    folder: Path,
    out: Path,
) -> None:
    home = folder / member.name
    home.mkdir()
    checkpoint, inside = weights
    where = f"../{inside}" if inside else os.path.relpath(checkpoint.folder.resolve(), (out / member.name).resolve())
    plans = {profile: one.built for profile, one in compiled.items() if one.built is not None}
    for profile, one in compiled.items():
        write_bytes(home / f"{profile}.layers.jsonl", "".join(f"{line}\n" for line in one.layers).encode())
    for profile, built in plans.items():
        write_bytes(home / f"{profile}.engine", built.plan)
    if plans:
        log = [f"{profile}: {line}\n" for profile, built in plans.items() for line in built.log]
        write_bytes(home / BUILD_LOG, "".join(log).encode())
        last = list(plans.values())[-1].timing_cache
        if last:
            write_bytes(home / TIMING_CACHE, last)
    limits = deployment.limits
    first = next(iter(compiled.values()))
    write_json(
        home / "config.json",
        {
            "producer": producer(MODEL_ENGINE),
            "pretrained_config": checkpoint.record,
            "build_config": {
                "compute": deployment.compute,
                "plugins": deployment.plugins,
                **member.choices,
                "num_drafts": member.num_drafts,
                "law": asdict(member.probs) if member.probs else None,
                "index_topk": member.index_topk(limits),
                "limits": asdict(limits),
                "profiles": member.ranges(limits),
            },
            "weights": {"folder": where, **checkpoint.identity},
            "networks": {
                profile: {"sha256": one.sha256, "layers": len(one.layers)} for profile, one in compiled.items()
            },
            "plans": {
                profile: {"file": f"{profile}.engine", "sha256": hashlib.sha256(built.plan).hexdigest()}
                for profile, built in plans.items()
            },
            "contract": first.contract.to_json(),
        },
    )


def weights_size(deployment: Deployment) -> int:
    """Bytes of the weights that `written_weights` will write."""
    return sum(one.output_size for one in deployment.origins if isinstance(one, Conversion))


def keep_conversions(deployment: Deployment, folder: Path) -> None:
    """Remove what an interrupted run left in a folder, but the conversions that `written_weights` goes on with."""
    wanted = {one.name for one in deployment.members if isinstance(one.origin, Conversion)}
    others = [left for left in folder.iterdir() if left.name != CHECKPOINTS]
    others += [left for left in folder.glob(f"{CHECKPOINTS}/*") if left.name not in wanted]
    for left in others:
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def written_weights(
    deployment: Deployment, folder: Path, progress: Progress
) -> dict[str, tuple[Checkpoint, str | None]]:
    """Every member's converted checkpoint; those written into the folder now also with their path in there."""
    made: dict[int, tuple[Checkpoint, str | None]] = {}
    for member in deployment.members:
        origin, name = member.origin, member.name
        if id(origin) in made:
            continue
        if isinstance(origin, Conversion):
            with progress.bytes(f"Converting {name}", origin.size) as advance:
                written = origin.write_into(folder / CHECKPOINTS / name, Run(advance=advance))
            made[id(origin)] = (written, f"{CHECKPOINTS}/{name}")
        else:
            made[id(origin)] = (origin, None)
    return {member.name: made[id(member.origin)] for member in deployment.members}


def copy_tokenizer(verifier: Member, folder: Path) -> bool:
    """Copy the verifier's tokenizer, if it has one."""
    if not has_tokenizer(verifier.folder):
        return False
    copy_files(verifier.folder, matching(verifier.folder, TEXT), folder / TOKENIZER)
    return True


def copy_licences(weights: dict[str, tuple[Checkpoint, str | None]], folder: Path) -> dict[str, Any]:
    """Copy every member's licence files; what is known of its terms, by member. Members of one checkpoint have one."""
    made: dict[Path, tuple[str, dict[str, Any]]] = {}
    for name, (checkpoint, _) in weights.items():
        if checkpoint.folder not in made:
            terms = Terms.from_json(checkpoint.record.get("license"))
            copy_files(checkpoint.folder, terms.files, folder / LICENCES / name)
            files = [f"{LICENCES}/{name}/{file}" for file in terms.files]
            made[checkpoint.folder] = name, terms.to_json() | {"files": files}
    return dict(made.values())


def digests_beside_checkpoints(folder: Path) -> dict[str, str]:
    """The digest of every file of a folder but of converted checkpoints, whose own records have theirs."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return digests(folder, (path for path in paths if path.relative_to(folder).parts[0] != CHECKPOINTS))


def _directory_record(deployment: Deployment, folder: Path, tensorrt: Backend, tokenizer: bool) -> dict[str, Any]:
    target, members = deployment.target, deployment.members
    mapping = deployment.mapping
    return {
        "producer": producer(ENGINES),
        "target": target.name,
        "compute_capability": target.compute_capability,
        "tensorrt": {"package": tensorrt.package, "version": tensorrt.version},
        "mapping": {"tp_size": mapping.tp, "moe_ep_size": mapping.ep},
        "compute": deployment.compute,
        "limits": asdict(deployment.limits),
        "eos_token_ids": list(members[0].end_ids),
        "illegal_ids": members[0].illegal.to_json(),
        "tokenizer": TOKENIZER if tokenizer else None,
        "verifier": VERIFIER,
        "mtp": MTP if any(one.name == MTP for one in members) else None,
        "acceptance": [one.name for one in members if one.accepts],
        "drafters": [
            {"name": one.name, "kind": one.config.kind, "source": one.source or name_of(one.folder)}
            for one in deployment.drafters
        ],
        "files": digests_beside_checkpoints(folder),
    }
