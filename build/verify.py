"""`glmspec-build verify`: a finished directory checked again."""

from __future__ import annotations

from pathlib import Path

from glmspec.build.bundle import open_bundle
from glmspec.build.configs.fields import read_json
from glmspec.build.directory import EngineDirectory
from glmspec.build.errors import GlmspecError
from glmspec.build.progress import Progress
from glmspec.convert.beside import MANIFEST
from glmspec.convert.checkpoint import Checkpoint, check_digest, read_checkpoint


def verify_folder(folder: Path, progress: Progress) -> str:
    """Raise naming the first file or tensor that is not as it was written; else say what was checked."""
    if (folder / MANIFEST).exists():
        return _verify_hf(folder, progress)
    record = read_json(folder / "config.json")
    if "hf_config" in record:
        return _verify_checkpoint(read_checkpoint(folder), progress)
    if "members" in record:
        places = {(folder / one["weights"]["folder"]).resolve() for one in open_bundle(folder)["members"]}
        lines = [_verify_checkpoint(read_checkpoint(place), progress) for place in sorted(places)]
        return "\n".join([f"{folder}: engine bundle: as it was prepared", *lines])
    if "target" in record:
        directory = EngineDirectory.open(folder)
        for name in directory.names:
            for plan in directory.model(name)["plans"].values():
                check_digest(folder / name / plan["file"], plan["sha256"], "Build the engine directory again.")
        lines = [_verify_checkpoint(directory.checkpoint(name), progress) for name in directory.names]
        return "\n".join([f"{folder}: engine directory: as it was built", *lines])
    if "kernels_for" in record:
        kernels = read_json(folder / "manifest.json")["plugins"]
        for one in kernels:
            check_digest(folder / one["file"], one["sha256"], "Compile the plugins again.")
            check_digest(folder / one["cubin"], one["cubin_sha256"], "Compile the plugins again.")
        return f"{folder}: kernel folder: {len(kernels)} kernels as they were compiled"
    raise GlmspecError(
        f"{folder}: not a converted checkpoint, engine bundle, engine directory or kernel folder of glmspec."
    )


def _verify_checkpoint(checkpoint: Checkpoint, progress: Progress) -> str:
    parts = checkpoint.record["parts"]
    with progress.steps(f"Hashing {checkpoint.folder.name}", len(parts)) as advance:
        checkpoint.check(advance)
    tensors = sum(len(one.outputs(rank)) for rank in range(checkpoint.mapping.tp) for one in checkpoint.weights())
    return f"{checkpoint.folder}: checkpoint: {len(parts)} parts and {tensors:,} tensors as they were written"


def _verify_hf(folder: Path, progress: Progress) -> str:
    record = read_json(folder / MANIFEST)
    for name, digest in record["files"].items():
        check_digest(folder / name, digest)
    parts = record["parts"]
    with progress.steps(f"Hashing {folder.name}", len(parts)) as advance:
        for name, part in parts.items():
            check_digest(folder / name, part["sha256"])
            advance(name)
    return f"{folder}: Hugging Face checkpoint: {len(parts)} parts as they were written"
