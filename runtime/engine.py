"""`Engine`: an engine directory loaded and answering requests, several at a time."""

from __future__ import annotations

from collections import abc
from pathlib import Path
from typing import Any

import torch

from glmspec.convert.checkpoint import Checkpoint
from glmspec.core.errors import EngineError
from glmspec.core.files import sha256
from glmspec.core.progress import Progress
from glmspec.models.acceptance import DraftProbs, acceptance_of
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.illegal import IllegalIds
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.mtp import Mtp
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import CONTEXT, EngineLimits
from glmspec.runtime.accept import BLOCK, STANDARD, Acceptance
from glmspec.runtime.adaptive import Adaptive, AdaptiveVerification, prepare
from glmspec.runtime.adjustments import Adjustments
from glmspec.runtime.cost_table import MeasuredOn
from glmspec.runtime.directory import EngineDirectory
from glmspec.runtime.ending import Ending
from glmspec.runtime.executor import Tensors
from glmspec.runtime.model import Model
from glmspec.runtime.profile import LoadedModels
from glmspec.runtime.propose import BlockDrafter, Drafter
from glmspec.runtime.propose_mtp import MtpDrafter
from glmspec.runtime.request import Answer, Delta, Request
from glmspec.runtime.scheduler import Scheduler
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.speculate import SpeculativeLoop
from glmspec.runtime.stats import SpecStats
from glmspec.runtime.text import Tokenizer

_SMALL_MODEL = 2048  # hidden size up to which threads cost more than they give


class Engine:
    """Add requests, then `step` until they finish. Not thread-safe: one thread owns it.

    drafter: name of the drafter to use (None takes the directory's default, if it has any). speculate: False
    loads no drafter. verification: how drafts that were drawn are verified, "standard" or "block". adaptive: choose
    every step how many drafts are verified; None verifies them all. progress: told what is being loaded. Raises
    `EngineError` for a directory that does not fit this version or its weights, or has no drafter for `adaptive`.
    A small model sets torch to one thread, for the whole process: more of them make it slower.
    """

    def __init__(
        self,
        folder: Path,
        drafter: str | None = None,
        speculate: bool = True,
        *,
        verification: str = STANDARD,
        adaptive: Adaptive | None = None,
        progress: Progress | None = None,
    ) -> None:
        if verification not in (STANDARD, BLOCK):
            raise EngineError(f"verification: found {verification!r}, expected {STANDARD} or {BLOCK}.")
        self.verification, self.adaptive = verification, adaptive
        self.directory = EngineDirectory.open(folder)
        self.directory.check_runs()
        self.limits, self.end_ids = self.directory.limits, self.directory.end_ids
        self.drafter_name = self.directory.choose_drafter(drafter) if speculate else None
        self.tokenizer = Tokenizer(self.directory.tokenizer) if self.directory.tokenizer else None
        self._doing = (progress or Progress()).doing
        self._doing("verifier")
        verifier = self.directory.checkpoint(self.directory.verifier)
        if verifier.config.hidden_size <= _SMALL_MODEL:
            torch.set_num_threads(1)
        self.verifier = _model(verifier, self.directory.model(self.directory.verifier))
        self.drafter = self._load_drafter(self.drafter_name) if self.drafter_name else None
        num_drafts = self.drafter.num_drafts if self.drafter else 0
        self.scheduler = Scheduler(self.limits, num_drafts, self.drafter.ring_pages if self.drafter else 0)
        names = self.directory.acceptance_for(self.drafter_name)
        acceptance = Acceptance({name: self._load_acceptance(name) for name in names}, self.limits, verification)
        chosen = self._prepare(adaptive) if adaptive else None
        self.loop = SpeculativeLoop(self.verifier, self.drafter, acceptance, self.limits, chosen)
        self.stats = SpecStats(num_drafts)

    def _load_drafter(self, name: str) -> Drafter:
        self._doing(name)
        record, checkpoint = self.directory.model(name), self.directory.checkpoint(name)
        if isinstance(checkpoint.config, VerifierConfig):  # the MTP module; embedding and head are the verifier's
            build = record["build_config"]
            network = Mtp(checkpoint.config, sampled=build["sampled"], illegal=self.directory.illegal)
            model = _model(checkpoint, record, self.verifier.weights, network)
            return MtpDrafter(model, self.limits, build["num_drafts"])
        shared = {name: self._shared(source) for name, source in checkpoint.shared.items()}
        return BlockDrafter(_model(checkpoint, record, [shared]), self.limits)

    def _prepare(self, adaptive: Adaptive) -> AdaptiveVerification:
        if self.drafter is None or self.drafter_name is None:
            raise EngineError(
                f"{self.directory.folder}: adaptive verification chooses among drafts, and there is no drafter. "
                "Leave it out, or use engines with a drafter."
            )
        self._doing("measuring steps")
        measured_on = MeasuredOn(sha256(self.directory.folder / "config.json"), self.drafter_name)
        models = LoadedModels(self.verifier, self.drafter, self.limits, self.scheduler.pool, self.scheduler.rings)
        return prepare(adaptive, models, measured_on)

    def _load_acceptance(self, name: str) -> Model:
        """A network on logits: no weights, and one rank."""
        record = self.directory.model(name)
        q = record["build_config"]["q"]
        network = acceptance_of(self.verifier.config, name, DraftProbs(**q) if q else None)
        net_config = NetworkConfig(compute=record["build_config"]["compute"])
        return Model(network, self.limits, net_config, [{}], network_sha256=record["networks"][CONTEXT]["sha256"])

    def _shared(self, name: str) -> torch.Tensor:
        """A whole weight of the verifier, in the compute dtype: on one rank its own tensor and no second copy."""
        parts = [weights[name] for weights in self.verifier.weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts)[: self.verifier.config.vocab_size]

    @property
    def busy(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that does not fit the verifier, the limits or the tokenizer."""
        vocab_size, has_text = self.verifier.config.vocab_size, self.tokenizer is not None
        request.check(vocab_size, self.limits.max_model_len, has_text, self.directory.illegal)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises `RequestError` for one that cannot be served."""
        self.check(request)
        max_tokens = min(request.max_tokens, self.limits.max_model_len - len(request.prompt_ids))
        ending = Ending(request, self.end_ids, self.tokenizer.stream() if self.tokenizer else None, max_tokens)
        request.sampling.check_choice(self.verifier.config.vocab_size - len(self.directory.illegal), ending.tokens)
        adjustments = None
        if request.sampling.adjusts:
            adjustments = Adjustments(request.sampling, request.prompt_ids, ending.tokens)
        stats = SpecStats(self.stats.num_spec_tokens)
        max_positions = self.drafter.max_positions if self.drafter else 0
        sequence = Sequence(request, ending, len(request.prompt_ids) + max_tokens, stats, adjustments, max_positions)
        self.scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a request; its pages are free at once."""
        self.scheduler.abort(sequence)

    def step(self) -> list[tuple[Sequence, Delta]]:
        """Run one step. Returns the sequences whose answers gained something, and what they gained."""
        shares = self.scheduler.plan()
        if not shares:
            return []
        try:
            deltas = self.loop.step(shares)
        finally:
            self.scheduler.retire()  # even when the step fails: answers may have ended in it
        gained = [(share.sequence, delta) for share, delta in zip(shares, deltas, strict=True) if delta is not None]
        for sequence, _ in gained:
            if sequence.finished:
                self.stats.add(sequence.stats)
        return gained

    def answer(self, request: Request) -> tuple[Answer, SpecStats]:
        """Answer one request alone."""
        sequence, answer = self.add(request), Answer()
        while self.busy:
            for _, delta in self.step():
                answer.add(delta)
        return answer, sequence.stats


def _model(
    checkpoint: Checkpoint,
    record: dict[str, Any],
    shared: abc.Sequence[Tensors] | None = None,
    network: Mtp | None = None,
) -> Model:
    """Loads a model. record: its own config.json. shared: weights of other models to take, by rank. network: the one to
    author when it is not the config's own."""
    build, config, ranks = record["build_config"], checkpoint.config, range(checkpoint.mapping.tp)
    if isinstance(config, DrafterConfig):
        config = config.chosen(build["drafter_window"], build["num_speculative_tokens"], build["markov_top_k"])
    taps, outputs = tuple(build["taps"]), {name: build[name] for name in ("hidden", "sampled")}
    return Model(
        network or model_of(config, taps, **outputs, illegal=IllegalIds.from_json(build["illegal_ids"])),
        EngineLimits(**build["limits"]),
        checkpoint.net_config(build["compute"]),
        [checkpoint.tensors(rank) | (shared[rank] if shared else {}) for rank in ranks],
        network_sha256=record["networks"][CONTEXT]["sha256"],
    )
