"""Writing a Triton model repository for an engine directory.

REPO/config.json               who wrote it, for which engines, the digest of every file, what is known of licences
REPO/licenses/                 their texts
REPO/glmspec/config.pbtxt      built from Triton's own protobuf message
REPO/glmspec/1/model.py        imports the model; all of it lives in `glmspec.triton_repo.model`
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from glmspec.convert.beside import copy_files
from glmspec.core.errors import EngineError
from glmspec.core.files import REPOSITORY, producer, sha256, write_bytes
from glmspec.core.folders import new_folder
from glmspec.core.sealed import check_digest, check_files, digests, kind_of, open_sealed, write_sealed
from glmspec.runtime.adaptive import Adaptive
from glmspec.runtime.directory import EngineDirectory
from glmspec.triton_repo.interface import INPUTS, MODEL_NAME, OUTPUTS
from glmspec.triton_repo.parameters import parameters_of

_AGAIN = "Make the model repository again: glmspec-build repo ENGINES -o REPO"
_MODEL_FILE = '''"""The Triton model: see glmspec.triton_repo.model."""

from glmspec.triton_repo.model import TritonPythonModel  # noqa: F401
'''


def write_repository(
    engines: Path,
    out: Path,
    drafter: str | None,
    speculate: bool,
    verification: str = "standard",
    adaptive: Adaptive | None = None,
) -> None:
    """Write the repository. The engines stay where they are: the model finds them relative to its own folder. drafter,
    speculate, verification, adaptive: as `Engine` takes them. Raises `GlmspecError`, and writes nothing, for engines
    that cannot be served so or an output that would replace something."""
    directory = EngineDirectory.open(engines)
    directory.check_runs()
    if adaptive and not (speculate and directory.choices):
        raise EngineError(f"{engines}: adaptive verification chooses among drafts, and there is no drafter.")
    if drafter is not None:
        drafter = directory.choose_drafter(drafter)
    with new_folder(out, REPOSITORY, [engines]) as folder:
        version = folder / MODEL_NAME / "1"
        version.mkdir(parents=True)
        place = (out / MODEL_NAME / "1").resolve()  # the final one, not the temporary one
        relative = os.path.relpath(engines.resolve(), place)
        parameters = {"engines": relative, **parameters_of(drafter, speculate, verification, adaptive, place)}
        write_bytes(folder / MODEL_NAME / "config.pbtxt", model_config(parameters).encode())
        write_bytes(version / "model.py", _MODEL_FILE.encode())
        engines_record = {"folder": relative, "sha256": sha256(engines / "config.json")}
        licences = directory.record.get("licenses", {})
        copy_files(engines, [file for licence in licences.values() for file in licence["files"]], folder)
        files = digests(folder, (path for path in folder.rglob("*") if path.is_file()))
        record = {"producer": producer(REPOSITORY), "engines": engines_record, "licenses": licences, "files": files}
        write_sealed(folder / "config.json", record)


def read_repository(folder: Path) -> dict[str, Any]:
    """A repository's record. Raises `GlmspecError` naming what changed of its files."""
    if kind_of(folder) != REPOSITORY:
        raise EngineError(f"{folder}: not a model repository. Make one: glmspec-build repo ENGINES -o REPO")
    shape = {"engines": {"folder": str, "sha256": str}, "files": dict}
    record = open_sealed(folder / "config.json", shape, _AGAIN)
    check_files(folder, record["files"], _AGAIN)
    return record


def open_repository(folder: Path) -> Path:
    """Where a repository's engines are. Raises `GlmspecError` naming what changed of the repository's files, or when
    the engines are others than it was made for."""
    record = read_repository(folder)
    engines = (folder / MODEL_NAME / "1" / record["engines"]["folder"]).resolve()
    check_digest(engines / "config.json", record["engines"]["sha256"], f"It is not what {folder} serves. {_AGAIN}")
    return engines


def model_config(parameters: dict[str, str]) -> str:
    """The text of config.pbtxt: one decoupled model, no batching by Triton (the engine packs requests itself)."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    message = model_config_pb2.ModelConfig  # pyright: ignore[reportAttributeAccessIssue]  (protobuf makes it at import)
    config = message(name=MODEL_NAME, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    config.instance_group.add(kind="KIND_CPU", count=1)
    for side, fields, optional in ((config.input, INPUTS, True), (config.output, OUTPUTS, False)):
        for field in fields.values():
            for name in field.names:
                entry = side.add(name=name, data_type=field.dtype, dims=field.dims)
                if optional:
                    entry.optional = True
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return text_format.MessageToString(config)
