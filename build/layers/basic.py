"""Embedding, linear, norm and MLP.

Legend: N tokens, D input columns, F output columns.
"""

from __future__ import annotations

from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.build.network.module import Module, Weight
from glmspec.plugins import rms_norm


class Embedding(Module):
    """Rows of a [vocabulary, D] table."""

    def __init__(self, vocab: int, dim: int) -> None:
        self.weight = Weight(vocab, dim)

    def forward(self, ids_N: Tensor) -> Tensor:
        """int32 [...] -> [..., D]."""
        return ops.gather(self.weight.tensor, ids_N)


class Linear(Module):
    """y = x W^T, no bias. dtype: of the weight and the product; None is the compute dtype."""

    def __init__(self, inputs: int, outputs: int, dtype: str | None = None) -> None:
        self.weight = Weight(outputs, inputs, dtype=dtype)

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, F]."""
        weight = self.weight.tensor
        return ops.matmul(ops.cast(x_ND, weight.dtype), weight, transpose_b=True)


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
