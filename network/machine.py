"""This machine's GPU, and the TensorRT that is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """compute_capability: of its GPU, such as "SM100". version: of a TensorRT package. None: there is none."""

    compute_capability: str | None
    version: str | None


def this_machine(package: str) -> Machine:
    """This machine. package: "tensorrt" or "tensorrt_rtx"."""
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
