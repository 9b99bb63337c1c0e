"""DSpark: the DFlash block plus a Markov head and a confidence head.

Legend: B blocks, J drafts, D hidden, V draft vocabulary, A Markov rank.
"""

from __future__ import annotations

import numpy as np

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.dflash import DFlash, Rows
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.network.module import Module, Weight
from glmspec.plugins import markov_walk, selector_walk


class MarkovHead(Module):
    """Walks the block left to right, biasing each draft's logits by the drafts before it."""

    def __init__(self, config: DrafterConfig) -> None:
        rank, hidden = config.markov.rank, config.hidden_size
        self.markov_w1 = Table(config.vocab_size, rank)
        self.markov_w2 = Table(config.draft_vocab_size, rank)
        if config.markov.type == "gated":  # over [hidden ; W1[previous]]
            self.gate_proj = Joint(hidden + rank, rank)
        elif config.markov.type == "rnn":  # over [state ; W1[previous] ; hidden], for [gate ; candidate ; output]
            self.joint_proj = Joint(2 * rank + hidden, 3 * rank)
        self.type, self.rank, self.hidden, self.top_k = config.markov.type, rank, hidden, config.markov.top_k

    def forward(self, rows: Rows, d2t: Tensor | None, *, margins: bool) -> markov_walk.Walk:
        """Drafts, what they were chosen by, and W1 of each draft's predecessor."""
        w1, w2 = self.markov_w1.weight.tensor, self.markov_w2.weight.tensor
        parts: dict[str, Tensor | None] = {}
        if self.type == "gated":
            parts["rows"] = self.gate_proj(rows.hidden_BJD, 0)
            parts["recurrent"] = self.gate_proj.columns(self.hidden, self.rank)
        elif self.type == "rnn":
            parts["rows"] = self.joint_proj(rows.hidden_BRD, 2 * self.rank)
            parts["recurrent"] = self.joint_proj.columns(0, 2 * self.rank)
        parts |= {"offset": d2t, "temperature": rows.temperature_B, "uniform": rows.uniform_BJ}
        return markov_walk.native(rows.logits_BJV, rows.anchor_ids_B, w1, w2, head=self.type, margins=margins, **parts)

    def among_best(self, rows: Rows, d2t: Tensor | None) -> tuple[selector_walk.Walk, Tensor]:
        """Drafts among the `top_k` best logits, and W1 of each draft's predecessor [B, J, A]: the walk of a selector
        whose codebooks are W1 and W2, and which the hidden states do not turn."""
        w1, w2, drafts = self.markov_w1.weight.tensor, self.markov_w2.weight.tensor, rows.logits_BJV.shape[1]
        zero_B11 = ops.reshape(ops.cast(rows.anchor_ids_B * 0, w1.dtype), (0, 1, 1))
        ones_BJA = zero_B11 + rows.net.constant(np.ones((1, drafts, self.rank), np.float32), w1.dtype)
        noise = {"temperature": rows.temperature_B, "uniform": rows.uniform_BJ}
        walk = selector_walk.native(
            rows.logits_BJV, ones_BJA, rows.anchor_ids_B, w1, w2, k=self.top_k, offset=d2t, **noise
        )
        previous_BJ = ops.reshape(rows.anchor_ids_B, (0, 1))
        if drafts > 1:
            previous_BJ = ops.concat([previous_BJ, ops.narrow(walk.ids_BJ, 1, 0, drafts - 1)], 1)
        return walk, ops.gather(w1, previous_BJ)


class Joint(Module):
    """y = [part ; part ; ...] W^T + b, whose parts are known at different times."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = Weight(outputs, inputs)
        self.bias = Weight(outputs)

    def forward(self, x_BRD: Tensor, first: int) -> Tensor:
        """[B, R, D] -> [B, R, outputs]: what the part whose columns begin at `first` adds, and the bias."""
        rows, size = x_BRD.shape[1:]
        part = self.columns(first, size)
        y_ZF = ops.matmul(ops.reshape(x_BRD, (-1, size)), part, transpose_b=True) + self.bias.tensor
        return ops.reshape(y_ZF, (-1, rows, part.shape[0]))

    def columns(self, first: int, size: int) -> Tensor:
        """The weight of one part, [outputs, size]."""
        return ops.narrow(self.weight.tensor, 1, first, size)


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

    def __init__(self, config: DrafterConfig, *, sampled: bool = False) -> None:
        super().__init__(config, sampled=sampled)
        self.markov_head = MarkovHead(config) if config.markov else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def propose(self, rows: Rows) -> dict[str, Tensor]:
        """Drafts by the Markov walk, with the confidence in each. Markov rank 0 is plain DFlash."""
        if self.markov_head is None:
            proposal, previous_BJA = super().propose(rows), None
        else:
            proposal, previous_BJA = self._walked(rows)
        if self.confidence_head:
            proposal["confidence"] = self.confidence_head(rows.hidden_BJD, previous_BJA)
        return proposal

    def _walked(self, rows: Rows) -> tuple[dict[str, Tensor], Tensor]:
        """What the Markov walk proposes, and W1 of each draft's predecessor."""
        d2t, margins = self.d2t.tensor if self.d2t else None, self.confidence_head is None
        if self.markov_head.top_k:
            walk, embeddings_BJA = self.markov_head.among_best(rows, d2t)
            probs = {"q": walk.probs_BJK, "q_ids": walk.candidates_BJK} if self.sampled else {}
        else:
            walk = self.markov_head(rows, d2t, margins=margins)
            embeddings_BJA, probs = walk.embeddings_BJA, self.probs(walk.probs_BJV) if self.sampled else {}
        told = {"margin": walk.margins_BJ} if margins else {}
        return {"draft_ids": walk.ids_BJ, "scores": walk.scores_BJ, **told, **probs}, embeddings_BJA
