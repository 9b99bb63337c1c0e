"""Compilation: a network and the sizes of its steps to a serialized TensorRT plan.

Needs no GPU with tensorrt_rtx (SM120). The plan holds no weights: they are inputs, so that plans are small, are built
anywhere and fit any checkpoint of that shape.

Every profile has a plan of its own, "generation" (blocks and single tokens) and "context" (anything, with chunks of
prompts), rather than one engine with two profiles: the indexer's heads are scored in as few goes, its segments in as
few pieces, as the profile allows. Keys and scores are a step's largest tensors and must stay countable in 32 bits;
plugins read keys in their pages and need pieces later.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from glmspec.build.kernel_list import name_layers
from glmspec.build.routes import set_build_route
from glmspec.core.errors import NetworkError
from glmspec.network.graph import Network
from glmspec.network.limits import Ranges


@dataclass(frozen=True)
class BuiltPlan:
    """plan: the serialized engine. log: what TensorRT said on the way. timing_cache: for the next build of something
    alike; empty where TensorRT has none (tensorrt_rtx). kernels: TensorRT's list of them (`kernel_list.py`), empty
    where it printed none. build_route: switches of its compiler (`routes.py`)."""

    plan: bytes
    log: tuple[str, ...]
    timing_cache: bytes
    kernels: tuple[str, ...]
    build_route: str


def build_plan(net: Network, ranges: Ranges, compute_capability: str, timing_cache: bytes = b"") -> BuiltPlan:
    """Compile. ranges: of every run-time size. compute_capability: such as "SM120"; TensorRT for a GPU machine builds
    for the GPU that is there. Raises `NetworkError` with the layer's module path."""
    config = net.builder.create_builder_config()
    _aim(net, config, compute_capability)
    route = set_build_route(config, compute_capability, net.backend.version)
    cache = None if _ahead_of_time(config) else config.create_timing_cache(timing_cache)
    if cache is not None:
        config.set_timing_cache(cache, False)
    name_layers(net)
    config.profiling_verbosity = net.api.ProfilingVerbosity.DETAILED
    net.backend.take_errors()
    net.backend.take_lines()
    net.backend.take_kernels()
    if _run_time_sizes(net) and config.add_optimization_profile(_profile(net, ranges)) < 0:
        raise NetworkError(f"{net.name}: TensorRT refuses the ranges of its inputs: {net.backend.take_errors()}")
    with _interruptible(net, config):
        plan = net.builder.build_serialized_network(net.definition, config)
    complaint = net.backend.take_errors()
    if plan is None:
        raise NetworkError(f"{net.name}: TensorRT could not build the network: {complaint or 'it gave no reason'}")
    kept = b"" if cache is None else bytes(config.get_timing_cache().serialize())
    return BuiltPlan(bytes(plan), tuple(net.backend.take_lines()), kept, tuple(net.backend.take_kernels()), route)


@contextmanager
def _interruptible(net: Network, config) -> Iterator[None]:
    """Stop the build on Ctrl-C as soon as TensorRT asks (seldom, in a large network), at once on a second one: Python's
    own exception would be raised, and lost, in whatever TensorRT calls of ours. Nothing is written meanwhile."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(net.api, "IProgressMonitor"):
        yield
        return
    pressed: list[int] = []

    class Monitor(net.api.IProgressMonitor):
        """Lets TensorRT ask whether to go on."""

        def phase_start(self, *_) -> None:
            """Nothing to do."""

        def phase_finish(self, *_) -> None:
            """Nothing to do."""

        def step_complete(self, *_) -> bool:
            """False stops the build."""
            return not pressed

    def press(number: int, _) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            os._exit(128 + number)

    monitor = Monitor()  # TensorRT does not keep it alive
    config.progress_monitor = monitor
    before = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        config.progress_monitor = None
    if pressed:
        raise KeyboardInterrupt


def _ahead_of_time(config) -> bool:
    """tensorrt_rtx: it builds for a GPU that need not be here."""
    return hasattr(config, "num_compute_capabilities")


def _aim(net: Network, config, compute_capability: str) -> None:
    """What the engine is for: which GPU, and whether its ranks talk to each other."""
    trt = net.api
    if _ahead_of_time(config):
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, compute_capability), 0)
        return
    collectives = getattr(trt.PreviewFeature, "MULTIDEVICE_RUNTIME_10_16", None)  # no preview in TensorRT 11
    if net.config.mapping.tp > 1 and collectives is not None:
        config.set_preview_feature(collectives, True)
    if net.config.plugins:  # some write in place
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


def _run_time_sizes(net: Network) -> bool:
    return any(isinstance(dim, str) for spec in net.contract().inputs for dim in spec.dims)


def _profile(net: Network, ranges: Ranges):
    """One profile over every run-time size."""
    profile = net.builder.create_optimization_profile()
    for spec in net.contract().inputs:
        if any(isinstance(dim, str) for dim in spec.dims):
            shapes = [tuple(d if isinstance(d, int) else ranges[d][bound] for d in spec.dims) for bound in range(3)]
            profile.set_shape(spec.name, *shapes)
    return profile
