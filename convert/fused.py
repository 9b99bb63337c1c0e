"""Modules that serving engines run as one matrix: where they are quantized, they share one scale."""

from __future__ import annotations

from collections.abc import Callable

from glmspec.convert.recipe import Recipe, quantizable
from glmspec.convert.storage import StoredWeight

# They read the same input.
_FUSED = (
    ("gate_proj", "up_proj"),
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk"),
    ("self_attn.q_b_proj", "self_attn.indexer.wq_b"),
)


def partners(
    name: str, format: str, recipe: Recipe, find: Callable[[str], StoredWeight | None]
) -> tuple[StoredWeight, ...]:
    """The weights that share the one scale of the weight `name`: fused with it, and of the same format by the recipe.
    find: a weight of the checkpoint by name, or None. Nothing for a format without one scale."""
    if format not in ("nvfp4", "fp8") or not quantizable(name.removesuffix(".weight")):
        return ()
    sharing = []
    for group in _FUSED:
        projection = next((projection for projection in group if name.endswith(f".{projection}.weight")), None)
        stem = name.removesuffix(f"{projection}.weight")
        for other in [f"{stem}{other}.weight" for other in group if projection and other != projection]:
            weight = find(other)
            if weight and recipe.format(other.removesuffix(".weight"), weight.format) == format:
                sharing.append(weight)
    return tuple(sharing)
