"""`glmspec-build engine`: from checkpoints to an engine directory, or to a bundle where its GPU is not here.

Everything is read and checked, and every network authored and compiled, before the first file is written
(`engine_writer.py` shows the layout).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glmspec.build.bundle import prepare
from glmspec.build.deployment import Deployment, open_deployment
from glmspec.build.engine_writer import REPORT, compile_member, keep_conversions, weights_size, write_directory
from glmspec.build.member import MTP
from glmspec.build.memory import MemoryPlan, greatest_steps, plan_memory, with_pool
from glmspec.build.plugin_variants import check_plugins
from glmspec.build.settings import BuildOptions
from glmspec.build.target import PROXY_PACKAGE, Target, compiler_for
from glmspec.build.validate.run import ValidateOptions, refuse_failures, validate
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.conversion import Conversion
from glmspec.convert.terms import Terms
from glmspec.core.files import BUNDLE, ENGINES, write_json
from glmspec.core.folders import refuse_to_replace, resumable_folder
from glmspec.core.progress import Progress
from glmspec.core.units import size_text
from glmspec.network.trt import backend


def build_engines(
    verifier: Path,
    drafters: Sequence[Path],
    target: Target,
    options: BuildOptions,
    out: Path,
    progress: Progress,
    *,
    check: bool = True,
    resume: bool = False,
) -> str | None:
    """Build an engine directory. check: validate first what can be validated without compiling. resume: go on with the
    conversions of an interrupted run. Raises naming the field, tensor or layer at fault, having written nothing. Where
    the target's TensorRT or GPU is not here, writes a bundle, and returns what is left to do and by which command."""
    tensorrt = compiler_for(target)
    author = tensorrt or backend(PROXY_PACKAGE)
    inputs, kind = [verifier, *drafters], ENGINES if tensorrt else BUNDLE
    refuse_to_replace(out, kind, inputs)
    with progress.stage("Reading checkpoints"):
        deployment = open_deployment(verifier, drafters, target, options)
    for note in beside_notes(deployment):
        progress.note(note)
    with resumable_folder(out, kind, inputs, resume, weights_size(deployment)) as folder:
        keep_conversions(deployment, folder)
        check_weights(deployment, progress)
        with progress.stage("Planning memory"):
            steps = greatest_steps(deployment, author)
            plan = plan_memory(deployment, steps)
        deployment = planned(deployment, plan, progress)
        check_plugins(deployment, steps)
        report = None
        if check:
            stages = ValidateOptions.before_building(bundle=tensorrt is None)
            report = validate(deployment, stages, progress, steps=steps)
            refuse_failures(report)
        if tensorrt is None:
            prepare(deployment, report, folder, out, author, progress)
        else:
            networks = {
                member.name: compile_member(deployment, member, tensorrt, progress) for member in deployment.members
            }
            if report is not None:
                write_json(folder / REPORT, report.to_json())
            write_directory(deployment, networks, folder, out, tensorrt, progress)
    if tensorrt is None:
        return (
            f"{out}: a bundle with all that needs no GPU. Left to do, on a machine with a {target.name} and "
            f"{target.package}: glmspec-build engine --from-bundle {out} -o ENGINES"
        )
    return None


def check_weights(deployment: Deployment, progress: Progress) -> None:
    """Compare every converted checkpoint with its digests, once."""
    converted = [weights for weights in deployment.weights if isinstance(weights, Checkpoint)]
    with progress.bytes("Checking checkpoints", sum(checkpoint.size for checkpoint in converted)) as advance:
        for checkpoint in converted:
            checkpoint.check(advance)


def beside_notes(deployment: Deployment) -> list[str]:
    """What a user should know of files beside the weights, licences among them."""
    notes: list[str] = []
    for weights in deployment.weights:
        if isinstance(weights, Checkpoint):
            warning = Terms.from_json(weights.record.get("license")).warning
            notes += [f"{weights.folder}: {warning}"] if warning else []
        elif isinstance(weights, Conversion):
            notes += [f"{weights.source.folder}: {note}" for note in weights.source.notes]
    return notes


def planned(deployment: Deployment, plan: MemoryPlan, progress: Progress) -> Deployment:
    """The deployment with a pool of pages that fits its GPU. Says what is legal and surprising."""
    sized = with_pool(deployment, plan)
    limits = sized.limits
    if sized is not deployment:
        progress.note(
            f"caches hold {plan.tokens:,} tokens ({size_text(plan.caches)}), "
            f"which up to {limits.max_num_seqs} sequences share"
        )
    for member in sized.drafters:
        reach = member.config.max_position_embeddings
        if reach < limits.max_model_len:
            progress.note(
                f"{member.name} knows {reach} positions and max_model_len is {limits.max_model_len}: "
                "beyond its own it drafts nothing."
            )
    shares = sized.verifier.verifier_config.index_share_for_mtp_iteration
    if shares and any(member.name == MTP for member in sized.members):
        progress.note(
            "index_share_for_mtp_iteration: the MTP module may reuse its first run's top-k in a chain's later runs; "
            "here every run makes its own: more work a draft, and the same answers."
        )
    if count := len(sized.verifier.illegal):
        progress.note(
            f"{count:,} of the head's {sized.verifier.config.vocab_size:,} rows are no token of the tokenizer: "
            "they are never chosen."
        )
    if not sized.verifier.end_ids:
        progress.note("the verifier names no end token: answers end at max_tokens only.")
    return sized
