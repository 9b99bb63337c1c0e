"""The two block drafters in plain PyTorch: DSpark (Markov and confidence heads) and DFlash2 (convolutions, selector).

A block is [anchor, mask, mask, ...]. Its rows attend to the context (keys and values made from the verifier's
features, never from the block) and to each other. `golden_check.py` compares this module with published outputs.

Shape suffixes: B rows of the batch, S context tokens, A anchors, R block rows, H hidden, N query heads,
M key/value heads, D head size, F concatenated features, V vocabulary, C candidates, Z Markov or selector rank,
G convolution groups, T convolution taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import RMSNorm, linear
from .tokenizer import MASK, PADDED_VOCAB


@dataclass
class Context:
    """Keys and values [B, S, M, D] of the context tokens for every layer, and their positions [B, S]."""

    positions_BS: Tensor
    layers: list[tuple[Tensor, Tensor]]

    def extended(self, other: Context) -> Context:
        """The context with later tokens appended."""
        pairs = zip(self.layers, other.layers, strict=True)
        layers = [(torch.cat([k, k2], 1), torch.cat([v, v2], 1)) for (k, v), (k2, v2) in pairs]
        return Context(torch.cat([self.positions_BS, other.positions_BS], 1), layers)


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter needs to know; `export.py` writes it in the speculators format."""

    algorithm: str  # "dspark" or "dflash2"
    layer_types: tuple[str, ...]
    aux_layer_ids: tuple[int, ...]
    block_size: int
    speculative_tokens: int
    sample_from_anchor: bool
    sliding_window_non_causal: bool
    hidden_size: int = 128
    intermediate_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    sliding_window: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    mask_token_id: int = MASK
    vocab_size: int = PADDED_VOCAB
    max_position_embeddings: int = 2048
    markov_rank: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_top_k: int = 0
    selector_rank: int = 0

    @property
    def rows(self) -> int:
        """Block rows for `speculative_tokens` drafts: one more when the anchor's row drafts nothing."""
        return self.speculative_tokens + (0 if self.sample_from_anchor else 1)

    @property
    def first_row(self) -> int:
        """The first block row that drafts a token."""
        return 0 if self.sample_from_anchor else 1


DSPARK = DrafterConfig(
    algorithm="dspark",
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    aux_layer_ids=(2, 4, 6),
    block_size=8,
    speculative_tokens=8,
    sample_from_anchor=True,
    sliding_window_non_causal=False,
    markov_rank=32,
)
DFLASH2 = DrafterConfig(
    algorithm="dflash2",
    layer_types=("sliding_attention", "sliding_attention", "full_attention"),
    aux_layer_ids=(1, 3, 5, 6),
    block_size=9,
    speculative_tokens=8,
    sample_from_anchor=False,
    sliding_window_non_causal=True,
    conv_kernel_size=2,
    selector_top_k=8,
    selector_rank=32,
)


def half_split_rope(x_BRND: Tensor, positions_BR: Tensor, theta: float) -> Tensor:
    """Rotate element d with element d + D/2."""
    half = x_BRND.shape[-1] // 2
    rates = theta ** -(torch.arange(half) / half)
    angles = positions_BR[..., None, None].float() * rates
    first, second = x_BRND[..., :half].float(), x_BRND[..., half:].float()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class BlockAttention(nn.Module):
    """Qwen3-style attention of block rows over context and block."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.config, self.sliding = config, layer_type == "sliding_attention"
        self.causal = self.sliding and not config.sliding_window_non_causal
        size, kv = config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, config.num_attention_heads * size)
        self.k_proj, self.v_proj = linear(config.hidden_size, kv), linear(config.hidden_size, kv)
        self.o_proj = linear(config.num_attention_heads * size, config.hidden_size)
        self.q_norm, self.k_norm = RMSNorm(size, config.rms_norm_eps), RMSNorm(size, config.rms_norm_eps)

    def keys_values(self, x_BXH: Tensor, positions_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Normed, rotated keys and plain values [B, X, M, D]."""
        size = (-1, self.config.head_dim)
        key = half_split_rope(self.k_norm(self.k_proj(x_BXH).unflatten(-1, size)), positions_BX, self.config.rope_theta)
        return key, self.v_proj(x_BXH).unflatten(-1, size).float()

    def context_mask(self, anchors_BA: Tensor, positions_BS: Tensor) -> Tensor:
        """[B, A, S]: every row of the block at p sees context [0, p), or [p - window, p) on sliding layers."""
        distance_BAS = anchors_BA[..., None] - positions_BS[:, None]
        mask = distance_BAS > 0
        return mask & (distance_BAS <= self.config.sliding_window) if self.sliding else mask

    def forward(self, x_BARH: Tensor, anchors_BA: Tensor, context: Context, layer: int) -> Tensor:
        """Attention output [B, A, R, H] of blocks at `anchors_BA`."""
        _, anchors, rows, _ = x_BARH.shape
        context_k_BSMD, context_v_BSMD = context.layers[layer]
        length, size = context_k_BSMD.shape[1], self.config.head_dim
        kv_heads = self.config.num_key_value_heads
        positions = (anchors_BA[..., None] + torch.arange(rows)).flatten(1)
        flat = x_BARH.flatten(1, 2)
        query = self.q_norm(self.q_proj(flat).unflatten(-1, (-1, size)))
        query = half_split_rope(query, positions, self.config.rope_theta) * size**-0.5
        key, value = self.keys_values(flat, positions)

        # Query heads of one kv head stand together: [B, M, N/M, A*R, D].
        q = query.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
        to_context = torch.einsum("bmgxd,bsmd->bmgxs", q, context_k_BSMD).unflatten(3, (anchors, rows))
        blocks = [t.unflatten(1, (anchors, rows)) for t in (key, value)]
        to_block = torch.einsum("bmgard,bacmd->bmgarc", q.unflatten(3, (anchors, rows)), blocks[0])
        context_mask = self.context_mask(anchors_BA, context.positions_BS)[:, None, None, :, None, :]
        to_context = to_context.float().masked_fill(~context_mask, float("-inf"))
        if self.causal:
            future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
            to_block = to_block.masked_fill(future, float("-inf"))
        probs = torch.cat([to_context, to_block.float()], dim=-1).softmax(dim=-1)
        out = torch.einsum("bmgars,bsmd->bmgard", probs[..., :length], context_v_BSMD)
        out = out + torch.einsum("bmgarc,bacmd->bmgard", probs[..., length:], blocks[1])
        return self.o_proj(out.permute(0, 3, 4, 1, 2, 5).flatten(3))


class GroupedConv(nn.Module):
    """Causal convolution along a block, before (side 0) and after (side 1) a sublayer.

    Its kernel is a base per channel plus a per-token change per group, made from the sublayer's input.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.taps, self.group = config.conv_kernel_size, config.conv_group_size
        self.groups = config.hidden_size // self.group
        base = torch.zeros(2, self.taps, config.hidden_size)
        base[:, 0] = 1.0  # the identity, from which training moves away
        self.base_kernel = nn.Parameter(base + 0.02 * torch.randn_like(base))
        self.kernel_projection = linear(config.hidden_size, 2 * self.taps * self.groups)
        nn.init.normal_(self.kernel_projection.weight, std=0.02)

    def kernels(self, x_BARH: Tensor) -> Tensor:
        """Kernels [B, A, R, side, tap, H] of every row."""
        delta = self.kernel_projection(x_BARH).float().unflatten(-1, (2, self.taps, self.groups))
        return self.base_kernel + delta.repeat_interleave(self.group, dim=-1)

    def apply_side(self, x_BARH: Tensor, kernels: Tensor, side: int) -> Tensor:
        """sum over taps of kernel[tap] * x[row - tap], zero before the block's first row."""
        total = kernels[..., side, 0, :] * x_BARH
        for tap in range(1, self.taps):
            shifted = F.pad(x_BARH, (0, 0, tap, 0))[..., : x_BARH.shape[-2], :]
            total = total + kernels[..., side, tap, :] * shifted
        return total


class DraftLayer(nn.Module):
    """One drafter layer: attention and MLP, each between convolutions when the config has them."""

    def __init__(self, config: DrafterConfig, layer_type: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, layer_type)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(config.hidden_size, config.intermediate_size),
                "up_proj": linear(config.hidden_size, config.intermediate_size),
                "down_proj": linear(config.intermediate_size, config.hidden_size),
            }
        )
        if config.conv_kernel_size:
            self.attention_conv, self.mlp_conv = GroupedConv(config), GroupedConv(config)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The gated MLP."""
        return self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))

    def forward(self, x_BARH: Tensor, anchors_BA: Tensor, context: Context, layer: int) -> Tensor:
        """The residual stream after this layer."""
        normed = self.input_layernorm(x_BARH)
        if hasattr(self, "attention_conv"):
            kernels = self.attention_conv.kernels(normed)
            inner = self.attention_conv.apply_side(normed, kernels, 0)
            inner = self.self_attn(inner, anchors_BA, context, layer).float()
            x_BARH = x_BARH + self.attention_conv.apply_side(inner, kernels, 1)
            normed = self.post_attention_layernorm(x_BARH)
            kernels = self.mlp_conv.kernels(normed)
            inner = self.feed_forward(self.mlp_conv.apply_side(normed, kernels, 0)).float()
            return x_BARH + self.mlp_conv.apply_side(inner, kernels, 1)
        x_BARH = x_BARH + self.self_attn(normed, anchors_BA, context, layer).float()
        return x_BARH + self.feed_forward(self.post_attention_layernorm(x_BARH)).float()


class MarkovHead(nn.Module):
    """A bias on the next draft's logits from the draft before it: W2 W1[previous]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = linear(config.markov_rank, config.vocab_size)
        nn.init.normal_(self.markov_w1.weight, std=0.3)
        nn.init.normal_(self.markov_w2.weight, std=0.05)

    def bias(self, previous: Tensor) -> Tensor:
        """Logit bias [..., V] after the tokens `previous` [...]."""
        return self.markov_w2(self.markov_w1(previous)).float()


class CandidateSelector(nn.Module):
    """Rescores candidates by how well they follow the token before: <pred[previous] * (W h), succ[candidate]>."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.randn(shape) * 0.3)
        self.successor_codebook = nn.Parameter(torch.randn(shape) * 0.05)
        self.hidden_projection = linear(config.hidden_size, config.selector_rank)

    def state(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """What a candidate's successor code is multiplied with [..., Z]."""
        return F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden).float()


class Drafter(nn.Module):
    """A block drafter without embedding and lm_head: those are the verifier's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = linear(len(config.aux_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, layer_type) for layer_type in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.algorithm == "dspark":
            self.markov_head = MarkovHead(config)
            confidence = nn.Linear(config.hidden_size + config.markov_rank, 1)
            nn.init.zeros_(confidence.bias)
            self.confidence_head = nn.ModuleDict({"proj": confidence})
        else:
            self.candidate_selector = CandidateSelector(config)

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """`layers`, whose type torch does not keep."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def context(self, features_BSF: Tensor, positions_BS: Tensor) -> Context:
        """Keys and values of context tokens for every layer."""
        c_BSH = self.hidden_norm(self.fc(features_BSF))
        return Context(positions_BS, [layer.self_attn.keys_values(c_BSH, positions_BS) for layer in self.draft_layers])

    def block(self, anchor_ids_BA: Tensor, anchors_BA: Tensor, context: Context, embedding: Tensor) -> Tensor:
        """Final-normed hidden states [B, A, R, H] of blocks whose anchors stand at `anchors_BA`."""
        ids_BAR = anchor_ids_BA.unsqueeze(-1).repeat(1, 1, self.config.rows)
        ids_BAR[..., 1:] = self.config.mask_token_id
        x_BARH = F.embedding(ids_BAR, embedding)
        for index, layer in enumerate(self.layers):
            x_BARH = layer(x_BARH, anchors_BA, context, index)
        return self.norm(x_BARH)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """DSpark's confidence logits, in float32."""
        features = torch.cat([hidden.float(), self.markov_head.markov_w1(previous).float()], dim=-1)
        with torch.autocast("cpu", enabled=False):
            return self.confidence_head["proj"](features).squeeze(-1)
