"""What this machine can do: its GPU, and the TensorRT that is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from glmspec.build.target import PROXY_PACKAGE, Target
from glmspec.core.errors import EngineError, MissingCapability
from glmspec.network.trt import Backend, backend


@dataclass(frozen=True)
class Machine:
    """compute_capability: of its GPU, such as "SM100". version: of a TensorRT package. None: there is none."""

    compute_capability: str | None
    version: str | None


def this_machine(package: str) -> Machine:
    """What is here. package: "tensorrt" or "tensorrt_rtx"."""
    import torch

    capability = None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        capability = f"SM{major}{minor}"
    try:
        version = importlib.import_module(package).__version__
    except ImportError:
        version = None
    return Machine(capability, version)


def compiler_for(target: Target) -> Backend | None:
    """The TensorRT that compiles for the target on this machine; None when it is not here, or its GPU is not.
    Raises `EngineError` when the GPU is another one, `MissingCapability` when no TensorRT at all is here."""
    if target.package in (None, PROXY_PACKAGE):
        try:
            return backend(target.package)
        except MissingCapability as error:
            raise MissingCapability(f"--target {target.name} ({target.description}): {error}") from None
    machine = this_machine(target.package)
    if machine.version is None or machine.compute_capability is None:
        return None
    if machine.compute_capability != target.compute_capability:
        raise EngineError(
            f"--target {target.name}: needs a GPU of {target.compute_capability}, and this machine's is "
            f"{machine.compute_capability}. Build where that GPU is, or choose another target."
        )
    return backend(target.package)
