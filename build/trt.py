"""The one place that picks TensorRT and turns its logger into exceptions.

`tensorrt` (a GPU machine: SM90, SM100, SM103) and `tensorrt_rtx` (any machine:
ahead-of-time builds for SM120) share one Python network API, so everything above
this file is written once against `api()`.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from glmspec.build.errors import MissingCapability

# TensorRT probes for a driver after every error; on a machine without one that adds a line that explains nothing.
_NOISE = ("cudaError 35", "CUDA driver version is insufficient")


@functools.cache
def api(package: str | None = None) -> ModuleType:
    """The TensorRT module. package: "tensorrt" or "tensorrt_rtx"; None takes the first that imports."""
    wanted = [package] if package else ["tensorrt_rtx", "tensorrt"]
    for name in wanted:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    hint = "pip install tensorrt" if package == "tensorrt" else "pip install tensorrt-rtx"
    raise MissingCapability(f"{' or '.join(wanted)} cannot be imported on this machine. Try: {hint}")


@functools.cache
def logger() -> Any:
    """The process's TensorRT logger (TensorRT keeps the first one it is given): it remembers errors."""
    trt = api()

    class ErrorLog(trt.ILogger):
        """Keeps error lines until somebody takes them; drops everything below."""

        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR and not any(noise in message for noise in _NOISE):
                self.lines.append(message)

        def take(self) -> str:
            """The errors since the last call, joined."""
            text = "\n".join(self.lines)
            self.lines.clear()
            return text

    return ErrorLog()


def dtype(name: str) -> Any:
    """TensorRT's data type for a torch-style name such as "float32" or "bfloat16"."""
    trt = api()
    return {
        "float32": trt.DataType.FLOAT,
        "bfloat16": trt.DataType.BF16,
        "float16": trt.DataType.HALF,
        "int32": trt.DataType.INT32,
        "int64": trt.DataType.INT64,
        "bool": trt.DataType.BOOL,
    }[name]


def dtype_name(value: Any) -> str:
    """The torch-style name of a TensorRT data type."""
    trt = api()
    return {
        trt.DataType.FLOAT: "float32",
        trt.DataType.BF16: "bfloat16",
        trt.DataType.HALF: "float16",
        trt.DataType.INT32: "int32",
        trt.DataType.INT64: "int64",
        trt.DataType.BOOL: "bool",
    }[value]
