"""An engine directory: what `glmspec-build engine` writes and everything after it reads.

    ENGINES/config.json                  target, limits, models, end tokens, hashes
    ENGINES/checkpoints/NAME/            converted weights, when the inputs were Hugging Face folders
    ENGINES/verifier/config.json         I/O contract, network hashes, where the weights are
    ENGINES/verifier/PROFILE.engine      a plan a profile, for GPUs; every rank loads the same ones
    ENGINES/verifier/PROFILE.layers.jsonl, build.log, timing.cache
    ENGINES/DRAFTER/...                  the same, one folder a drafter
    ENGINES/tokenizer/                   when the verifier has one
    ENGINES/validation.json              what `validate` found, unless it was skipped

Everything is read and checked, and every network authored and compiled, before the first file is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from glmspec.build.configs.target import PROXY_PACKAGE, Target
from glmspec.build.deployment import MTP, VERIFIER, Deployment, Member, Options, open_deployment
from glmspec.build.errors import MissingCapability
from glmspec.build.layer_list import layer_lines
from glmspec.build.machine import compiler_for
from glmspec.build.memory import greatest_steps, plan_memory, with_pool
from glmspec.build.network.contract import Contract
from glmspec.build.network.reader import read
from glmspec.build.plan import Built, build_plan
from glmspec.build.progress import Progress
from glmspec.build.trt import Backend, backend
from glmspec.build.validate.report import Report
from glmspec.build.validate.run import Wanted, refuse_failures, validate
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.conversion import TOKENIZER_FILES, Conversion
from glmspec.convert.files import (
    BUNDLE,
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

TOKENIZER, REPORT = "tokenizer", "validation.json"
TIMING_CACHE, BUILD_LOG = "timing.cache", "build.log"


@dataclass(frozen=True)
class Compiled:
    """One member's network for one profile. built: None where the executor runs it."""

    sha256: str
    layers: tuple[str, ...]
    contract: Contract
    built: Built | None


def build_engines(
    verifier: Path,
    drafters: Sequence[Path],
    target: Target,
    options: Options,
    out: Path,
    progress: Progress,
    *,
    check: bool = True,
) -> None:
    """Build an engine directory. check: validate first what can be validated without compiling. Raises naming the
    field, tensor or layer at fault, having written nothing. Where the target's TensorRT or GPU is not here, writes a
    bundle and raises `MissingCapability` with the command that finishes it."""
    tensorrt = compiler_for(target)
    author = tensorrt or backend(PROXY_PACKAGE)
    inputs = [verifier, *drafters]
    refuse_to_replace(out, ENGINES if tensorrt else BUNDLE, inputs)
    with progress.stage("Reading and checking checkpoints"):
        deployment = open_deployment(verifier, drafters, target, options)
        check_weights(deployment)
    deployment = planned(deployment, author, progress)
    report = None
    if check:
        report = validate(deployment, Wanted.before_building(bundle=tensorrt is None), progress)
        refuse_failures(report)
    if tensorrt is None:
        _bundled(deployment, report, inputs, out, author, progress)
    compiled = {member.name: compile_member(deployment, member, tensorrt, progress) for member in deployment.members}
    with new_folder(out, ENGINES, inputs) as folder:
        if report is not None:
            write_json(folder / REPORT, report.to_json())
        write_engines(deployment, compiled, folder, out, tensorrt, progress)


def _bundled(
    deployment: Deployment, report: Report | None, inputs: list[Path], out: Path, author: Backend, progress: Progress
) -> NoReturn:
    from glmspec.build.bundle import prepare

    prepare(deployment, report, inputs, out, author, progress)
    target = deployment.target
    raise MissingCapability(
        f"{out}: a bundle with all that needs no GPU. Left to do, on a machine with a {target.name} and "
        f"{target.package}: glmspec-build engine --from-bundle {out} -o ENGINES"
    )


def check_weights(deployment: Deployment) -> None:
    """Compare every converted checkpoint with its digests."""
    for member in deployment.members:
        if isinstance(member.origin, Checkpoint):
            member.origin.check()


def planned(deployment: Deployment, tensorrt: Backend, progress: Progress) -> Deployment:
    """The deployment with a pool of pages that fits its GPU. Says what is legal and surprising."""
    with progress.stage("Planning memory"):
        plan = plan_memory(deployment, greatest_steps(deployment, tensorrt))
    made = with_pool(deployment, plan)
    limits = made.limits
    if made is not deployment:
        progress.note(
            f"caches hold {plan.tokens:,} tokens ({plan.caches / 1e9:.1f} GB), "
            f"which up to {limits.max_num_seqs} sequences share"
        )
    for member in made.drafters:
        reach = member.config.max_position_embeddings
        if reach < limits.max_model_len:
            progress.note(
                f"{member.name} knows {reach} positions and max_model_len is {limits.max_model_len}: "
                "beyond its own it drafts nothing."
            )
    if not made.verifier.end_ids:
        progress.note("the verifier names no end token: answers end at max_tokens only.")
    return made


def compile_member(
    deployment: Deployment, member: Member, tensorrt: Backend, progress: Progress
) -> dict[str, Compiled]:
    """A member's networks by profile, compiled where the target wants plans."""
    made, cache = {}, b""
    ranges = deployment.limits.profiles(member.index_topk(deployment.limits))
    for profile in deployment.profiles():
        with progress.stage(f"Authoring the {member.name} network ({profile})"):
            net = deployment.author(member, profile, tensorrt)
            graph = read(net.definition, net.backend)
        built = None
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
    write_json(folder / "config.json", _directory_record(deployment, folder, tensorrt, tokenizer))


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
    limits, k = deployment.limits, member.index_topk(deployment.limits)
    first = next(iter(compiled.values()))
    write_json(
        home / "config.json",
        {
            "producer": producer(MODEL_ENGINE),
            "pretrained_config": checkpoint.record,
            "build_config": {
                "compute": deployment.compute,
                "taps": list(member.taps),
                "hidden": member.hidden,
                "index_topk": k,
                "limits": asdict(limits),
                "profiles": limits.profiles(k),
            },
            "weights": {"folder": where, "sha256": checkpoint.weights_sha256},
            "networks": {
                profile: {"sha256": one.sha256, "layers": len(one.layers)} for profile, one in compiled.items()
            },
            "plans": {
                profile: {"file": f"{profile}.engine", "sha256": sha256(home / f"{profile}.engine")}
                for profile in plans
            },
            "contract": first.contract.to_json(),
        },
    )


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
                written = origin.write(folder / "checkpoints" / name, Run(advance=advance))
            made[id(origin)] = (written, f"checkpoints/{name}")
        else:
            made[id(origin)] = (origin, None)
    return {member.name: made[id(member.origin)] for member in deployment.members}


def copy_tokenizer(verifier: Member, folder: Path) -> bool:
    """Copy the verifier's tokenizer, if it has one."""
    if not (verifier.folder / "tokenizer.json").exists():
        return False
    (folder / TOKENIZER).mkdir()
    for name in TOKENIZER_FILES:
        if (verifier.folder / name).exists():
            shutil.copyfile(verifier.folder / name, folder / TOKENIZER / name)
    return True


def _directory_record(deployment: Deployment, folder: Path, tensorrt: Backend, tokenizer: bool) -> dict[str, Any]:
    target, members = deployment.target, deployment.members
    listed = [folder / one.name / "config.json" for one in members]
    if tokenizer:
        listed += (folder / TOKENIZER).iterdir()
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
        "tokenizer": TOKENIZER if tokenizer else None,
        "verifier": VERIFIER,
        "mtp": MTP if any(one.name == MTP for one in members) else None,
        "drafters": [
            {"name": one.name, "kind": one.config.kind, "source": one.source or one.folder.resolve().name}
            for one in deployment.drafters
        ],
        "files": {str(path.relative_to(folder)): sha256(path) for path in sorted(listed)},
    }
