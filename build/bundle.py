"""A bundle: everything of an engine directory that needs no GPU, ready to be finished where the GPU is.

    BUNDLE/config.json           target, limits, models by hash, contracts, what is left to do
    BUNDLE/checkpoints/NAME/     converted weights, when the inputs were Hugging Face folders
    BUNDLE/plugins/              kernels compiled for the target's GPU, with a manifest
    BUNDLE/tokenizer/, licenses/, validation.json

`prepare` writes one; `finish` compiles it with the target's own TensorRT and writes the engine directory, which refers
to the bundle's weights.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

from glmspec.build.deployment import PLUGINS_AUTO, PLUGINS_OFF, PLUGINS_ON, Deployment
from glmspec.build.engine_writer import (
    REPORT,
    TOKENIZER,
    compile_member,
    copy_licences,
    copy_tokenizer,
    digests_beside_checkpoints,
    write_engines,
    written_weights,
)
from glmspec.build.kernels import graphs_of, kernels_of
from glmspec.build.member import Member
from glmspec.build.target import TARGETS, Target, compiler_for
from glmspec.build.validate.report import Report
from glmspec.convert.checkpoint import Checkpoint, built_for
from glmspec.convert.origin import name_of
from glmspec.convert.tokenizer import check_tokenizer
from glmspec.core.errors import EngineError, MissingCapability
from glmspec.core.fields import Fields
from glmspec.core.files import BUNDLE, ENGINES, producer, write_json
from glmspec.core.folders import new_folder, refuse_to_replace
from glmspec.core.progress import Progress
from glmspec.core.sealed import check_files, check_shape, kind_of, open_sealed, write_sealed
from glmspec.models.acceptance import DraftProbs
from glmspec.models.configs.illegal import IllegalIds
from glmspec.network.contract import Contract
from glmspec.network.machine import this_machine
from glmspec.network.trt import Backend
from glmspec.runtime.directory import CHOICES, CONTRACT, WEIGHTS, limits_of

PLUGINS = "plugins"
_AGAIN = "Prepare the bundle again."
_SHAPE = {
    "target": str,
    "limits": dict,
    "members": list,
    "tokenizer": (str, NoneType),
    "kernels": (str, NoneType),
    "files": dict,
    "finish": str,
}
_MEMBER = {
    "name": str,
    "source": str,
    "weights": WEIGHTS,
    "contract": CONTRACT,
    **CHOICES,
}


def prepare(
    deployment: Deployment, report: Report | None, folder: Path, out: Path, proxy: Backend, progress: Progress
) -> None:
    """Fill a bundle that will be at `out`. proxy: the TensorRT that authors the networks here, to know their
    contracts."""
    weights = written_weights(deployment, folder, progress)
    members = [
        _prepared(deployment, member, weights[member.name], out, proxy, progress) for member in deployment.members
    ]
    if report is not None:
        write_json(folder / REPORT, report.to_json())
    tokenizer = copy_tokenizer(deployment.verifier, folder)
    licences = copy_licences(weights, folder)
    kernels = _write_kernels(folder / PLUGINS, deployment, proxy, progress)
    write_sealed(
        folder / "config.json",
        {
            "producer": producer(BUNDLE),
            "target": deployment.target.name,
            "compute": deployment.compute,
            "limits": asdict(deployment.limits),
            "members": members,
            "tokenizer": TOKENIZER if tokenizer else None,
            "licenses": licences,
            "plugins": deployment.plugins,
            "kernels": PLUGINS if kernels else None,
            "files": digests_beside_checkpoints(folder),
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
        check_tokenizer(deployment.verifier.folder)
    refuse_to_replace(out, ENGINES, [bundle])
    tensorrt = compiler_for(target)
    if tensorrt is None:
        machine = this_machine(target.package)
        raise MissingCapability(
            f"{bundle}: finishing it needs {target.package} and a GPU of {target.compute_capability}; this machine has "
            f"{target.package} {machine.version or 'not installed'} and "
            f"{f'a GPU of {machine.compute_capability}' if machine.compute_capability else 'no GPU'}."
        )
    with new_folder(out, ENGINES, [bundle]) as folder:
        for member, prepared in zip(deployment.members, record["members"], strict=True):
            for profile in deployment.profiles(member):  # before anything is compiled: minutes of that machine cost
                contract = deployment.author(member, profile, tensorrt, plugged=True).contract()
                _same_contract(bundle, member.name, profile, contract, Contract.from_json(prepared["contract"]))
        compiled = {one.name: compile_member(deployment, one, tensorrt, progress) for one in deployment.members}
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
        "source": name_of(member.folder),
        "weights": {"folder": where, **checkpoint.identity},
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
    if kind_of(bundle) != BUNDLE:
        raise EngineError(f"{bundle}: not a bundle. Make one: glmspec-build engine --verifier DIR --target b200 -o OUT")
    record = open_sealed(bundle / "config.json", _SHAPE, _AGAIN)
    fields = Fields(record, f"{bundle}/config.json")
    fields.choice("target", tuple(TARGETS))
    fields.choice("compute", ("float32", "bfloat16"))
    fields.choice("plugins", (PLUGINS_AUTO, PLUGINS_ON, PLUGINS_OFF))
    limits_of(fields)
    if not record["members"] or not all(isinstance(one, dict) for one in record["members"]):
        fields.fail("members", "objects")
    for one in record["members"]:
        check_shape(Fields(one, f"{fields.source}: members"), _MEMBER)
    check_files(bundle, record["files"], _AGAIN)
    return record


def checkpoints_of(bundle: Path, record: dict[str, Any]) -> dict[Path, Checkpoint]:
    """Every checkpoint that a bundle's members use, once, by its folder. Raises `EngineError` for another one."""
    opened: dict[Path, Checkpoint] = {}  # the verifier and its MTP module share one
    for one in record["members"]:
        home = (bundle / one["weights"]["folder"]).resolve()
        if home not in opened:
            opened[home] = built_for(home, bundle / one["name"], one["weights"], _AGAIN)
    return opened


def _deployment(bundle: Path, record: dict[str, Any], target: Target) -> Deployment:
    opened = checkpoints_of(bundle, record)
    for checkpoint in opened.values():
        checkpoint.check_loaded()
    homes = [(bundle / one["weights"]["folder"]).resolve() for one in record["members"]]
    members = [_member(one, home, opened[home]) for one, home in zip(record["members"], homes, strict=True)]
    limits = limits_of(Fields(record, f"{bundle}/config.json"))
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
        q=DraftProbs(**record["q"]) if record["q"] else None,
        markov_top_k=record["markov_top_k"],
        illegal=IllegalIds.from_json(record["illegal_ids"]),
    )


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
