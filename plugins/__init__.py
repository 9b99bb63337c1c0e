"""The ops TensorRT lacks, one file or folder each.

Every op has a torch reference (the oracle), a native lowering made of TensorRT layers that is tagged as a region of the
network (see `glmspec.network.graph`) and, where speed asks for it, a chain of plugins, whose kernels lie beside
it. `OPS` lists them all (`spec.py` says what an op is).
"""

from __future__ import annotations

from glmspec.plugins import (
    accept,
    adjust,
    argmax,
    block_attention,
    block_product,
    draft_probs,
    draw,
    grouped_conv,
    index_topk,
    kv_append,
    lowest_topk,
    margin,
    markov_walk,
    moe,
    moe_fp8,
    moe_fp8_block,
    moe_nvfp4,
    quantize_blocks,
    reject,
    rms_norm,
    rounding,
    sample,
    selector_walk,
    sparse_mla,
    target_probs,
)
from glmspec.plugins.spec import Op

OPS: dict[str, Op] = {
    op.OP.name: op.OP
    for op in (
        accept,
        adjust,
        argmax,
        block_attention,
        block_product,
        draft_probs,
        draw,
        grouped_conv,
        index_topk,
        kv_append,
        lowest_topk,
        margin,
        markov_walk,
        moe,
        moe_fp8,
        moe_fp8_block,
        moe_nvfp4,
        quantize_blocks,
        reject,
        rms_norm,
        rounding,
        sample,
        target_probs,
        selector_walk,
        sparse_mla,
    )
}
