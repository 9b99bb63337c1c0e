"""`glmspec-build validate`: run, show, write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from glmspec.build.deployment import BuildOptions
from glmspec.build.target import Target
from glmspec.build.validate.run import NAMES, ValidateOptions, validate_source
from glmspec.core.errors import GlmspecError
from glmspec.core.files import check_output, json_bytes, write_output
from glmspec.core.progress import Progress

STDOUT = Path("-")


@dataclass(frozen=True)
class Outputs:
    """Files to write a report to, None for none; `STDOUT` for the JSON takes the table's place."""

    json: Path | None
    junit: Path | None


def checked_options(stages: tuple[str, ...], group_layers: int, cache: Path | None) -> ValidateOptions:
    """What the user asked to run. group_layers: 0 for all layers at once."""
    unknown = [name for name in stages if name not in NAMES]
    if unknown:
        raise click.UsageError(f"--stage {unknown[0]!r}: expected one of {', '.join(NAMES)}")
    return ValidateOptions(tuple(name for name in NAMES if not stages or name in stages), group_layers or None, cache)


def validate_command(
    source: Path,
    drafters: tuple[Path, ...],
    target: Target,
    options: BuildOptions,
    validate_options: ValidateOptions,
    outputs: Outputs,
    progress: Progress,
    *,
    config_only: bool,
) -> int:
    """Validate, show the table and write the reports; the exit code."""
    for option, path in (("--json", outputs.json), ("--junit", outputs.junit)):
        if path not in (None, STDOUT):
            check_output(path, option)
    if validate_options.cache and not _usable(validate_options.cache):
        raise GlmspecError(
            f"--cache {validate_options.cache}: not a folder that can be made and written. Choose another."
        )
    report = validate_source(source, drafters, target, options, validate_options, progress, config_only=config_only)
    if outputs.json == STDOUT:
        click.echo(json_bytes(report.to_json()), nl=False)
    else:
        report.show(Console())
    if outputs.json not in (None, STDOUT):
        write_output(outputs.json, json_bytes(report.to_json()))
    if outputs.junit:
        write_output(outputs.junit, report.junit())
    return report.exit_code


def _usable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
