"""The one place that picks TensorRT and turns its logger into exceptions.

`tensorrt` (a GPU machine: SM90, SM100, SM103) and `tensorrt_rtx` (any machine: ahead-of-time builds for
SM120) share one Python network API, so everything above this file is written once against a `Backend`.
"""

from __future__ import annotations

import functools
import gc
import importlib
from types import ModuleType
from typing import Any

from glmspec.core.dtypes import DTYPES
from glmspec.core.errors import MissingCapability

# TensorRT probes for a driver after every error; on a machine without one that adds a line that explains nothing.
_NOISE = ("cudaError 35", "CUDA driver version is insufficient")
_MAX_LINES = 10_000  # remarks kept between two builds
DATA_TYPES = {name: one.data_type for name, one in DTYPES.items() if one.data_type}  # torch-style names -> DataType's


class Backend:
    """A TensorRT package, its logger and its names for data types."""

    def __init__(self, module: ModuleType) -> None:
        self.api = module
        self.package = module.__name__
        self.version: str = module.__version__
        self.errors: list[str] = []  # error lines nobody has taken yet
        self.lines: list[str] = []  # warnings and remarks, likewise
        self.kernels: list[str] = []  # of what was built last, a line each
        self.logger = _logger(module, self.errors, self.lines, self.kernels)
        self._dtypes = {name: getattr(module.DataType, theirs) for name, theirs in DATA_TYPES.items()}
        self._names = {value: name for name, value in self._dtypes.items()}

    def take_errors(self) -> str:
        """The error lines since the last call, joined."""
        text = "\n".join(self.errors)
        self.errors.clear()
        return text

    def take_lines(self) -> list[str]:
        """Warnings and remarks since the last call."""
        lines = list(self.lines)
        self.lines.clear()
        return lines

    def take_kernels(self) -> list[str]:
        """The list of kernels since the last call, a line each."""
        kernels = list(self.kernels)
        self.kernels.clear()
        return kernels

    def builder(self) -> Any:
        """A fresh builder. Making one logs under a lock that the end of another one wants, and a garbage collection may
        begin in the logger and end one: so none begins meanwhile."""
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self.api.Builder(self.logger)
        finally:
            if collecting:
                gc.enable()

    def dtype(self, name: str) -> Any:
        """TensorRT's data type for a torch-style name such as "float32"."""
        return self._dtypes[name]

    def dtype_name(self, value: Any) -> str:
        """The torch-style name of a TensorRT data type."""
        return self._names[value]


@functools.cache
def backend(package: str | None = None) -> Backend:
    """A TensorRT package, "tensorrt" or "tensorrt_rtx"; None takes the first that imports. One logger a package
    and process, because TensorRT keeps the first it is given. Raises `MissingCapability` when it is not there."""
    for name in [package] if package else ["tensorrt_rtx", "tensorrt"]:
        try:
            return Backend(importlib.import_module(name))
        except ImportError:
            continue
    install = (package or "tensorrt_rtx").replace("_", "-")
    raise MissingCapability(f"{package or 'tensorrt_rtx'} cannot be imported on this machine (pip install {install}).")


def _logger(module: ModuleType, errors: list[str], lines: list[str], kernels: list[str]) -> Any:
    severity = module.ILogger.Severity

    class Log(module.ILogger):
        """Keeps errors, warnings, remarks and the list of kernels; drops what else is of a lower level."""

        def log(self, level: Any, message: str) -> None:
            if any(noise in message for noise in _NOISE):
                return
            if level <= severity.ERROR:
                errors.append(message)
            elif level <= severity.INFO and len(lines) < _MAX_LINES:
                lines.append(f"{str(level).rpartition('.')[2]}: {message}")
            elif ", LayerType: " in message:
                kernels.extend(line for line in message.splitlines() if line.startswith("Name: "))

    return Log()
