"""The ops TensorRT lacks, one file each.

Every op has a torch reference (the oracle), and a native lowering made of TensorRT layers
that is tagged as a region of the network (see `glmspec.build.network.graph`). `OPS` lists
the references by op name, for whoever replaces a region.
"""

from __future__ import annotations

from collections.abc import Callable

from glmspec.plugins import (
    accept,
    adjust,
    argmax,
    block_attention,
    draw,
    grouped_conv,
    index_topk,
    lowest_topk,
    margin,
    markov_walk,
    moe,
    reject,
    rms_norm,
    rounding,
    sampling_law,
    selector_walk,
    sparse_mla,
)

# Each reference takes the region's inputs in order, then its attributes by name, and returns
# the region's output or a tuple of them.
OPS: dict[str, Callable] = {
    "accept": accept.reference,
    "adjust": adjust.reference,
    "argmax": argmax.reference,
    "block_attention": block_attention.reference,
    "draw": draw.reference,
    "grouped_conv": grouped_conv.reference,
    "index_topk": index_topk.reference,
    "lowest_topk": lowest_topk.reference,
    "margin": margin.reference,
    "markov_walk": markov_walk.reference,
    "moe": moe.reference,
    "reject": reject.reference,
    "rms_norm": rms_norm.reference,
    "rounding": rounding.reference,
    "sampling_law": sampling_law.reference,
    "selector_walk": selector_walk.reference,
    "sparse_mla": sparse_mla.reference,
}
