"""`glmspec-build`: one command for the whole way from a checkpoint to served tokens.

Nothing heavy is imported before a command runs, so `--help` is instant. Exit codes: 0 done, 1 the input
is at fault (one message, no traceback), 2 wrong usage, 3 this machine lacks something (a GPU, TensorRT).
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import click

from glmspec.build.cli_options import FILE, PLACE, WRITTEN, adaptive, build_options, drafting, sampling, sizes
from glmspec.build.configs.target import TARGETS
from glmspec.build.errors import GlmspecError, os_error_text

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_OUT = click.Path(file_okay=False, path_type=Path)
_UNSAID = (None, (), False, "auto", "greedy")  # what size options are that nobody gave


def _drop_output() -> None:
    """Let go of what standard output does not take; else Python tries again at exit, and complains."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Commands(click.Group):
    """Turns our own exceptions into a message and an exit code; keeps the commands in the order of the work."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GlmspecError as error:
            click.echo(f"glmspec-build: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt as error:
            click.echo(f"glmspec-build: interrupted{f': {error}' if error.args else ''}", err=True)
            sys.exit(130)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # its reader has read enough
                click.echo(f"glmspec-build: {os_error_text(error)}", err=True)
            _drop_output()
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Commands)
@click.version_option(package_name="glmspec")
def main() -> None:
    """GLM-5.3 with block speculative decoding: convert, build engines, generate, serve."""


@main.command()
@click.argument("source", type=PLACE)
@click.option("-o", "--output", type=_OUT, help="Folder to write the converted checkpoint to.")
@click.option("--quant", type=click.Choice(["auto", "bf16", "fp8", "nvfp4"]), default="auto", show_default=True,
              help="Recipe for a verifier's matrices; auto keeps what the checkpoint has.")  # fmt: skip
@click.option("--recipe", type=FILE, help="JSON or YAML list of rules {modules: pattern, format: name} for others.")
@click.option("--calibration", type=FILE, help="Largest activation by module, as `calibrate` writes it.")
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
@click.option("--input", "prompts", required=True, type=FILE, help="JSON lines with prompt or prompt_token_ids.")
@click.option("-o", "--output", required=True, type=WRITTEN,
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
    """Check a folder that glmspec wrote again: the digest of every file, and of what it refers to."""
    from glmspec.build.progress import RichProgress
    from glmspec.build.verify import verify_folder

    click.echo(verify_folder(directory, RichProgress()))


@main.command()
@click.option("--verifier", type=_FOLDER, help="Verifier: Hugging Face or converted checkpoint.")
@sizes
@click.option("-o", "--output", type=_OUT, help="Engine directory (or bundle) to write.")
@click.option("--no-validate", is_flag=True, help="Skip the checks that `validate` makes.")
@click.option("--resume", is_flag=True, help="Go on with the conversions of an interrupted run.")
@click.option("--from-bundle", "bundle", type=_FOLDER, help="Finish a bundle, on a machine with its GPU and TensorRT.")
def engine(
    verifier: Path | None,
    drafters: tuple[Path, ...],
    target: str | None,
    output: Path | None,
    no_validate: bool,
    resume: bool,
    bundle: Path | None,
    **sizes: Any,
) -> None:
    """Build an engine directory from a verifier and its drafters.

    Where the target's TensorRT is not installed, what needs no GPU is done and written as a bundle (exit code 3)."""
    from glmspec.build.progress import RichProgress

    if bundle:
        from glmspec.build.bundle import finish, finished_name

        given = (verifier, drafters, target, resume, *sizes.values())
        if any(value not in _UNSAID for value in given):
            raise click.UsageError("--from-bundle knows its models, target and sizes: leave them out")
        output = output or finished_name(bundle)
        finish(bundle, output, RichProgress())
    else:
        from glmspec.build.engine import build_engines

        for name, value in (("--verifier", verifier), ("--target", target), ("--output", output)):
            if value is None:
                raise click.UsageError(f"Missing option {name!r}.")
        options = build_options(sizes)
        flags = {"check": not no_validate, "resume": resume}
        build_engines(verifier, drafters, TARGETS[target], options, output, RichProgress(), **flags)
    click.echo(str(output))


@main.command()
@click.argument("source", type=PLACE)
@sizes
@click.option("--config-only", is_flag=True, help="SOURCE and the drafters are config.json files, or folders with one.")
@click.option("--group-layers", type=click.IntRange(0), default=8, show_default=True,
              help="Compile so many layers at a time; 0: all in one network, which takes longer.")  # fmt: skip
@click.option("--cache", type=_OUT, help="Folder that remembers which networks compile.")
@click.option("--stage", "stages", multiple=True, metavar="NAME",
              help="Run this stage only (see docs/validate.md); may be given several times.")  # fmt: skip
@click.option("--json", "json_file", type=WRITTEN, help="Write the report as JSON.")
@click.option("--junit", type=WRITTEN, help="Write the report as JUnit XML.")
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
    options = build_options(sizes)
    code = validate_command(source, drafters, TARGETS[target], options, wanted, outputs, config_only=config_only)
    sys.exit(code)


@main.command()
@click.option("--verifier", type=PLACE,
              help="Compile what its networks and the drafters' use. Default: what the full model's do.")  # fmt: skip
@sizes
@click.option(
    "--config-only", is_flag=True, help="The verifier and drafters are config.json files, or folders with one."
)
@click.option("--op", "ops", multiple=True, metavar="NAME", help="Of this op only; may be given several times.")
@click.option("-o", "--output", type=_OUT, help="Folder to write PTX, cubins and a manifest to.")
def plugins(
    verifier: Path | None,
    drafters: tuple[Path, ...],
    target: str | None,
    config_only: bool,
    ops: tuple[str, ...],
    output: Path | None,
    **sizes: Any,
) -> None:
    """Compile the plugins' kernels for a target. Needs Triton, no GPU; fails when one spills or passes its limits."""
    if target is None:
        raise click.UsageError("Missing option '--target'.")
    given = {"drafter": drafters, "config_only": config_only, **sizes}
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in _UNSAID]
    if verifier is None and named:
        raise click.UsageError(
            f"{', '.join(named)}: of use with --verifier only; sizes are the full model's without it"
        )
    if verifier and ops:
        raise click.UsageError("--verifier and --op exclude each other")
    from glmspec.build.compile_plugins import compile_plugins, full_model, of_deployment
    from glmspec.build.deployment import open_deployment
    from glmspec.build.progress import RichProgress

    progress = RichProgress()
    if verifier:
        options = build_options(sizes)
        deployment = open_deployment(verifier, drafters, TARGETS[target], options, config_only=config_only)
        variants = of_deployment(deployment, progress)
    else:
        variants = full_model(TARGETS[target], ops)
    compile_plugins(variants, TARGETS[target], output, progress)


@main.command()
@click.argument("engines", type=_FOLDER)
@click.option("--input", "source", type=FILE, help="JSON lines, each with prompt (text), prompt_token_ids or messages.")
@click.option("--prompt", "prompts", multiple=True, help="A text, instead; may be given several times.")
@click.option("--chat", is_flag=True, help="Texts are what a user says, for the chat template.")
@click.option("--output", type=WRITTEN,
              help="JSON lines to write. Default: shown on a terminal, else to standard output.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the answers that an interrupted run kept.")
@click.option("--stats", "statistics", type=WRITTEN,
              help="JSON file to write: acceptance over all answers.")  # fmt: skip
@click.option("--max-tokens", required=True, type=click.IntRange(1), help="Most new tokens a prompt.")
@sampling
@drafting
@adaptive
def generate(
    engines: Path,
    source: Path | None,
    prompts: tuple[str, ...],
    chat: bool,
    output: Path | None,
    resume: bool,
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
    if not source and not prompts and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("give --input or --prompt; only on a terminal prompts can be typed")
    if resume and not (output and (source or prompts)):
        raise click.UsageError("--resume goes on with an --output of --input or --prompt: give them as before")
    if source and chat:
        raise click.UsageError("--input and --chat exclude each other: a line has messages instead of a prompt")
    from glmspec.build.progress import RichProgress
    from glmspec.runtime.engine import Engine
    from glmspec.runtime.generate import Wanted
    from glmspec.runtime.generate import generate as answer

    files = {"source": source, "output": output, "statistics": statistics}
    wanted = Wanted(**files, resume=resume, prompts=prompts, chat=chat, settings=settings)
    load = functools.partial(Engine, engines, drafter, not no_speculation, verification=verification, adaptive=adaptive)
    answer(load, wanted, RichProgress())


@main.command()
@click.argument("engines", type=_FOLDER)
@click.option("-o", "--output", required=True, type=_OUT, help="Triton model repository to write.")
@drafting
@adaptive
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
