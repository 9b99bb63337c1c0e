"""`glmspec-build validate`: run, show, write."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console

from glmspec.build.cli_base import required
from glmspec.build.settings import ValidateSettings
from glmspec.build.target import Target
from glmspec.build.validate.run import NAMES, ValidateOptions, validate_source
from glmspec.core.errors import GlmspecError
from glmspec.core.files import check_output, json_bytes, write_output
from glmspec.core.progress import Progress

STDOUT = Path("-")


def validate_command(settings: ValidateSettings, target: Target, progress: Progress) -> int:
    """Validate, show the table and write the reports; the exit code. `STDOUT` for the JSON takes the table's place."""
    options, json_file = _validate_options(settings), settings.json_file
    for option, path in (("--json", json_file), ("--junit", settings.junit)):
        if path not in (None, STDOUT):
            check_output(path, option)
    if options.cache and not _usable(options.cache):
        raise GlmspecError(f"--cache {options.cache}: not a folder that can be made and written. Choose another.")
    source, drafters = required("--verifier", settings.source or settings.verifier), settings.drafters
    report = validate_source(
        source, drafters, target, settings.options, options, progress, config_only=settings.config_only
    )
    if json_file == STDOUT:
        click.echo(json_bytes(report.to_json()), nl=False)
    else:
        report.show(Console())
    if json_file not in (None, STDOUT):
        write_output(json_file, json_bytes(report.to_json()))
    if settings.junit:
        write_output(settings.junit, report.junit())
    return report.exit_code


def _validate_options(settings: ValidateSettings) -> ValidateOptions:
    unknown = [name for name in settings.stages if name not in NAMES]
    if unknown:
        raise click.UsageError(f"--stage {unknown[0]!r}: expected one of {', '.join(NAMES)}")
    stages = tuple(name for name in NAMES if not settings.stages or name in settings.stages)
    return ValidateOptions(stages, settings.group_layers or None, settings.cache)


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
