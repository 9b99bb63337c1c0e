"""A bundle: everything of an engine directory that needs no GPU, ready to be finished where the GPU is.

    BUNDLE/config.json           target, limits, models by hash, contracts, what is left to do
    BUNDLE/checkpoints/NAME/     converted weights, when the inputs were Hugging Face folders
    BUNDLE/plugins/              kernels compiled for the target's GPU, with a manifest
    BUNDLE/tokenizer/, validation.json

`prepare` writes one; `finish` compiles it with the target's own TensorRT and writes the engine directory, which refers
to the bundle's weights.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glmspec.build.configs.fields import Fields, read_json
from glmspec.build.configs.illegal import IllegalIds
from glmspec.build.configs.limits import EngineLimits
from glmspec.build.configs.target import TARGETS, Target
from glmspec.build.deployment import PLUGINS_AUTO, PLUGINS_OFF, PLUGINS_ON, Deployment
from glmspec.build.engine_writer import (
    REPORT,
    TOKENIZER,
    compile_member,
    copy_tokenizer,
    write_engines,
    written_weights,
)
from glmspec.build.errors import EngineError, MissingCapability
from glmspec.build.kernels import graphs_of, kernels_of
from glmspec.build.machine import compiler_for, this_machine
from glmspec.build.member import Member
from glmspec.build.models.acceptance import DraftLaw
from glmspec.build.network.contract import Contract
from glmspec.build.progress import Progress
from glmspec.build.trt import Backend
from glmspec.build.validate.report import Report
from glmspec.convert.checkpoint import Checkpoint, read_checkpoint
from glmspec.convert.files import BUNDLE, ENGINES, new_folder, producer, refuse_to_replace, sha256, write_json

PLUGINS = "plugins"
_CHOICES = {"taps", "hidden", "drafter_window", "num_speculative_tokens", "markov_top_k", "sampled", "q", "illegal_ids"}
_MEMBER = {"name", "source", "weights", "contract"} | _CHOICES


def prepare(
    deployment: Deployment, report: Report | None, inputs: list[Path], out: Path, proxy: Backend, progress: Progress
) -> None:
    """Write a bundle. proxy: the TensorRT that authors the networks here, to know their contracts."""
    with new_folder(out, BUNDLE, inputs) as folder:
        weights = written_weights(deployment, folder, progress)
        members = [
            _prepared(deployment, member, weights[member.name], out, proxy, progress) for member in deployment.members
        ]
        if report is not None:
            write_json(folder / REPORT, report.to_json())
        tokenizer = copy_tokenizer(deployment.verifier, folder)
        kernels = _write_kernels(folder / PLUGINS, deployment, proxy, progress)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "checkpoints" not in path.parts]
        write_json(
            folder / "config.json",
            {
                "producer": producer(BUNDLE),
                "target": deployment.target.name,
                "compute": deployment.compute,
                "limits": asdict(deployment.limits),
                "members": members,
                "tokenizer": TOKENIZER if tokenizer else None,
                "plugins": deployment.plugins,
                "kernels": PLUGINS if kernels else None,
                "files": {str(path.relative_to(folder)): sha256(path) for path in files},
                "finish": f"glmspec-build engine --from-bundle {out} -o ENGINES",
            },
        )


def finish(bundle: Path, out: Path, progress: Progress) -> None:
    """Compile a bundle's networks with the target's TensorRT, on its GPU. Raises before anything is written: for a
    damaged bundle, another GPU, another contract than the one prepared."""
    with progress.stage("Checking the bundle"):
        record = open_bundle(bundle)
        target = TARGETS[record["target"]]
        deployment = _deployment(bundle, record, target)
    refuse_to_replace(out, ENGINES, [bundle])
    tensorrt = compiler_for(target)
    if tensorrt is None:
        machine = this_machine(target.package)
        raise MissingCapability(
            f"{bundle}: finishing it needs {target.package} and a GPU of {target.compute_capability}; this machine has "
            f"{target.package} {machine.version or 'not installed'} and "
            f"{f'a GPU of {machine.compute_capability}' if machine.compute_capability else 'no GPU'}."
        )
    for member, prepared in zip(deployment.members, record["members"], strict=True):
        for profile in deployment.profiles(member):  # before anything is compiled: minutes of that machine cost
            contract = deployment.author(member, profile, tensorrt, plugged=True).contract()
            _same_contract(bundle, member.name, profile, contract, Contract.from_json(prepared["contract"]))
    compiled = {member.name: compile_member(deployment, member, tensorrt, progress) for member in deployment.members}
    with new_folder(out, ENGINES, [bundle]) as folder:
        if (bundle / REPORT).exists():
            shutil.copyfile(bundle / REPORT, folder / REPORT)
        write_engines(deployment, compiled, folder, out, tensorrt, progress)


def finished_name(bundle: Path) -> Path:
    """Where `finish` writes when no output is named."""
    place = bundle.resolve()
    return place.with_name(f"{place.name}-engines")


def _prepared(
    deployment: Deployment,
    member: Member,
    weights: tuple[Checkpoint, str | None],
    out: Path,
    proxy: Backend,
    progress: Progress,
) -> dict[str, Any]:
    """A member as the record keeps it."""
    checkpoint, inside = weights
    where = inside or os.path.relpath(checkpoint.folder.resolve(), out.resolve())
    profile = deployment.profiles(member)[0]
    with progress.stage(f"Authoring the {member.name} network ({profile})"):
        contract = deployment.author(member, profile, proxy).contract()
    return {
        "name": member.name,
        "source": member.folder.resolve().name,
        "weights": {"folder": where, "sha256": checkpoint.weights_sha256},
        **member.choices,
        "contract": contract.to_json(),
    }


def _write_kernels(folder: Path, deployment: Deployment, proxy: Backend, progress: Progress) -> bool:
    """The kernels of the plugins that the networks use, where the kernel compiler is installed."""
    from glmspec.plugins.compiler import compile_all, triton, write_compiled

    if deployment.plugins == PLUGINS_OFF:
        return False
    try:
        triton()
    except MissingCapability as error:
        progress.note(f"no kernels in the bundle: {error}")
        return False
    with progress.stage(f"Compiling kernels for {deployment.target.compute_capability}"):
        kernels = kernels_of(deployment, graphs_of(deployment, proxy))
        write_compiled(folder, deployment.target.compute_capability, compile_all(kernels.variants))
    return True


def open_bundle(bundle: Path) -> dict[str, Any]:
    """The record of a bundle, its files compared with their digests. Raises `EngineError` naming what is wrong."""
    record = read_json(bundle / "config.json")
    made = record.get("producer")
    if not isinstance(made, dict) or made.get("kind") != BUNDLE:
        raise EngineError(f"{bundle}: not a bundle. Make one: glmspec-build engine --verifier DIR --target b200 -o OUT")
    fields = Fields(record, f"{bundle}/config.json")
    fields.choice("target", tuple(TARGETS))
    fields.choice("compute", ("float32", "bfloat16"))
    fields.choice("plugins", (PLUGINS_AUTO, PLUGINS_ON, PLUGINS_OFF))
    fields.section("limits")
    members = record.get("members")
    if not isinstance(members, list) or not members or not all(one.keys() >= _MEMBER for one in members):
        fields.fail("members", f"a list of objects with {', '.join(sorted(_MEMBER))}")
    for name, digest in fields.section("files").values.items():
        path = bundle / name
        if not path.exists() or sha256(path) != digest:
            what = "changed" if path.exists() else "missing"
            raise EngineError(f"{path}: {what} since the bundle was made. Prepare it again.")
    return record


def _deployment(bundle: Path, record: dict[str, Any], target: Target) -> Deployment:
    opened: dict[Path, Checkpoint] = {}  # the verifier and its MTP module share one
    members = []
    for one in record["members"]:
        home = (bundle / one["weights"]["folder"]).resolve()
        if not (home / "config.json").exists():
            raise EngineError(f"{bundle}: the weights of {one['name']} are expected in {home}, and are not there.")
        if home not in opened:
            opened[home] = _unchanged(read_checkpoint(home))
        checkpoint = opened[home]
        found, expected = checkpoint.weights_sha256, one["weights"]["sha256"]
        if found != expected:
            raise EngineError(
                f"{home}: not the weights the bundle was made for (found {found[:12]}, expected {expected[:12]})."
            )
        members.append(_member(one, home, checkpoint))
    limits = EngineLimits(**record["limits"])
    return Deployment(target, tuple(members), limits, record["compute"], record["plugins"])


def _member(record: dict[str, Any], home: Path, checkpoint: Checkpoint) -> Member:
    """A member as the record keeps it, with its weights."""
    return Member(
        record["name"],
        home,
        checkpoint,
        tuple(record["taps"]),
        record["hidden"],
        record["drafter_window"],
        record["num_speculative_tokens"],
        record["sampled"],
        source=record["source"],
        q=DraftLaw(**record["q"]) if record["q"] else None,
        markov_top_k=record["markov_top_k"],
        illegal=IllegalIds.from_json(record["illegal_ids"]),
    )


def _unchanged(checkpoint: Checkpoint) -> Checkpoint:
    for path, why in checkpoint.changed():
        raise EngineError(f"{path}: {why}. Convert again.")
    return checkpoint


def _same_contract(bundle: Path, name: str, profile: str, found: Contract, prepared: Contract) -> None:
    for side in ("inputs", "outputs"):
        for one, other in zip(getattr(found, side), getattr(prepared, side), strict=False):
            if one != other:
                raise EngineError(
                    f"{bundle}: {name} ({profile}): this glmspec authors {one}, the bundle was prepared with {other}. "
                    "Finish it with the version that prepared it."
                )
        if len(getattr(found, side)) != len(getattr(prepared, side)):
            raise EngineError(
                f"{bundle}: {name} ({profile}): {len(getattr(found, side))} {side}, the bundle was prepared with "
                f"{len(getattr(prepared, side))}. Finish it with the version that prepared it."
            )
