"""Routed experts: out = sum over a token's chosen experts of weight * down(silu(gate(x)) * up(x)).

The native form computes every expert for every token and masks (it is what SM120 can build);
the reference computes the chosen ones only.

Legend: N tokens, D hidden, E experts, A experts a token, F expert width (gate rows first, then up).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor

# How the reference computes the chosen experts: for a few (token, expert) pairs it copies their experts'
# weights; small weights it multiplies all at once, a batch an expert; else it loops over the experts hit.
_GATHER_PAIRS = 16
_SMALL_WEIGHTS = 1 << 20


def reference(
    x_ND: torch.Tensor,
    expert_NA: torch.Tensor,
    weight_NA: torch.Tensor,
    gate_up_EFD: torch.Tensor,
    down_EDF: torch.Tensor,
) -> torch.Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype."""
    expert_NA = expert_NA.long()
    if expert_NA.numel() <= min(_GATHER_PAIRS, len(gate_up_EFD)):
        out_NAD = _gathered(x_ND, expert_NA, gate_up_EFD, down_EDF)
    elif gate_up_EFD.numel() <= _SMALL_WEIGHTS:
        out_NAD = _batched(x_ND, expert_NA, gate_up_EFD, down_EDF)
    else:
        out_NAD = _looped(x_ND, expert_NA, gate_up_EFD, down_EDF)
    return (out_NAD * weight_NA.to(x_ND.dtype).unsqueeze(2)).sum(1)


def _gathered(x_ND, expert_NA, gate_up_EFD, down_EDF) -> torch.Tensor:
    """[N, A, D]: one matrix-vector product a pair."""
    pair_expert = expert_NA.reshape(-1)
    pair_x = x_ND.repeat_interleave(expert_NA.shape[1], 0).unsqueeze(2)
    gate, up = torch.bmm(gate_up_EFD[pair_expert], pair_x).chunk(2, 1)
    return torch.bmm(down_EDF[pair_expert], functional.silu(gate) * up).view(*expert_NA.shape, -1)


def _batched(x_ND, expert_NA, gate_up_EFD, down_EDF) -> torch.Tensor:
    """[N, A, D]: every expert on every token, then the chosen ones."""
    gate, up = torch.matmul(x_ND, gate_up_EFD.mT).chunk(2, 2)
    out_END = torch.bmm(functional.silu(gate) * up, down_EDF.mT)
    return out_END[expert_NA, torch.arange(len(x_ND)).unsqueeze(1)]


def _looped(x_ND, expert_NA, gate_up_EFD, down_EDF) -> torch.Tensor:
    """[N, A, D]: each expert that was hit, on its tokens."""
    out_NAD = x_ND.new_empty(*expert_NA.shape, x_ND.shape[1])
    for expert in expert_NA.unique().tolist():
        token, place = (expert_NA == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x_ND[token], gate_up_EFD[expert]).chunk(2, -1)
        out_NAD[token, place] = functional.linear(functional.silu(gate) * up, down_EDF[expert])
    return out_NAD


def native(x_ND: Tensor, expert_NA: Tensor, weight_NA: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype."""
    net = x_ND.net
    experts, width = gate_up_EFD.shape[0], down_EDF.shape[2]
    hidden, chosen = x_ND.shape[1], expert_NA.shape[1]
    with net.region("moe", [x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDF], {}) as outputs:
        x_1ND = ops.reshape(x_ND, (1, -1, hidden))
        gate_up_ENF = ops.matmul(x_1ND, gate_up_EFD, transpose_b=True)
        gate_ENF = ops.narrow(gate_up_ENF, 2, 0, width)
        up_ENF = ops.narrow(gate_up_ENF, 2, width, width)
        out_END = ops.matmul(ops.silu(gate_ENF) * up_ENF, down_EDF, transpose_b=True)
        # The routing weight of every (token, expert): zero where the expert was not chosen.
        id_11E = net.constant([[list(range(experts))]], "int32")
        hit_NAE = ops.reshape(expert_NA, (0, chosen, 1)).equals(id_11E)
        dense_NAE = ops.select(hit_NAE, ops.reshape(weight_NA, (0, chosen, 1)), 0.0)
        dense_NE = ops.cast(ops.reduce(dense_NAE, "SUM", 1, keep=False), x_ND.dtype)
        dense_EN1 = ops.reshape(ops.transpose(dense_NE, (1, 0)), (experts, -1, 1))
        outputs.append(ops.reduce(out_END * dense_EN1, "SUM", 0, keep=False))
    return outputs[0]
