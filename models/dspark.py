"""DSpark: the DFlash block plus a Markov head and a confidence head.

    for every draft:  logits += W2 f(W1[previous], hidden)  -> draft  (f by the head: vanilla, gated or rnn)
    confidence = sigmoid(w . [hidden ; W1[previous]] + b)

An rnn head reads the anchor's row also where that row drafts nothing, because it is trained so.

A dense head reads all of W2 for every draft of a block, 79 MB each. With `--markov-top-k` a draft is one of its row's K
best logits, and the walk is DFlash2's with W1 and W2 as codebooks: the same op and kernels.

Legend: B blocks, R rows of a block, J drafts, Z = rows of all blocks, D hidden, F columns of a linear layer, A Markov
rank, N rows, V draft vocabulary.
"""

from __future__ import annotations

import numpy as np

from glmspec.models.configs.drafter import ConfidenceHeadConfig, DrafterConfig, MarkovHeadConfig
from glmspec.models.dflash import DFlash, Rows
from glmspec.models.layers.basic import Embedding, Linear
from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.network.module import Module, Weight
from glmspec.plugins import markov_walk, selector_walk


class MarkovHead(Module):
    """Walks the block left to right, biasing each draft's logits by the drafts before it."""

    def __init__(self, config: DrafterConfig, markov: MarkovHeadConfig) -> None:
        rank, hidden = markov.rank, config.hidden_size
        self.markov_w1 = Embedding(config.vocab_size, rank)
        self.markov_w2 = Linear(rank, config.draft_vocab_size)
        if markov.type == "gated":  # over [hidden ; W1[previous]]
            self.gate_proj = ConcatLinear(hidden + rank, rank)
        elif markov.type == "rnn":  # over [state ; W1[previous] ; hidden], for [gate ; candidate ; output]
            self.joint_proj = ConcatLinear(2 * rank + hidden, 3 * rank)
        self.type, self.rank, self.hidden, self.top_k = markov.type, rank, hidden, markov.top_k

    def forward(self, rows: Rows, offset: Tensor | None, *, margins: bool) -> markov_walk.Walk:
        """Drafts, their scores, margins and probs, and W1 of each draft's predecessor. offset: see `DFlash.offset`."""
        w1, w2 = self.markov_w1.weight.tensor, self.markov_w2.weight.tensor
        parts: dict[str, Tensor] = {}
        if self.type == "gated":
            parts["rows"] = self.gate_proj(rows.hidden_BJD, 0)
            parts["recurrent"] = self.gate_proj.columns(self.hidden, self.rank)
        elif self.type == "rnn":
            parts["rows"] = self.joint_proj(rows.hidden_BRD, 2 * self.rank)
            parts["recurrent"] = self.joint_proj.columns(0, 2 * self.rank)
        return markov_walk.native(
            rows.logits_BJV,
            rows.anchor_ids_B,
            w1,
            w2,
            head=self.type,
            margins=margins,
            **parts,
            offset=offset,
            **rows.noise,
        )

    def among_best(self, rows: Rows, offset: Tensor | None, top_k: int) -> tuple[selector_walk.Walk, Tensor]:
        """Drafts among the `top_k` best logits, and W1 of each draft's predecessor [B, J, A]: the walk of a selector
        whose codebooks are W1 and W2, and which the hidden states do not turn."""
        w1, w2, drafts = self.markov_w1.weight.tensor, self.markov_w2.weight.tensor, rows.logits_BJV.shape[1]
        zero_B11 = ops.reshape(ops.cast(rows.anchor_ids_B * 0, w1.dtype), (0, 1, 1))
        ones_BJA = zero_B11 + rows.net.constant(np.ones((1, drafts, self.rank), np.float32), w1.dtype)
        walk = selector_walk.native(
            rows.logits_BJV, ones_BJA, rows.anchor_ids_B, w1, w2, k=top_k, offset=offset, **rows.noise
        )
        previous_BJ = ops.reshape(rows.anchor_ids_B, (0, 1))
        if drafts > 1:
            previous_BJ = ops.concat([previous_BJ, ops.narrow(walk.ids_BJ, 1, 0, drafts - 1)], 1)
        return walk, ops.gather(w1, previous_BJ)


class ConcatLinear(Module):
    """y = [part ; part ; ...] W^T + b, whose parts are known at different times."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = Weight(outputs, inputs)
        self.bias = Weight(outputs)

    def forward(self, x_BRD: Tensor, first: int) -> Tensor:
        """[B, R, D] -> [B, R, F]: the term of the part whose columns begin at `first`, and the bias."""
        rows, size = x_BRD.shape[1:]
        part = self.columns(first, size)
        y_ZF = ops.matmul(ops.reshape(x_BRD, (-1, size)), part, transpose_b=True) + self.bias.tensor
        return ops.reshape(y_ZF, (-1, rows, part.shape[0]))

    def columns(self, first: int, size: int) -> Tensor:
        """The weight of one part, [F, size]."""
        return ops.narrow(self.weight.tensor, 1, first, size)


class BiasedLinear(Linear):
    """y = x W^T + b in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, "float32")
        self.bias = Weight(outputs, dtype="float32")

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, F]."""
        return super().forward(x_ND) + self.bias.tensor


class ConfidenceHead(Module):
    """The chance that each draft is accepted, in float32: sigmoid(w . [hidden ; W1[previous]] + b)."""

    def __init__(self, config: DrafterConfig, confidence: ConfidenceHeadConfig) -> None:
        self.markov_rank = config.markov.rank if config.markov and confidence.with_markov else 0
        self.proj = BiasedLinear(config.hidden_size + self.markov_rank, 1)

    def forward(self, hidden_BJD: Tensor, previous_BJA: Tensor | None) -> Tensor:
        """float32 [B, J]."""
        parts = [hidden_BJD, previous_BJA] if previous_BJA and self.markov_rank else [hidden_BJD]
        drafts = hidden_BJD.shape[1]
        x_BJF = ops.cast(ops.concat(parts, 2), "float32")
        x_ZF = ops.reshape(x_BJF, (-1, x_BJF.shape[2]))
        return ops.sigmoid(ops.reshape(self.proj(x_ZF), (-1, drafts)))


class DSpark(DFlash):
    """DFlash whose drafts see the drafts before them."""

    def __init__(self, config: DrafterConfig, *, sampled: bool = False) -> None:
        super().__init__(config, sampled=sampled)
        self.markov_head = MarkovHead(config, config.markov) if config.markov else None
        self.confidence_head = ConfidenceHead(config, config.confidence) if config.confidence else None

    def propose(self, rows: Rows) -> dict[str, Tensor]:
        """Drafts by the Markov walk, with the confidence in each. Markov rank 0 is plain DFlash."""
        head, previous_BJA = self.markov_head, None
        if head is None:
            proposal = super().propose(rows)
        elif head.top_k:
            walk, previous_BJA = head.among_best(rows, self.offset, head.top_k)
            proposal = self.selected(walk)
        else:
            proposal, previous_BJA = self._walked(head, rows)
        if self.confidence_head:
            proposal["confidence"] = self.confidence_head(rows.hidden_BJD, previous_BJA)
        return proposal

    def _walked(self, head: MarkovHead, rows: Rows) -> tuple[dict[str, Tensor], Tensor]:
        """The proposal of a dense Markov walk, and W1 of each draft's predecessor."""
        walk: markov_walk.Walk = head(rows, self.offset, margins=self.confidence_head is None)
        proposal = {"draft_ids": walk.ids_BJ, "scores": walk.scores_BJ}
        if walk.margins_BJ is not None:
            proposal["margin"] = walk.margins_BJ
        return proposal | (self.dense_probs(walk.probs_BJV) if walk.probs_BJV is not None else {}), walk.embeddings_BJA
