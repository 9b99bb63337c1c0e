"""The probs that a token is drawn from: temperature, then min-p, top-k and top-p, as cutoffs on one scale.

With z the logits over the temperature, less their largest: min-p keeps z >= log(min_p), top-k what is at least the k-th
largest, top-p the fewest of the most probable that together have at least top_p of what the other two leave. Equals of
a cutoff all stay, so the probs do not depend on their order. Temperature 0 is the lowest argmax with certainty.

Legend: R rows, V vocabulary, K most that top-k may keep.
"""

from __future__ import annotations

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.network.limits import MAX_TOP_K
from glmspec.plugins import argmax
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, Op

_LEAST = -110.0  # exp of less is 0 in float32
_HALVINGS = 26  # of [_LEAST, 0], to 2e-6: about what float32 tells apart there
_TINY = 1e-38


def reference(
    logits_RV: Compute,
    temperature_R: Float32,
    top_k_R: Int32,
    top_p_R: Float32,
    min_p_R: Float32,
) -> torch.Tensor:
    """Probabilities float32 [R, V]. temperature, top_p, min_p: float32 [R]; top_k: int32 [R]. 0 is no top-k or min-p,
    1 no top-p."""
    logits_RV = logits_RV.float()
    probs_RV = torch.zeros_like(logits_RV)
    greedy_R = temperature_R == 0
    probs_RV[greedy_R, logits_RV[greedy_R].argmax(-1)] = 1.0
    if bool(greedy_R.all()):
        return probs_RV
    temperature_R1 = torch.where(greedy_R, 1.0, temperature_R).unsqueeze(1)
    z_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature_R1
    cutoff_R1 = min_p_R.log().unsqueeze(1)
    narrowed_R = (top_k_R > 0) | (top_p_R < 1)
    if bool(narrowed_R.any()):
        falling_RV = z_RV.sort(-1, descending=True).values
        at_R1 = (top_k_R.clamp(1, z_RV.shape[1]) - 1).long().unsqueeze(1)
        kth_R1 = torch.where(top_k_R.unsqueeze(1) > 0, falling_RV.gather(1, at_R1), -torch.inf)
        cutoff_R1 = torch.maximum(cutoff_R1, kth_R1)
        mass_RV = torch.where(falling_RV >= cutoff_R1, falling_RV.exp(), 0.0).double().cumsum(-1)
        short_RV = mass_RV < top_p_R.double().unsqueeze(1) * mass_RV[:, -1:]
        last_R1 = short_RV.sum(-1, keepdim=True).clamp_(max=z_RV.shape[1] - 1)
        nucleus_R1 = torch.where(top_p_R.unsqueeze(1) < 1, falling_RV.gather(1, last_R1), -torch.inf)
        cutoff_R1 = torch.maximum(cutoff_R1, nucleus_R1)
    weight_RV = torch.where(z_RV >= cutoff_R1, z_RV.exp(), 0.0)
    sampled_RV = weight_RV / weight_RV.sum(-1, keepdim=True)
    return torch.where(greedy_R.unsqueeze(1), probs_RV, sampled_RV)


@lowers("sampling_law")
def native(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Probabilities float32 [R, V]. temperature, top_p, min_p: float32 [R]; top_k: int32 [R], at most `MAX_TOP_K`. 0
    is no top-k or min-p, 1 no top-p."""
    logits_RV = ops.cast(logits_RV, "float32")
    temperature_R1, top_k_R1, top_p_R1, min_p_R1 = (
        ops.reshape(x_R, (0, 1)) for x_R in (temperature_R, top_k_R, top_p_R, min_p_R)
    )
    greedy_R1 = temperature_R1.equals(0.0)
    largest_R1 = ops.reduce(logits_RV, "MAX", 1)
    z_RV = (logits_RV - largest_R1) / ops.select(greedy_R1, 1.0, temperature_R1)
    floor_R1 = ops.select(min_p_R1 > 0.0, ops.unary(ops.maximum(min_p_R1, _TINY), "LOG"), float("-inf"))
    cutoff_R1 = ops.maximum(floor_R1, _kth(z_RV, top_k_R1))
    weight_RV = _kept(z_RV, cutoff_R1)
    weight_RV = _kept(z_RV, ops.maximum(cutoff_R1, _nucleus(z_RV, weight_RV, top_p_R1)))
    sampled_RV = weight_RV / ops.reduce(weight_RV, "SUM", 1)
    certain_RV = argmax.one_hot(argmax.native(logits_RV), logits_RV.shape[1])
    return ops.select(greedy_R1, certain_RV, sampled_RV)


def _kept(z_RV: Tensor, cutoff_R1: Tensor) -> Tensor:
    """exp(z) of what is not below the cutoff, 0 elsewhere."""
    return ops.select(cutoff_R1 > z_RV, 0.0, ops.unary(z_RV, "EXP"))


def _kth(z_RV: Tensor, top_k_R1: Tensor) -> Tensor:
    """The k-th largest of every row, [R, 1]; -inf where k is 0."""
    most = min(MAX_TOP_K, z_RV.shape[1])
    falling_RK, _ = ops.topk(z_RV, most, 1)
    at_R1 = ops.minimum(ops.maximum(top_k_R1, 1), most) - 1
    return ops.select(top_k_R1 > 0, ops.gather_elements(falling_RK, at_R1, 1), float("-inf"))


def _nucleus(z_RV: Tensor, weight_RV: Tensor, top_p_R1: Tensor) -> Tensor:
    """The largest z such that it and all above have at least top_p of the weight, [R, 1]; -inf where top_p is 1.

    Found by halving: what lies above `low` has enough weight, what lies a width higher has not; the least that lies
    above `low` in the end is it (or less by the last width at most, which keeps a few more). (One number goes from step
    to step: with both ends, tensorrt_rtx 1.7 takes time exponential in the steps where sizes are fixed.)"""
    wanted_R1 = top_p_R1 * ops.reduce(weight_RV, "SUM", 1)
    low_R1, width = wanted_R1 * 0.0 + _LEAST, -_LEAST
    for _ in range(_HALVINGS):
        width /= 2
        mass_R1 = ops.reduce(ops.select(z_RV > low_R1 + width, weight_RV, 0.0), "SUM", 1)
        short_R1 = ops.cast(wanted_R1 > mass_R1, "float32")
        low_R1 = low_R1 + (1.0 - short_R1) * width
    value_R1 = ops.reduce(ops.select(z_RV > low_R1, z_RV, 0.0), "MIN", 1)
    return ops.select(top_p_R1 < 1.0, value_R1, float("-inf"))


OP = Op(
    name="sampling_law",
    outputs={"probs_RV": "float32"},
    reference=reference,
    native="part of sampling and rejection",
)
