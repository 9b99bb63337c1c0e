"""Routed experts: out = sum over a token's chosen experts of weight * down(silu(gate(x)) * up(x)).

An op for each number format of the experts' weights: `moe` (plain), `moe_fp8`, `moe_fp8_block` and `moe_nvfp4`; here is
what they share. An id outside 0 .. E-1 is another rank's expert, or a pad, and adds nothing.

The native form computes every expert for every token and weighs by zero where one was not chosen: any GPU builds it,
and it computes 32 times what is needed. The reference computes the chosen experts only.

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate (first) and up, L
leading axes of the reference (pairs, or experts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import experts, experts_fp8
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, Op, Rule, Use

# How the reference computes the chosen experts: for a few (token, expert) pairs it copies their experts'
# weights; small weights it multiplies all at once, a batch an expert; else it loops over the experts hit.
_GATHER_PAIRS = 16
_SMALL_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class Steps:
    """What a number format does around the two products; each is given a value and, of the reference, the experts whose
    it is. gate, up: a half of the first product, to the compute dtype. middle: the input of `down`, rounded. out: the
    second product, to the compute dtype. The default leaves a value as it is."""

    gate: Callable[..., Any] = lambda value, *experts: value
    up: Callable[..., Any] = lambda value, *experts: value
    middle: Callable[..., Any] = lambda value, *experts: value
    out: Callable[..., Any] = lambda value, *experts: value


PLAIN = Steps()


def reference(
    x_ND: Compute, expert_NA: Int32, weight_NA: Float32, gate_up_EFD: Compute, down_EDG: Compute, *, prompts: int
) -> torch.Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype. prompts: 1 where steps hold
    many rows an expert, which decides how plugins tile them; no result depends on it."""
    return chosen(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, PLAIN)


def chosen(
    x_ND: torch.Tensor,
    expert_NA: torch.Tensor,
    weight_NA: torch.Tensor,
    gate_up_EFD: torch.Tensor,
    down_EDG: torch.Tensor,
    steps: Steps,
) -> torch.Tensor:
    """[N, D]: x and the matrices as the products see them; the result in the dtype that `steps.out` gives."""
    here_NA = (expert_NA >= 0) & (expert_NA < len(gate_up_EFD))
    expert_NA, weight_NA = torch.where(here_NA, expert_NA, 0).long(), torch.where(here_NA, weight_NA, 0.0)

    def experts(x_LND: torch.Tensor, gate_up_LFD: torch.Tensor, down_LDG: torch.Tensor, index_L: torch.Tensor):
        gate, up = torch.matmul(x_LND, gate_up_LFD.mT).chunk(2, -1)
        hidden = functional.silu(steps.gate(gate, index_L)) * steps.up(up, index_L)
        return steps.out(torch.matmul(steps.middle(hidden, index_L), down_LDG.mT), index_L)

    if expert_NA.numel() <= min(_GATHER_PAIRS, len(gate_up_EFD)):  # a matrix-vector product a pair
        pair = expert_NA.reshape(-1)
        pair_x = x_ND.repeat_interleave(expert_NA.shape[1], 0).unsqueeze(1)
        out_NAD = experts(pair_x, gate_up_EFD[pair], down_EDG[pair], pair).view(*expert_NA.shape, -1)
    elif gate_up_EFD.numel() <= _SMALL_WEIGHTS:  # every expert on every token, then the chosen ones
        out_END = experts(x_ND, gate_up_EFD, down_EDG, torch.arange(len(gate_up_EFD)))
        out_NAD = out_END[expert_NA, torch.arange(len(x_ND)).unsqueeze(1)]
    else:  # each expert that was hit, on its tokens
        out_NAD = torch.empty(())
        for expert in expert_NA.unique().tolist():
            token, place = (expert_NA == expert).nonzero(as_tuple=True)
            out = experts(x_ND[token], gate_up_EFD[expert], down_EDG[expert], torch.tensor(expert))
            if not out_NAD.dim():
                out_NAD = out.new_empty(*expert_NA.shape, out.shape[1])
            out_NAD[token, place] = out
    return (out_NAD * weight_NA.to(out_NAD.dtype).unsqueeze(2)).sum(1)


@lowers("moe")
def native(
    x_ND: Tensor, expert_NA: Tensor, weight_NA: Tensor, gate_up_EFD: Tensor, down_EDG: Tensor, *, prompts: int
) -> Tensor:
    """See `reference`."""
    return every(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, PLAIN)


def every(
    x_ND: Tensor, expert_NA: Tensor, weight_NA: Tensor, gate_up_EFD: Tensor, down_EDG: Tensor, steps: Steps
) -> Tensor:
    """Every expert on every token, weighed by zero where it was not chosen. See `chosen`."""
    (experts, hidden, width), chosen = down_EDG.shape, expert_NA.shape[1]
    gate_up_ENF = ops.matmul(ops.reshape(x_ND, (1, -1, hidden)), gate_up_EFD, transpose_b=True)
    gate_ENG = steps.gate(ops.narrow(gate_up_ENF, 2, 0, width))
    up_ENG = steps.up(ops.narrow(gate_up_ENF, 2, width, width))
    hidden_ENG = steps.middle(ops.silu(gate_ENG) * up_ENG)
    out_END = steps.out(ops.matmul(hidden_ENG, down_EDG, transpose_b=True))
    # The routing weight of every (token, expert): zero where the expert was not chosen.
    id_11E = x_ND.net.constant([[list(range(experts))]], "int32")
    hit_NAE = ops.reshape(expert_NA, (0, chosen, 1)).equals(id_11E)
    dense_NAE = ops.select(hit_NAE, ops.reshape(weight_NA, (0, chosen, 1)), 0.0)
    dense_NE = ops.cast(ops.reduce(dense_NAE, "SUM", 1, keep=False), out_END.dtype)
    dense_EN1 = ops.reshape(ops.transpose(dense_NE, (1, 0)), (experts, -1, 1))
    return ops.reduce(out_END * dense_EN1, "SUM", 0, keep=False)


# What the ops of all formats have in common. On 8 ranks a rank has an eighth of every expert's width.
COMMON: dict[str, Any] = {
    "outputs": {"out_ND": "T"},
    # Rounding of both halves, of their product and of the result, which the reference does too.
    "tolerance": {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2},
    "run_time": "N",
}
REAL: dict[str, Rule] = {
    "N": lambda batch: 9 * batch,
    "A": 8,
    "E": 256,
    "D": 6144,
    "G": 256,
    "F": lambda G: 2 * G,
}
BLOCKS, PROMPTS = Use({"prompts": 0}), Use({"prompts": 1})
OP = Op(
    name="moe",
    reference=reference,
    plugged=experts_fp8.plain,
    plugins=(experts.ROUTE, experts_fp8.GATE_UP, experts_fp8.DOWN, experts.SUM),
    real=REAL,
    uses={"": BLOCKS, "prompts": PROMPTS},
    **COMMON,
)
