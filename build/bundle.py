"""A bundle: an engine directory whose plans are missing, ready to be finished where the GPU is.

`prepare` writes one, with kernels compiled for the target's GPU; `finish` compiles its networks with the target's own
TensorRT and writes the engine directory, which refers to the bundle's weights. `engine_writer.py` shows the layout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from glmspec.build.deployment import Deployment
from glmspec.build.engine_writer import REPORT, MemberNetworks, compile_member, write_directory
from glmspec.build.member import Member
from glmspec.build.plugin_variants import graphs_of, variants_of
from glmspec.build.settings import PLUGINS_AUTO, PLUGINS_OFF, PLUGINS_ON
from glmspec.build.target import TARGETS, compiler_for
from glmspec.build.validate.cut import Cut
from glmspec.build.validate.report import Report
from glmspec.convert.tokenizer import check_tokenizer
from glmspec.core.errors import EngineError, MissingCapability
from glmspec.core.fields import Fields
from glmspec.core.files import BUNDLE, ENGINES, write_json
from glmspec.core.folders import new_folder, refuse_to_replace
from glmspec.core.progress import Progress
from glmspec.network.contract import Contract
from glmspec.network.machine import this_machine
from glmspec.network.trt import Backend
from glmspec.runtime.directory import EngineDirectory, each_once

PLUGINS = "plugins"


def prepare(
    deployment: Deployment, report: Report | None, folder: Path, out: Path, proxy: Backend, progress: Progress
) -> None:
    """Fill a bundle that will be at `out`. proxy: the TensorRT that authors the networks here, to know their
    contracts."""
    networks = {}
    for member in deployment.members:
        profile = deployment.profiles(member)[0]
        with progress.stage(f"Authoring the {member.name} network ({profile})"):
            networks[member.name] = MemberNetworks(contract_of(deployment, member, profile, proxy), {})
    if report is not None:
        write_json(folder / REPORT, report.to_json())
    kernels = _write_kernels(folder / PLUGINS, deployment, proxy, progress)
    more = {
        "kernels": PLUGINS if kernels else None,
        "plugins": deployment.plugins,
        "finish": f"glmspec-build engine --from-bundle {out} -o ENGINES",
    }
    write_directory(deployment, networks, folder, out, proxy, progress, more)


def contract_of(deployment: Deployment, member: Member, profile: str, proxy: Backend) -> Contract:
    """What the finished network will have, with the target's plugins, which proxy need not have."""
    net_config = deployment.net_config(member, profile, plugged=True)
    return member.model.author(deployment.limits, net_config, proxy, Cut(net_config.plugins)).contract()


def finish(bundle: Path, out: Path, progress: Progress) -> None:
    """Compile a bundle's networks with the target's TensorRT, on its GPU. Raises before anything is written: for a
    damaged bundle, another GPU, another contract than the one prepared."""
    with progress.stage("Checking the bundle"):
        directory = open_bundle(bundle)
        deployment = _deployment(directory)
        target = deployment.target
        check_tokenizer(deployment.verifier.folder)
    refuse_to_replace(out, ENGINES, [bundle])
    tensorrt = compiler_for(target)
    if tensorrt is None:
        machine = this_machine(str(target.package))
        raise MissingCapability(
            f"{bundle}: finishing it needs {target.package} and a GPU of {target.compute_capability}; this machine has "
            f"{target.package} {machine.version or 'not installed'} and "
            f"{f'a GPU of {machine.compute_capability}' if machine.compute_capability else 'no GPU'}."
        )
    with new_folder(out, ENGINES, [bundle]) as folder:
        for member in deployment.members:
            prepared = Contract.from_json(directory.model(member.name)["contract"])
            for profile in deployment.profiles(member):  # before anything is compiled: minutes of that machine cost
                contract = deployment.author(member, profile, tensorrt, plugged=True).contract()
                _same_contract(bundle, member.name, profile, contract, prepared)
        networks = {
            member.name: compile_member(deployment, member, tensorrt, progress) for member in deployment.members
        }
        if (bundle / REPORT).exists():
            shutil.copyfile(bundle / REPORT, folder / REPORT)
        write_directory(deployment, networks, folder, out, tensorrt, progress)


def finished_name(bundle: Path) -> Path:
    """Where `finish` writes when no output is named."""
    place = bundle.resolve()
    return place.with_name(f"{place.name}-engines")


def open_bundle(bundle: Path) -> EngineDirectory:
    """A bundle, its files compared with their digests. Raises `EngineError` naming what is wrong."""
    directory = EngineDirectory.open(bundle, BUNDLE)
    fields = Fields(directory.record, f"{bundle}/config.json")
    fields.choice("target", tuple(TARGETS))
    fields.choice("compute", ("float32", "bfloat16"))
    fields.choice("plugins", (PLUGINS_AUTO, PLUGINS_ON, PLUGINS_OFF))
    return directory


def _deployment(directory: EngineDirectory) -> Deployment:
    """What a bundle was prepared from, its weights compared with their digests."""
    weights, record = directory.all_weights(), directory.record
    for checkpoint in each_once(weights):
        checkpoint.check_loaded()
    sources = {drafter["name"]: drafter["source"] for drafter in directory.drafters}
    members = tuple(
        Member.chosen(name, weights[name], weights[name].folder, model["build_config"], sources.get(name, ""))
        for name, model in directory.models.items()
    )
    return Deployment(TARGETS[record["target"]], members, directory.limits, record["compute"], record["plugins"])


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
    with progress.stage(f"Compiling kernels for {deployment.target.gpu}"):
        variants = variants_of(deployment, graphs_of(deployment, proxy)).variants
        write_compiled(folder, deployment.target.gpu, compile_all(variants))
    return True


def _same_contract(bundle: Path, name: str, profile: str, authored: Contract, prepared: Contract) -> None:
    for side in ("inputs", "outputs"):
        for here, there in zip(getattr(authored, side), getattr(prepared, side), strict=False):
            if here != there:
                raise EngineError(
                    f"{bundle}: {name} ({profile}): this glmspec authors {here}, the bundle was prepared with {there}. "
                    "Finish it with the version that prepared it."
                )
        if len(getattr(authored, side)) != len(getattr(prepared, side)):
            raise EngineError(
                f"{bundle}: {name} ({profile}): {len(getattr(authored, side))} {side}, the bundle was prepared with "
                f"{len(getattr(prepared, side))}. Finish it with the version that prepared it."
            )
