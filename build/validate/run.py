"""The stages in order, and what `validate` runs of them.

The stages look at the networks that will be compiled, read back as data; steps are packed by the runtime's own code,
and the twin is converted and run by the same code as a real checkpoint. Division among ranks is checked by dataflow at
full size (a value that ranks divide must be summed or gathered before it is used as a whole), and by numbers at a small
one.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from glmspec.build.deployment import Deployment, open_deployment
from glmspec.build.settings import BuildOptions
from glmspec.build.target import Target
from glmspec.build.validate import compile as aot
from glmspec.build.validate import coverage, kernels, layers, products, ranks, tensorrt_limits, twin, weights
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.report import Fault, Outcome, Report, fault_of
from glmspec.core.errors import CheckpointError, GlmspecError, MissingCapability, os_error_text
from glmspec.core.progress import Progress
from glmspec.core.units import size_text
from glmspec.core.versions import versions
from glmspec.network.reader import Graph


@dataclass(frozen=True)
class ValidateOptions:
    """What to run. stages: by name, in order. group_layers: layers of the verifier compiled at a time, None for all.
    cache: folder that remembers what compiled."""

    stages: tuple[str, ...]
    group_layers: int | None = None
    cache: Path | None = None

    @classmethod
    def before_building(cls, *, bundle: bool) -> ValidateOptions:
        """What `engine` checks first: all that is about this checkpoint and these limits, in seconds. A bundle is
        compiled where it costs, so for one everything is checked."""
        if bundle:
            return cls(NAMES, group_layers=8)
        return cls(tuple(stage.name for stage in STAGES if not stage.slow))


@dataclass(frozen=True)
class Stage:
    """needs: stages without which this one cannot run. slow: it compiles or computes, for longer than seconds."""

    name: str
    title: str
    check: Callable[[Case, ValidateOptions], StageResult]
    needs: tuple[str, ...] = ()
    slow: bool = False


def _config(case: Case, _: ValidateOptions) -> StageResult:
    """That the deployment opened says that its configs agree; here is what they add up to."""
    deployment, limits = case.deployment, case.deployment.limits
    config = deployment.verifier.verifier_config
    limits.index_topk(config.index_topk)
    layers, experts = config.num_hidden_layers, config.mlp_layer_types.count("sparse")
    indexers = config.indexer_types.count("full")
    numbers = {
        "layers": layers,
        "layers_of_experts": experts,
        "layers_with_an_indexer": indexers,
        **{key: getattr(limits, key) for key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")},
    }
    kinds = ", ".join(member.name for member in deployment.members if member.num_drafts) or "none"
    return StageResult(
        (
            f"{layers} layers ({experts} of experts, {indexers} with an indexer), drafters: {kinds}",
            f"weights {_kinds(deployment)}, compute {deployment.compute}; sequences of {limits.max_model_len:,} "
            f"tokens, {limits.max_num_seqs} at once, steps of {limits.max_num_batched_tokens:,} rows",
        ),
        numbers=numbers,
    )


def _memory(case: Case, _: ValidateOptions) -> StageResult:
    """The plan, or `ConfigError` with the numbers when not one sequence fits."""
    plan, limits, target = case.memory, case.deployment.limits, case.deployment.target
    if plan.available is None:
        ranks = case.deployment.mapping.tp
        held = f"weights {size_text(plan.weights)} a rank, {ranks} in one process"
        return StageResult(
            (f"{target.name}: {held}; its memory is not checked",), numbers={"weight_bytes": plan.weights}
        )
    return StageResult(
        (
            f"{target.name}, {size_text(plan.available)} usable: weights {size_text(plan.weights)}, a step's tensors "
            f"at most {size_text(plan.step)}, caches {size_text(plan.caches)}",
            f"{plan.tokens:,} cached tokens fit ({plan.per_token:,} bytes each): "
            f"{plan.tokens / limits.max_model_len:.1f} sequences of {limits.max_model_len:,}",
        ),
        numbers={
            "usable_bytes": plan.available,
            "weight_bytes": plan.weights,
            "step_bytes": plan.step,
            "cache_bytes": plan.caches,
            "cached_tokens": plan.tokens,
            "bytes_per_cached_token": plan.per_token,
        },
    )


STAGES = (
    Stage("config", "the configs agree", _config),
    Stage("weights", "the checkpoint is what the networks take", weights.check, ("config",)),
    Stage("layers", "dtypes and shapes of every layer", layers.check, ("config",)),
    Stage("ranks", "what ranks divide is made whole", ranks.check, ("layers",)),
    Stage("profiles", "every legal step fits a profile", coverage.check, ("layers",)),
    Stage("memory", "one GPU holds it", _memory, ("layers",)),
    Stage("limits", "TensorRT's limits", tensorrt_limits.check, ("layers", "memory")),
    Stage("build", "ahead-of-time build", aot.check, ("layers", "memory"), slow=True),
    Stage("products", "quantized weights are multiplied as they are", products.check, ("build",), slow=True),
    Stage("twin", "a scaled-down twin computes what transformers does", twin.check, ("config",), slow=True),
    Stage("kernels", "plugin kernels compile", kernels.check, ("config",), slow=True),
)
NAMES = tuple(stage.name for stage in STAGES)


def validate_source(
    verifier: Path,
    drafters: tuple[Path, ...],
    target: Target,
    options: BuildOptions,
    validate_options: ValidateOptions,
    progress: Progress,
    *,
    config_only: bool,
) -> Report:
    """Open, then validate. A checkpoint that does not open is a fault of the stage "config", or of "weights" when its
    tensors are to blame; later stages are not run then."""
    subject = {"glmspec": version("glmspec"), "source": str(verifier), "target": target.name, "quant": options.quant}
    start = time.perf_counter()
    try:
        deployment = open_deployment(verifier, drafters, target, options, config_only=config_only)
    except GlmspecError as error:
        return _unopened(subject, error, validate_options, time.perf_counter() - start)
    return validate(deployment, validate_options, progress, opened=time.perf_counter() - start)


def validate(
    deployment: Deployment,
    validate_options: ValidateOptions,
    progress: Progress,
    opened: float = 0.0,
    steps: list[Graph] | None = None,
) -> Report:
    """Run the stages on a deployment. opened: seconds that opening it took, counted to the first stage. steps: the
    greatest steps, if they are there (see `Case`)."""
    outcomes: list[Outcome] = []
    stages = [stage for stage in STAGES if stage.name in validate_options.stages]
    with _uncollected(), progress.steps("Validating", len(stages)) as advance:
        case = Case(deployment, progress.doing, steps)
        for stage in stages:
            outcomes.append(_run(stage, case, validate_options, outcomes, opened if stage is stages[0] else 0.0))
            advance(stage.name)
    return Report(_subject(deployment), tuple(outcomes), versions())


def _subject(deployment: Deployment) -> dict[str, Any]:
    """What a report is about, so that two of them can be told apart."""
    mapping, limits = deployment.mapping, deployment.limits
    return {
        "glmspec": version("glmspec"),
        "source": str(deployment.verifier.folder),
        "target": deployment.target.name,
        "tp": mapping.tp,
        "ep": mapping.ep,
        "weights": _kinds(deployment),
        "compute": deployment.compute,
        "models": ", ".join(member.name for member in deployment.members),
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
    }


def _kinds(deployment: Deployment) -> str:
    return ", ".join(deployment.kinds) or "plain"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Networks read back are a million small objects that all stay: looking for garbage among them takes seconds."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def refuse_failures(report: Report) -> None:
    """Raise `GlmspecError` with the first faults of a report that has some."""
    faults = [f"{outcome.stage}: {fault}" for outcome in report.outcomes for fault in outcome.faults]
    if faults:
        more = f"\n(and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise GlmspecError("\n".join(faults[:5]) + more)


def _run(stage: Stage, case: Case, validate_options: ValidateOptions, before: list[Outcome], opened: float) -> Outcome:
    broken = [outcome.stage for outcome in before if outcome.stage in stage.needs and outcome.status != "passed"]
    if broken:
        return Outcome(stage.name, stage.title, why=f"needs {', '.join(broken)}")
    start = time.perf_counter()
    try:
        checked = stage.check(case, validate_options)
    except MissingCapability as error:
        return Outcome(stage.name, stage.title, time.perf_counter() - start, why=str(error), missing=True)
    except GlmspecError as error:
        checked = StageResult(faults=(fault_of(error),))
    except (OSError, SafetensorError) as error:  # of the disk: a twin is written, in the temporary folder
        text = os_error_text(error) if isinstance(error, OSError) else str(error)
        checked = StageResult(faults=(Fault(stage.title, text, ""),))
    except Exception as error:  # ours: the other stages, and the report, are worth having all the same
        text = f"{type(error).__name__}: {error}"
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"glmspec failed in {Path(where.filename).name}:{where.lineno} ({text})."
        checked = StageResult(faults=(Fault(stage.title, why, "This is a fault of glmspec: report it."),))
    seconds = time.perf_counter() - start + opened
    return Outcome(stage.name, stage.title, seconds, checked.facts, checked.faults, dict(checked.numbers))


def _unopened(subject: dict, error: GlmspecError, validate_options: ValidateOptions, seconds: float) -> Report:
    """A report of a checkpoint that could not be opened: a tensor's fault is the stage "weights"'s."""
    blamed = "weights" if isinstance(error, CheckpointError) else "config"
    outcomes = []
    for stage in STAGES:
        if stage.name == blamed:
            outcomes.append(Outcome(stage.name, stage.title, seconds, faults=(fault_of(error),)))
        elif stage.name in validate_options.stages:
            why = "" if stage.name == "config" else f"needs {blamed}"  # configs are read before tensors
            outcomes.append(Outcome(stage.name, stage.title, why=why))
    return Report(subject, tuple(outcomes), versions())
