"""Mixture of experts: a float32 sigmoid router, routed experts and a shared expert.

    x -> gate -> A experts a token, and their weights -> experts -> + shared_experts(x)

Legend: N tokens, D hidden, E experts, A experts a token, G expert width, F = 2 G rows of gate and up.
"""

from __future__ import annotations

from functools import partial

from glmspec.core.errors import NetworkError
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.layers.basic import EXPERT_START, MLP
from glmspec.models.layers.tiles import in_tiles
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.network.module import Module, Weight
from glmspec.plugins import lowest_topk, moe, moe_fp8, moe_fp8_block, moe_nvfp4

# The op for each number format of the experts, and the fields of gate_up and of down that it takes, in its order.
_OPS = {
    None: (moe.native, ("",)),
    "fp8": (moe_fp8.native, ("", "scale", "input_scale")),
    "fp8_block": (moe_fp8_block.native, ("", "scale_inv")),
    "nvfp4": (moe_nvfp4.native, ("", "scale", "scale_2", "input_scale")),
}


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

    def forward(self, x_ND: Tensor, expert_NA: Tensor, weight_NA: Tensor, tiles: int, prompts: int) -> Tensor:
        """[N, D] -> [N, D]: of the rank's own experts, or its part of each. tiles: of the rows. prompts: 1 where an
        expert has many."""
        if expert_NA.net.config.mapping.ep > 1:  # ids as this rank numbers its own: others' are out of range
            expert_NA = expert_NA - expert_NA.net.inputs[EXPERT_START]
        return in_tiles(partial(self._chosen, prompts), tiles, x_ND, expert_NA, weight_NA)

    def _chosen(self, prompts: int, *tokens: Tensor) -> Tensor:
        """The op of the weights' format."""
        op, suffixes = _OPS[self.gate_up_proj.format]
        fields = [self.gate_up_proj.fields, self.down_proj.fields]
        if fields[0].keys() != fields[1].keys():
            names = [", ".join(sorted(of)) for of in fields]
            raise NetworkError(
                f"{self.gate_up_proj.name}: found the fields {names[0]}, and {names[1]} of down_proj; "
                "expected the same: one format, and scales of activations for both or none"
            )
        given = [of[suffix] for suffix in suffixes for of in fields if suffix in of]
        return op(*tokens, *given, prompts=prompts)


class MixtureOfExperts(Module):
    """Routed experts and the shared expert, summed."""

    def __init__(self, config: VerifierConfig) -> None:
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x_ND: Tensor, tiles: int, prompts: int) -> Tensor:
        """[N, D] -> [N, D]. tiles: of the rows, through the routed experts one after the other. prompts: 1 where steps
        hold many rows an expert."""
        expert_NA, weight_NA = self.gate(x_ND)
        return self.experts(x_ND, expert_NA, weight_NA, tiles, prompts) + self.shared_experts(x_ND)
