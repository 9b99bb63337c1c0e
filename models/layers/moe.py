"""Mixture of experts: a float32 sigmoid router, routed experts and a shared expert.

    x -> gate -> A experts a token, and their weights -> experts -> + shared_experts(x)

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate and up.
"""

from __future__ import annotations

from functools import partial

from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.layers.basic import EXPERT_START, MLP, own_ids
from glmspec.models.layers.quantized import activation_format, dequantized, rounded
from glmspec.models.layers.tiles import in_tiles
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.network.module import Module, Weight
from glmspec.plugins import lowest_topk, moe


class Router(Module):
    """Picks experts by sigmoid score plus a correction bias; weighs them by the score alone.

    The lowest expert wins a tie: saturated sigmoids are equal. Everything is float32: the bias is near 7 with a
    spread of 0.25, and a BF16 step of 0.03 reroutes tokens.
    """

    def __init__(self, config: VerifierConfig) -> None:
        self.weight = Weight(config.n_routed_experts, config.hidden_size, dtype="float32")
        self.e_score_correction_bias = Weight(config.n_routed_experts, dtype="float32")
        self.chosen = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.scaling = config.routed_scaling_factor

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] -> expert ids int32 [N, A], weights float32 [N, A]."""
        logits_NE = ops.matmul(ops.cast(x_ND, "float32"), self.weight.tensor, transpose_b=True)
        score_NE = ops.sigmoid(logits_NE)
        expert_NA = lowest_topk.native(score_NE + self.e_score_correction_bias.tensor, k=self.chosen)
        weight_NA = ops.gather_elements(score_NE, expert_NA, 1)
        if self.normalize:
            weight_NA = weight_NA / (ops.reduce(weight_NA, "SUM", 1) + 1e-20)
        return expert_NA, weight_NA * self.scaling


class Experts(Module):
    """The routed experts' weights, fused: gate rows first, then up."""

    def __init__(self, config: VerifierConfig) -> None:
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = Weight(experts, 2 * width, hidden)
        self.down_proj = Weight(experts, hidden, width)

    def forward(self, x_ND: Tensor, expert_NA: Tensor, weight_NA: Tensor, tiles: int) -> Tensor:
        """[N, D] -> [N, D]: of the rank's own experts, or its part of each. tiles: of the rows."""
        x_ND = rounded(x_ND, self.gate_up_proj)
        expert_NA, weight_NA = self._own(expert_NA, weight_NA)
        experts = partial(
            moe.native,
            gate_up_EFD=dequantized(self.gate_up_proj),
            down_EDG=dequantized(self.down_proj),
            middle_E=self.down_proj.fields.get("input_scale"),
            middle=activation_format(self.down_proj),
        )
        return in_tiles(experts, tiles, x_ND, expert_NA, weight_NA)

    def _own(self, expert_NA: Tensor, weight_NA: Tensor) -> tuple[Tensor, Tensor]:
        """Ids among the rank's experts; those of other ranks become expert 0 with weight 0."""
        if expert_NA.net.config.mapping.ep == 1:
            return expert_NA, weight_NA
        own_NA, here_NA = own_ids(expert_NA, EXPERT_START, self.down_proj.fields[""].shape[0])
        return own_NA, ops.select(here_NA, weight_NA, 0.0)


class MixtureOfExperts(Module):
    """Routed experts and the shared expert, summed."""

    def __init__(self, config: VerifierConfig) -> None:
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x_ND: Tensor, tiles: int = 1) -> Tensor:
        """[N, D] -> [N, D]. tiles: of the rows, through the routed experts one after the other."""
        expert_NA, weight_NA = self.gate(x_ND)
        return self.experts(x_ND, expert_NA, weight_NA, tiles) + self.shared_experts(x_ND)
