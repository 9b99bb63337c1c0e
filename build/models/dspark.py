"""DSpark: the DFlash block plus a Markov head and a confidence head.

Legend: B blocks, J drafts, D hidden, V draft vocabulary, A Markov rank.
"""

from __future__ import annotations

from glmspec.build.configs.drafter import DrafterConfig
from glmspec.build.models.dflash import DFlash
from glmspec.build.network import ops
from glmspec.build.network.graph import Tensor
from glmspec.build.network.module import Module, Weight
from glmspec.plugins import markov_walk


class MarkovHead(Module):
    """Walks the block left to right, biasing each draft's logits by the draft before it."""

    def __init__(self, config: DrafterConfig) -> None:
        self.markov_w1 = Table(config.vocab_size, config.markov.rank)
        self.markov_w2 = Table(config.draft_vocab_size, config.markov.rank)

    def forward(self, logits_BJV: Tensor, anchor_ids_B: Tensor, d2t: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Draft ids [B, J], their biased logits [B, J], W1 of each draft's predecessor [B, J, A]."""
        w1, w2 = self.markov_w1.weight.tensor, self.markov_w2.weight.tensor
        return markov_walk.native(logits_BJV, anchor_ids_B, w1, w2, d2t)


class Table(Module):
    """A [rows, columns] table under the name `weight`."""

    def __init__(self, rows: int, columns: int) -> None:
        self.weight = Weight(rows, columns)


class ConfidenceHead(Module):
    """The chance that each draft is accepted, in float32: sigmoid(w . [hidden ; W1[previous]] + b)."""

    def __init__(self, config: DrafterConfig) -> None:
        extra = config.markov.rank if config.confidence.with_markov else 0
        self.proj = Affine(config.hidden_size + extra, 1)
        self.with_markov = config.confidence.with_markov

    def forward(self, hidden_BJD: Tensor, previous_BJA: Tensor | None) -> Tensor:
        """float32 [B, J]."""
        parts = [hidden_BJD, previous_BJA] if self.with_markov else [hidden_BJD]
        drafts = hidden_BJD.shape[1]
        input_ZF = ops.cast(ops.concat(parts, 2), "float32")
        input_ZF = ops.reshape(input_ZF, (-1, input_ZF.shape[2]))
        return ops.sigmoid(ops.reshape(self.proj(input_ZF), (-1, drafts)))


class Affine(Module):
    """y = x W^T + b in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = Weight(outputs, inputs, dtype="float32")
        self.bias = Weight(outputs, dtype="float32")

    def forward(self, x_ZF: Tensor) -> Tensor:
        """[Z, inputs] -> [Z, outputs]."""
        return ops.matmul(x_ZF, self.weight.tensor, transpose_b=True) + self.bias.tensor


class DSpark(DFlash):
    """DFlash whose drafts see the drafts before them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def propose(self, hidden_BJD: Tensor, logits_BJV: Tensor, anchor_ids_B: Tensor) -> dict[str, Tensor]:
        """Drafts by the Markov walk, with the confidence in each. Markov rank 0 is plain DFlash."""
        d2t = self.d2t.tensor if self.d2t else None
        previous_BJA = None
        if self.markov_head:
            ids_BJ, scores_BJ, previous_BJA = self.markov_head(logits_BJV, anchor_ids_B, d2t)
            proposal = {"draft_ids": ids_BJ, "scores": scores_BJ}
        else:
            proposal = super().propose(hidden_BJD, logits_BJV, anchor_ids_B)
        if self.confidence_head:
            proposal["confidence"] = self.confidence_head(hidden_BJD, previous_BJA)
        return proposal
