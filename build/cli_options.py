"""Options that several commands share, or that come in groups: how large, how drafted, how drawn."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import click

from glmspec.build.cli_base import FILE, PLACE, WRITTEN, Count, Value, section
from glmspec.build.settings import BuildOptions, DraftingSettings
from glmspec.build.target import TARGETS
from glmspec.runtime.request_table import BOOL, COUNT, NUMBER, SETTINGS, TEXTS, Setting

DTYPES = click.Choice(["float32", "bfloat16"])
RECIPES = click.Choice(["auto", "bf16", "fp8", "nvfp4"])
MODEL, TARGET, SIZES, DRAFTING, SAMPLING, OUTPUT = "Model", "Target", "Sizes", "Drafting", "Sampling", "Output"


def ranks(default: str) -> tuple[Any, Any]:
    """The options that divide a verifier. default: what leaving them out means."""
    return (
        click.option("--tp", "--tensor-parallel-size", "tp", type=click.IntRange(1),
                     help=f"GPUs to divide the verifier among. Default: {default}."),
        click.option("--ep", "--expert-parallel-size", "ep", type=click.IntRange(1),
                     help=f"Groups of them with whole experts. Default: {default}."),
    )  # fmt: skip


def _taken(kind: Callable[..., Value], values: dict[str, Any]) -> Value:
    """A dataclass of those of a command's values that are called as its fields are, which are taken out of `values`."""
    return kind(**{name: values.pop(name) for name in inspect.signature(kind).parameters})


def sizes(command: Any) -> Any:
    """The options that say for what, how large and in which form: of `engine`, `validate` and `plugins` alike. Those
    that are build options reach the command as one argument, `options`."""

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        options = _taken(BuildOptions, values)
        command(**values, options=options)

    model = section(
        MODEL,
        click.option("--drafter", "drafters", multiple=True, type=PLACE,
                     help="Block drafter; may be given several times."),
        click.option("--mtp", is_flag=True, help="Also the verifier's multi-token-prediction module, as a drafter."),
        click.option("--quant", type=RECIPES, default="auto",
                     help="Recipe for the verifier's matrices; auto keeps what the checkpoint has."),
    )  # fmt: skip
    target = section(
        TARGET,
        click.option("--target", type=click.Choice(list(TARGETS)), help="Where the engines will run."),
        *ranks("as converted, else 1"),
        click.option("--dtype", "compute", type=DTYPES,
                     help="Compute dtype. Default: float32 for cpu, bfloat16 for GPUs."),
        click.option("--kv-cache-dtype", type=click.Choice(["auto"]), default="auto", hidden=True,
                     help="auto: the compute dtype, all that TensorRT's cache update takes."),
        click.option("--plugins", type=click.Choice(["auto", "on", "off"]), default="auto",
                     help="Plugins in place of TensorRT's layers. auto: where the target has them and sizes allow; on: "
                          "refuse otherwise."),
    )  # fmt: skip
    limits = section(
        SIZES,
        click.option("--max-model-len", type=Count(2),
                     help="Tokens of one sequence, prompt and output together: 131072, 128K (the same) or 128k "
                          "(128,000). Default: what the model allows, up to 4,096 on cpu and 131,072 on GPUs."),
        click.option("--max-num-seqs", type=Count(), help="Sequences running at once. Default: 8 on cpu, 16 on GPUs."),
        click.option("--max-num-batched-tokens", type=Count(),
                     help="Rows of one step. Default: 512, or what the blocks of all sequences need."),
        click.option("--max-cached-tokens", type=Count(),
                     help="Tokens that the caches hold. Default: what the limits can use and the GPU has room for."),
    )  # fmt: skip
    drafts = section(
        DRAFTING,
        click.option("--num-speculative-tokens", type=click.IntRange(1),
                     help="Drafts of a block. Default: what each drafter's checkpoint allows; 3 of the MTP module."),
        click.option("--markov-top-k", type=click.IntRange(1), metavar="K",
                     help="Drafts of a vanilla Markov head are among the K best logits of their row: less to read for "
                          "each, fewer that stand. Default: any token."),
        click.option("--drafter-window", type=click.Choice(["anchored", "relative"]),
                     help="What sliding layers of drafters see: the same for all rows of a block, or relative to each. "
                          "Default: as the checkpoint's format is trained."),
        click.option("--draft-sampling", type=click.Choice(["greedy", "probabilistic"]), default="greedy",
                     help="Drafts are the drafter's best, or drawn at the request's temperature."),
    )  # fmt: skip
    return model(target(limits(drafts(with_options))))


def drafting(command: Any) -> Any:
    """The options that say how drafts are made, and how many are verified: of `generate` and `repo` alike. The command
    gets them as one argument, `drafting`."""

    @functools.wraps(command)
    def with_drafting(**values: Any) -> None:
        settings = _taken(DraftingSettings, values)
        _check_drafting(settings)
        command(**values, drafting=settings)

    return section(
        DRAFTING,
        click.option("--drafter", help="Name of the drafter to use. Default: the first block drafter, else mtp."),
        click.option("--no-speculation", is_flag=True, help="Without a drafter."),
        click.option("--verification", type=click.Choice(["standard", "block"]), default="standard",
                     help="How drafts that were drawn (not the drafter's best) are verified."),
        click.option("--adaptive-verification/--no-adaptive-verification", "--enable-adaptive-verification", "adaptive",
                     default=False,
                     help="Choose every step how many drafts are verified, by their chances and what a step costs."),
        click.option("--adaptive-threshold", type=click.FloatRange(0, 1),
                     help="Never verify a draft that stands with a lower chance. Default: 0."),
        click.option("--cost-table", type=WRITTEN,
                     help="JSON file of step times: read if it is there, else measured at start and written. "
                          "Default: measured at start."),
        click.option("--confidence-temperatures", type=FILE,
                     help='JSON file {"temperatures": [one a draft]} that calibrates a drafter\'s confidence. '
                          "Default: 1 each."),
    )(with_drafting)  # fmt: skip


def _check_drafting(settings: DraftingSettings) -> None:
    """Raise `UsageError` for options that contradict each other."""
    if settings.no_speculation and settings.drafter:
        raise click.UsageError("--no-speculation and --drafter exclude each other")
    for name in ("adaptive_threshold", "cost_table", "confidence_temperatures"):
        if not settings.adaptive and getattr(settings, name) is not None:
            raise click.UsageError(f"--{name.replace('_', '-')}: of use with --adaptive-verification only")
    if settings.no_speculation and settings.adaptive:
        raise click.UsageError("--no-speculation and --adaptive-verification exclude each other")


def sampling(command: Any) -> Any:
    """How tokens are drawn, for every prompt that does not say: every setting whose meaning is told. The command gets
    them, and others of a request that it has itself, as one argument, `settings`."""

    @functools.wraps(command)
    def with_settings(**values: Any) -> None:
        settings = {name: values.pop(name) for name in SETTINGS if name in values}
        command(**values, settings=settings)

    options = (_setting(name, setting) for name, setting in SETTINGS.items() if setting.meaning)
    return section(SAMPLING, *options)(with_settings)


def _setting(name: str, setting: Setting) -> Any:
    if setting.kind is BOOL:
        more: dict[str, Any] = {"is_flag": True, "default": None}
    elif setting.kind is TEXTS:
        more = {"multiple": True}
    elif setting.kind is NUMBER:
        more = {"type": click.FLOAT}
    elif setting.kind is COUNT:
        more = {"type": Count(int(setting.least))}
    else:
        more = {"type": click.IntRange(0) if setting.least == 0 else click.INT}
    return click.option(f"--{name.replace('_', '-')}", help=setting.meaning, **more)
