"""What a checkpoint declares about its quantization, held against its tensors.

The tensors decide, but a declaration that they contradict is refused: one of the two is another checkpoint's, and codes
read by the wrong rule are noise. Lists of modules that stay plain are not held against them, for they misname modules.
"""

from __future__ import annotations

from collections.abc import Mapping

from glmspec.convert.declared import DYNAMIC, NONE, STATIC, Scheme
from glmspec.convert.source import Source
from glmspec.convert.storage import StoredWeight
from glmspec.core.errors import CheckpointError
from glmspec.network.formats import QUANTIZED

_SPOKEN = {
    "fp8_block": "FP8 with 128x128 block scales",
    "fp8": "FP8 with one scale",
    "fp8_rows": "FP8 with a scale a row",
    "nvfp4": "NVFP4",
}


def check_declared(source: Source, stored: Mapping[str, StoredWeight]) -> tuple[str, ...]:
    """Notes on what is declared. stored: the weights by name. Raises `CheckpointError` for a contradiction."""
    declared = source.declared
    quantized = {name: weight for name, weight in stored.items() if weight.format in QUANTIZED}
    if declared.schemes and not quantized:
        raise CheckpointError(
            f"{source.folder}: its config says that it is quantized, and no weight has scales. "
            "Remove quantization_config (and hf_quant_config.json), or get the quantized files."
        )
    seen: dict[Scheme, list[StoredWeight]] = {}
    for name, weight in quantized.items():
        if declared.schemes:
            seen.setdefault(_scheme(source, name, weight), []).append(weight)
    notes = [note for scheme, weights in seen.items() if (note := _activations(source, scheme, weights))]
    return (*declared.notes, *notes)


def _scheme(source: Source, name: str, weight: StoredWeight) -> Scheme:
    """The scheme that a quantized weight follows. One that is listed nowhere follows any."""
    module = name.removesuffix(".weight")
    schemes = source.declared.of(module) or source.declared.schemes
    fitting = next((scheme for scheme in schemes if weight.format in scheme.formats), None)
    if fitting is None:
        declared_formats = " or ".join(_SPOKEN[format] for format in schemes[0].formats)
        raise CheckpointError(
            f"{source.folder}: tensor {weight.name}: found {_SPOKEN[weight.format]}, but {schemes[0].label} declares "
            f"{declared_formats}. "
            "One of the two is of another checkpoint: get matching files."
        )
    return fitting


def _activations(source: Source, scheme: Scheme, weights: list[StoredWeight]) -> str | None:
    """What networks do with activations is told by the tensors: block scales round them as they come, one scale by a
    stored scale if there is one. A note where that is not what is declared."""
    blocks, plain = weights[0].format == "fp8_block", scheme.activations in (NONE, DYNAMIC)
    scaled = next((weight for weight in weights if weight.inputs), None)
    if blocks:
        rounds = "their activations are rounded to FP8 all the same, as the products of block scales do"
        return f"{scheme.label}: of weights alone; {rounds}" if scheme.activations == NONE else None
    if plain and scaled:
        raise CheckpointError(
            f"{source.folder}: tensor {scaled.inputs[0]}: found a stored scale of activations, but {scheme.label} "
            f"declares that activations have none ({scheme.activations}). Remove one of the two."
        )
    if scheme.activations == DYNAMIC or (scheme.activations == STATIC and not scaled):
        return f"{scheme.label}: declares quantized activations ({scheme.activations}); they stay unquantized"
    return None
