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

_GATHER_LIMIT = 64  # (token, expert) pairs up to which copying the experts' weights beats looping over experts


def reference(
    x_ND: torch.Tensor,
    expert_NA: torch.Tensor,
    weight_NA: torch.Tensor,
    gate_up_EFD: torch.Tensor,
    down_EDF: torch.Tensor,
) -> torch.Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype."""
    tokens, chosen = expert_NA.shape
    pair_expert = expert_NA.reshape(-1).long()
    pair_x = x_ND.repeat_interleave(chosen, 0)
    if len(pair_expert) <= _GATHER_LIMIT:
        gate_up = torch.bmm(gate_up_EFD[pair_expert], pair_x.unsqueeze(2)).squeeze(2)
        gate, up = gate_up.chunk(2, -1)
        pair_out = torch.bmm(down_EDF[pair_expert], (functional.silu(gate) * up).unsqueeze(2)).squeeze(2)
    else:
        pair_out = torch.empty_like(pair_x)
        for expert in pair_expert.unique().tolist():
            at = (pair_expert == expert).nonzero().squeeze(1)
            gate, up = functional.linear(pair_x[at], gate_up_EFD[expert]).chunk(2, -1)
            pair_out[at] = functional.linear(functional.silu(gate) * up, down_EDF[expert])
    weighted = pair_out.view(tokens, chosen, -1) * weight_NA.to(x_ND.dtype).unsqueeze(2)
    return weighted.sum(1)


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
