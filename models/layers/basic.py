"""Embedding, linear, norm and MLP; the vocabulary and its head as ranks divide them.

Illegal ids (rows of the head that are no token of the tokenizer) get -inf where logits leave the head, so nothing
behind knows of them. That bias is a table that the runtime makes of the spans in the engine directory's config.json; a
network has that input only where there are illegal ids.

Legend: N tokens, D input columns, F output columns, R rows whose logits are asked for, T ranks, V vocabulary.
"""

from __future__ import annotations

from glmspec.models.configs.illegal import IllegalIds
from glmspec.models.layers.quantized import product
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TABLE, TensorSpec
from glmspec.network.graph import Tensor
from glmspec.network.module import Module, Weight
from glmspec.plugins import rms_norm

# Table inputs, int32 [1]: the first token id, and the first expert, that a rank holds.
VOCABULARY_START, EXPERT_START = "vocabulary_start", "expert_start"
LEGAL_BIAS = "legal_bias"  # table input, [V] in the compute dtype: -inf of illegal token ids, 0 of others


class Embedding(Module):
    """Rows of a [vocabulary, D] table."""

    def __init__(self, vocab: int, dim: int) -> None:
        self.weight = Weight(vocab, dim)

    def forward(self, ids_N: Tensor) -> Tensor:
        """int32 [...] -> [..., D]."""
        return ops.gather(self.weight.tensor, ids_N)


class VocabularyEmbedding(Embedding):
    """An `Embedding` whose rows are divided among the ranks: each looks up its own, the sum is everybody's."""

    def forward(self, ids_N: Tensor) -> Tensor:
        """int32 [N] -> [N, D]."""
        net = ids_N.net
        if net.config.mapping.tp == 1:
            return super().forward(ids_N)
        own_N, here_N = own_ids(ids_N, VOCABULARY_START, self.weight.tensor.shape[0])
        rows_ND = ops.gather(self.weight.tensor, own_N)
        return ops.all_reduce(ops.select(ops.reshape(here_N, (-1, 1)), rows_ND, 0.0))


class Linear(Module):
    """y = x W^T, no bias. dtype: of the weight and the product; None is the compute dtype. Where ranks divide the
    weight's rows, y is the rank's columns; where its columns, y is the rank's term of a sum."""

    def __init__(self, inputs: int, outputs: int, dtype: str | None = None) -> None:
        self.weight = Weight(outputs, inputs, dtype=dtype)

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, F]."""
        return product(x_ND, self.weight)


def own_ids(ids: Tensor, start: str, count: int) -> tuple[Tensor, Tensor]:
    """int32 ids as a rank numbers its own, 0 for others', and bool: which are its own. start: the table input that
    names the first of its `count`."""
    own = ids - ids.net.inputs[start]
    here = ops.unary(own < 0, "NOT") & (own < count)
    return ops.select(here, own, 0), here


def legal_specs(vocab: int, illegal: IllegalIds, net_config: NetworkConfig) -> list[TensorSpec]:
    """The input that bars illegal tokens; none where all are legal."""
    return [TensorSpec(LEGAL_BIAS, net_config.compute, (vocab,), TABLE)] if illegal else []


def legal_logits(part_RF: Tensor, vocab: int) -> Tensor:
    """Logits [R, F] of each rank's rows of the head -> [R, V]: the whole vocabulary, illegal ids at -inf, so that
    nothing that follows need know of them."""
    logits_RV, bias_V = whole_vocabulary(part_RF, vocab), part_RF.net.inputs.get(LEGAL_BIAS)
    return logits_RV if bias_V is None else logits_RV + bias_V


def whole_vocabulary(part_RF: Tensor, vocab: int) -> Tensor:
    """Logits [R, F] of each rank's rows of the head -> [R, V]: all of them side by side, without the rows that
    pad the vocabulary."""
    ranks, columns = part_RF.net.config.mapping.tp, part_RF.shape[1]
    if ranks == 1:
        return part_RF
    parts_TRF = ops.reshape(ops.all_gather(part_RF), (ranks, -1, columns))
    logits_RV = ops.reshape(ops.transpose(parts_TRF, (1, 0, 2)), (-1, ranks * columns))
    return ops.narrow(logits_RV, 1, 0, vocab)


class RMSNorm(Module):
    """RMSNorm over the last axis."""

    def __init__(self, dim: int, eps: float) -> None:
        self.weight = Weight(dim)
        self.eps = eps

    def forward(self, x_ND: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return rms_norm.native(x_ND, self.weight.tensor, eps=self.eps)


class LayerNorm(Module):
    """Mean-centred normalization over the last of two axes, with a bias."""

    def __init__(self, dim: int, eps: float) -> None:
        self.weight = Weight(dim)
        self.bias = Weight(dim)
        self.eps = eps

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        return ops.layer_norm(x_ND, self.weight.tensor, self.bias.tensor, self.eps)


class MLP(Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, width: int) -> None:
        self.gate_proj = Linear(dim, width)
        self.up_proj = Linear(dim, width)
        self.down_proj = Linear(width, dim)

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        return self.down_proj(ops.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))
