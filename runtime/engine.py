"""`Engine`: an engine directory loaded and answering requests, several at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from glmspec.build.configs.fields import read_json
from glmspec.build.configs.limits import EngineLimits
from glmspec.build.errors import EngineError, MissingCapability
from glmspec.convert.checkpoint import Checkpoint, read_checkpoint
from glmspec.convert.files import sha256
from glmspec.runtime.ending import Ending
from glmspec.runtime.model import Model
from glmspec.runtime.request import Answer, Delta, Request
from glmspec.runtime.scheduler import Scheduler
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.speculate import SpeculativeLoop
from glmspec.runtime.stats import SpecStats
from glmspec.runtime.text import Tokenizer

_HASHED_AT_LOAD = 1 << 30  # bytes up to which weights are hashed again when they are loaded
_SMALL_MODEL = 2048  # hidden size up to which threads cost more than they give


class Engine:
    """Add requests, then `step` until they finish. Not thread-safe: one thread owns it.

    drafter: name of the drafter to use (None takes the directory's first, if it has any). speculate: False
    loads no drafter. Raises `EngineError` for a directory that does not fit this version or its weights.
    """

    def __init__(self, folder: Path, drafter: str | None = None, speculate: bool = True) -> None:
        self.folder = folder
        self.record = _directory(folder)
        self.limits = EngineLimits(**self.record["limits"])
        self.end_ids: tuple[int, ...] = tuple(self.record["eos_token_ids"])
        self.drafter_name = _choose(self.record, drafter, folder) if speculate else None
        self.tokenizer = Tokenizer(folder / self.record["tokenizer"]) if self.record["tokenizer"] else None
        verifier, config = _checkpoint(folder, self.record["verifier"])
        if verifier.config.hidden_size <= _SMALL_MODEL:
            torch.set_num_threads(1)
        weights = verifier.load()
        self.verifier = _model(verifier, config, weights)
        self.drafter = self._load_drafter() if self.drafter_name else None
        num_drafts = self.drafter.config.num_drafts if self.drafter else 0
        reach = self.drafter.config.max_position_embeddings if self.drafter else 0
        self.scheduler = Scheduler(self.limits, num_drafts, reach)
        self.loop = SpeculativeLoop(self.verifier, self.drafter, self.limits)
        self.stats = SpecStats(num_drafts)

    def _load_drafter(self) -> Model:
        checkpoint, config = _checkpoint(self.folder, self.drafter_name)
        # Shared weights are the verifier's own tensors, already in the compute dtype: no second copy.
        shared = {name: self.verifier.weights[source] for name, source in checkpoint.shared.items()}
        return _model(checkpoint, config, checkpoint.load() | shared)

    @property
    def busy(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises `RequestError` for one that cannot be served."""
        config, limit = self.verifier.config, self.limits.max_model_len
        request.check(config.vocab_size, limit, self.tokenizer is not None)
        most = min(request.max_tokens, limit - len(request.prompt_ids))
        text = self.tokenizer.stream() if self.tokenizer else None
        ending = Ending(request, self.end_ids, text, most)
        sequence = Sequence(request, ending, len(request.prompt_ids) + most, SpecStats(self.stats.num_spec_tokens))
        self.scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a request; its pages are free at once."""
        self.scheduler.abort(sequence)

    def step(self) -> list[tuple[Sequence, Delta]]:
        """Run one step; what every request that gained something gained."""
        turns = self.scheduler.plan()
        if not turns:
            return []
        try:
            deltas = self.loop.step(turns)
        finally:
            self.scheduler.retire()  # even when the step fails: answers may have ended in it
        gained = [(turn.sequence, delta) for turn, delta in zip(turns, deltas, strict=True) if delta is not None]
        for sequence, _ in gained:
            if sequence.finished:
                self.stats.add(sequence.stats)
        return gained

    def stream(self, request: Request) -> Iterator[tuple[Sequence, Delta]]:
        """Answer one request alone, step by step."""
        self.add(request)
        while self.busy:
            yield from self.step()

    def answer(self, request: Request) -> tuple[Answer, SpecStats]:
        """Answer one request alone."""
        answer, stats = Answer(), SpecStats(self.stats.num_spec_tokens)
        for sequence, delta in self.stream(request):
            answer.add(delta)
            stats = sequence.stats
        return answer, stats


def _directory(folder: Path) -> dict[str, Any]:
    record = read_json(folder / "config.json")
    if "target" not in record or "limits" not in record:
        raise EngineError(
            f"{folder}: not an engine directory. Make one: glmspec-build engine --verifier DIR -o {folder}"
        )
    if record["target"] != "cpu":
        raise MissingCapability(
            f"{folder}: built for {record['target']}, and this version runs engines for the target cpu only. "
            "Build with --target cpu to generate or serve on this machine."
        )
    for name, digest in record["files"].items():
        if not (folder / name).exists():
            raise EngineError(f"{folder / name}: missing. Build the engine directory again.")
        if sha256(folder / name) != digest:
            raise EngineError(f"{folder / name}: changed since the engine directory was built. Build it again.")
        built = read_json(folder / name)["build_config"]
        if any(built[limit] != value for limit, value in record["limits"].items()):
            raise EngineError(f"{folder}/config.json: limits: found {record['limits']}, {name} was built for {built}.")
    return record


def _choose(record: dict[str, Any], name: str | None, folder: Path) -> str | None:
    """The drafter called `name`, or whose source folder was called so."""
    drafters = record["drafters"]
    if name is None:
        return drafters[0]["name"] if drafters else None
    for key in ("name", "source"):
        for drafter in drafters:
            if drafter[key] == name:
                return drafter["name"]
    known = ", ".join(drafter["name"] for drafter in drafters) or "none"
    raise EngineError(f"{folder}: drafter {name!r}: no such drafter in this engine directory. It has: {known}.")


def _checkpoint(folder: Path, name: str) -> tuple[Checkpoint, dict[str, Any]]:
    """A model's weights and its engine config. Raises when the weights are not those it was built for."""
    config = read_json(folder / name / "config.json")
    checkpoint = read_checkpoint((folder / name / config["weights"]["folder"]).resolve())
    path, expected = checkpoint.folder / checkpoint.record["weights"]["file"], config["weights"]["sha256"]
    if checkpoint.weights_sha256 != expected or (path.stat().st_size <= _HASHED_AT_LOAD and sha256(path) != expected):
        raise EngineError(
            f"{checkpoint.folder}: these are not the weights {folder / name} was built for "
            f"({path.name}: expected {expected[:12]}). Build the engine again."
        )
    return checkpoint, config


def _model(checkpoint: Checkpoint, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Model:
    build = dict(config["build_config"])
    compute, taps = build.pop("compute"), tuple(build.pop("taps"))
    return Model(
        checkpoint.config,
        EngineLimits(**build),
        compute,
        weights,
        taps=taps,
        network_sha256=config["network"]["sha256"],
    )
