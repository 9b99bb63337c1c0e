"""The ops TensorRT lacks, one file each.

Every op has a torch reference (the oracle), and a native lowering made of TensorRT layers
that is tagged as a region of the network (see `glmspec.build.network.graph`). `OPS` lists
the references by op name, for whoever replaces a region.
"""

from __future__ import annotations

from collections.abc import Callable

from glmspec.plugins import (
    argmax,
    block_attention,
    grouped_conv,
    index_topk,
    lowest_topk,
    markov_walk,
    moe,
    rms_norm,
    rounding,
    selector_walk,
    sparse_mla,
)

# Each reference takes the region's inputs in order, then its attributes by name, and returns
# the region's output or a tuple of them.
OPS: dict[str, Callable] = {
    "argmax": argmax.reference,
    "block_attention": block_attention.reference,
    "grouped_conv": grouped_conv.reference,
    "index_topk": index_topk.reference,
    "lowest_topk": lowest_topk.reference,
    "markov_walk": markov_walk.reference,
    "moe": moe.reference,
    "rms_norm": rms_norm.reference,
    "rounding": rounding.reference,
    "selector_walk": selector_walk.reference,
    "sparse_mla": sparse_mla.reference,
}
