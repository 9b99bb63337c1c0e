"""The commands that run engines: `generate`, `repo` and `serve`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import click

from glmspec.build.cli_base import FILE, FOLDER, OUT, WRITTEN, Command, Count, as_one, progress, result, section
from glmspec.build.cli_options import OUTPUT, drafting, sampling
from glmspec.build.settings import DraftingSettings, GenerateSettings


@click.command(cls=Command)
@click.argument("engines", type=FOLDER)
@section(
    "Prompts",
    click.option("--input", "source", type=FILE,
                 help="JSON lines, each with prompt (text), prompt_token_ids or messages."),
    click.option("--prompt", "prompts", multiple=True, help="A text, instead; may be given several times."),
    click.option("--chat", is_flag=True,
                 help="Texts are what a user says, for the chat template; what is typed is one conversation."),
)  # fmt: skip
@section(
    OUTPUT,
    click.option("-o", "--output", type=WRITTEN,
                 help="JSON lines to write. Default: shown on a terminal, else to standard output."),
    click.option("--resume", is_flag=True, help="Go on with the answers that an interrupted run kept."),
    click.option("--stats", "statistics", type=WRITTEN,
                 help="JSON file to write: acceptance, tokens and time over all answers. Default: none."),
    click.option("--max-tokens", required=True, type=Count(), help="Most new tokens a prompt."),
)  # fmt: skip
@sampling
@drafting
@as_one(GenerateSettings)
def generate(settings: GenerateSettings) -> None:
    """Answer prompts with the engines in ENGINES: of a file, or given, or typed on the terminal.

    On a terminal accepted and rejected drafts are shown in colour; elsewhere answers are JSON lines."""
    source, prompts = settings.source, settings.prompts
    if source and prompts:
        raise click.UsageError("--input and --prompt exclude each other")
    if not source and not prompts and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("give --input or --prompt; only on a terminal prompts can be typed")
    if settings.resume and not (settings.output and (source or prompts)):
        raise click.UsageError("--resume goes on with an --output of --input or --prompt: give them as before")
    if source and settings.chat:
        raise click.UsageError("--input and --chat exclude each other: a line has messages instead of a prompt")
    from glmspec.runtime.engine import Engine
    from glmspec.runtime.generate import generate as answer

    load = functools.partial(Engine, settings.engines, **settings.drafting.engine_options(), progress=progress())
    answer(load, settings, progress())


@click.command(cls=Command)
@click.argument("engines", type=FOLDER)
@section(OUTPUT, click.option("-o", "--output", required=True, type=OUT, help="Triton model repository to write."))
@drafting
def repo(engines: Path, output: Path, drafting: DraftingSettings) -> None:
    """Write a Triton model repository that serves ENGINES."""
    from glmspec.triton_repo.repository import write_repository

    write_repository(engines, output, **drafting.engine_options())
    result(str(output))


@click.command(cls=Command)
@click.argument("repository", type=FOLDER)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--http-port", "http", type=click.IntRange(0, 65535), default=8000, help="0: a free port.")
@click.option("--grpc-port", "grpc", type=click.IntRange(0, 65535), default=8001, help="0: a free port.")
@click.option("--metrics-port", "metrics", type=click.IntRange(0, 65535), default=8002, help="0: a free port.")
def serve(repository: Path, **address: Any) -> None:
    """Run tritonserver on a model REPOSITORY until it is stopped."""
    from glmspec.triton_repo.launcher import Ports, run_server

    run_server(repository, Ports.choose(**address), progress())
