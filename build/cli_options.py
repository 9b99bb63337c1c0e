"""Options that several commands share, or that come in groups: how large, how drafted, how drawn."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from glmspec.build.configs.target import TARGETS

PLACE = click.Path(exists=True, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
WRITTEN = click.Path(dir_okay=False, path_type=Path)
DTYPES = click.Choice(["float32", "bfloat16"])


def _with(command: Any, options: Sequence[Any]) -> Any:
    """The command with these options, in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def sizes(command: Any) -> Any:
    """The options that say for what, how large and in which form: of `engine` and `validate` alike."""
    made = (
        click.option("--drafter", "drafters", multiple=True, type=PLACE,
                     help="Block drafter; may be given several times."),
        click.option("--target", type=click.Choice(list(TARGETS)), help="Where the engines will run."),
        click.option("--tp", "--tensor-parallel-size", "tp", type=click.IntRange(1),
                     help="GPUs. Default: as converted, else 1."),
        click.option("--ep", type=click.IntRange(1), help="Groups of them with whole experts. Default: as converted."),
        click.option("--quant", type=click.Choice(["auto", "bf16", "fp8", "nvfp4"]), default="auto", show_default=True,
                     help="Recipe for the verifier's matrices; auto keeps what the checkpoint has."),
        click.option("--num-speculative-tokens", type=click.IntRange(1),
                     help="Drafts of a block. Default: what each drafter's checkpoint allows; 3 of the MTP module."),
        click.option("--markov-top-k", type=click.IntRange(1), metavar="K",
                     help="Drafts of a vanilla Markov head are among the K best logits of their row: less to read for "
                          "each, fewer that stand. Default: any token."),
        click.option("--drafter-window", type=click.Choice(["anchored", "relative"]),
                     help="What sliding layers of drafters see: the same for all rows of a block, or relative to each. "
                          "Default: as the checkpoint's format is trained."),
        click.option("--draft-sampling", type=click.Choice(["greedy", "probabilistic"]), default="greedy",
                     show_default=True, help="Drafts are the drafter's best, or drawn at the request's temperature."),
        click.option("--mtp", is_flag=True, help="Also the verifier's multi-token-prediction module, as a drafter."),
        click.option("--plugins", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
                     help="Plugins in place of TensorRT's layers. auto: where the target has them and sizes allow; on: "
                          "refuse otherwise."),
        click.option("--dtype", type=DTYPES, help="Compute dtype. Default: float32 for cpu, bfloat16 for GPUs."),
        click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True,
                     help="auto: the compute dtype, all that TensorRT's cache update takes."),
        click.option("--max-model-len", type=click.IntRange(2),
                     help="Tokens of one sequence, prompt and output together."),
        click.option("--max-num-seqs", type=click.IntRange(1), help="Sequences running at once."),
        click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Rows of one step."),
        click.option("--max-cached-tokens", type=click.IntRange(1),
                     help="Tokens that the caches hold. Default: what the limits can use and the GPU has room for."),
    )  # fmt: skip
    return _with(command, made)


def build_options(values: dict[str, Any]) -> Any:
    """The build options among a command's parameters."""
    from glmspec.build.deployment import Options

    values["compute"] = values.pop("dtype")
    return Options(**values)


def drafting(command: Any) -> Any:
    """The options that say how drafts are made and verified: of `generate` and `repo` alike."""
    made = (
        click.option("--drafter", help="Name of the drafter to use. Default: the first block drafter, else mtp."),
        click.option("--no-speculation", is_flag=True, help="Without a drafter."),
        click.option("--verification", type=click.Choice(["standard", "block"]), default="standard", show_default=True,
                     help="How drafts that were drawn (not the drafter's best) are verified."),
    )  # fmt: skip
    return _with(command, made)


def adaptive(command: Any) -> Any:
    """The options that say how much of each block is verified; the command gets them as one argument, `adaptive`."""

    @functools.wraps(command)
    def with_settings(**values: Any) -> None:
        if values["no_speculation"] and values["drafter"]:
            raise click.UsageError("--no-speculation and --drafter exclude each other")
        mine = {name: values.pop(name) for name in ("adaptive", "threshold", "cost_table", "temperatures")}
        command(**values, adaptive=_adaptive_settings(**mine, no_speculation=values["no_speculation"]))

    made = (
        click.option("--adaptive-verification/--no-adaptive-verification", "--enable-adaptive-verification", "adaptive",
                     default=False, show_default=True,
                     help="Choose every step how many drafts are verified, by their chances and what a step costs."),
        click.option("--adaptive-threshold", "threshold", type=click.FloatRange(0, 1),
                     help="Never verify a draft that stands with a lower chance. Default: 0."),
        click.option("--cost-table", type=WRITTEN,
                     help="JSON file of step times: read if it is there, else measured at start and written. "
                          "Default: measured at start."),
        click.option("--confidence-temperatures", "temperatures", type=FILE,
                     help='JSON file {"temperatures": [one a draft]} that calibrates a drafter\'s confidence.'),
    )  # fmt: skip
    return _with(with_settings, made)


def _adaptive_settings(
    adaptive: bool, threshold: float | None, cost_table: Path | None, temperatures: Path | None, no_speculation: bool
) -> Any:
    """None where all drafts are verified."""
    named = {"--adaptive-threshold": threshold, "--cost-table": cost_table, "--confidence-temperatures": temperatures}
    if not adaptive:
        for option in (name for name, value in named.items() if value is not None):
            raise click.UsageError(f"{option}: of use with --adaptive-verification only")
        return None
    if no_speculation:
        raise click.UsageError("--no-speculation and --adaptive-verification exclude each other")
    from glmspec.runtime.adaptive import Adaptive
    from glmspec.runtime.estimates import read_temperatures

    read = read_temperatures(temperatures) if temperatures else None
    return Adaptive(threshold=threshold or 0.0, costs=cost_table, temperatures=read)


def sampling(command: Any) -> Any:
    """How tokens are drawn, for every prompt that does not say."""
    real, count = click.FLOAT, click.IntRange(0)
    made = (
        click.option("--temperature", type=real, help="0: greedy. Default: 0, or 1 with --top-k, --top-p or --min-p."),
        click.option("--top-k", type=click.INT, help="Draw among so many best tokens."),
        click.option("--top-p", type=real, help="Draw among the best tokens that together have this chance."),
        click.option("--min-p", type=real, help="Draw among tokens with at least this share of the best one's chance."),
        click.option("--seed", type=count, help="The same seed, the same answer."),
        click.option("--repetition-penalty", type=real, help="Above 1: tokens of prompt and answer come less often."),
        click.option("--frequency-penalty", type=real, help="Taken from a token's logit each time the answer has it."),
        click.option("--presence-penalty", type=real, help="Taken once from the logit of each token of the answer."),
        click.option("--min-tokens", type=count, help="No end token before so many tokens."),
        click.option("--logprobs", type=count, help="Log-probabilities of each token and of so many best ones."),
        click.option("--stop", multiple=True, help="Text that ends an answer; may be given several times."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on past end tokens."),
    )  # fmt: skip
    return _with(command, made)
