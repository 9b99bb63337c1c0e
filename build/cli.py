"""`glmspec-build`: one command for the whole way from a checkpoint to served tokens.

Nothing heavy is imported before a command runs, so `--help` is instant. Exit codes: 0 done, 1 the input
is at fault (one message, no traceback), 2 wrong usage, 3 this machine lacks something (a GPU, TensorRT).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import click

from glmspec.build.configs.target import TARGETS
from glmspec.build.errors import GlmspecError

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_PLACE = click.Path(exists=True, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(file_okay=False, path_type=Path)
_DTYPES = click.Choice(["float32", "bfloat16"])


class _Commands(click.Group):
    """Turns our own exceptions into a message and an exit code; keeps the commands in the order of the work."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GlmspecError as error:
            click.echo(f"glmspec-build: {error}", err=True)
            sys.exit(error.exit_code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands)
@click.version_option(package_name="glmspec")
def main() -> None:
    """GLM-5.3 with block speculative decoding: convert, build engines, generate, serve."""


@main.command()
@click.argument("source", type=_PLACE)
@click.option("-o", "--output", type=_OUT, help="Folder to write the converted checkpoint to.")
@click.option("--quant", type=click.Choice(["auto", "bf16", "fp8", "nvfp4"]), default="auto", show_default=True,
              help="Recipe for a verifier's matrices; auto keeps what the checkpoint has.")  # fmt: skip
@click.option("--recipe", type=_FILE, help="JSON or YAML list of rules {modules: pattern, format: name} for others.")
@click.option("--calibration", type=_FILE, help="Largest activation by module, as `calibrate` writes it.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks to divide a verifier among.")
@click.option("--ep", type=click.IntRange(1), default=1, show_default=True, help="Groups of them with whole experts.")
@click.option("--format", "layout", type=click.Choice(["trtllm", "hf"]), default="trtllm", show_default=True,
              help="hf: a Hugging Face checkpoint with ModelOpt's names.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), help="Threads. Default: the cores there are.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Where NVFP4 is computed.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on from an interrupted run.")
@click.option("--expect-sha256", metavar="HEX", help="Refuse SOURCE unless its model.safetensors has this digest.")
@click.option("--dry-run", is_flag=True,
              help="List what would be written. SOURCE may be a config.json without weights.")  # fmt: skip
def convert(
    source: Path,
    output: Path | None,
    quant: str,
    recipe: Path | None,
    calibration: Path | None,
    tp: int,
    ep: int,
    layout: str,
    workers: int | None,
    device: str,
    resume: bool,
    expect_sha256: str | None,
    dry_run: bool,
) -> None:
    """Convert the Hugging Face checkpoint SOURCE (a verifier or a drafter) to glmspec's layout."""
    if recipe and quant != "auto":
        raise click.UsageError("--quant and --recipe exclude each other")
    if dry_run and (resume or expect_sha256):
        raise click.UsageError("--dry-run reads no weights: leave --resume and --expect-sha256 out")
    if source.is_file() and not dry_run:
        raise click.UsageError(f"{source}: a file is enough for --dry-run only; give a checkpoint's folder")
    if (output is None) != dry_run:
        raise click.UsageError("give --output, or --dry-run and no output")
    from glmspec.build.progress import RichProgress
    from glmspec.convert.command import Wanted, convert_folder, options_of
    from glmspec.convert.dry_run import dry_run as list_outputs

    options = options_of(quant, recipe, calibration, tp, ep)
    if dry_run:
        list_outputs(source, options, layout == "hf")
        return
    wanted = Wanted(hf=layout == "hf", device=device, workers=workers, resume=resume, sha256=expect_sha256)
    for line in convert_folder(source, output, options, wanted, RichProgress()):
        click.echo(line, err=True)
    click.echo(str(output))


@main.command()
@click.argument("source", type=_FOLDER)
@click.option("--input", "prompts", required=True, type=_FILE, help="JSON lines with prompt or prompt_token_ids.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path),
              help="JSON file to write: {module: largest input}.")  # fmt: skip
def calibrate(source: Path, prompts: Path, output: Path) -> None:
    """Measure the activations of the verifier SOURCE on prompts, for `convert --calibration`. Needs ModelOpt."""
    from glmspec.build.progress import RichProgress
    from glmspec.convert.calibrate import calibrate as measure

    count = measure(source, prompts, output, RichProgress())
    click.echo(f"{output}: {count} modules")


@main.command()
@click.argument("directory", type=_FOLDER)
def verify(directory: Path) -> None:
    """Check a converted checkpoint, a Hugging Face one of ours, or an engine directory again: every file's digest."""
    from glmspec.build.progress import RichProgress
    from glmspec.build.verify import verify_folder

    click.echo(verify_folder(directory, RichProgress()))


def _sizes(command: Any) -> Any:
    """The options that say for what, how large and in which form: of `engine` and `validate` alike."""
    options = (
        click.option("--drafter", "drafters", multiple=True, type=_PLACE,
                     help="Block drafter; may be given several times."),
        click.option("--target", type=click.Choice(list(TARGETS)), help="Where the engines will run."),
        click.option("--tp", "--tensor-parallel-size", "tp", type=click.IntRange(1),
                     help="GPUs. Default: as converted, else 1."),
        click.option("--ep", type=click.IntRange(1), help="Groups of them with whole experts. Default: as converted."),
        click.option("--quant", type=click.Choice(["auto", "bf16", "fp8", "nvfp4"]), default="auto", show_default=True,
                     help="Recipe for the verifier's matrices; auto keeps what the checkpoint has."),
        click.option("--num-speculative-tokens", type=click.IntRange(1),
                     help="Drafts of a block. Default: what each drafter's checkpoint allows; 3 of the MTP module."),
        click.option("--drafter-window", type=click.Choice(["anchored", "relative"]),
                     help="What sliding layers of drafters see: the same for all rows of a block, or relative to each. "
                          "Default: as the checkpoint's format is trained."),
        click.option("--draft-sampling", type=click.Choice(["greedy", "probabilistic"]), default="greedy",
                     show_default=True, help="Drafts are the drafter's best, or drawn at the request's temperature."),
        click.option("--mtp", is_flag=True, help="Also the verifier's multi-token-prediction module, as a drafter."),
        click.option("--dtype", type=_DTYPES, help="Compute dtype. Default: float32 for cpu, bfloat16 for GPUs."),
        click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True,
                     help="auto: the compute dtype, all that TensorRT's cache update takes."),
        click.option("--max-model-len", type=click.IntRange(2),
                     help="Tokens of one sequence, prompt and output together."),
        click.option("--max-num-seqs", type=click.IntRange(1), help="Sequences running at once."),
        click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Rows of one step."),
        click.option("--max-cached-tokens", type=click.IntRange(1),
                     help="Tokens that the caches hold. Default: what the limits can use and the GPU has room for."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _options(values: dict[str, Any]) -> Any:
    """The build options among a command's parameters."""
    from glmspec.build.deployment import Options

    values["compute"] = values.pop("dtype")
    return Options(**values)


@main.command()
@click.option("--verifier", type=_FOLDER, help="Verifier: Hugging Face or converted checkpoint.")
@_sizes
@click.option("-o", "--output", type=_OUT, help="Engine directory (or bundle) to write.")
@click.option("--no-validate", is_flag=True, help="Skip the checks that `validate` makes.")
@click.option("--from-bundle", "bundle", type=_FOLDER, help="Finish a bundle, on a machine with its GPU and TensorRT.")
def engine(
    verifier: Path | None,
    drafters: tuple[Path, ...],
    target: str | None,
    output: Path | None,
    no_validate: bool,
    bundle: Path | None,
    **sizes: Any,
) -> None:
    """Build an engine directory from a verifier and its drafters.

    Where the target's TensorRT is not installed, what needs no GPU is done and written as a bundle (exit code 3)."""
    from glmspec.build.progress import RichProgress

    if bundle:
        from glmspec.build.bundle import finish, finished_name

        given = (verifier, drafters, target, *sizes.values())
        if any(value not in (None, (), False, "auto", "greedy") for value in given):
            raise click.UsageError("--from-bundle knows its models, target and sizes: leave them out")
        output = output or finished_name(bundle)
        finish(bundle, output, RichProgress())
    else:
        from glmspec.build.engine import build_engines

        for name, value in (("--verifier", verifier), ("--target", target), ("--output", output)):
            if value is None:
                raise click.UsageError(f"Missing option {name!r}.")
        options = _options(sizes)
        build_engines(verifier, drafters, TARGETS[target], options, output, RichProgress(), check=not no_validate)
    click.echo(str(output))


@main.command()
@click.argument("source", type=_PLACE)
@_sizes
@click.option("--config-only", is_flag=True, help="SOURCE and the drafters are config.json files, or folders with one.")
@click.option("--group-layers", type=click.IntRange(0), default=8, show_default=True,
              help="Compile so many layers at a time; 0: all in one network, which takes longer.")  # fmt: skip
@click.option("--cache", type=_OUT, help="Folder that remembers which networks compile.")
@click.option("--stage", "stages", multiple=True, metavar="NAME",
              help="Run this stage only (see docs/validate.md); may be given several times.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as JSON.")
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as JUnit XML.")
def validate(
    source: Path,
    drafters: tuple[Path, ...],
    target: str,
    config_only: bool,
    group_layers: int,
    cache: Path | None,
    stages: tuple[str, ...],
    json_file: Path | None,
    junit: Path | None,
    **sizes: Any,
) -> None:
    """Check, without a GPU, that the verifier SOURCE builds for a target and computes what it should.

    Exit code 1 when a check fails, 3 when one could not run for lack of a package."""
    from glmspec.build.validate.command import Outputs, validate_command, wanted_of

    if target is None:
        raise click.UsageError("Missing option '--target'.")
    wanted, outputs = wanted_of(stages, group_layers, cache), Outputs(json_file, junit)
    options = _options(sizes)
    code = validate_command(source, drafters, TARGETS[target], options, wanted, outputs, config_only=config_only)
    sys.exit(code)


def _drafting(command: Any) -> Any:
    """The options that say how drafts are made and verified: of `generate` and `repo` alike."""
    options = (
        click.option("--drafter", help="Name of the drafter to use. Default: the first block drafter, else mtp."),
        click.option("--no-speculation", is_flag=True, help="Without a drafter."),
        click.option("--verification", type=click.Choice(["standard", "block"]), default="standard", show_default=True,
                     help="How drafts that were drawn (not the drafter's best) are verified."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _adaptive(command: Any) -> Any:
    """The options that say how much of each block is verified; the command gets them as one argument, `adaptive`."""

    @functools.wraps(command)
    def with_settings(**values: Any) -> None:
        if values["no_speculation"] and values["drafter"]:
            raise click.UsageError("--no-speculation and --drafter exclude each other")
        mine = {name: values.pop(name) for name in ("adaptive", "threshold", "cost_table", "temperatures")}
        command(**values, adaptive=_adaptive_settings(**mine, no_speculation=values["no_speculation"]))

    options = (
        click.option("--adaptive-verification/--no-adaptive-verification", "--enable-adaptive-verification", "adaptive",
                     default=False, show_default=True,
                     help="Choose every step how many drafts are verified, by their chances and what a step costs."),
        click.option("--adaptive-threshold", "threshold", type=click.FloatRange(0, 1),
                     help="Never verify a draft that stands with a lower chance. Default: 0."),
        click.option("--cost-table", type=click.Path(dir_okay=False, path_type=Path),
                     help="JSON file of step times: read if it is there, else measured at start and written. "
                          "Default: measured at start."),
        click.option("--confidence-temperatures", "temperatures", type=_FILE,
                     help='JSON file {"temperatures": [one a draft]} that calibrates a drafter\'s confidence.'),
    )  # fmt: skip
    wrapped = with_settings
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


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


def _sampling(command: Any) -> Any:
    """How tokens are drawn, for every prompt that does not say."""
    real, count = click.FLOAT, click.IntRange(0)
    options = (
        click.option("--temperature", type=real, help="0, the default, is greedy."),
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
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@click.argument("engines", type=_FOLDER)
@click.option("--input", "source", type=_FILE, help="JSON lines, each with prompt (text) or prompt_token_ids.")
@click.option("--prompt", "prompts", multiple=True, help="A text, instead; may be given several times.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="JSON lines to write.")
@click.option("--stats", "statistics", type=click.Path(dir_okay=False, path_type=Path),
              help="JSON file to write: acceptance over all answers.")  # fmt: skip
@click.option("--max-tokens", required=True, type=click.IntRange(1), help="Most new tokens a prompt.")
@_sampling
@_drafting
@_adaptive
def generate(
    engines: Path,
    source: Path | None,
    prompts: tuple[str, ...],
    output: Path | None,
    statistics: Path | None,
    drafter: str | None,
    no_speculation: bool,
    verification: str,
    adaptive: Any,
    **settings: Any,
) -> None:
    """Answer prompts with the engines in ENGINES: of a file, or given, or typed on the terminal.

    On a terminal accepted and rejected drafts are shown in colour; elsewhere answers are JSON lines."""
    if source and prompts:
        raise click.UsageError("--input and --prompt exclude each other")
    if not source and not prompts and not sys.stdin.isatty():
        raise click.UsageError("give --input or --prompt; only on a terminal prompts can be typed")
    from glmspec.build.progress import RichProgress
    from glmspec.runtime.engine import Engine
    from glmspec.runtime.generate import Wanted
    from glmspec.runtime.generate import generate as answer

    wanted = Wanted(source=source, prompts=prompts, output=output, statistics=statistics, settings=settings)
    load = functools.partial(Engine, engines, drafter, not no_speculation, verification=verification, adaptive=adaptive)
    answer(load, wanted, RichProgress())


@main.command()
@click.argument("engines", type=_FOLDER)
@click.option("-o", "--output", required=True, type=_OUT, help="Triton model repository to write.")
@_drafting
@_adaptive
def repo(
    engines: Path, output: Path, drafter: str | None, no_speculation: bool, verification: str, adaptive: Any
) -> None:
    """Write a Triton model repository that serves ENGINES."""
    from glmspec.triton_repo.repository import write_repository

    write_repository(engines, output, drafter, not no_speculation, verification, adaptive)
    click.echo(str(output))


@main.command()
@click.argument("repository", type=_FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free port.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0: a free port.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=8002, show_default=True, help="0: a free port.")
def serve(repository: Path, host: str, http_port: int, grpc_port: int, metrics_port: int) -> None:
    """Run tritonserver on a model REPOSITORY until it is stopped."""
    from glmspec.triton_repo.launcher import Ports, run_server

    run_server(repository, Ports.choose(host, http_port, grpc_port, metrics_port))


@main.command()
@click.argument("directory", type=_FOLDER)
def inspect(directory: Path) -> None:
    """Show what a converted checkpoint, an engine directory or a model repository holds."""
    from glmspec.build.inspect import show

    show(directory)
