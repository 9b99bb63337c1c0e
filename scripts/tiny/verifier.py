"""The tiny verifier in plain PyTorch: decoder layers, MoE and one MTP module, made for training.

The math is that of GlmMoeDsaForCausalLM; `parity.py` compares the two on the exported files. Experts are
evaluated densely (all experts, masked by the router's weights): at this size that is quicker than routing.

Shape suffixes: B rows, S query positions, T key positions, H hidden, D rope angles, E experts, I expert width,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Cache, RMSNorm, Step, VerifierConfig, linear


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the gated MLP."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the selection adds a bias that balances the load, the weights do not see it."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.topk, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.load_E = torch.zeros(config.n_routed_experts)  # tokens per expert since the last bias update

    def forward(self, x: Tensor) -> Tensor:
        """Weight of every expert [..., E], zero for the unselected."""
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.topk, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load_E += mask.detach().flatten(0, -2).sum(0)
        weights = scores * mask
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling

    @torch.no_grad()
    def rebalance(self, rate: float) -> None:
        """Aux-loss-free balancing: raise the bias of underused experts, lower that of overused ones."""
        self.e_score_correction_bias += rate * (self.load_E.mean() - self.load_E).sign()
        self.load_E.zero_()


class Experts(nn.Module):
    """All routed experts as stacked weights."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        experts, width, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_EIH = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.up_EIH = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.down_EHI = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)

    def forward(self, x: Tensor, weights_E: Tensor) -> Tensor:
        """Sum of the experts' outputs under their weights."""
        experts = self.gate_EIH.shape[0]
        inner = F.silu(F.linear(x, self.gate_EIH.flatten(0, 1))) * F.linear(x, self.up_EIH.flatten(0, 1))
        inner = inner.unflatten(-1, (experts, -1)) * weights_E.unsqueeze(-1).to(inner.dtype)
        return F.linear(inner.flatten(-2), self.down_EHI.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    """Routed experts plus one shared expert."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.gate, self.experts = Router(config), Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Sum of routed and shared experts."""
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: VerifierConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        full = index >= config.num_hidden_layers or config.indexer_types[index] == "full"
        self.self_attn = Attention(config, full)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = index < config.first_k_dense_replace
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)

    def forward(self, x_BSH: Tensor, step: Step) -> Tensor:
        """The residual stream after this layer."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), step, self.index).float()
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH)).float()


class MtpLayer(Layer):
    """The next-next-token module: a decoder layer over the next token's embedding and the verifier's hidden."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__(config, config.num_hidden_layers)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})

    def predict(self, embedded_BSH: Tensor, hidden_BSH: Tensor, step: Step) -> Tensor:
        """Normed hidden [B, S, H]; the lm_head makes the token after the embedded one from it."""
        x_BSH = self.eh_proj(torch.cat([self.enorm(embedded_BSH), self.hnorm(hidden_BSH)], dim=-1)).float()
        return self.shared_head["norm"](self(x_BSH, step))


class Verifier(nn.Module):
    """The whole model; the last of `layers` is the MTP module."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.layers.append(MtpLayer(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        for layer in self.layers:  # residual branches start small
            for name, weight in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_EHI")):
                    weight.data.mul_(0.1)
        half = torch.arange(0, config.qk_rope_head_dim, 2) / config.qk_rope_head_dim
        angles_TD = torch.arange(config.max_position_embeddings)[:, None] / config.rope_theta**half
        self.register_buffer("cos_TD", angles_TD.cos(), persistent=False)
        self.register_buffer("sin_TD", angles_TD.sin(), persistent=False)

    @property
    def mtp(self) -> MtpLayer:
        """The next-next-token module."""
        layer = self.layers[-1]
        assert isinstance(layer, MtpLayer)
        return layer

    def step(
        self, positions_BS: Tensor, *, sparse: bool = True, cache: Cache | None = None, learn_index: bool = False
    ) -> Step:
        """The shared state of a forward at these positions; without a cache the keys are the positions themselves."""
        if cache is None:
            allowed_BST = positions_BS[:, None, :] <= positions_BS[:, :, None]
        else:
            allowed_BST = torch.arange(cache.latent_BTL[0].shape[1]) <= positions_BS[:, :, None]
        cos_BSD, sin_BSD = self.cos_TD[positions_BS], self.sin_TD[positions_BS]
        return Step(positions_BS, cos_BSD, sin_BSD, allowed_BST, sparse, cache, learn_index)

    def hiddens(self, ids_BS: Tensor, step: Step) -> list[Tensor]:
        """The residual stream H_0 .. H_L after every layer, un-normed (H_0 is the embedding)."""
        streams = [self.embed_tokens(ids_BS)]
        for layer in self.layers[:-1]:
            streams.append(layer(streams[-1], step))
        return streams

    def logits(self, ids_BS: Tensor, step: Step) -> tuple[Tensor, list[Tensor]]:
        """(logits [B, S, V], residual streams)."""
        streams = self.hiddens(ids_BS, step)
        return self.lm_head(self.norm(streams[-1])).float(), streams
