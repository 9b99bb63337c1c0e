"""DFlash2: the DFlash block with dynamic convolutions around its sublayers, and a candidate selector.

    h = input_layernorm(x);            x += conv_after(self_attn(conv_before(h)))      (kernels of both from h)
    h = post_attention_layernorm(x);   x += conv_after(mlp(conv_before(h)))
    logits -> the top_k best of every row -> walk: unary + <W_pred[previous] * projection(hidden), W_succ[candidate]>

Legend: T = B * R rows, B blocks, R rows of a block, S = 2 sides (before, after), O taps, D hidden,
U groups, J drafts, Z = B * J, A selector rank, V draft vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.dflash import BlockLayer, Context, DFlash, Rows
from glmspec.models.layers.basic import Linear
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.network.module import Module, Weight
from glmspec.plugins import grouped_conv, selector_walk

BEFORE, AFTER = 0, 1


class DynamicConvolution(Module):
    """Causal convolution on both sides of a sublayer; both kernels come from the sublayer's input."""

    def __init__(self, config: DrafterConfig) -> None:
        convolution, _ = config.dflash2
        self.rows, self.taps, self.hidden = config.block_size, convolution.taps, config.hidden_size
        self.groups = self.hidden // convolution.group
        self.base_kernel = Weight(2, self.taps, self.hidden)
        self.kernel_projection = Linear(self.hidden, 2 * self.taps * self.groups)

    def forward(self, h_TD: Tensor, sublayer: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
        """The sublayer's input h [T, D] and the residual stream x [T, D] -> x + convolution, sublayer, convolution."""
        delta_BRSOU = ops.reshape(self.kernel_projection(h_TD), (-1, self.rows, 2, self.taps, self.groups))
        h_TD = self._side(h_TD, delta_BRSOU, BEFORE)
        return self._side(sublayer(h_TD), delta_BRSOU, AFTER, x_TD)

    def _side(self, h_TD: Tensor, delta_BRSOU: Tensor, side: int, x_TD: Tensor | None = None) -> Tensor:
        h_BRD = ops.reshape(h_TD, (-1, self.rows, self.hidden))
        x_BRD = None if x_TD is None else ops.reshape(x_TD, (-1, self.rows, self.hidden))
        y_BRD = grouped_conv.native(h_BRD, self.base_kernel.tensor, delta_BRSOU, x_BRD, side=side)
        return ops.reshape(y_BRD, (-1, self.hidden))


class ConvolvedLayer(BlockLayer):
    """A block layer whose sublayers sit between convolutions."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__(config, index)
        self.attention_conv = DynamicConvolution(config)
        self.mlp_conv = DynamicConvolution(config)

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        """[T, D] -> [T, D]."""
        h_TD = self.input_layernorm(x_TD)
        x_TD = self.attention_conv(h_TD, lambda h_TD: self.self_attn(h_TD, context), x_TD)
        return self.mlp_conv(self.post_attention_layernorm(x_TD), self.mlp, x_TD)


class CandidateSelector(Module):
    """Chooses each draft among its row's best logits, given the draft before it."""

    def __init__(self, config: DrafterConfig) -> None:
        _, selector = config.dflash2
        self.hidden_projection = Linear(config.hidden_size, selector.rank)
        self.predecessor_codebook = Weight(config.vocab_size, selector.rank)
        self.successor_codebook = Weight(config.draft_vocab_size, selector.rank)
        self.selector = selector

    def forward(self, rows: Rows, offset: Tensor | None) -> selector_walk.Walk:
        """Drafts, their scores, margins and probs. offset: see `DFlash.offset`."""
        drafts, hidden = rows.hidden_BJD.shape[1:]
        projected_ZA = self.hidden_projection(ops.reshape(rows.hidden_BJD, (-1, hidden)))
        return selector_walk.native(
            rows.logits_BJV,
            ops.reshape(projected_ZA, (-1, drafts, self.selector.rank)),
            rows.anchor_ids_B,
            self.predecessor_codebook.tensor,
            self.successor_codebook.tensor,
            k=self.selector.top_k,
            offset=offset,
            **rows.noise,
        )


class DFlash2(DFlash):
    """DFlash with convolved layers and a selector."""

    layer = ConvolvedLayer

    def __init__(self, config: DrafterConfig, *, sampled: bool = False) -> None:
        super().__init__(config, sampled=sampled)
        self.candidate_selector = CandidateSelector(config)

    def propose(self, rows: Rows) -> dict[str, Tensor]:
        """Drafts by the selector walk; probs are over each row's candidates."""
        return self.selected(self.candidate_selector(rows, self.offset))
