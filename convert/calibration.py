"""Activation scales: the largest input magnitude (amax) of every quantized module, measured on real text.

A calibration file is JSON, {module: amax}, or safetensors with ModelOpt's names (`MODULE.input_quantizer._amax`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from glmspec.convert.storage import StoredWeight
from glmspec.core.errors import CheckpointError, ConfigError
from glmspec.core.fields import read_json
from glmspec.network.formats import FP4_MAX, FP8_MAX

# The largest magnitude that a format's activation scale of 1 reaches, for formats that have one.
MAX_INPUT = {"nvfp4": FP4_MAX * FP8_MAX, "fp8": FP8_MAX}
_SUFFIX = ".input_quantizer._amax"


@dataclass(frozen=True)
class Activations:
    """Calibrated amax by module; empty without a calibration."""

    amax: dict[str, float] = field(default_factory=dict)

    def scale(self, module: str, weight: StoredWeight, format: str) -> float | None:
        """The activation scale of a module in a format: calibrated, else from the checkpoint, else None."""
        if module in self.amax:
            return self.amax[module] / MAX_INPUT[format]
        recorded = weight.input_scale() if weight.format in MAX_INPUT else None
        if recorded is None or weight.format == format:
            return recorded
        return recorded * MAX_INPUT[weight.format] / MAX_INPUT[format]

    def check_known(self, modules: list[str]) -> None:
        """Raise `ConfigError` for a calibrated module that the checkpoint lacks: it is another model's."""
        known = set(modules)
        strange = next((module for module in self.amax if module not in known), None)
        if strange is not None:
            raise ConfigError(f"calibration: {strange}: the checkpoint has no such module. Is it another model's?")

    def scales(
        self, modules: list[str], weights: list[StoredWeight], format: str, shared: int = 1
    ) -> tuple[tuple[float, ...] | None, list[str]]:
        """The activation scales of a weight's units, and the modules for which none is known.
        shared: neighbours that see the same input. A scale that is missing among others is the largest of them; with
        none at all, or in a format that has none, the weight has none (its activations stay unquantized)."""
        known = [self.scale(m, s, format) for m, s in zip(modules, weights, strict=True)] if format in MAX_INPUT else []
        if not any(known):
            return None, []
        largest = max(scale for scale in known if scale)
        missing = [module for module, scale in zip(modules, known, strict=True) if scale is None]
        groups = [known[at : at + shared] for at in range(0, len(known), shared)]
        scales = [max((scale or largest) for scale in group) for group in groups for _ in range(shared)]
        return tuple(scales), missing


def read_calibration(path: Path) -> Activations:
    """Read a calibration file. Raises naming the module whose amax is no positive number."""
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error}).") from None
        values = {n.removesuffix(_SUFFIX): float(t.float().max()) for n, t in tensors.items() if n.endswith(_SUFFIX)}
    else:
        values = read_json(path)
    for module, amax in values.items():
        if isinstance(amax, bool) or not isinstance(amax, (int, float)) or not 0 < amax < math.inf:
            raise ConfigError(f"{path}: {module}: found {amax!r}, expected a positive number.")
    if not values:
        raise ConfigError(f"{path}: found no amax, expected {{module: amax}} or tensors named MODULE{_SUFFIX}.")
    return Activations(values)
