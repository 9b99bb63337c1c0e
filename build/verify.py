"""`glmspec-build verify`: a finished directory checked again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from glmspec.build.bundle import open_bundle
from glmspec.build.plugin_variants import open_kernels
from glmspec.convert.checkpoint import Checkpoint, read_checkpoint
from glmspec.core.errors import GlmspecError
from glmspec.core.files import BUNDLE, CHECKPOINT, ENGINES, KERNELS, REPOSITORY
from glmspec.core.progress import Progress
from glmspec.core.sealed import MANIFEST, check_digest, kind_of, open_manifest
from glmspec.runtime.directory import EngineDirectory, each_once


def verify_folder(folder: Path, progress: Progress) -> str:
    """Raise naming the first file or tensor that is not as it was written; else say what was checked."""
    if (folder / MANIFEST).exists():
        return _verify_hf(folder, progress)
    verify = _KINDS.get(kind_of(folder) or "")
    if verify is None:
        raise GlmspecError(
            f"{folder}: not a converted checkpoint, engine bundle, engine directory, kernel folder or model repository "
            "of glmspec."
        )
    return verify(folder, progress)


def _verify_bundle(folder: Path, progress: Progress) -> str:
    return _verify_directory(open_bundle(folder), "engine bundle: as it was prepared", progress)


def _verify_engines(folder: Path, progress: Progress) -> str:
    return _verify_directory(EngineDirectory.open(folder), "engine directory: as it was built", progress)


def _verify_directory(directory: EngineDirectory, what: str, progress: Progress) -> str:
    lines = [_verify_checkpoint(checkpoint, progress) for checkpoint in each_once(directory.all_weights())]
    return "\n".join([f"{directory.folder}: {what}", *lines])


def _verify_repository(folder: Path, progress: Progress) -> str:
    from glmspec.triton_repo.repository import open_repository

    engines = open_repository(folder)
    return f"{folder}: model repository: as it was written\n{_verify_engines(engines, progress)}"


def _verify_kernels(folder: Path, _: Progress) -> str:
    kernels = sum(name.endswith(".cubin") for name in open_kernels(folder)["files"])
    return f"{folder}: kernel folder: {kernels} kernels as they were compiled"


def _verify_checkpoint(checkpoint: Checkpoint, progress: Progress) -> str:
    with progress.bytes(f"Hashing {checkpoint.folder.name}", checkpoint.size) as advance:
        checkpoint.check(advance)
    parts = len(checkpoint.files)
    tensors = sum(len(weight.outputs(rank)) for rank in range(checkpoint.mapping.tp) for weight in checkpoint.weights())
    return f"{checkpoint.folder}: checkpoint: {parts} parts and {tensors:,} tensors as they were written"


def _verify_hf(folder: Path, progress: Progress) -> str:
    parts = open_manifest(folder)["parts"]
    with progress.bytes(f"Hashing {folder.name}", sum(part["size"] for part in parts.values())) as advance:
        for name, part in parts.items():
            check_digest(folder / name, part["sha256"], "Convert again.", advance)
    return f"{folder}: Hugging Face checkpoint: {len(parts)} parts as they were written"


_KINDS: dict[str, Callable[[Path, Progress], str]] = {
    CHECKPOINT: lambda folder, progress: _verify_checkpoint(read_checkpoint(folder), progress),
    BUNDLE: _verify_bundle,
    ENGINES: _verify_engines,
    KERNELS: _verify_kernels,
    REPOSITORY: _verify_repository,
}
