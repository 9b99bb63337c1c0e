"""What an engine is loaded with, as parameters of the Triton model: strings, written and read here alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glmspec.runtime.adaptive import Adaptive

_DRAFTER, _SPECULATE, _VERIFICATION = "drafter", "speculate", "verification"
_ADAPTIVE, _THRESHOLD = "adaptive_verification", "adaptive_threshold"
_COSTS, _TEMPERATURES = "cost_table", "confidence_temperatures"


def parameters_of(
    drafter: str | None, speculate: bool, verification: str, adaptive: Adaptive | None, version_folder: Path
) -> dict[str, str]:
    """version_folder: from which the cost table's place is told. The temperatures themselves are written down."""
    parameters = {
        _DRAFTER: drafter or "",
        _SPECULATE: json.dumps(speculate),
        _VERIFICATION: verification,
        _ADAPTIVE: json.dumps(adaptive is not None),
    }
    if adaptive is not None:
        costs = os.path.relpath(adaptive.costs.resolve(), version_folder) if isinstance(adaptive.costs, Path) else ""
        temperatures = json.dumps(adaptive.temperatures) if adaptive.temperatures else ""
        parameters |= {_THRESHOLD: repr(adaptive.threshold), _COSTS: costs, _TEMPERATURES: temperatures}
    return parameters


def engine_options(parameters: Mapping[str, str], version_folder: Path) -> dict[str, Any]:
    """The inverse, as `Engine` takes it. Repositories of versions that had no adaptive verification verify all
    drafts."""
    adaptive = None
    if parameters.get(_ADAPTIVE) == "true":
        costs, temperatures = parameters[_COSTS], parameters[_TEMPERATURES]
        adaptive = Adaptive(
            threshold=float(parameters[_THRESHOLD]),
            costs=(version_folder / costs).resolve() if costs else None,
            temperatures=tuple(json.loads(temperatures)) if temperatures else None,
        )
    return {
        "drafter": parameters[_DRAFTER] or None,
        "speculate": parameters[_SPECULATE] == "true",
        "verification": parameters[_VERIFICATION],
        "adaptive": adaptive,
    }
