"""Activations as e4m3 codes with a scale for every 128 columns of a row: the input of a product with FP8 block weights.

A dequantize layer follows, outside the region: TensorRT must see it before the product to multiply in FP8.

Legend: N rows, D columns, Z blocks of a row, the last of which may be partial.
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.formats import BLOCK, FP8_MAX
from glmspec.network.graph import Tensor
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, NoPlugin, Op, Plugin, Runs, Use, cdiv, inputs_of

_LEAST = 1e-12  # scale of a block of zeros


def reference(x_ND: Compute) -> tuple[torch.Tensor, torch.Tensor]:
    """x_ND [..., D] -> float8_e4m3fn [..., D] and scales float32 [..., Z]: a block's amax / 448."""
    wide, columns = x_ND.float(), x_ND.shape[-1]
    if columns <= BLOCK:
        scale = (wide.abs().amax(-1, keepdim=True) * (1 / FP8_MAX)).clamp(min=_LEAST)
        return to_e4m3(wide / scale), scale
    wide = torch.nn.functional.pad(wide, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = (wide.abs().amax(-1) * (1 / FP8_MAX)).clamp(min=_LEAST)
    return to_e4m3(wide / scale.unsqueeze(-1)).flatten(-2)[..., :columns].contiguous(), scale


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 to float8_e4m3fn, saturating."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


@lowers("quantize_blocks")
def native(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, D] or [E, N, D] -> codes and scales: see `reference`."""
    columns, last = x_ND.shape[-1], x_ND.rank - 1
    wide = ops.cast(ops.pad(x_ND, last, -(-columns // BLOCK) * BLOCK), "float32")
    lead = (0,) * last
    largest = ops.reduce(ops.unary(ops.reshape(wide, (*lead, -1, BLOCK)), "ABS"), "MAX", last + 1, keep=False)
    scale = ops.maximum(largest * (1 / FP8_MAX), _LEAST)
    return ops.quantize(x_ND, scale, (1,) * last + (BLOCK,)), scale


def plugged(run: Runs, x_ND) -> tuple:
    """One launch: see `reference`."""
    if len(run.shape(x_ND)) != 2:
        raise NoPlugin(f"plugin {QUANTIZE_BLOCKS.id}: x: found {len(run.shape(x_ND))} dimensions, expected 2")
    return run(QUANTIZE_BLOCKS, x_ND)


QUANTIZE_BLOCKS = Plugin(
    name="quantize_blocks",
    op="quantize_blocks",
    function="quantize_blocks_kernel",
    inputs=inputs_of(reference),
    outputs={"code_ND": "float8_e4m3fn", "scale_NZ": "float32"},
    sizes={"Z": lambda D: cdiv(D, 128)},
    scalars=("N",),
    grid=(lambda N, Z, BLOCKS: cdiv(N * Z, BLOCKS),),
    tiles={"": {"BLOCK": BLOCK, "BLOCKS": 4, "WARPS": 2}},
)
OP = Op(
    name="quantize_blocks",
    outputs=QUANTIZE_BLOCKS.outputs,
    reference=reference,
    plugged=plugged,
    plugins=(QUANTIZE_BLOCKS,),
    tolerance={"float8_e4m3fn": 0.0, "float32": 0.0},
    real={"N": lambda batch: 9 * batch, "D": 6144},
    uses={
        "": Use(),
        "query rank": Use(sizes={"D": 2048}),
        "attention": Use(sizes={"D": 16384}),
    },
)
