"""`glmspec-build`: one command for the whole way from a checkpoint to served tokens.

Nothing heavy is imported before a command runs, so `--help` is instant. Exit codes: 0 done, 1 the input
is at fault (one message, no traceback), 2 wrong usage, 3 nothing was done for lack of something (a GPU, TensorRT).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from glmspec.build.cli_base import (
    FILE,
    FOLDER,
    JSON,
    OUT,
    PLACE,
    WRITTEN,
    Commands,
    as_one,
    progress,
    required,
    result,
    section,
    write_json_to,
)
from glmspec.build.cli_options import (
    MODEL,
    OUTPUT,
    RECIPES,
    ranks,
    sizes,
)
from glmspec.build.cli_serving import generate, repo, serve
from glmspec.build.settings import EngineSettings, PluginsSettings, ValidateSettings
from glmspec.build.target import TARGETS
from glmspec.convert.settings import ConvertSettings
from glmspec.core.errors import GlmspecError
from glmspec.models.configs.kinds import check_config, check_configs

# A table for people, and the same for programs.
as_json = section(
    OUTPUT, click.option("--json", "json_file", type=JSON, help="Write it as JSON; -: to standard output, no table.")
)
config_only = section(
    MODEL,
    click.option("--config-only", is_flag=True,
                 help="The verifier and drafters are config.json files, or folders with one."),
)  # fmt: skip


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
)
@click.version_option(package_name="glmspec")
def main() -> None:
    """GLM-5.3 with block speculative decoding: convert, build engines, generate, serve."""


@main.command()
@click.argument("source", type=PLACE)
@section(
    MODEL,
    click.option("--quant", type=RECIPES, default="auto",
                 help="Recipe for a verifier's matrices; auto keeps what the checkpoint has."),
    click.option("--recipe", type=FILE,
                 help="JSON or YAML list of rules {modules: pattern, format: name} for others. Default: none."),
    click.option("--calibration", type=FILE,
                 help="Largest activation by module, as `calibrate` writes it. Default: none."),
    *ranks("1"),
    click.option("--expect-sha256", metavar="HEX",
                 help="Refuse SOURCE unless its model.safetensors has this digest. Default: any."),
)  # fmt: skip
@section(
    OUTPUT,
    click.option("-o", "--output", type=OUT, help="Folder to write the converted checkpoint to."),
    click.option("--format", "layout", type=click.Choice(["trtllm", "hf"]), default="trtllm",
                 help="hf: a Hugging Face checkpoint with ModelOpt's names."),
    click.option("--workers", type=click.IntRange(1), help="Threads. Default: the cores there are."),
    click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where NVFP4 is computed."),
    click.option("--resume", is_flag=True, help="Go on from an interrupted run."),
    click.option("--dry-run", is_flag=True,
                 help="List what would be written. SOURCE may be a config.json without weights."),
)  # fmt: skip
@as_one(ConvertSettings)
def convert(settings: ConvertSettings) -> None:
    """Convert the Hugging Face checkpoint SOURCE (a verifier or a drafter) to glmspec's layout."""
    source, output = settings.source, settings.output
    if settings.recipe and settings.quant != "auto":
        raise click.UsageError("--quant and --recipe exclude each other")
    if settings.dry_run and (settings.resume or settings.expect_sha256):
        raise click.UsageError("--dry-run reads no weights: leave --resume and --expect-sha256 out")
    if source.is_file() and not settings.dry_run:
        raise click.UsageError(f"{source}: a file is enough for --dry-run only; give a checkpoint's folder")
    if (output is None) != settings.dry_run:
        raise click.UsageError("give --output, or --dry-run and no output")
    check_config(source)
    from glmspec.convert.command import convert_folder, options_of
    from glmspec.convert.dry_run import dry_run as list_outputs

    options = options_of(settings)
    if output is None:
        list_outputs(source, options, settings.hf, progress())
        return
    for line in convert_folder(settings, output, options, progress()):
        progress().say(line)
    result(str(output))


@main.command()
@click.argument("source", type=FOLDER)
@click.option("--input", "prompts", required=True, type=FILE, help="JSON lines with prompt or prompt_token_ids.")
@click.option("-o", "--output", required=True, type=WRITTEN,
              help="JSON file to write: {module: largest input}.")  # fmt: skip
def calibrate(source: Path, prompts: Path, output: Path) -> None:
    """Measure the activations of the verifier SOURCE on prompts, for `convert --calibration`. Needs ModelOpt."""
    check_config(source)
    from glmspec.build.calibrate import calibrate as measure

    count = measure(source, prompts, output, progress())
    result(f"{output}: {count} modules")


@main.command()
@click.argument("directory", type=FOLDER)
@as_json
def verify(directory: Path, json_file: Path | None) -> None:
    """Check a folder that glmspec wrote again: the digest of every file, and of what it refers to."""
    from glmspec.build.describe import describe
    from glmspec.build.verify import verify_folder

    start = time.perf_counter()
    try:
        checked, error = verify_folder(directory, progress()), None
    except GlmspecError as raised:
        checked, error = None, raised
    if json_file:
        seconds = round(time.perf_counter() - start, 3)
        about = {"error": str(error)} if error else describe(directory)
        write_json_to(json_file, {"ok": error is None, "folder": str(directory), "seconds": seconds, **about})
    if error:
        raise error
    if checked is not None and str(json_file) != "-":
        result(checked)


@main.command()
@section(MODEL, click.option("--verifier", type=FOLDER, help="Verifier: Hugging Face or converted checkpoint."))
@sizes
@section(
    OUTPUT,
    click.option("-o", "--output", type=OUT, help="Engine directory (or bundle) to write."),
    click.option("--no-validate", is_flag=True, help="Skip the checks that `validate` makes."),
    click.option("--resume", is_flag=True, help="Go on with the conversions of an interrupted run."),
    click.option("--from-bundle", "bundle", type=FOLDER,
                 help="Finish a bundle, on a machine with its GPU and TensorRT. Default of --output: BUNDLE-engines."),
)  # fmt: skip
@as_one(EngineSettings)
def engine(settings: EngineSettings) -> None:
    """Build an engine directory from a verifier and its drafters.

    Where the target's TensorRT or GPU is not here, what needs none is done and written as a bundle; the command that
    finishes it is told."""
    left, output = None, settings.output
    if settings.bundle:
        given = (settings.verifier, settings.drafters, settings.target, settings.resume, settings.options.given)
        if any(given):
            raise click.UsageError("--from-bundle knows its models, target and sizes: leave them out")
        from glmspec.build.bundle import finish, finished_name

        output = output or finished_name(settings.bundle)
        finish(settings.bundle, output, progress())
    else:
        verifier, target = required("--verifier", settings.verifier), required("--target", settings.target)
        output = required("--output", output)
        check_configs(verifier, settings.drafters)
        from glmspec.build.engine import build_engines

        flags = {"check": not settings.no_validate, "resume": settings.resume}
        left = build_engines(
            verifier, settings.drafters, TARGETS[target], settings.options, output, progress(), **flags
        )
    result(str(output))
    if left:
        click.echo(left, err=True)


@main.command()
@click.argument("source", type=PLACE, required=False)
@section(MODEL, click.option("--verifier", type=PLACE, help="SOURCE by the name that other commands have for it."))
@sizes
@config_only
@section(
    "Checks",
    click.option("--stage", "stages", multiple=True, metavar="NAME",
                 help="Run this stage only (see docs/validate.md); may be given several times. Default: all."),
    click.option("--group-layers", type=click.IntRange(0), default=8,
                 help="Compile so many layers at a time; 0: all in one network, which takes longer."),
    click.option("--cache", type=OUT, help="Folder that remembers which networks compile. Default: none."),
)  # fmt: skip
@section(
    OUTPUT,
    click.option("--json", "json_file", type=JSON, help="Write the report as JSON; -: to standard output, no table."),
    click.option("--junit", type=WRITTEN, help="Write the report as JUnit XML."),
)  # fmt: skip
@as_one(ValidateSettings)
def validate(settings: ValidateSettings) -> None:
    """Check, without a GPU, that the verifier SOURCE builds for a target and computes what it should.

    Exit code 1 when a check fails, 3 when one could not run for lack of a package."""
    if (settings.source is None) == (settings.verifier is None):
        raise click.UsageError("give SOURCE, or --verifier in its place")
    target = required("--target", settings.target)
    from glmspec.build.validate.command import validate_command

    sys.exit(validate_command(settings, TARGETS[target], progress()))


@main.command()
@section(
    MODEL,
    click.option("--verifier", type=PLACE,
                 help="Compile what its networks and the drafters' use. Default: what the full model's do."),
)  # fmt: skip
@sizes
@config_only
@section(
    OUTPUT,
    click.option("--op", "ops", multiple=True, metavar="NAME",
                 help="Of this op only; may be given several times. Default: all."),
    click.option("-o", "--output", type=OUT, help="Folder to write PTX, cubins and a manifest to. Default: none."),
)  # fmt: skip
@as_json
@as_one(PluginsSettings)
def plugins(settings: PluginsSettings) -> None:
    """Compile the plugins' kernels for a target. Needs Triton, no GPU; fails when one spills or passes its limits."""
    verifier, target = settings.verifier, TARGETS[required("--target", settings.target)]
    given = ["--drafter"] * bool(settings.drafters) + ["--config-only"] * settings.config_only + settings.options.given
    if verifier is None and given:
        raise click.UsageError(
            f"{', '.join(given)}: of use with --verifier only; sizes are the full model's without it"
        )
    if verifier and settings.ops:
        raise click.UsageError("--verifier and --op exclude each other")
    if verifier:
        check_configs(verifier, settings.drafters)
    from glmspec.build.compile_plugins import compile_plugins, full_model, of_deployment
    from glmspec.build.deployment import open_deployment

    if verifier:
        config_only = settings.config_only
        deployment = open_deployment(verifier, settings.drafters, target, settings.options, config_only=config_only)
        variants = of_deployment(deployment, progress())
    else:
        variants = full_model(target, settings.ops)
    record = compile_plugins(variants, target, settings.output, progress(), table=str(settings.json_file) != "-")
    if settings.json_file:
        write_json_to(settings.json_file, record)


for _command in (generate, repo, serve):
    main.add_command(_command)


@main.command()
@click.argument("directory", type=PLACE)
@as_json
def inspect(directory: Path, json_file: Path | None) -> None:
    """Show what a folder holds: a Hugging Face checkpoint (its config.json will do), or anything that glmspec wrote."""
    if directory.is_file():
        if directory.name != "config.json":
            raise click.UsageError(f"{directory}: found a file, expected a folder or its config.json")
        directory = directory.parent
    from glmspec.build.describe import describe
    from glmspec.build.inspect import show

    if json_file:
        write_json_to(json_file, describe(directory))
    if str(json_file) != "-":
        show(directory)
