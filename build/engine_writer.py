"""An engine directory's files: networks compiled, weights and tokenizer beside them, records that hash it all.

A bundle is an engine directory whose plans are missing: the same files by the same writer, and kernels beside them.

    ENGINES/config.json                  target, limits, models, end tokens, hashes
    ENGINES/checkpoints/NAME/            converted weights, when the inputs were Hugging Face folders
    ENGINES/verifier/config.json         I/O contract, network hashes, where the weights are
    ENGINES/verifier/PROFILE.engine      a plan a profile, for GPUs; every rank loads the same ones
    ENGINES/verifier/PROFILE.layers.jsonl, build.log, timing.cache
    ENGINES/DRAFTER/...                  the same, one folder a drafter
    ENGINES/tokenizer/                   when the verifier has one
    ENGINES/licenses/NAME/               of each member whose checkpoint has licence files
    ENGINES/validation.json              what `validate` found, unless it was skipped
    BUNDLE/plugins/                      in a bundle: kernels compiled for the target's GPU, with a manifest

`engine.py` fills one at once, `bundle.py` in two halves. Weights are referred to by relative path and hash, as 700 GB
are not copied; only Hugging Face folders are converted into the directory. Every rank has the same network, and so the
same plan: what differs is in the inputs, its part of the weights and where its vocabulary and its experts begin.
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
from glmspec.build.plan import BuiltPlan, build_plan
from glmspec.convert.beside import TEXT, copy_files, matching
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.conversion import Conversion
from glmspec.convert.origin import name_of
from glmspec.convert.terms import Terms
from glmspec.convert.tokenizer import has_tokenizer
from glmspec.convert.writer import Run
from glmspec.core.files import BUNDLE, ENGINES, MODEL_ENGINE, producer, write_bytes, write_json
from glmspec.core.progress import Progress
from glmspec.core.sealed import digests, write_sealed
from glmspec.network.contract import Contract
from glmspec.network.reader import read
from glmspec.network.trt import Backend
from glmspec.plugins.registration import compile_kernels

TOKENIZER, LICENCES, REPORT, CHECKPOINTS = "tokenizer", "licenses", "validation.json", "checkpoints"
TIMING_CACHE, BUILD_LOG = "timing.cache", "build.log"


@dataclass(frozen=True)
class CompiledNetwork:
    """One member's network for one profile. plan: None where the executor runs it."""

    sha256: str
    layers: tuple[str, ...]
    contract: Contract
    plan: BuiltPlan | None


@dataclass(frozen=True)
class MemberNetworks:
    """One member's networks by profile. profiles: empty in a bundle, whose networks another TensorRT will author."""

    contract: Contract
    profiles: dict[str, CompiledNetwork]


def compile_member(deployment: Deployment, member: Member, tensorrt: Backend, progress: Progress) -> MemberNetworks:
    """A member's networks, compiled where the target wants plans."""
    networks, cache = {}, b""
    ranges = member.ranges(deployment.limits)
    for profile in deployment.profiles(member):
        with progress.stage(f"Authoring the {member.name} network ({profile})"):
            net = deployment.author(member, profile, tensorrt, plugged=True)
            graph = read(net.definition, net.backend)
        plan = None
        if net.kernels:  # what fails in TensorRT's hands has no name there
            with progress.steps(f"Compiling the plugins of {member.name} ({profile})", len(net.kernels)) as advance:
                compile_kernels(net.kernels, advance)
        if deployment.target.package:
            with progress.stage(f"Building {member.name} ({profile}) for {deployment.target.gpu}"):
                plan = build_plan(net, ranges[profile], deployment.target.gpu, cache)
            cache = plan.timing_cache
        layers = tuple(layer_lines(graph))
        networks[profile] = CompiledNetwork(graph.content_hash(), layers, net.contract(), plan)
    return MemberNetworks(next(iter(networks.values())).contract, networks)


def write_directory(
    deployment: Deployment,
    networks: dict[str, MemberNetworks],
    folder: Path,
    out: Path,
    tensorrt: Backend,
    progress: Progress,
    bundle: dict[str, Any] | None = None,
) -> None:
    """Fill an engine directory that will be at `out`. networks: by member. tensorrt: what authored them. bundle: what
    the record of a bundle says besides, None for an engine directory."""
    weights = written_weights(deployment, folder, progress)
    for member in deployment.members:
        _write_member(deployment, member, weights[member.name], networks[member.name], folder, out)
    tokenizer = copy_tokenizer(deployment.verifier, folder)
    licences = copy_licences(weights, folder)
    kind = ENGINES if bundle is None else BUNDLE
    record = _directory_record(deployment, folder, tensorrt, tokenizer, kind)
    write_sealed(folder / "config.json", record | {"licenses": licences} | (bundle or {}))


def _write_member(
    deployment: Deployment,
    member: Member,
    weights: tuple[Checkpoint, str | None],
    networks: MemberNetworks,
    folder: Path,
    out: Path,
) -> None:
    home = folder / member.name
    home.mkdir()
    checkpoint, inside = weights
    where = f"../{inside}" if inside else os.path.relpath(checkpoint.folder.resolve(), (out / member.name).resolve())
    plans = {profile: network.plan for profile, network in networks.profiles.items() if network.plan is not None}
    for profile, network in networks.profiles.items():
        write_bytes(home / f"{profile}.layers.jsonl", "".join(f"{line}\n" for line in network.layers).encode())
    for profile, plan in plans.items():
        write_bytes(home / f"{profile}.engine", plan.plan)
    if plans:
        log = [f"{profile}: {line}\n" for profile, plan in plans.items() for line in plan.log]
        write_bytes(home / BUILD_LOG, "".join(log).encode())
        last = list(plans.values())[-1].timing_cache
        if last:
            write_bytes(home / TIMING_CACHE, last)
    limits = deployment.limits
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
                profile: {"sha256": network.sha256, "layers": len(network.layers)}
                for profile, network in networks.profiles.items()
            },
            "plans": {
                profile: {"file": f"{profile}.engine", "sha256": hashlib.sha256(plan.plan).hexdigest()}
                | ({"build_route": plan.build_route} if plan.build_route else {})
                for profile, plan in plans.items()
            },
            "contract": networks.contract.to_json(),
        },
    )


def weights_size(deployment: Deployment) -> int:
    """Bytes of the weights that `written_weights` will write."""
    return sum(weights.output_size for weights in deployment.weights if isinstance(weights, Conversion))


def keep_conversions(deployment: Deployment, folder: Path) -> None:
    """Remove what an interrupted run left in a folder, but the conversions that `written_weights` goes on with."""
    wanted = {member.name for member in deployment.members if isinstance(member.weights, Conversion)}
    others = [left for left in folder.iterdir() if left.name != CHECKPOINTS]
    others += [left for left in folder.glob(f"{CHECKPOINTS}/*") if left.name not in wanted]
    for left in others:
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def written_weights(
    deployment: Deployment, folder: Path, progress: Progress
) -> dict[str, tuple[Checkpoint, str | None]]:
    """Every member's converted checkpoint; those written into the folder now also with their path in there."""
    written: dict[int, tuple[Checkpoint, str | None]] = {}
    for member in deployment.members:
        weights, name = member.weights, member.name
        if isinstance(weights, Checkpoint):
            written[id(weights)] = (weights, None)
        elif isinstance(weights, Conversion) and id(weights) not in written:
            with progress.bytes(f"Converting {name}", weights.size) as advance:
                checkpoint = weights.write_into(folder / CHECKPOINTS / name, Run(advance=advance))
            written[id(weights)] = (checkpoint, f"{CHECKPOINTS}/{name}")
    return {member.name: written[id(member.weights)] for member in deployment.members}


def copy_tokenizer(verifier: Member, folder: Path) -> bool:
    """Copy the verifier's tokenizer, if it has one."""
    if not has_tokenizer(verifier.folder):
        return False
    copy_files(verifier.folder, matching(verifier.folder, TEXT), folder / TOKENIZER)
    return True


def copy_licences(weights: dict[str, tuple[Checkpoint, str | None]], folder: Path) -> dict[str, Any]:
    """Copy every member's licence files; what is known of its terms, by member. Members of one checkpoint have one."""
    by_folder: dict[Path, tuple[str, dict[str, Any]]] = {}
    for name, (checkpoint, _) in weights.items():
        if checkpoint.folder not in by_folder:
            terms = Terms.from_json(checkpoint.record.get("license"))
            copy_files(checkpoint.folder, terms.files, folder / LICENCES / name)
            files = [f"{LICENCES}/{name}/{file}" for file in terms.files]
            by_folder[checkpoint.folder] = name, terms.to_json() | {"files": files}
    return dict(by_folder.values())


def digests_beside_checkpoints(folder: Path) -> dict[str, str]:
    """The digest of every file of a folder but of converted checkpoints, whose own records have theirs."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return digests(folder, (path for path in paths if path.relative_to(folder).parts[0] != CHECKPOINTS))


def _directory_record(
    deployment: Deployment, folder: Path, tensorrt: Backend, tokenizer: bool, kind: str
) -> dict[str, Any]:
    target, members = deployment.target, deployment.members
    mapping = deployment.mapping
    return {
        "producer": producer(kind),
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
        "mtp": MTP if any(member.name == MTP for member in members) else None,
        "acceptance": [member.name for member in members if member.accepts],
        "drafters": [
            {"name": member.name, "kind": member.drafter_config.kind, "source": member.source or name_of(member.folder)}
            for member in deployment.drafters
        ],
        "files": digests_beside_checkpoints(folder),
    }
