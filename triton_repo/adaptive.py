"""Settings of adaptive verification as parameters of the Triton model: strings, written and read here alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from glmspec.runtime.adaptive import Adaptive

_ON, _THRESHOLD, _COSTS, _TEMPERATURES = (
    "adaptive_verification",
    "adaptive_threshold",
    "cost_table",
    "confidence_temperatures",
)


def parameters_of(settings: Adaptive | None, version_folder: Path) -> dict[str, str]:
    """version_folder: from which the cost table's place is told. The temperatures themselves are written down."""
    if settings is None:
        return {_ON: "false"}
    costs = os.path.relpath(settings.costs.resolve(), version_folder) if isinstance(settings.costs, Path) else ""
    temperatures = json.dumps(settings.temperatures) if settings.temperatures else ""
    return {_ON: "true", _THRESHOLD: repr(settings.threshold), _COSTS: costs, _TEMPERATURES: temperatures}


def settings_of(parameters: Mapping[str, str], version_folder: Path) -> Adaptive | None:
    """The inverse. Repositories of versions that had no such parameters verify all drafts."""
    if parameters.get(_ON) != "true":
        return None
    costs, temperatures = parameters[_COSTS], parameters[_TEMPERATURES]
    return Adaptive(
        threshold=float(parameters[_THRESHOLD]),
        costs=(version_folder / costs).resolve() if costs else None,
        temperatures=tuple(json.loads(temperatures)) if temperatures else None,
    )
