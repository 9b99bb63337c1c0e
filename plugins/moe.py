"""Routed experts: out = sum over a token's chosen experts of weight * down(silu(gate(x)) * up(x)).

Two native forms. "composed" computes every expert for every token and masks: any GPU builds it. "layer" is TensorRT's
own mixture-of-experts layer (SM100, SM103). The reference computes the chosen experts only.

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate (first) and up.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from glmspec.core.errors import NetworkError
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import rounding
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, Op

# How the reference computes the chosen experts: for a few (token, expert) pairs it copies their experts'
# weights; small weights it multiplies all at once, a batch an expert; else it loops over the experts hit.
_GATHER_PAIRS = 16
_SMALL_WEIGHTS = 1 << 20


def reference(
    x_ND: Compute,
    expert_NA: Int32,
    weight_NA: Float32,
    gate_up_EFD: Compute,
    down_EDG: Compute,
    middle_E: Float32 | None = None,
    *,
    middle: str | None = None,
) -> torch.Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype.

    middle: format to which the input of `down` is rounded (`rounding.py`), with scales middle_E if it takes some.
    """
    expert_NA = expert_NA.long()

    def gated(gate_up: torch.Tensor, axis: int, expert: torch.Tensor | None) -> torch.Tensor:
        """silu(gate) * up, rounded. axis: of the columns. expert: whose scale, broadcast to the result's lead."""
        gate, up = gate_up.chunk(2, axis)
        hidden = functional.silu(gate) * up
        if middle is None:
            return hidden
        scale = None if middle_E is None else middle_E[expert].unsqueeze(-1)
        turned = rounding.reference(hidden.movedim(axis, -1), scale, format=middle)
        return turned.movedim(-1, axis)

    if expert_NA.numel() <= min(_GATHER_PAIRS, len(gate_up_EFD)):
        out_NAD = _gathered(x_ND, expert_NA, gate_up_EFD, down_EDG, gated)
    elif gate_up_EFD.numel() <= _SMALL_WEIGHTS:
        out_NAD = _batched(x_ND, expert_NA, gate_up_EFD, down_EDG, gated)
    else:
        out_NAD = _looped(x_ND, expert_NA, gate_up_EFD, down_EDG, gated)
    return (out_NAD * weight_NA.to(x_ND.dtype).unsqueeze(2)).sum(1)


def _gathered(x_ND, expert_NA, gate_up_EFD, down_EDG, gated) -> torch.Tensor:
    """[N, A, D]: one matrix-vector product a pair."""
    pair_expert = expert_NA.reshape(-1)
    pair_x = x_ND.repeat_interleave(expert_NA.shape[1], 0).unsqueeze(2)
    hidden = gated(torch.bmm(gate_up_EFD[pair_expert], pair_x), 1, pair_expert.unsqueeze(1))
    return torch.bmm(down_EDG[pair_expert], hidden).view(*expert_NA.shape, -1)


def _batched(x_ND, expert_NA, gate_up_EFD, down_EDG, gated) -> torch.Tensor:
    """[N, A, D]: every expert on every token, then the chosen ones."""
    hidden_ENG = gated(torch.matmul(x_ND, gate_up_EFD.mT), 2, torch.arange(len(gate_up_EFD)).unsqueeze(1))
    out_END = torch.bmm(hidden_ENG, down_EDG.mT)
    return out_END[expert_NA, torch.arange(len(x_ND)).unsqueeze(1)]


def _looped(x_ND, expert_NA, gate_up_EFD, down_EDG, gated) -> torch.Tensor:
    """[N, A, D]: each expert that was hit, on its tokens."""
    out_NAD = x_ND.new_empty(*expert_NA.shape, x_ND.shape[1])
    for expert in expert_NA.unique().tolist():
        token, place = (expert_NA == expert).nonzero(as_tuple=True)
        gate_up = functional.linear(x_ND[token], gate_up_EFD[expert])
        out_NAD[token, place] = functional.linear(gated(gate_up, -1, torch.tensor([expert])), down_EDG[expert])
    return out_NAD


@lowers("moe")
def native(
    x_ND: Tensor,
    expert_NA: Tensor,
    weight_NA: Tensor,
    gate_up_EFD: Tensor,
    down_EDG: Tensor,
    middle_E: Tensor | None = None,
    *,
    middle: str | None = None,
) -> Tensor:
    """x [N, D], expert ids int32 [N, A], weights float32 [N, A] -> [N, D] in x's dtype. See `reference`."""
    net = x_ND.net
    lower = {"composed": _composed, "layer": _layer}.get(net.config.moe)
    if lower is None:
        raise NetworkError(f"{net.name}: form of the experts: found {net.config.moe!r}, expected 'composed' or 'layer'")
    return lower(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, middle_E, middle)


def _composed(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, middle_E, middle) -> Tensor:
    """Every expert on every token, weighed by zero where it was not chosen."""
    net, (hidden, chosen) = x_ND.net, (x_ND.shape[1], expert_NA.shape[1])
    experts, width = gate_up_EFD.shape[0], down_EDG.shape[2]
    x_1ND = ops.reshape(x_ND, (1, -1, hidden))
    gate_up_ENF = ops.matmul(x_1ND, gate_up_EFD, transpose_b=True)
    gate_ENG = ops.narrow(gate_up_ENF, 2, 0, width)
    up_ENG = ops.narrow(gate_up_ENF, 2, width, width)
    hidden_ENG = ops.silu(gate_ENG) * up_ENG
    if middle is not None:
        hidden_ENG = rounding.native(hidden_ENG, middle_E, format=middle)
    out_END = ops.matmul(hidden_ENG, down_EDG, transpose_b=True)
    # The routing weight of every (token, expert): zero where the expert was not chosen.
    id_11E = net.constant([[list(range(experts))]], "int32")
    hit_NAE = ops.reshape(expert_NA, (0, chosen, 1)).equals(id_11E)
    dense_NAE = ops.select(hit_NAE, ops.reshape(weight_NA, (0, chosen, 1)), 0.0)
    dense_NE = ops.cast(ops.reduce(dense_NAE, "SUM", 1, keep=False), x_ND.dtype)
    dense_EN1 = ops.reshape(ops.transpose(dense_NE, (1, 0)), (experts, -1, 1))
    return ops.reduce(out_END * dense_EN1, "SUM", 0, keep=False)


def _layer(x_ND, expert_NA, weight_NA, gate_up_EFD, down_EDG, middle_E, middle) -> Tensor:
    """TensorRT's layer takes matrices the other way round. Its input of `down` stays unrounded: in TensorRT 11 it can
    round to FP8 only."""
    hidden, chosen, width = x_ND.shape[1], expert_NA.shape[1], down_EDG.shape[2]
    gate_EDF, up_EDF = (ops.transpose(ops.narrow(gate_up_EFD, 1, at, width), (0, 2, 1)) for at in (0, width))
    out_1ND = ops.moe(
        ops.reshape(x_ND, (1, -1, hidden)),
        ops.reshape(expert_NA, (1, -1, chosen)),
        ops.reshape(ops.cast(weight_NA, x_ND.dtype), (1, -1, chosen)),
        gate_EDF,
        up_EDF,
        ops.transpose(down_EDG, (0, 2, 1)),
    )
    return ops.reshape(out_1ND, (-1, hidden))


OP = Op(
    name="moe",
    outputs={"out_ND": "T"},
    reference=reference,
    native="TensorRT has a layer of its own for SM100 and SM103; 9 tokens need about 64 of 256 experts' weights, 128 "
    "tokens 252. The composed form reads all of them and multiplies 32 times as much: it is for tests on other "
    "GPUs, and not for speed",
)
