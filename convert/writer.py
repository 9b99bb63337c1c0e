"""Writes the weights of a plan as safetensors parts: streamed, by several threads, resumable.

Every rank's weights are cut into the same parts at the same tensors. A part is written under a temporary name, every
task placing its rows where they belong, then synced, hashed, renamed and noted in the journal, in that order. A run
that dies leaves whole parts and a journal behind; the next one goes on from there and ends with the same bytes.

Memory: one task a worker (its matrices, at most a few times its own size), whatever the checkpoint's size.

Threads, not processes: the kernels (`quantize.py`, compiled by numba) and reads and writes release the GIL, nothing is
copied between workers, and one process is easier to bound in memory. Files are read with `pread` rather than mapped,
as mapped pages count as ours and would grow with the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glmspec.convert import formats
from glmspec.convert.formats import Matrix
from glmspec.convert.plan import Part, Task, Weight, needs_amax
from glmspec.convert.storage import StoredWeight
from glmspec.core.errors import CheckpointError
from glmspec.core.files import PARTIAL, sha256, sync, write_bytes
from glmspec.network.config import RankTensor

PART_BYTES = 1 << 31  # a part holds whole tensors up to this size, or one larger tensor
JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Run:
    """How to write. workers: threads. resume: go on from an interrupted run. advance: called, from any thread, with
    the bytes that were read from the checkpoint (or would have been, for parts that are there). device: where NVFP4
    is computed."""

    workers: int = 1
    resume: bool = False
    advance: Callable[[int], None] = lambda size: None
    device: str = "cpu"


@dataclass(frozen=True)
class FilePart:
    """Some weights of one rank in a file. outputs: (weight's place in the part, field) -> tensor and its offset."""

    file: str
    header: bytes
    offsets: dict[tuple[int, str], tuple[RankTensor, int]]
    size: int


def cut(weights: tuple[Weight, ...], ranks: int) -> list[tuple[Weight, ...]]:
    """Weights in parts of about PART_BYTES for the rank that holds most."""
    parts: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        size = max(sum(tensor.size for tensor in weight.outputs(rank).values()) for rank in range(ranks))
        if parts[-1] and filled + size > PART_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(weight)
        filled += size
    return [tuple(part) for part in parts]


def file_part(weights: tuple[Weight, ...], rank: int, file: str) -> FilePart:
    """The layout of one rank's part."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "producer": "glmspec"}}
    offsets, end = {}, 0
    for at, weight in enumerate(weights):
        for suffix, output in weight.outputs(rank).items():
            begin, end = end, end + output.size
            header[output.name] = {
                "dtype": output.dtype,
                "shape": list(output.shape),
                "data_offsets": [begin, end],
            }
            offsets[at, suffix] = (output, begin)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    placed = {key: (output, base + begin) for key, (output, begin) in offsets.items()}
    return FilePart(file, len(text).to_bytes(8, "little") + text, placed, base + end)


class Journal:
    """The parts that are whole, one JSON line each, synced before the next step counts on it."""

    def __init__(self, folder: Path, plan: str) -> None:
        self._path = folder / JOURNAL
        self.done: dict[str, dict[str, Any]] = {}
        self._plan = plan

    def begin(self) -> None:
        """A new run."""
        self._append({"plan": self._plan})

    def resume(self) -> None:
        """Take over what an earlier run of the same plan finished. Raises when the plan was another."""
        if not self._path.exists():
            return self.begin()
        lines = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break  # the run died while writing it
        if not lines:
            return self.begin()
        if lines[0].get("plan") != self._plan:
            raise CheckpointError(
                f"{self._path.parent}: left by a conversion of other files or with other options. "
                "Delete it, or convert with the same ones."
            )
        write_bytes(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        for line in lines[1:]:
            path = self._path.parent / line["file"]
            if path.exists() and path.stat().st_size == line["size"] and sha256(path) == line["sha256"]:
                self.done[line["file"]] = line

    def add(self, file: str, size: int, digest: str) -> None:
        """A part is whole and renamed."""
        self.done[file] = {"file": file, "size": size, "sha256": digest}
        self._append(self.done[file])

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            sync(file.fileno())


def write_parts(
    folder: Path,
    parts: list[tuple[Weight, ...]],
    names: list[list[str]],
    journal: Journal,
    run: Run,
) -> None:
    """Write every part that the journal lacks. names: by rank, the file of every part."""
    workers, advance = run.workers, run.advance
    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        closing: list[Future] = []
        for at, weights in enumerate(parts):
            ranks = [rank for rank in range(len(names)) if names[rank][at] not in journal.done]
            tasks = [(place, task) for place, weight in enumerate(weights) for task in weight.tasks]
            if not ranks:
                advance(sum(task.size for _, task in tasks))
                continue
            files = [_OpenPart(folder, file_part(weights, rank, names[rank][at]), rank) for rank in ranks]
            for file in files:
                file.write_inputs(weights)
            running = [pool.submit(_run, weights[place], place, task, files, run) for place, task in tasks]
            _collect(running)
            _collect(closing)  # one part is synced and hashed while the next is written
            closing = [pool.submit(file.close) for file in files]
            # After them in the pool's queue, and before the next part's: one at a time.
            closing.append(pool.submit(lambda files=files, closing=tuple(closing): _note(journal, files, closing)))
        _collect(closing)


def _note(journal: Journal, files: list[_OpenPart], closing: tuple[Future, ...]) -> None:
    for file, future in zip(files, closing, strict=True):
        journal.add(file.part.file, file.part.size, future.result())


def _collect(futures: list[Future]) -> None:
    """Wait for all; raise the first failure, after the rest have stopped."""
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


class _OpenPart:
    """A part being written under its temporary name."""

    def __init__(self, folder: Path, part: FilePart, rank: int) -> None:
        self.part, self.rank = part, rank
        self._path = folder / part.file
        self._temporary = folder / f".{part.file}.{PARTIAL}"
        self._descriptor = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.ftruncate(self._descriptor, part.size)
        self._write(part.header, 0)

    def write_inputs(self, weights: tuple[Weight, ...]) -> None:
        """The activation scales, known beforehand."""
        for at, weight in enumerate(weights):
            if weight.inputs is not None:
                units = weight.layout.box(self.rank)[0]
                values = np.array(weight.inputs, np.float32)[units.start : units.stop]
                self._write(values.tobytes(), self.part.offsets[at, "input_scale"][1])

    def place(self, weight: Weight, at: int, part: Part, matrix: Matrix) -> None:
        """Write what this rank takes of a matrix."""
        for suffix, offset, rows in weight.places(self.rank, part, matrix):
            self._write(rows.data.cast("B"), self.part.offsets[at, suffix][1] + offset)

    def close(self) -> str:
        """Sync, hash and rename; the digest."""
        sync(self._descriptor)
        os.close(self._descriptor)
        digest = sha256(self._temporary)
        self._temporary.rename(self._path)
        return digest

    def _write(self, data: Any, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written


def _run(weight: Weight, at: int, task: Task, files: list[_OpenPart], run: Run) -> None:
    for part, matrix in matrices(weight, task, run.device):
        for file in files:
            file.place(weight, at, part, matrix)
    run.advance(task.size)


def matrices(weight: Weight, task: Task, device: str = "cpu") -> Iterator[tuple[Part, Matrix]]:
    """Make a task's matrices in the weight's format. Raises `CheckpointError` for values that are not finite."""
    read = [part.stored.read() for part in task.parts]
    for part, matrix in zip(task.parts, read, strict=True):
        if not formats.is_finite(matrix):
            raise CheckpointError(
                f"{part.stored.source.folder}: tensor {part.stored.name}: holds values or scales that are not finite, "
                "or a scale of zero."
            )
    if task.make is not None:
        matrix = task.make(read[0])
        for unit in range(weight.layout.units):
            rows = slice(unit * weight.layout.rows, (unit + 1) * weight.layout.rows)
            yield Part(unit, 0, task.parts[0].stored), Matrix(matrix.format, {"": matrix.fields[""][rows]})
        return
    largest = 0.0
    if needs_amax(task, weight.format):
        sizes = [_amax(part.stored, matrix) for part, matrix in zip(task.parts, read, strict=True)]
        largest = max(sizes + [_amax(share, share.read()) for share in task.shares])
    for part, matrix in zip(task.parts, read, strict=True):
        yield part, _padded(weight, part, formats.convert(matrix, weight.format, largest, device))


def _amax(stored: StoredWeight, matrix: Matrix) -> float:
    largest = formats.amax(matrix)
    if np.isnan(largest):
        raise CheckpointError(f"{stored.source.folder}: tensor {stored.name}: holds values that are not finite.")
    return largest


def _padded(weight: Weight, part: Part, matrix: Matrix) -> Matrix:
    """The last rows of a vocabulary, with copies of the last one for the padding: a copy of an earlier row never wins
    an argmax whose ties go to the lowest index, and the sampler cuts it off."""
    layout = weight.layout
    missing = layout.padded - layout.rows
    if not missing or part.row + matrix.shape[0] < layout.rows:
        return matrix
    rows = matrix.fields[""]
    return Matrix(matrix.format, {"": np.concatenate([rows, np.repeat(rows[-1:], missing, 0)])})
