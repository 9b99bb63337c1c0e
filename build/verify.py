"""`glmspec-build verify`: a finished directory checked again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from glmspec.build.bundle import checkpoints_of, open_bundle
from glmspec.build.kernels import open_kernels
from glmspec.convert.checkpoint import Checkpoint, read_checkpoint
from glmspec.core.errors import GlmspecError
from glmspec.core.files import BUNDLE, CHECKPOINT, ENGINES, KERNELS, REPOSITORY
from glmspec.core.progress import Progress
from glmspec.core.sealed import MANIFEST, check_digest, kind_of, open_manifest
from glmspec.runtime.directory import EngineDirectory


def verify_folder(folder: Path, progress: Progress) -> str:
    """Raise naming the first file or tensor that is not as it was written; else say what was checked."""
    if (folder / MANIFEST).exists():
        return _verify_hf(folder, progress)
    verify = _KINDS.get(kind_of(folder))
    if verify is None:
        raise GlmspecError(
            f"{folder}: not a converted checkpoint, engine bundle, engine directory, kernel folder or model repository "
            "of glmspec."
        )
    return verify(folder, progress)


def _verify_bundle(folder: Path, progress: Progress) -> str:
    checkpoints = checkpoints_of(folder, open_bundle(folder))
    return _lines(f"{folder}: engine bundle: as it was prepared", checkpoints.values(), progress)


def _verify_engines(folder: Path, progress: Progress) -> str:
    directory = EngineDirectory.open(folder)
    checkpoints = {one.folder: one for one in map(directory.weights, directory.names)}  # several models may use one
    return _lines(f"{folder}: engine directory: as it was built", checkpoints.values(), progress)


def _verify_repository(folder: Path, progress: Progress) -> str:
    from glmspec.triton_repo.repository import open_repository

    engines = open_repository(folder)
    return f"{folder}: model repository: as it was written\n{_verify_engines(engines, progress)}"


def _verify_kernels(folder: Path, _: Progress) -> str:
    kernels = sum(name.endswith(".cubin") for name in open_kernels(folder)["files"])
    return f"{folder}: kernel folder: {kernels} kernels as they were compiled"


def _lines(first: str, checkpoints: Iterable[Checkpoint], progress: Progress) -> str:
    return "\n".join([first, *(_verify_checkpoint(one, progress) for one in checkpoints)])


def _verify_checkpoint(checkpoint: Checkpoint, progress: Progress) -> str:
    with progress.bytes(f"Hashing {checkpoint.folder.name}", checkpoint.size) as advance:
        checkpoint.check(advance)
    parts = len(checkpoint.files)
    tensors = sum(len(one.outputs(rank)) for rank in range(checkpoint.mapping.tp) for one in checkpoint.weights())
    return f"{checkpoint.folder}: checkpoint: {parts} parts and {tensors:,} tensors as they were written"


def _verify_hf(folder: Path, progress: Progress) -> str:
    parts = open_manifest(folder)["parts"]
    with progress.bytes(f"Hashing {folder.name}", sum(part["size"] for part in parts.values())) as advance:
        for name, part in parts.items():
            check_digest(folder / name, part["sha256"], "Convert again.", advance)
    return f"{folder}: Hugging Face checkpoint: {len(parts)} parts as they were written"


_KINDS = {
    CHECKPOINT: lambda folder, progress: _verify_checkpoint(read_checkpoint(folder), progress),
    BUNDLE: _verify_bundle,
    ENGINES: _verify_engines,
    KERNELS: _verify_kernels,
    REPOSITORY: _verify_repository,
}
