"""What `glmspec-build convert` does, from options to notes."""

from __future__ import annotations

import os
from pathlib import Path

from glmspec.convert.calibration import Activations, read_calibration
from glmspec.convert.conversion import is_written, plan_conversion
from glmspec.convert.hf import write_hf
from glmspec.convert.names import ConvertOptions
from glmspec.convert.on_device import require
from glmspec.convert.origin import name_of
from glmspec.convert.recipe import RECIPES, read_recipe
from glmspec.convert.settings import ConvertSettings
from glmspec.convert.source import SINGLE
from glmspec.convert.tokenizer import unreadable
from glmspec.convert.writer import Run
from glmspec.core.errors import CheckpointError
from glmspec.core.fields import read_json
from glmspec.core.files import sha256
from glmspec.core.progress import Progress
from glmspec.core.sealed import MANIFEST
from glmspec.network.shards import Mapping


def options_of(settings: ConvertSettings) -> ConvertOptions:
    """The options of a conversion from what the user typed. Raises `ConfigError` naming what does not fit."""
    return ConvertOptions(
        read_recipe(settings.recipe) if settings.recipe else RECIPES[settings.quant],
        Mapping(settings.tp or 1, settings.ep or 1),
        read_calibration(settings.calibration) if settings.calibration else Activations(),
    )


def convert_folder(settings: ConvertSettings, out: Path, options: ConvertOptions, progress: Progress) -> list[str]:
    """Convert; returns what the user should know."""
    folder = settings.source
    require(settings.device)
    if settings.expect_sha256:
        with progress.stage("Hashing the source"):
            expect_digest(folder, settings.expect_sha256)
    with progress.stage("Reading and checking the checkpoint"):
        conversion = plan_conversion(folder, options)
        if settings.expect_sha256:  # no need to hash it again
            conversion.source.known_digests[SINGLE] = settings.expect_sha256.lower()
        if conversion.end_tokens is not None:  # a drafter is given ids
            conversion.source.notes += unreadable(folder)
    record_file = MANIFEST if settings.hf else "config.json"
    if is_written(out, record_file, conversion.fingerprint):
        return [f"{out}: converted before, from these files with these options; nothing to do"]
    with progress.bytes(f"Converting {name_of(folder)}", conversion.size) as advance:
        run = Run(settings.workers or os.cpu_count() or 1, settings.resume, advance, settings.device)
        if settings.hf:
            write_hf(conversion, out, run)
        else:
            conversion.write(out, run)
    return left_out_lines(read_json(out / record_file))


def expect_digest(folder: Path, wanted: str) -> None:
    """Raise `CheckpointError` unless the folder's one file of weights has this SHA-256."""
    path = folder / SINGLE
    if not path.exists():
        raise CheckpointError(f"{path}: no such file; --expect-sha256 is for a checkpoint in one file.")
    actual = sha256(path)
    if actual != wanted.lower():
        raise CheckpointError(f"{path}: SHA-256: found {actual}, expected {wanted.lower()}. These are other weights.")


def left_out_lines(record: dict) -> list[str]:
    """What a conversion left out, and why, a line a reason; then its notes."""
    lines = [f"left out {len(names)} tensors: {reason}" for reason, names in record["left_out"].items()]
    return lines + [f"note: {note}" for note in record["notes"]]
