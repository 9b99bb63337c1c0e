"""What the stages look at: a deployment, and its networks, each authored and read back once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from glmspec.build.deployment import Deployment
from glmspec.build.member import Member
from glmspec.build.memory import MemoryPlan, greatest_steps, plan_memory, with_pool
from glmspec.build.target import PROXY_PACKAGE
from glmspec.build.validate.report import Fault
from glmspec.core.errors import MissingCapability
from glmspec.network.contract import Contract
from glmspec.network.reader import Graph, read
from glmspec.network.trt import Backend, backend


@dataclass(frozen=True)
class StageResult:
    """What a stage did (facts; numbers: the same for programs) and found."""

    facts: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Authored:
    """A network read back."""

    graph: Graph
    contract: Contract
    seconds: float


@dataclass
class Case:
    """A deployment under validation. tick: called as long work goes on, with what is being done. steps: every member's
    network for the greatest step, where somebody has authored them already."""

    deployment: Deployment
    tick: Callable[[str], None] = lambda what: None
    steps: list[Graph] | None = None
    records: list[tuple[Any, dict[str, Any] | str]] | None = None  # of stage "build", for every network it compiled
    compiling: dict[str, float] = field(default_factory=dict)  # networks built and known, layers, seconds
    _authored: dict[tuple[str, str], Authored] = field(default_factory=dict)

    @cached_property
    def backend(self) -> Backend:
        """The target's TensorRT where it is here, else the proxy: both author the same networks."""
        package = self.deployment.target.package
        try:
            return backend(package)
        except MissingCapability:
            return backend(PROXY_PACKAGE)

    @cached_property
    def memory(self) -> MemoryPlan:
        """The memory plan. Raises `ConfigError` when nothing fits."""
        return plan_memory(self.deployment, self.greatest)

    @cached_property
    def planned(self) -> Deployment:
        """The deployment with the pool of pages that fits its GPU."""
        return with_pool(self.deployment, self.memory)

    @cached_property
    def greatest(self) -> list[Graph]:
        """Every member's network for the greatest step."""
        return self.steps or greatest_steps(self.deployment, self.backend)

    def networks(self) -> Iterator[tuple[Member, str, Authored]]:
        """Every member's network for every profile, as the target will run it."""
        for member in self.deployment.members:
            for profile in self.deployment.profiles(member):
                yield member, profile, self.authored(member, profile)

    def authored(self, member: Member, profile: str) -> Authored:
        """One network. Raises `NetworkError` with the layer's module path."""
        key = (member.name, profile)
        if key not in self._authored:
            self.tick(f"authoring {member.name}, {profile}")
            start = time.perf_counter()
            net = self.deployment.author(member, profile, self.backend)
            seconds = time.perf_counter() - start
            self._authored[key] = Authored(read(net.definition, net.backend), net.contract(), seconds)
        return self._authored[key]
