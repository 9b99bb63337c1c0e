"""Tensor-parallel ranks in lockstep: a thread a rank, collectives really carried out.

Ranks share one network; their weights, tables and caches differ. At a collective every rank hands in its tensor and
waits for the others; that all of them are at the same layer is checked, so a rank that skips one is an error and not a
hang. Sums are taken in the order of the ranks: the same on every rank, and from run to run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from glmspec.core.errors import NetworkError
from glmspec.network.reader import Graph
from glmspec.runtime.executor.executor import ReferenceExecutor, Tensors


class LockstepExecutor:
    """All ranks of a network. weights, caches: by rank. options: as for `ReferenceExecutor`.

    Raises `NetworkError` when ranks disagree: about the layer they are at, or about an output of the step.
    """

    def __init__(self, graph: Graph, weights: Sequence[Tensors], caches: Sequence[Tensors], **options: Any) -> None:
        self.graph = graph
        self._rendezvous = Rendezvous(len(weights))
        self.ranks = [
            ReferenceExecutor(graph, *bound, ranks=RankCollectives(self._rendezvous, rank), **options)
            for rank, bound in enumerate(zip(weights, caches, strict=True))
        ]
        self._threads = ThreadPoolExecutor(len(self.ranks), thread_name_prefix=graph.name)

    @property
    def program(self) -> Any:
        """The program every rank runs."""
        return self.ranks[0].program

    def run(self, inputs: Tensors) -> Tensors:
        """One step of all ranks; the first one's outputs, which all have."""
        self._rendezvous.reset()
        steps = [self._threads.submit(self._run, rank, inputs) for rank in self.ranks]
        errors = [error for error in (step.exception() for step in steps) if error]
        if errors:  # a rank that only waited in vain says less than the one that failed
            causes = [error for error in errors if not isinstance(error.__cause__, threading.BrokenBarrierError)]
            raise (causes or errors)[0]
        first, *others = (step.result() for step in steps)
        for rank, other in enumerate(others, 1):
            for name, tensor in first.items():
                if not _same(tensor, other[name]):
                    raise NetworkError(f"{self.graph.name}: output {name}: rank {rank} and rank 0 disagree.")
        return first

    def _run(self, rank: ReferenceExecutor, inputs: Tensors) -> Tensors:
        try:
            return rank.run(inputs)
        except Exception:
            self._rendezvous.abort()
            raise


class Rendezvous:
    """Lets ranks meet at collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._brought: list[tuple[str, torch.Tensor | None]] = [("", None)] * size

    def reset(self) -> None:
        """Forget an earlier failure."""
        if self._barrier.broken:
            self._barrier = threading.Barrier(self.size)

    def abort(self) -> None:
        """Let nobody wait for a rank that failed."""
        self._barrier.abort()

    def exchange(self, rank: int, layer: str, x: torch.Tensor, combine: Callable) -> torch.Tensor:
        """Waits for all ranks, and combines their tensors, in the ranks' order."""
        self._brought[rank] = (layer, x)
        self._barrier.wait()
        layers = {name for name, _ in self._brought}
        if len(layers) > 1:
            raise NetworkError(f"ranks meet at different layers: {', '.join(sorted(layers))}")
        combined = combine([tensor for _, tensor in self._brought])
        self._barrier.wait()  # nobody brings the next tensor before all have read this one
        return combined


class RankCollectives:
    """A rank's collectives, as the generated code calls them."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous, self._rank = rendezvous, rank

    def all_reduce(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, added up in float32, in x's dtype."""
        return self._rendezvous.exchange(self._rank, layer, x, _sum)

    def all_gather(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """All ranks' tensors, one after the other along the first axis."""
        return self._rendezvous.exchange(self._rank, layer, x, torch.cat)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN in the same places is the same: it is an error of its own, and not the ranks' disagreement."""
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
