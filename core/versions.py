"""The versions of what this package works with, for logs and reports."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("glmspec", "torch", "triton", "tensorrt", "tensorrt-rtx", "transformers", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """By package, Python first; None for one that is not installed. Nothing is imported for it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
