"""`glmspec-build validate`: run, show, write."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from glmspec.build.configs.target import Target
from glmspec.build.deployment import Options
from glmspec.build.progress import RichProgress
from glmspec.build.validate.run import NAMES, Wanted, validate_source
from glmspec.convert.files import write_bytes, write_json


def validate_command(
    source: Path,
    drafters: tuple[Path, ...],
    target: Target,
    options: Options,
    config_only: bool,
    group_layers: int | None,
    cache: Path | None,
    stages: tuple[str, ...],
    json_file: Path | None,
    junit: Path | None,
) -> bool:
    """Validate, show the table and write the reports; True when nothing failed."""
    unknown = [name for name in stages if name not in NAMES]
    if unknown:
        raise click.UsageError(f"--stage {unknown[0]}: expected one of {', '.join(NAMES)}")
    wanted = Wanted(tuple(name for name in NAMES if not stages or name in stages), group_layers, cache)
    report = validate_source(source, drafters, target, options, wanted, RichProgress(), config_only=config_only)
    report.show(Console())
    if json_file:
        write_json(json_file, report.to_json())
    if junit:
        write_bytes(junit, report.junit())
    return report.ok
