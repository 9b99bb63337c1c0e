"""The versions of what this package works with, for logs and reports."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("glmspec", "torch", "triton", "tensorrt", "tensorrt-rtx", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """By package, Python first; None for one that is not installed. Nothing is imported for it."""
    by_package: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            by_package[name] = None
    return by_package
